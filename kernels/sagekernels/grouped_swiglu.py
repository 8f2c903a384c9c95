"""silu(gate) * up of a mixture's rows, times the weight that the router gave each row: the torch twin,
then Triton.

The weight is multiplied here, before the experts' last product. Its gradient then falls out of this backward pass, and
the result of that product is neither kept nor read again. gate and up are halves of one matrix, and so are their
gradients. Both kernels can leave the largest magnitudes of what they write, for the casts behind them.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .casts import DTYPES
from .grouped import Rows
from .grouped_casts import grouped_largest_twin
from .launch import ceil_div, on_device_of
from .operators import by_device
from .refusals import differentiated_once, refuse_transforms
from .swiglu import Experts, launched

SUM_CHOICES, SUM_WARPS = 256, 4
"""The choices of a program that adds up the parts of the weights' gradients."""


def weighted_swiglu_twin(
    gate_up: Tensor, weights: Tensor, choice: Tensor, ends: Tensor, tiles: Tensor, measured: bool
) -> tuple[Tensor, Tensor]:
    """Return silu(gate) * up * weight, computed in float32 and rounded once; zeros for empty rows. Then with `measured`
    its largest magnitudes (grouped_casts.grouped_largest_twin)."""
    wide = torch.promote_types(gate_up.dtype, torch.float32)
    gate, up = gate_up.to(wide).chunk(2, 1)
    y = (F.silu(gate) * up * of_rows(weights, choice, wide)).to(gate_up.dtype)
    y.masked_fill_((choice < 0)[:, None], 0)
    return y, grouped_largest_twin(y, ends) if measured else _no_largest(ends)


