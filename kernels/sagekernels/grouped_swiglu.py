"""silu(gate) * up of a mixture's rows, or another activation, times the weight that the router gave each row: the torch
twin, then Triton. Experts may have biases.

The weight is multiplied here, before the experts' last product. Its gradient then falls out of this backward pass, and
the result of that product is neither kept nor read again. gate and up are halves of one matrix, and so are their
gradients. Both kernels can leave the largest magnitudes of what they write, for the casts behind them.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .casts import DTYPES
from .grouped import Rows
from .grouped_casts import grouped_largest_twin
from .launch import ceil_div, on_device_of
from .operators import by_device
from .refusals import differentiated_once, refuse_transforms
from .swiglu import GATES, Experts, Gate, launched

SUM_CHOICES, SUM_COLUMNS, SUM_WARPS = 256, 256, 4
"""The choices of a program that adds up the parts of the weights' gradients, and the columns of one for the bias."""


def weighted_swiglu_twin(
    gate_up: Tensor, bias: Tensor | None, weights: Tensor, choice: Tensor, ends: Tensor, tiles: Tensor,
    activation: str, measured: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the activation (swiglu.GATES) of gate and up with their biases, times the weight, computed in float32 and
    rounded once; zeros for empty rows. Then with `measured` its largest magnitudes
    (grouped_casts.grouped_largest_twin)."""
    _, (gate, up), sigmoid, _ = _activated(gate_up, bias, ends, GATES[activation])
    y = (gate * sigmoid * up * of_rows(weights, choice, gate.dtype)).to(gate_up.dtype)
    y.masked_fill_((choice < 0)[:, None], 0)
    return y, grouped_largest_twin(y, ends) if measured else _none(ends, torch.int32)


def weighted_swiglu_gradients_twin(
    grad: Tensor, gate_up: Tensor, bias: Tensor | None, weights: Tensor, choice: Tensor, slot: Tensor, ends: Tensor,
    tiles: Tensor, first: Tensor, activation: str, measured: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of gate and up side by side, rounded once; in float32 those of the weights [T, k], and of
    the bias [E, 2 F] if there is one; zeros for empty rows and for choices without one. Then with `measured` the
    largest magnitudes of the first ones."""
    limit, empty = GATES[activation].limit, (choice < 0)[:, None]
    whole, (gate, up), sigmoid, steep = _activated(gate_up, bias, ends, GATES[activation])
    grad = grad.to(gate.dtype)
    products = (grad * (gate * sigmoid) * up).sum(1)
    grad = grad * of_rows(weights, choice, gate.dtype)
    exact = [grad * up * sigmoid * (1 + steep * (1 - sigmoid)), grad * (gate * sigmoid)]
    if limit:
        exact = [exact[0].masked_fill(whole[0] > limit, 0), exact[1].masked_fill(whole[1].abs() > limit, 0)]
    of_halves = torch.cat(exact, 1).masked_fill_(empty, 0)
    gradients, of_bias = of_halves.to(gate_up.dtype), _none(ends, gate.dtype)
    if bias is not None:
        of_bias = gate.new_zeros(len(ends) + 1, gate_up.shape[1]).index_add_(0, _experts(ends, len(choice)), of_halves)
    largest = grouped_largest_twin(gradients, ends) if measured else _none(ends, torch.int32)
    return gradients, of_choices(products, slot), of_bias[:-1], largest


def _activated(
    gate_up: Tensor, bias: Tensor | None, ends: Tensor, gate: Gate
) -> tuple[Sequence[Tensor], Sequence[Tensor], Tensor, Tensor]:
    """Return gate and up with their biases, as they are and as limits leave them, then the sigmoid and gate times the
    derivative of what is in it, in float32."""
    x = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32))
    if bias is not None:
        x = x + bias.view(len(ends), -1).to(x.dtype)[_experts(ends, len(x)).clamp(max=len(ends) - 1)]
    whole = limited = x.chunk(2, 1)
    if gate.limit:
        limited = whole[0].clamp(max=gate.limit), whole[1].clamp(-gate.limit, gate.limit) + 1
    inner = steep = gate.slope * limited[0]
    if gate.cubic:
        square = gate.cubic * limited[0].square()
        inner, steep = inner * (1 + square), inner * (1 + 3 * square)
    return whole, limited, inner.sigmoid(), steep


def _experts(ends: Tensor, rows: int) -> Tensor:
    """Return the expert of each of so many rows, int64; for rows that no expert has, how many experts there are."""
    return torch.searchsorted(ends, torch.arange(rows, dtype=ends.dtype, device=ends.device), right=True)


def of_rows(weights: Tensor, choice: Tensor, wide: torch.dtype) -> Tensor:
    """Return the weight of each row as a column; anything for empty rows."""
    if not weights.numel():
        return weights.new_zeros(len(choice), 1, dtype=wide)
    return weights.reshape(-1).to(wide)[choice.long()][:, None]


