"""Micro-steps can be recorded once and replayed: their program holds no number that changes, and their memory stays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import tiny
from distributed import run_distributed
from fake_graph import FakeGraph, differences
from sagekernels.autograd import DOCUMENT_BOUNDS
from sagetrain.data.loader import Batch, Sample, batch_of
from sagetrain.engines.fsdp import FsdpEngine
from sagetrain.model import backends

LENGTH = tiny.SEQ


def micro_batches(kind: str, step: int, count: int, rank: int = 0) -> Iterator[Batch]:
    """Yield micro-batches of one sequence: "plain", with "documents", or with a loss "mask" too."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    for _ in range(count):
        tokens = torch.randint(0, tiny.VOCAB, (LENGTH + 1,), generator=draw)
        starts = sorted({int(place) for place in torch.randint(1, LENGTH, (3,), generator=draw)})
        counted = torch.rand(LENGTH, generator=draw).numpy() < 0.7
        if kind == "plain":
            yield Batch(tokens[None, :-1], tokens[None, 1:], None, None, None, [])
        else:
            sample = Sample(tokens.numpy(), starts, 0, counted if kind == "mask" else None)
            yield batch_of([sample], document_attention=True, document_positions=True)


def recorded(engine: FsdpEngine, kind: str, step: int, count: int, divisor: float | None) -> FakeGraph:
    """Record a micro-step of a step of `count` micro-batches, behind one that is not recorded."""
    engine._prepare(count, 1e-2)
    batch = next(micro_batches(kind, step, count))
    batch.divisor = divisor if kind == "mask" else None
    inputs = engine.inputs(batch)
    engine.backward(engine._run(inputs), last=False)
    return FakeGraph.of(lambda: engine.backward(engine._run(inputs), last=False))


def numbers(kinds: list[str]) -> list[str]:
    backends.document_bounds = DOCUMENT_BOUNDS  # The check of values is for CPUs alone.
    groups, found = tiny.join(1), []
    for kind in kinds:
        for stage, linear in ((0, "bf16"), (1, "int8")):
            cfg = tiny.config(
                stage, "bf16", linear={"precision": linear}, model={"hidden_size": 64, "ffn_hidden_size": 128}
            )
            engine: Any = tiny.engine(cfg, groups)
            one, *others = (recorded(engine, kind, *how) for how in ((0, 6, 9.0), (1, 6, 9.0), (0, 8, 11.0)))
            found += [f"{kind}, {linear}: {line}" for other in others for line in differences(one, other)]
            found += [f"{kind}, {linear}: a constant at {line}" for line in one.constants]
    return found


def test_a_micro_step_holds_no_number_that_changes() -> None:
    """Micro-batches, their number in a step, documents and counted tokens are tensors, so one recording serves all."""
    assert run_distributed(numbers, 1, ["plain", "documents", "mask"])[0] == []
