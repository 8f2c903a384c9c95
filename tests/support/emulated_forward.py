"""Inputs and comparisons that the tests of all emulated forward kernels share."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sagekernels.testing import rel_l2


def inputs(seed: int, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Return standard normal tensors in bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]


def assert_close(o: Tensor, lse: Tensor, o_twin: Tensor, lse_twin: Tensor) -> None:
    """Check that a kernel's results are those of the twin."""
    assert rel_l2(o, o_twin) < 5e-3
    assert torch.allclose(lse, lse_twin, atol=1e-4, rtol=1e-5)


def assert_non_finite_values_propagate(emulated: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]) -> None:
    """Check that an infinite query gives NaN in its row alone, and that a row of zeros gives the twin's result."""
    q, k, v = inputs(0, [(1, 200, 1, 64)] * 3)
    q[0, 20], q[0, 40, 0, 6] = 0, math.inf
    o, lse, o_twin, lse_twin = emulated(q, k, v, True)
    assert o.isnan().any(-1).flatten().nonzero().flatten().tolist() == [40]
    assert torch.equal(lse.isnan(), lse_twin.isnan())
    assert torch.allclose(o[0, 20], o_twin[0, 20], atol=1e-2)