def of_choices(numbers: Tensor, slot: Tensor) -> Tensor:
    """Return the number of each choice's row, [T, k]; zeros for choices without one."""
    if not len(numbers):
        return numbers.new_zeros(slot.shape)
    return numbers[slot.long().clamp(min=0)].masked_fill(slot < 0, 0)


@triton.jit
def _sum_parts_kernel(PARTIAL, SLOT, OF_WEIGHTS, choices, across, CHOICES: tl.constexpr):
    """Add up the parts of the gradient of each choice's weight, from the first column on."""
    choice = tl.program_id(0) * CHOICES + tl.arange(0, CHOICES)
    row = tl.load(SLOT + choice, mask=choice < choices, other=-1)
    total = tl.zeros([CHOICES], tl.float32)
    for part in range(across):
        total += tl.load(PARTIAL + row.to(tl.int64) * across + part, mask=row >= 0, other=0.0)
    tl.store(OF_WEIGHTS + choice, total, mask=choice < choices)


@triton.jit
def _sum_tiles_kernel(PARTIAL, FIRST, OF_BIAS, columns, COLUMNS: tl.constexpr):
    """Add up the parts of the gradient of an expert's bias, from its first tile on."""
    expert, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    for tile in range(tl.load(FIRST + expert), tl.load(FIRST + expert + 1)):
        total += tl.load(PARTIAL + tile * columns + column, mask=column < columns, other=0.0)
    tl.store(OF_BIAS + expert * columns + column, total, mask=column < columns)


def _none(like: Tensor, dtype: torch.dtype) -> Tensor:
    return like.new_zeros(0, dtype=dtype)


def _zero_largest(measured: bool, rows: int, columns: int, ends: Tensor) -> Tensor:
    """Return zeros for the largest magnitudes of rows and of each expert's columns, if they are `measured`."""
    return ends.new_zeros(rows + ends.shape[0] * columns, dtype=torch.int32) if measured else _none(ends, torch.int32)


