"""DeepSpeed sums gradients over micro-batches and over ranks in several ways. The tests hold which ways give the same
losses to the last bit, and when ranks exchange gradients."""

from importlib.metadata import version

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tiny
from distributed import run_distributed
from sagetrain.costs import deepspeed_prices
from sagetrain.engines.step import Engine

BY_DEEPSPEED = {"engine": "deepspeed"}
BUCKET = 8000  # The model has some 25,000 parameters.
WAYS = {"1": (1, "fp32"), "1 in bf16": (1, "bf16"), "2": (2, "fp32"), "2 in bf16": (2, "bf16")}
"""The ways: ZeRO stage, and the dtype that gradients travel in."""


class Reductions(TorchDispatchMode):
    """A counter of the collectives that reduce gradients, of the ranks' own group or of a group of one."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name().startswith("c10d::") and "reduce" in func.name()
        return func(*args, **(kwargs or {}))


Step = tuple[float, float]
"""The loss and the gradient norm."""


def engine_of(way: str) -> Engine:
    stage, reduction = WAYS[way]
    deepspeed_prices._REDUCE_BUCKET = BUCKET
    parallel, optimizer = {**BY_DEEPSPEED, "gradient_reduction": reduction}, {"clip_grad": 0.5, "eps": 1e-6}
    return tiny.engine(tiny.config(stage, "bf16", parallel=parallel, optimizer=optimizer), tiny.join(1))


def steps(engine: Engine, first: int, last: int) -> list[Step]:
    """Take steps of 2 micro-batches a rank, then of 4."""
    results = [tiny.global_step(engine, step, sequences=4 if step < 2 else 8) for step in range(first, last)]
    return [(result.loss, result.grad_norm) for result in results]


def of_all_ways() -> tuple[dict[str, list[Step]], dict[str, int], dict[str, int]]:
    """Return, for each way, its steps, the number of gradients held in bf16 after backward, and the number of
    collectives that had begun when backward came to the embedding's gradient, the last one."""
    found, held, begun = {}, {}, {}
    for way in WAYS:
        engine = engine_of(way)
        found[way] = steps(engine, 0, 4)
        tokens = torch.zeros(1, tiny.SEQ, dtype=torch.long)
        loss = engine._ds(tokens, tokens)
        with Reductions() as reductions:

            def note(grad: torch.Tensor, way: str = way, reductions: Reductions = reductions) -> None:
                begun[way] = reductions.count

            hook = engine.model.embedding.weight.register_hook(note)
            engine._ds.backward(loss)
        hook.remove()
        held[way] = sum(p.grad is not None for p in engine.model.parameters())
    return found, held, begun


def test_losses_are_equal_where_the_arithmetic_is() -> None:
    for found, held, begun in run_distributed(of_all_ways, 2):
        assert not any(held.values())
        assert all((count > 1) == (way[0] != "1") for way, count in begun.items()), begun
        for way in ("1 in bf16", "2 in bf16"):
            narrow, wide = torch.tensor(found[way]), torch.tensor(found[way[0]])
            assert narrow[0, 0] == wide[0, 0] and not torch.equal(narrow, wide), way  # The first loss saw no gradient.
            torch.testing.assert_close(narrow, wide, rtol=0.02, atol=0)


def without_a_call() -> None:
    """Take a step with a DeepSpeed that takes it for the middle of an accumulation, as version 0.18 does."""
    engine = tiny.engine(tiny.config(1, parallel=BY_DEEPSPEED), tiny.join(1))
    tiny.global_step(engine, 0)
    engine._ds.is_gradient_accumulation_boundary = lambda: False
    with pytest.raises(RuntimeError, match=f"DeepSpeed {version('deepspeed')} has not called the optimizer"):
        tiny.global_step(engine, 1)


def test_a_step_in_which_the_optimizer_is_not_called_is_no_step() -> None:
    run_distributed(without_a_call, 1)
