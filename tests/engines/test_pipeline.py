"""A pipeline takes the same steps as one process, at every layout, and its checkpoints continue at any other one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tiny
from distributed import run_distributed
from runs import check_same, finish, kill_all, log_of, reached, sagetrain, when, write_config
from sagetrain.checkpoint import on_disk, reading
from sagetrain.checkpoint.reading import Reader
from sagetrain.config import RunConfig
from sagetrain.data.loader import Batch
from sagetrain.engines.protocol import Engine, Observers
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.stability.controller import Event
from sagetrain.stability.noise_scale import GradientNoise
from sagetrain.stability.spikes import Verdict

SHAPE = {"num_layers": 5, "num_attention_heads": 4}
TIED = {"tie_embeddings": True}
# With an eps of 1e-8, Adam takes a full step of lr on a gradient that is nothing but rounding.
OPTIMIZER = {"clip_grad": 0.5, "eps": 1e-6}
SPREAD = {"sequence_parallel": True, "tensor_parallel_overlap": "on"}

# The sizes of tensor, context and pipeline parallelism, and the settings.
CASES: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "PP 4": ((1, 1, 4), {"stage": 1}),
    "PP 2 x FSDP 2, ZeRO 0": ((1, 1, 2), {"stage": 0}),
    "PP 2 x FSDP 2, ZeRO 1, tied": ((1, 1, 2), {"stage": 1, "model": TIED}),
    "PP 2 x FSDP 2, ZeRO 2, recomputed": ((1, 1, 2), {"stage": 2, "training": {"activation_checkpointing": "full"}}),
    "PP 2 x hybrid 1 x 2": ((1, 1, 2), {"stage": 1, "parallel": {"shard_size": 1}}),
    "PP 2 x FSDP 2, interleaved": ((1, 1, 2), {"stage": 1, "parallel": {"pipeline_chunks": 2}}),
    "PP 2 x FSDP 2, interleaved, tied, ZeRO 2": (
        (1, 1, 2), {"stage": 2, "model": TIED, "parallel": {"pipeline_chunks": 2, "pipeline_blocks": [2, 1, 1, 1]}},
    ),
    "PP 2 x TP 2": ((2, 1, 2), {"stage": 1}),
    "PP 2 x TP 2, halves, tied": ((2, 1, 2), {"stage": 1, "parallel": SPREAD, "model": TIED}),
    "PP 2 x TP 2, halves, interleaved, selective": (
        (2, 1, 2),
        {
            "stage": 2,
            "parallel": {**SPREAD, "pipeline_chunks": 2},
            "training": {"activation_checkpointing": "selective"},
        },
    ),
    "PP 2 x context 2": ((1, 2, 2), {"stage": 1}),
}  # fmt: skip


def config(stage: int, dtype: str = "fp32", **sections: dict) -> RunConfig:
    sections = {"optimizer": OPTIMIZER, **sections, "model": SHAPE | sections.get("model", {})}
    return tiny.config(stage, dtype, **{**sections, "parallel": {"engine": "fsdp", **sections.get("parallel", {})}})


def batches(step: int, sequences: int, groups: ParallelGroups) -> list[Batch]:
    """Return this rank's micro-batches: packed documents, of which some tokens are masked."""
    draw = torch.Generator().manual_seed(step % 5)
    tokens = torch.randint(0, tiny.VOCAB, (sequences, tiny.SEQ + 1), generator=draw)
    found = []
    for row in tokens[groups.dp_rank :: groups.dp_size]:
        cut = 3 + int(row[0]) % 8
        labels = row[None, 1:].clone()
        labels[:, : int(row[1]) % 6] = -100
        positions = torch.cat([torch.arange(cut), torch.arange(tiny.SEQ - cut)])[None]
        bounds = torch.tensor([0, cut, tiny.SEQ], dtype=torch.int32)
        found.append(Batch(row[None, :-1], labels, positions, bounds, None, []))
    return found


def counted(step: int, sequences: int) -> int:
    return sum(int((batch.labels >= 0).sum()) for batch in batches(step, sequences, ParallelGroups.single()))


def steps_of(engine: Engine) -> list[dict[str, float]]:
    """Return the numbers of steps of 4, 4, 12 and 4 sequences, the last two with packed documents and masks, and of an
    evaluation between them."""
    groups, noise = engine.groups, None
    if not (groups.pp_size > 1 and engine.model.config.tie_embeddings):
        noise = GradientNoise(engine.leaves(), engine.model.every_spec.values(), groups, engine.device)
    observers = Observers(noise=noise, layer_norms=True)
    found = [tiny.global_step(engine, step, observers=observers).metrics for step in range(2)]
    found.append(tiny.evaluation(engine, ["web", "code"]))
    for step, sequences in ((2, 12), (3, 4)):
        own = batches(step, sequences, groups)
        result = engine.step(own, len(own), 1e-2, observers, counted(step, sequences))
        found.append(result.metrics)
    return found


def losses_of(cases: Sequence[str]) -> dict[str, list[dict[str, float]]]:
    found, groups = {}, {}
    for name in cases:
        sizes, how = CASES[name]
        if dist.get_world_size() == 1:
            sizes, how = (1, 1, 1), {**how, "stage": 0, "parallel": {}}
        groups[sizes] = groups.get(sizes) or tiny.join(*sizes)
        parallel = {**how.get("parallel", {}), "pipeline_parallel_size": sizes[2]}
        found[name] = steps_of(tiny.engine(config(**{**how, "parallel": parallel}), groups[sizes]))
    return found