def weighted_swiglu_triton(
    gate_up: Tensor, bias: Tensor | None, weights: Tensor, choice: Tensor, ends: Tensor, tiles: Tensor,
    activation: str, measured: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute weighted_swiglu_twin on a GPU, within one rounding, and with `measured` exactly the largest magnitudes of
    the result."""
    experts = Experts(_contiguous(bias), weights.contiguous(), choice, tiles, len(ends), GATES[activation])
    return launched(None, gate_up, None, experts, measured)[:2]


def weighted_swiglu_gradients_triton(
    grad: Tensor, gate_up: Tensor, bias: Tensor | None, weights: Tensor, choice: Tensor, slot: Tensor, ends: Tensor,
    tiles: Tensor, first: Tensor, activation: str, measured: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute weighted_swiglu_gradients_twin on a GPU, within its rounding, and with `measured` exactly the largest
    magnitudes of the gradients of gate and up."""
    experts = Experts(_contiguous(bias), weights.contiguous(), choice, tiles, len(ends), GATES[activation])
    out, largest, partial, of_tiles = launched(grad, gate_up, None, experts, measured)
    of_weights, of_bias = _of_parameters(gate_up, bias, slot, ends)
    with on_device_of(out):
        if slot.numel():
            _sum_parts_kernel[(ceil_div(slot.numel(), SUM_CHOICES),)](
                partial, slot, of_weights, slot.numel(), partial.shape[1], CHOICES=SUM_CHOICES, num_warps=SUM_WARPS
            )
        if bias is not None:
            _sum_tiles_kernel[(len(ends), ceil_div(out.shape[1], SUM_COLUMNS))](
                of_tiles, first, of_bias, out.shape[1], COLUMNS=SUM_COLUMNS, num_warps=SUM_WARPS
            )
    return out, of_weights, of_bias, largest


def _contiguous(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()


def _of_parameters(gate_up: Tensor, bias: Tensor | None, slot: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for the gradients of the weights and of the bias."""
    wide = torch.promote_types(gate_up.dtype, torch.float32)
    of_bias = _none(ends, wide) if bias is None else gate_up.new_empty(len(ends), gate_up.shape[1], dtype=wide)
    return gate_up.new_empty(slot.shape, dtype=wide), of_bias


def _weighted_swiglu_fake(
    gate_up: Tensor, bias: Tensor | None, weights: Tensor, choice: Tensor, ends: Tensor, tiles: Tensor,
    activation: str, measured: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    return gate_up.new_empty(rows, columns), _zero_largest(measured, rows, columns, ends)


def _weighted_swiglu_gradients_fake(
    grad: Tensor, gate_up: Tensor, bias: Tensor | None, weights: Tensor, choice: Tensor, slot: Tensor, ends: Tensor,
    tiles: Tensor, first: Tensor, activation: str, measured: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    of_parameters = _of_parameters(gate_up, bias, slot, ends)
    return gate_up.new_empty(gate_up.shape), *of_parameters, _zero_largest(measured, *gate_up.shape, ends)


WEIGHTED_SWIGLU = by_device("weighted_swiglu", weighted_swiglu_twin, weighted_swiglu_triton, _weighted_swiglu_fake)
WEIGHTED_SWIGLU_GRADIENTS = by_device(
    "weighted_swiglu_gradients",
    weighted_swiglu_gradients_twin,
    weighted_swiglu_gradients_triton,
    _weighted_swiglu_gradients_fake,
)

_NAMED = "weighted_swiglu", "F.silu(gate) * up * weight"


class _WeightedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, activation: str, gate_up: Tensor, bias: Tensor | None, weights: Tensor, *places: Tensor
    ) -> Tensor:
        choice, _, ends, tiles, _ = places
        ctx.activation = activation
        ctx.save_for_backward(gate_up, bias, weights, *places)
        return WEIGHTED_SWIGLU(gate_up, bias, weights, choice, ends, tiles, activation, False)[0]

    @staticmethod
    @differentiated_once(*_NAMED)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # Recomputed blocks give them once.
        of_gate_up, of_weights, of_bias, _ = WEIGHTED_SWIGLU_GRADIENTS(grad, *tensors, ctx.activation, False)
        bias, weights, *places = tensors[1:]
        return None, of_gate_up, bias_gradient(of_bias, bias), of_weights.to(weights.dtype), *(None,) * len(places)


def bias_gradient(found: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return the gradient of a bias in its shape and dtype, of one that WEIGHTED_SWIGLU_GRADIENTS has found."""
    return None if bias is None else found.to(bias.dtype).view(bias.shape)


def weighted_swiglu(
    gate_up: Tensor, weights: Tensor, rows: Rows, activation: str = "swiglu", bias: Tensor | None = None
) -> Tensor:
    """Return silu(gate) * up of each row times its weight: [R, 2 F] -> [R, F]. It is computed in float32 and rounded
    once. Empty rows are zeros.

    Args:
        gate_up: [R, 2 F], gate in the first half of the columns and up in the second, bf16, fp16 or fp32. It is kept
            for the backward pass.
        weights: [T, k], the router's weight of each choice, fp32 as a rule. Its gradient is summed in float32.
        rows: of plan_rows.
        activation: the name of another one (swiglu.GATES).
        bias: [E, 2 F], or the same memory as a vector, in the dtype of gate_up: what is added to an expert's gate and
            up. Its gradient is summed in float32.

    Raises:
        TypeError: another dtype.
        ValueError: the shapes do not belong together.
        NotImplementedError: a second derivative, or a transform of torch.func.
    """
    refuse_transforms(*_NAMED)
    check_swiglu(gate_up.shape, gate_up.dtype, weights, rows, bias)
    places = rows.choice, rows.slot, rows.ends, rows.tiles, rows.first
    return _WeightedSwiGLU.apply(activation, gate_up, bias, weights, *places)


def check_swiglu(
    shape: tuple[int, ...], dtype: torch.dtype, weights: Tensor, rows: Rows, bias: Tensor | None = None
) -> None:
    """Raise the errors of weighted_swiglu, by the shape and dtype of gate_up."""
    if dtype not in (*DTYPES, torch.float64) or not weights.is_floating_point():
        raise TypeError(f"weighted_swiglu takes bf16, fp16 or fp32, got {dtype} and weights in {weights.dtype}")
    if len(shape) != 2 or shape[1] % 2 or shape[0] != len(rows.choice) or weights.shape != rows.slot.shape:
        raise ValueError(
            f"weighted_swiglu takes [{len(rows.choice)}, 2 F] and weights {list(rows.slot.shape)}, got shapes "
            f"{tuple(shape)} and {tuple(weights.shape)}"
        )
    if bias is not None and bias.dtype != dtype:
        raise TypeError(f"weighted_swiglu takes a bias in the dtype of gate_up, {dtype}, got {bias.dtype}")
    if bias is not None:
        _of_experts(bias, shape[1], rows)


def combined_bias(bias: Tensor, weights: Tensor, rows: Rows) -> Tensor:
    """Return the sum of the biases of each token's experts times their weights, [T, H]. It belongs to a product whose
    rows have their weights already. Choices without a row add nothing. torch's operators compute it.

    Args:
        bias: [E, H] or the same memory as a vector.
        weights: [T, k]. They are rounded to the dtype of the bias.

    Raises:
        TypeError: a bias of integers.
        ValueError: the bias is no such matrix.
    """
    if not bias.dtype.is_floating_point:
        raise TypeError(f"combined_bias takes a bias of floating-point numbers, got {bias.dtype}")
    of_experts = _of_experts(bias, bias.numel() // len(rows.ends), rows)
    there = rows.slot >= 0
    expert = torch.searchsorted(rows.ends, rows.slot, right=True).clamp(max=len(of_experts) - 1)
    shares = weights.new_zeros(len(weights), len(of_experts)).scatter_add(1, expert, weights * there)
    return shares.to(bias.dtype) @ of_experts


def _of_experts(bias: Tensor, columns: int, rows: Rows) -> Tensor:
    """View a bias as [E, columns]."""
    if bias.numel() != len(rows.ends) * columns:
        raise ValueError(f"experts take a bias [{len(rows.ends)}, {columns}], got shape {tuple(bias.shape)}")
    return bias.view(-1, columns)
