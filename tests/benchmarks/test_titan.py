"""benchmarks/titan.py: the settings that it hands to torchtitan, and those that torchtitan cannot follow."""

from __future__ import annotations

from pathlib import Path

import pytest

from runs import write_config
from sagetrain.config.load import load_config
from titan import RandomTokens, job_settings, refusals

FOLLOWED = [
    "model.vocab_size=512",
    "attention.qk_norm=none",
    "linear.precision=bf16",
    "parallel.zero_stage=3",
    "data.document_attention=false",
    "data.document_positions=false",
    "training.dtype=bf16",
]


@pytest.fixture
def config(corpus: Path, tmp_path: Path) -> Path:
    return write_config(tmp_path / "run.yaml", corpus, tmp_path / "unused")


def test_settings_are_those_of_the_configuration(config: Path) -> None:
    cfg = load_config(config, [*FOLLOWED, "optimizer={lr: 1e-3, betas: [0.8, 0.9], eps: 1e-7, weight_decay: 0.2}"])
    assert not refusals(cfg, 2)
    job = job_settings(cfg, 2)
    names = "lr", "beta1", "beta2", "eps", "weight_decay"
    assert [job[f"optimizer.{name}"] for name in names] == [1e-3, 0.8, 0.9, 1e-7, 0.2]
    assert (job["training.local_batch_size"], job["training.seq_len"], job["training.max_norm"]) == (4, 32, 1.0)
    assert job["parallelism.data_parallel_shard_degree"] == 2
    assert job["parallelism.fsdp_reshard_after_forward"] == "default" and "model.converters" not in job
    kept = load_config(config, [*FOLLOWED, "parallel.zero_stage=2", "linear={precision: fp8, recipe: tensorwise}"])
    assert not refusals(kept, 2)
    job = job_settings(kept, 2)
    assert job["parallelism.fsdp_reshard_after_forward"] == "never"
    assert job["quantize.linear.float8.enable_fsdp_float8_all_gather"]
    assert job["quantize.linear.float8.filter_fqns"] == ["output"]


@pytest.mark.parametrize(("world_size", "override", "said"), [
    (1, "linear.recipe=rowwise", "data-parallel ranks = 1: torchtitan needs 2 or more"),
    (2, "attention.qk_norm=before_rope", "attention.qk_norm = before_rope: torchtitan needs none"),
    (2, "linear.precision=int8", "linear.precision = int8: torchtitan needs bf16, or fp8 in all blocks"),
    (2, "linear={precision: fp8, keep_first_blocks: 1}", "linear.precision = fp8: torchtitan needs bf16, or fp8"),
    (2, "parallel.zero_stage=1", "parallel.zero_stage = 1: torchtitan needs 2 or 3"),
    (4, "parallel.tensor_parallel_size=2", "torchtitan needs true under tensor parallelism"),
    (2, "model.tie_embeddings=true", "model.tie_embeddings = True: torchtitan needs false"),
    (2, "data.document_attention=true", "data.document_attention = True: torchtitan needs false"),
])  # fmt: skip
def test_what_torchtitan_cannot_follow_is_refused(config: Path, world_size: int, override: str, said: str) -> None:
    (line,) = refusals(load_config(config, [*FOLLOWED, override]), world_size)
    assert said in line


def test_random_tokens_differ_between_ranks_and_labels_follow(config: Path) -> None:
    cfg = load_config(config, FOLLOWED)
    (one, labels), (other, _) = (next(iter(RandomTokens(cfg, rank))) for rank in range(2))
    assert one["input"].shape == labels.shape == (4, 32) and not one["input"].equal(other["input"])
    assert one["input"][:, 1:].equal(labels[:, :-1]) and int(labels.min()) >= 0 and int(labels.max()) < 512