def test_numbers_do_not_depend_on_the_layout() -> None:
    names = list(CASES)
    expected = run_distributed(losses_of, 1, [names[0], names[2]])[0]
    every = run_distributed(losses_of, 4, names)
    for name in names:
        there = expected[names[2] if "tied" in name else names[0]]
        for rank in every:
            for row, wanted in zip(rank[name], there, strict=True):
                assert row.keys() <= wanted.keys(), name
                assert "tied" in name or row.keys() == wanted.keys(), name
                for key, value in row.items():
                    # In halves, activations are those of the first half of the tokens.
                    if not ("halves" in name and key.endswith("/activation")):
                        limit = 2e-5 + 1e-4 * abs(wanted[key])
                        assert abs(value - wanted[key]) < limit, (name, key, value, wanted[key])


# -- checkpoints -------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "PP 1": ((1, 1, 1), {}),
    "PP 2 x FSDP 2": ((1, 1, 2), {}),
    "PP 2 x TP 2, interleaved": ((2, 1, 2), {"pipeline_chunks": 2}),
    "PP 4": ((1, 1, 4), {}),
    "PP 2 x hybrid": ((1, 1, 2), {"shard_size": 1}),
}


def saved_and_continued(root: str) -> tuple[dict[str, list], dict[tuple[str, str], list], bool]:
    """Return the losses of a step after a checkpoint was written, by layout, and those of the same step after it was
    read at another layout; and whether a refused step between them left every bit as it was."""
    later, resumed, groups = {}, {}, {sizes: tiny.join(*sizes) for sizes, _ in LAYOUTS.values()}
    refused = Observers(judge=lambda metrics: Verdict(False, Event("spike", "refused")))
    unchanged = True

    def engine(name: str, seed: int) -> Engine:
        sizes, parallel = LAYOUTS[name]
        parallel = {**parallel, "pipeline_parallel_size": sizes[2]}
        return tiny.engine(config(1, "bf16", parallel=parallel, model=TIED), groups[sizes], seed)

    for name in LAYOUTS:
        first = engine(name, 3)
        tiny.global_step(first, 0)
        saver = tiny.saver(Path(root) / name, first.groups)
        saver.start(tiny.run_state(1, 0), "", first.owned(), {})
        saver.wait()
        before = [kept.read(kind).clone() for kept in first.owned() for kind in kept.kinds]
        tiny.global_step(first, 4, observers=refused)
        after = [kept.read(kind) for kept in first.owned() for kind in kept.kinds]
        unchanged &= all(map(torch.equal, before, after))
        later[name] = [tiny.global_step(first, 1).loss, tiny.global_step(first, 2).loss]
    for name in LAYOUTS:
        for other in dict.fromkeys([name, "PP 1"]) if name != "PP 1" else LAYOUTS:
            second = engine(other, 11)
            reading.load_engine(Reader(Path(root) / name / on_disk.folder_name(1)), second, 1)
            resumed[name, other] = [tiny.global_step(second, 1).loss, tiny.global_step(second, 2).loss]
    return later, resumed, unchanged


def test_checkpoints_continue_at_any_layout(tmp_path) -> None:
    later, resumed, unchanged = run_distributed(saved_and_continued, 4, str(tmp_path))[0]
    assert unchanged
    for (name, other), losses in resumed.items():
        if name == other:
            assert losses == later[name], name
        else:
            assert losses == pytest.approx(later[name], rel=2e-3), (name, other)
    layout = json.loads((tmp_path / "PP 4" / on_disk.folder_name(1) / "manifest.json").read_text())["layout"]
    assert layout["pipeline_parallel_size"] == 4 and layout["data_parallel_size"] == 1


# -- real runs ---------------------------------------------------------------------------------------------------------


def test_a_run_whose_stages_are_killed_ends_with_the_same_bits(tmp_path, corpus) -> None:
    """The run has two pipeline stages of the deepspeed launcher. Its checkpoint is scored, continued as text and
    exported without a pipeline."""
    sections = {
        "model": {"num_layers": 3},
        "parallel": {"engine": "fsdp", "pipeline_parallel_size": 2},
        "training": {"dtype": "bf16"},
        "checkpoint": {"every_tokens": 2560},
        "evaluation": {"every_tokens": 5120},
        "logging": {"layer_norms_every_steps": 10},
    }
    whole = write_config(tmp_path / "whole.yaml", corpus, tmp_path / "whole", **sections)
    finish("deepspeed", whole)
    assert "x pipeline parallel 2 (blocks in chunks:" in log_of(whole)
    cut = write_config(tmp_path / "cut.yaml", corpus, tmp_path / "cut", **sections)
    assert when("ranks", cut, reached(cut, 14), kill_all) != 0
    finish("ranks", cut)
    assert "resumed from step-" in log_of(cut)
    check_same(tmp_path / "cut", tmp_path / "whole")
    rows = list(map(json.loads, (tmp_path / "whole/metrics.jsonl").read_text().splitlines()))
    *_, last = (row["valid/loss"] for row in rows if "valid/loss" in row)
    scored = json.loads(sagetrain("eval", tmp_path / "whole", "--attention", "sdpa", "--json").stdout)
    assert scored["all"]["loss"] == pytest.approx(last, rel=2e-3)
    assert any("norms/2/gradient" in row and "noise/0/variance" in row for row in rows)
    assert sagetrain("export", tmp_path / "whole", tmp_path / "hf").returncode == 0
