"""Gradient and activation norms by layer equal those of one process by hand at every layout."""

import math

import pytest
import torch
from torch import Tensor

import tiny
from distributed import run_distributed
from sagetrain.engines.build_engine import build_engine
from sagetrain.engines.protocol import Observers
from sagetrain.parallel.topology import ParallelGroups

Layout = tuple[int, int, int, str, str]
"""Tensor-parallel size, context-parallel size, ZeRO stage, recomputation and compile backend."""


def tokens() -> Tensor:
    return torch.randint(0, tiny.VOCAB, (4, tiny.SEQ + 1), generator=torch.Generator().manual_seed(1))


def by_hand() -> dict[str, float]:
    """Return the norms for the mean loss of all four sequences at once, without clipping."""
    model, squares = tiny.model(tiny.config(0), ParallelGroups.single()), {}
    found: dict[str, float] = {}
    model.watch_blocks = lambda block, x: found.update({f"norms/{block}/activation": x.square().mean().sqrt().item()})
    model(tokens()[:, :-1], tokens()[:, 1:]).backward()
    for name, parameter in model.named_parameters():
        layer = model.specs[name].layer
        squares[layer] = squares.get(layer, 0.0) + parameter.grad.double().square().sum().item()
    return found | {f"norms/{layer}/gradient": math.sqrt(square) for layer, square in squares.items()}


def measured(layouts: list[Layout]) -> list[dict[str, float]]:
    """Return the norms of a step at each layout."""
    results = []
    for tp_size, cp_size, stage, again, backend in layouts:
        torch._dynamo.reset()
        sections = {"optimizer": {"clip_grad": 0.05}, "training": {"activation_checkpointing": again}}
        sections["parallel"] = {"tensor_parallel_overlap": "off"}
        cfg, groups = tiny.config(stage, **sections), tiny.join(tp_size, cp_size)
        model = tiny.model(cfg, groups)
        if backend:
            tiny.compile_first_rank(model, backend)
        engine = build_engine(tiny.on(cfg, groups), model, groups, 1)
        batches = tiny.batches_of(tokens(), groups)
        found = engine.step(batches, len(batches), 1e-2, Observers(layer_norms=True)).metrics
        results.append({name: value for name, value in found.items() if name.startswith("norms/")})
    return results


WORLDS: dict[int, list[Layout]] = {
    1: [(1, 1, 0, "none", ""), (1, 1, 1, "full", "aot_eager")],
    2: [
        (1, 1, 2, "none", ""),
        (1, 1, 3, "none", ""),
        (1, 2, 1, "none", ""),
        (2, 1, 0, "selective", ""),
        (2, 1, 1, "none", "eager"),
    ],
}


@pytest.mark.parametrize("world", WORLDS)
def test_norms_are_those_of_one_process(world: int) -> None:
    exact = by_hand()
    assert len(exact) == 2 + 4  # There are two blocks, and the embedding and the head as well.
    for rank in run_distributed(measured, world, WORLDS[world]):
        for layout, norms in zip(WORLDS[world], rank, strict=True):
            assert norms == pytest.approx(exact, rel=2e-5), layout
