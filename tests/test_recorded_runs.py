"""Predictions against what runs on H200s reached (RESULTS.md): tokens/s of all ranks, and the fullest rank's memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sagetrain.config import load_config
from sagetrain.config.fit import padded_vocab_size
from sagetrain.hardware import H200
from sagetrain.model.accounting import memory_per_rank
from sagetrain.performance import predict

CONFIGS = Path(__file__).parent.parent / "configs"
NCCL = replace(H200, copy_bandwidth=0.0)
"""Before sequence parallelism's collectives went by copy engines."""
VOCAB = padded_vocab_size(32_000)
EVEN = "tokens_per_step={schedule: constant, tokens: %d}"
SHAPE_24 = "model={num_layers: 24, hidden_size: 1024, ffn_hidden_size: 2816, num_attention_heads: %d}"


@pytest.mark.parametrize(("name", "tensor", "data", "stage", "sequence", "tokens_per_second", "gib"), [
    ("1b", 1, 1, 1, False, 64_732, 60.0),
    ("1b", 1, 2, 1, False, 122_275, 54.2),
    ("1b", 1, 4, 1, False, 249_354, 51.3),
    ("1b", 1, 4, 2, False, 238_290, 46.5),
    ("1b", 1, 4, 3, False, 157_873, 83.2),
    ("1b", 4, 1, 1, True, 161_601, 19.3),
    ("1b", 2, 1, 1, False, 104_796, 35.9),
    # Before a micro-batch's tokens went through the blocks in two halves.
    ("1b", 2, 1, 1, True, 102_552, 33.5),
    ("1b", 4, 1, 1, False, 154_719, 23.5),
    ("325m", 1, 1, 1, False, 166_131, 30.2),
    ("325m", 1, 2, 1, False, 319_333, 28.5),
])  # fmt: skip
def test_layouts_are_met(name, tensor, data, stage, sequence, tokens_per_second, gib):
    """launch/benchmark_layouts.py: four micro-batches of 8 x 4096 tokens, packed documents, sage."""
    cfg = load_config(CONFIGS / f"{name}.yaml", [
        "data.micro_batch_size=8",
        EVEN % (4 * data * 8 * 4096),
        f"parallel.tensor_parallel_size={tensor}",
        f"parallel.zero_stage={stage}",
        f"parallel.sequence_parallel={str(sequence).lower()}",
    ])  # fmt: skip
    world_size = tensor * data
    assert predict(cfg, world_size, VOCAB, NCCL).tokens_per_second == pytest.approx(tokens_per_second, rel=0.15)
    memory = sum(item.bytes for item in memory_per_rank(cfg, world_size, VOCAB))
    assert memory / 2**30 == pytest.approx(gib, rel=0.1)


@pytest.mark.parametrize(("name", "overrides", "tokens_per_second", "gib"), [
    ("1b", ["data.micro_batch_size=8", EVEN % 131_072], 103_974, 33.3),
    ("1b", ["data.micro_batch_size=16", EVEN % 131_072], 113_049, 55.6),
    ("1b", ["data.micro_batch_size=32", EVEN % 131_072], 115_502, 98.9),
    ("1b", ["data.micro_batch_size=8", EVEN % 131_072, "attention.recipe=scores"], 135_434, 33.3),
    ("1b", ["data.micro_batch_size=16", EVEN % 131_072, "attention.recipe=scores"], 141_844, 55.6),
    ("1b", ["data.micro_batch_size=32", EVEN % 131_072, "attention.recipe=scores"], 144_486, 98.9),
    ("7b", [EVEN % 16_384], 16_546, 88.1),
])  # fmt: skip
def test_tensor_parallelism_by_copies_is_met(name, overrides, tokens_per_second, gib):
    """launch/benchmark_layouts.py --layouts tp2-sp."""
    layout = ["parallel.tensor_parallel_size=2", "parallel.sequence_parallel=true"]
    cfg = load_config(CONFIGS / f"{name}.yaml", [*layout, *overrides])
    assert predict(cfg, 2, VOCAB, H200).tokens_per_second == pytest.approx(tokens_per_second, rel=0.15)
    assert sum(item.bytes for item in memory_per_rank(cfg, 2, VOCAB)) / 2**30 == pytest.approx(gib, rel=0.1)