def weighted_swiglu_gradients_twin(
    grad: Tensor, gate_up: Tensor, weights: Tensor, choice: Tensor, slot: Tensor, ends: Tensor, tiles: Tensor,
    measured: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of gate and up side by side, rounded once, and those of the weights [T, k] in float32; zeros
    for empty rows and for choices without one. Then with `measured` the largest magnitudes of the first ones."""
    wide = torch.promote_types(gate_up.dtype, torch.float32)
    gate, up = gate_up.to(wide).chunk(2, 1)
    empty = (choice < 0)[:, None]
    products = (grad.to(wide) * (F.silu(gate) * up)).sum(1)
    of_result = grad.to(wide) * of_rows(weights, choice, wide)
    of_gate = torch.ops.aten.silu_backward(of_result * up, gate)
    gradients = torch.cat((of_gate, of_result * F.silu(gate)), 1).to(gate_up.dtype).masked_fill_(empty, 0)
    largest = grouped_largest_twin(gradients, ends) if measured else _no_largest(ends)
    return gradients, of_choices(products, slot), largest


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


def _no_largest(ends: Tensor) -> Tensor:
    return ends.new_zeros(0, dtype=torch.int32)


def _zero_largest(measured: bool, rows: int, columns: int, ends: Tensor) -> Tensor:
    """Return zeros for the largest magnitudes of rows and of each expert's columns, if they are `measured`."""
    return ends.new_zeros(rows + ends.shape[0] * columns, dtype=torch.int32) if measured else _no_largest(ends)


def weighted_swiglu_triton(
    gate_up: Tensor, weights: Tensor, choice: Tensor, ends: Tensor, tiles: Tensor, measured: bool
) -> tuple[Tensor, Tensor]:
    """Compute weighted_swiglu_twin on a GPU, within one rounding, and with `measured` exactly the largest magnitudes of
    the result."""
    experts = Experts(weights.contiguous(), choice, tiles, len(ends))
    return launched(None, gate_up, None, experts, measured)[:2]


def weighted_swiglu_gradients_triton(
    grad: Tensor, gate_up: Tensor, weights: Tensor, choice: Tensor, slot: Tensor, ends: Tensor, tiles: Tensor,
    measured: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute weighted_swiglu_gradients_twin on a GPU, within its rounding, and with `measured` exactly the largest
    magnitudes of the gradients of gate and up."""
    experts = Experts(weights.contiguous(), choice, tiles, len(ends))
    out, largest, partial = launched(grad, gate_up, None, experts, measured)
    of_weights = torch.empty(slot.shape, dtype=torch.float32, device=out.device)
    if slot.numel():
        with on_device_of(out):
            _sum_parts_kernel[(ceil_div(slot.numel(), SUM_CHOICES),)](
                partial, slot, of_weights, slot.numel(), partial.shape[1], CHOICES=SUM_CHOICES, num_warps=SUM_WARPS
            )
    return out, of_weights, largest


def _weighted_swiglu_fake(
    gate_up: Tensor, weights: Tensor, choice: Tensor, ends: Tensor, tiles: Tensor, measured: bool
) -> tuple[Tensor, Tensor]:
    rows, columns = gate_up.shape[0], gate_up.shape[1] // 2
    return gate_up.new_empty(rows, columns), _zero_largest(measured, rows, columns, ends)


def _weighted_swiglu_gradients_fake(
    grad: Tensor, gate_up: Tensor, weights: Tensor, choice: Tensor, slot: Tensor, ends: Tensor, tiles: Tensor,
    measured: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    of_weights = weights.new_empty(weights.shape, dtype=torch.promote_types(gate_up.dtype, torch.float32))
    return gate_up.new_empty(gate_up.shape), of_weights, _zero_largest(measured, *gate_up.shape, ends)


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
        ctx: Any, gate_up: Tensor, weights: Tensor, choice: Tensor, slot: Tensor, ends: Tensor, tiles: Tensor
    ) -> Tensor:
        ctx.save_for_backward(gate_up, weights, choice, slot, ends, tiles)
        return WEIGHTED_SWIGLU(gate_up, weights, choice, ends, tiles, False)[0]

    @staticmethod
    @differentiated_once(*_NAMED)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # Recomputed blocks give them once.
        of_gate_up, of_weights, _ = WEIGHTED_SWIGLU_GRADIENTS(grad, *tensors, False)
        return of_gate_up, of_weights.to(tensors[1].dtype), None, None, None, None


def weighted_swiglu(gate_up: Tensor, weights: Tensor, rows: Rows) -> Tensor:
    """Return silu(gate) * up of each row times its weight: [R, 2 F] -> [R, F]. It is computed in float32 and rounded
    once. Empty rows are zeros.

    Args:
        gate_up: [R, 2 F], gate in the first half of the columns and up in the second, bf16, fp16 or fp32. It is kept
            for the backward pass.
        weights: [T, k], the router's weight of each choice, fp32 as a rule. Its gradient is summed in float32.
        rows: of plan_rows.

    Raises:
        TypeError: another dtype.
        ValueError: the shapes do not belong together.
        NotImplementedError: a second derivative, or a transform of torch.func.
    """
    refuse_transforms(*_NAMED)
    check_swiglu(gate_up.shape, gate_up.dtype, weights, rows)
    return _WeightedSwiGLU.apply(gate_up, weights, rows.choice, rows.slot, rows.ends, rows.tiles)


def check_swiglu(shape: tuple[int, ...], dtype: torch.dtype, weights: Tensor, rows: Rows) -> None:
    """Raise the errors of weighted_swiglu, by the shape and dtype of gate_up."""
    if dtype not in (*DTYPES, torch.float64) or not weights.is_floating_point():
        raise TypeError(f"weighted_swiglu takes bf16, fp16 or fp32, got {dtype} and weights in {weights.dtype}")
    if len(shape) != 2 or shape[1] % 2 or shape[0] != len(rows.choice) or weights.shape != rows.slot.shape:
        raise ValueError(
            f"weighted_swiglu takes [{len(rows.choice)}, 2 F] and weights {list(rows.slot.shape)}, got shapes "
            f"{tuple(shape)} and {tuple(weights.shape)}"
        )
