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

from .casts import DTYPES, magnitudes, widened
from .grouped import TILE, Rows
from .grouped_casts import grouped_largest_twin
from .launch import ceil_div, on_device_of
from .operators import by_device
from .refusals import differentiated_once, refuse_transforms

# A program takes so many rows and columns at a time, until its tile is done.
ROWS, COLUMNS, STAGES, WARPS = 8, 256, 3, 4
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
def _load_row_tile(CHOICE, WEIGHTS, GATE_UP, row, own, column, columns, stride):
    """Load weight, gate and up of some rows as float32, with zeros for rows that are not this expert's own."""
    choice = tl.load(CHOICE + row, mask=own, other=0)
    weight = tl.load(WEIGHTS + choice, mask=own, other=0.0).to(tl.float32)[:, None]
    inside = own[:, None] & (column < columns)[None, :]
    at = GATE_UP + row.to(tl.int64)[:, None] * stride + column[None, :]
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + columns, mask=inside, other=0.0).to(tl.float32)
    return weight, gate, up, inside


@triton.jit
def _weighted_swiglu_kernel(
    GATE_UP, WEIGHTS, CHOICE, TILES, OUT, LARGEST, rows, columns, stride, across,
    MEASURED: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """Compute a tile of rows by COLUMNS columns. MEASURED: leave the largest magnitudes of rows, and of each expert's
    columns, of what is written (see casts.largest_kernel)."""
    at = TILES + 4 * (tl.program_id(0) // across)
    expert, first, end = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    of_columns = tl.zeros([ROWS, COLUMNS], tl.int16 if NARROW else tl.int32)
    for step in tl.range(TILE // ROWS, num_stages=STAGES):
        row = first + step * ROWS + tl.arange(0, ROWS)
        own = (row < end) & (expert >= 0)
        weight, gate, up, _ = _load_row_tile(CHOICE, WEIGHTS, GATE_UP, row, own, column, columns, stride)
        y = (gate * (1.0 / (1.0 + tl.exp(-gate))) * up * weight).to(OUT.dtype.element_ty)
        out = OUT + row.to(tl.int64)[:, None] * columns + column[None, :]
        tl.store(out, y, mask=(row < end)[:, None] & (column < columns)[None, :])
        if MEASURED:
            bits = magnitudes(y, NARROW)
            of_columns = tl.maximum(of_columns, bits)
            tl.atomic_max(LARGEST + row, widened(tl.max(bits, 1), NARROW), mask=row < end, sem="relaxed")
    if MEASURED:
        largest = widened(tl.max(of_columns, 0), NARROW)
        inside = (column < columns) & (expert >= 0)
        tl.atomic_max(LARGEST + rows + expert * columns + column, largest, mask=inside, sem="relaxed")


@triton.jit
def _weighted_swiglu_gradients_kernel(
    GRAD, GATE_UP, WEIGHTS, CHOICE, TILES, OUT, PARTIAL, LARGEST, rows, columns, grad_stride, stride, across,
    MEASURED: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    NARROW: tl.constexpr,
):  # fmt: skip
    """Compute both gradients of a tile of rows by COLUMNS columns, and the part that these columns have of the weights'
    gradients."""
    right = tl.program_id(0) % across
    at = TILES + 4 * (tl.program_id(0) // across)
    expert, first, end = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    column = right * COLUMNS + tl.arange(0, COLUMNS)
    of_gates = tl.zeros([ROWS, COLUMNS], tl.int16 if NARROW else tl.int32)
    of_ups = tl.zeros([ROWS, COLUMNS], tl.int16 if NARROW else tl.int32)
    for step in tl.range(TILE // ROWS, num_stages=STAGES):
        row = first + step * ROWS + tl.arange(0, ROWS)
        long = row.to(tl.int64)[:, None]
        own = (row < end) & (expert >= 0)
        weight, gate, up, inside = _load_row_tile(CHOICE, WEIGHTS, GATE_UP, row, own, column, columns, stride)
        grad = tl.load(GRAD + long * grad_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        silu = gate * sigmoid
        tl.store(PARTIAL + row.to(tl.int64) * across + right, tl.sum(grad * silu * up, 1), mask=row < end)
        grad *= weight
        of_gate = (grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))).to(OUT.dtype.element_ty)
        of_up = (grad * silu).to(OUT.dtype.element_ty)
        out = OUT + long * (2 * columns) + column[None, :]
        inside = (row < end)[:, None] & (column < columns)[None, :]
        tl.store(out, of_gate, mask=inside)
        tl.store(out + columns, of_up, mask=inside)
        if MEASURED:
            gate_bits, up_bits = magnitudes(of_gate, NARROW), magnitudes(of_up, NARROW)
            of_gates, of_ups = tl.maximum(of_gates, gate_bits), tl.maximum(of_ups, up_bits)
            largest = widened(tl.max(tl.maximum(gate_bits, up_bits), 1), NARROW)
            tl.atomic_max(LARGEST + row, largest, mask=row < end, sem="relaxed")
    if MEASURED:
        inside = (column < columns) & (expert >= 0)
        of_columns = LARGEST + rows + expert * 2 * columns + column
        tl.atomic_max(of_columns, widened(tl.max(of_gates, 0), NARROW), mask=inside, sem="relaxed")
        tl.atomic_max(of_columns + columns, widened(tl.max(of_ups, 0), NARROW), mask=inside, sem="relaxed")


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
    the result (grouped_casts.grouped_largest_twin)."""
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    rows, columns = len(gate_up), gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, columns)
    largest, across = _zero_largest(measured, rows, columns, ends), ceil_div(columns, COLUMNS)
    with on_device_of(gate_up):
        _weighted_swiglu_kernel[(len(tiles) * across,)](
            gate_up, weights.contiguous(), choice, tiles, out, largest, rows, columns, gate_up.stride(0), across,
            MEASURED=measured, TILE=TILE, ROWS=ROWS, COLUMNS=COLUMNS, STAGES=STAGES,
            NARROW=out.dtype == torch.bfloat16, num_warps=WARPS,
        )  # fmt: skip
    return out, largest


def weighted_swiglu_gradients_triton(
    grad: Tensor, gate_up: Tensor, weights: Tensor, choice: Tensor, slot: Tensor, ends: Tensor, tiles: Tensor,
    measured: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute weighted_swiglu_gradients_twin on a GPU, within its rounding, and with `measured` exactly the largest
    magnitudes of the gradients of gate and up."""
    grad, gate_up = (x if x.stride(1) == 1 else x.contiguous() for x in (grad, gate_up))
    rows, columns = grad.shape
    out = gate_up.new_empty(rows, 2 * columns)
    of_weights = torch.empty(slot.shape, dtype=torch.float32, device=out.device)
    largest, across = _zero_largest(measured, rows, 2 * columns, ends), ceil_div(columns, COLUMNS)
    partial = torch.empty(rows, across, dtype=torch.float32, device=out.device)
    with on_device_of(out):
        _weighted_swiglu_gradients_kernel[(len(tiles) * across,)](
            grad, gate_up, weights.contiguous(), choice, tiles, out, partial, largest,
            rows, columns, grad.stride(0), gate_up.stride(0), across,
            MEASURED=measured, TILE=TILE, ROWS=ROWS, COLUMNS=COLUMNS, STAGES=STAGES,
            NARROW=out.dtype == torch.bfloat16, num_warps=WARPS,
        )  # fmt: skip
        if slot.numel():
            _sum_parts_kernel[(ceil_div(slot.numel(), SUM_CHOICES),)](
                partial, slot, of_weights, slot.numel(), across, CHOICES=SUM_CHOICES, num_warps=SUM_WARPS
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
