"""Experts with biases and with other activations than SwiGLU agree with a loop over experts in float64."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_inputs import ACTIVATED, random_choices
from sagekernels.grouped import plan_rows
from sagekernels.grouped_matmul import GROUPED_LOW_BIT, grouped_gated, grouped_matmul
from sagekernels.grouped_swiglu import combined_bias, weighted_swiglu
from sagekernels.testing import rel_l2

LOADS = (0, 17, 128, 1, 129, 0, 40, 0)
TOP, HIDDEN, INNER = 3, 32, 48
CHOICES = random_choices(LOADS, TOP)
DRAW = torch.Generator().manual_seed(0)
SHAPES = (len(CHOICES), HIDDEN), CHOICES.shape, (8, 2 * INNER, HIDDEN), (8, 2 * INNER), (8, HIDDEN, INNER), (8, HIDDEN)
# Both sides of both limits are reached.
TENSORS = [
    torch.randn(shape, generator=DRAW, dtype=torch.float64) * s
    for shape, s in zip(SHAPES, (1, 1, 1, 2, 0.2, 1), strict=True)
]
GRAD = torch.randn(SHAPES[0], generator=DRAW, dtype=torch.float64)


def experts(x, weights, gate_up, bias, down, down_bias, activation, choices, matmul=None, room=None):  # type: ignore[no-untyped-def]
    rows = plan_rows(choices, len(gate_up), room)
    inner = grouped_gated(x, gate_up, weights, rows, matmul, gathers=True, activation=activation, bias=bias)
    return grouped_matmul(inner, down, rows, matmul, combines=True) + combined_bias(down_bias, weights, rows)


def loop(x, weights, gate_up, bias, down, down_bias, activation, choices):  # type: ignore[no-untyped-def]
    y = torch.zeros_like(x)
    for expert, place in itertools.product(range(len(gate_up)), range(TOP)):
        inner = ACTIVATED[activation](*(F.linear(x, gate_up[expert], bias[expert])).chunk(2, 1))
        of_expert = F.linear(inner, down[expert], down_bias[expert])
        y = y + torch.where((choices[:, place] == expert)[:, None], weights[:, place, None] * of_expert, 0)
    return y


def results(function, dtype: torch.dtype, activation: str, *arguments: object) -> list[Tensor]:  # type: ignore[no-untyped-def]
    leaves = [tensor.to(dtype).requires_grad_() for tensor in TENSORS]
    y = function(*leaves, activation, CHOICES, *arguments)
    return [y.detach(), *torch.autograd.grad(y, leaves, GRAD.to(dtype))]


@pytest.mark.parametrize("activation", ACTIVATED)
def test_experts_with_biases_are_a_loop_over_experts(activation: str) -> None:
    """In 8 bits they err by the roundings of other experts, and one graph has their bits. Rows without a choice, which
    more room has, change nothing whatever lies in them, and experts without a token have no gradient."""
    truth = results(loop, torch.float64, activation)
    limits = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 0.02}
    for dtype, limit in limits.items():
        found = results(experts, dtype, activation)
        assert all(a.dtype == dtype and rel_l2(a, b) < limit for a, b in zip(found, truth, strict=True)), dtype
        assert all(map(torch.equal, found, results(experts, dtype, activation, None, 600)))
        assert not found[4][0].any() and not found[6][0].any()
    low = results(experts, torch.float32, activation, GROUPED_LOW_BIT["int8"])
    errors = [rel_l2(a, b) for a, b in zip(low, truth, strict=True)]
    # Where rounding moves a number over a limit, its gradient comes or goes.
    assert all(error < 0.08 for error in errors) and errors[6] < 1e-6, errors
    if activation == "clamped_swiglu":
        torch._dynamo.reset()
        compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
        for matmul in (None, GROUPED_LOW_BIT["int8"]):
            pairs = (results(way, torch.float32, activation, matmul) for way in (experts, compiled))
            assert all(rel_l2(a, b) < 1e-6 for a, b in zip(*pairs, strict=True))


def test_empty_rows_are_zeros_and_wrong_biases_are_refused() -> None:
    rows = plan_rows(CHOICES, 8, 600)
    gate_up, weights, bias = torch.full((600, 2 * INNER), torch.nan), TENSORS[1].float(), TENSORS[3].float()
    gate_up[: sum(LOADS)] = 1.0
    leaves = [x.requires_grad_() for x in (gate_up, bias, weights)]
    y = weighted_swiglu(gate_up, weights, rows, "clamped_swiglu", bias.flatten())
    assert y.isfinite().all() and not y[sum(LOADS) :].any()
    assert all(x.isfinite().all() for x in torch.autograd.grad(y.sum(), leaves))
    with pytest.raises(ValueError, match=r"experts take a bias \[8, 96\], got shape \(7, 96\)"):
        weighted_swiglu(gate_up, weights, rows, bias=bias[:7])
    with pytest.raises(TypeError, match=r"combined_bias takes a bias of floating-point numbers, got torch\.int32"):
        combined_bias(TENSORS[5].int(), TENSORS[1], rows)
    with pytest.raises(TypeError, match="a bias in the dtype of gate_up"):
        weighted_swiglu(gate_up, weights, rows, bias=bias.double())
    none = plan_rows(CHOICES[:0], 8)
    assert combined_bias(TENSORS[5], TENSORS[1][:0], none).shape == (0, HIDDEN)
    assert weighted_swiglu(torch.zeros(0, 2 * INNER), weights[:0], none, bias=bias).shape == (0, INNER)
