"""Gradient and activation norms by layer equal those by hand. Tests of engines compare them at every layout."""

import math

import pytest
import torch
from torch import Tensor

import tiny
from distributed import run_distributed
from sagetrain.engines.build_engine import build_engine
from sagetrain.engines.protocol import Observers
from sagetrain.parallel.topology import ParallelGroups


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


def measured(cases: list[tuple[int, str, str]]) -> list[dict[str, float]]:
    """Return the norms of a step for each ZeRO stage, recomputation and compile backend."""
    results = []
    for stage, again, backend in cases:
        torch._dynamo.reset()
        sections = {"optimizer": {"clip_grad": 0.05}, "training": {"activation_checkpointing": again}}
        cfg, groups = tiny.config(stage, **sections), tiny.join(1)
        model = tiny.model(cfg, groups)
        if backend:
            tiny.compile_first_rank(model, backend)
        engine = build_engine(tiny.on(cfg, groups), model)
        batches = tiny.batches_of(tokens(), groups)
        found = engine.step(batches, len(batches), 1e-2, Observers(layer_norms=True)).metrics
        results.append({name: value for name, value in found.items() if name.startswith("norms/")})
    return results


def test_norms_are_those_by_hand() -> None:
    exact, cases = by_hand(), [(0, "none", ""), (1, "full", "aot_eager")]
    assert len(exact) == 2 + 4  # There are two blocks, and the embedding and the head as well.
    for case, norms in zip(cases, run_distributed(measured, 1, cases)[0], strict=True):
        assert norms == pytest.approx(exact, rel=2e-5), case