def test_long_sequences_over_two_gpus_are_met():
    """launch/benchmark_layouts.py --layouts cp2, 1B, one sequence of 128K tokens."""
    cfg = load_config(CONFIGS / "1b.yaml", [
        "data.seq_length=131072", "data.micro_batch_size=1", EVEN % 131_072,
        "parallel.context_parallel_size=2", "attention.recipe=scores", "data.document_attention=false",
    ])  # fmt: skip
    assert predict(cfg, 2, VOCAB, H200).tokens_per_second == pytest.approx(27_439, rel=0.15)
    assert sum(item.bytes for item in memory_per_rank(cfg, 2, VOCAB)) / 2**30 == pytest.approx(96.0, rel=0.1)


@pytest.mark.parametrize(("choice", "tokens_per_second", "gib"), [
    ("recipe=fine", 64_732, 60.0),
    ("recipe=scores", 84_181, 59.9),
    ("backend=sdpa", 76_504, 65.1),
])  # fmt: skip
def test_attention_of_1b_on_one_gpu_is_met(choice, tokens_per_second, gib):
    """launch/benchmark_layouts.py --layouts tp1, as above."""
    settings = ["data.micro_batch_size=8", EVEN % 131_072]
    cfg = load_config(CONFIGS / "1b.yaml", [*settings, f"attention.{choice}"])
    assert predict(cfg, 1, VOCAB, H200).tokens_per_second == pytest.approx(tokens_per_second, rel=0.1)
    assert sum(item.bytes for item in memory_per_rank(cfg, 1, VOCAB)) / 2**30 == pytest.approx(gib, rel=0.1)


@pytest.mark.parametrize(("shape", "seq_length", "backend", "documents", "tokens", "ranks", "tokens_per_second"), [
    ("24 of 16", 2048, "sdpa", False, 32_768, 1, 187_500),
    ("325m", 4096, "sdpa", False, 32_768, 1, 186_800),
    ("325m", 4096, "sdpa", True, 262_144, 1, 183_700),
    ("325m", 4096, "sage", True, 262_144, 1, 173_800),
    ("325m", 4096, "sdpa", True, 65_536, 1, 175_000),
    ("325m", 4096, "sdpa", True, 65_536, 2, 343_000),
    # A plain-PyTorch peer with FlashAttention-4.
    ("24 of 16", 2048, "flash", False, 32_768, 1, 174_400),
    ("24 of 16", 8192, "flash", False, 32_768, 1, 129_800),
    ("24 of 16", 32768, "flash", False, 32_768, 1, 64_600),
    ("24 of 8", 2048, "flash", False, 32_768, 1, 180_900),
    ("24 of 8", 8192, "flash", False, 32_768, 1, 139_000),
    ("24 of 8", 32768, "flash", False, 32_768, 1, 71_900),
])  # fmt: skip
def test_speeds_of_other_shapes_are_met(shape, seq_length, backend, documents, tokens, ranks, tokens_per_second):
    model = [] if shape == "325m" else [SHAPE_24 % int(shape.split()[-1])]
    cfg = load_config(CONFIGS / "325m.yaml", [
        *model,
        f"attention.backend={backend}",
        f"data.document_attention={str(documents).lower()}",
        f"data.seq_length={seq_length}",
        f"data.micro_batch_size={32_768 // seq_length}",
        f"tokens_per_step.tokens={tokens}",
    ])  # fmt: skip
    assert predict(cfg, ranks, VOCAB, H200).tokens_per_second == pytest.approx(tokens_per_second, rel=0.1)


@pytest.mark.parametrize(("backend", "gib"), [("sage", 30.2), ("sdpa", 31.4)])
def test_memory_of_the_papers_model_is_met(backend, gib):
    """torch's own count, so without what the estimate leaves out."""
    cfg = load_config(CONFIGS / "325m.yaml", [f"attention.backend={backend}"])
    assert sum(item.bytes for item in memory_per_rank(cfg, 1, VOCAB)) / 2**30 == pytest.approx(gib, rel=0.05)
