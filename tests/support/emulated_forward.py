"""Inputs and comparisons that the tests of all emulated forward kernels share."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from sagekernels.testing import Shape, rel_l2


def inputs(seed: int, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return standard normal tensors in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def assert_close(o: Tensor, lse: Tensor, o_twin: Tensor, lse_twin: Tensor) -> None:
    """Check that a kernel's results are those of the twin."""
    assert rel_l2(o, o_twin) < 5e-3
    assert torch.allclose(lse, lse_twin, atol=1e-4, rtol=1e-5)


WINDOWS = pytest.mark.parametrize(("documents", "window", "causal"), [
    ((90, 210), 1, True), ((90, 0, 210), 100, True), ((), 40, True), ((90, 210), 40, False),
])  # fmt: skip


def assert_bounds_are_kept(
    emulated: Callable[..., Sequence[Tensor]], documents: Sequence[int], window: int | None, causal: bool
) -> None:
    """Check documents, and a window. Without documents there are two rows, which have the same bounds."""
    batch, n = (1, sum(documents)) if documents else (2, 200)
    q, k, v = inputs(n, [(batch, n, heads, 64) for heads in (2, 1, 1)])
    assert_close(*emulated(q, k, v, causal, bounds=Shape(n_q=n, documents=tuple(documents), window=window).bounds()))


def assert_scores_may_outgrow_the_maximum(emulated: Callable[..., Sequence[Tensor]], head_dim: int, n: int) -> None:
    """Check keys that get larger towards the first one, which is visited last. Scores grow by more than 2^127 from tile
    to tile."""
    q, k, v = inputs(0, [(1, n, 1, head_dim)] * 3)
    q, k = q.abs() * 8, k.abs() * torch.linspace(16, -16, n)[None, :, None, None].bfloat16()
    assert_close(*emulated(q, k, v, True, smooth=False, scale=0.25))


def assert_sinks_are_another_score(emulated: Callable[..., Sequence[Tensor]], head_dim: int) -> None:
    """Check sinks of any size beside the twin's. They are relative to a mean of K that is as large as its noise. Minus
    infinity changes no bit."""
    q, k, v = inputs(1, [(2, 150, heads, head_dim) for heads in (4, 2, 2)])
    for window in (None, 40):
        bounds = Shape(n_q=150, window=window).bounds()
        found = emulated(q, k + 1, v, True, sinks=torch.tensor([0.0, 6.0, -1e4, 1e4]), bounds=bounds)
        assert_close(*found)
        assert not found[0][:, :, 3].any()
    none, infinite = (
        emulated(q, k, v, True, bounds=bounds, sinks=sinks)[:2] for sinks in (None, torch.full((4,), -math.inf))
    )
    assert all(map(torch.equal, none, infinite))


def assert_non_finite_values_propagate(emulated: Callable[..., Sequence[Tensor]]) -> None:
    """Check that an infinite query gives NaN in its row alone, and that a row of zeros gives the twin's result."""
    q, k, v = inputs(0, [(1, 200, 1, 64)] * 3)
    q[0, 20], q[0, 40, 0, 6] = 0, math.inf
    o, lse, o_twin, lse_twin = emulated(q, k, v, True)
    assert o.isnan().any(-1).flatten().nonzero().flatten().tolist() == [40]
    assert torch.equal(lse.isnan(), lse_twin.isnan())
    assert torch.allclose(o[0, 20], o_twin[0, 20], atol=1e-2)
