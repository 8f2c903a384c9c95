"""silu(gate) * up and its gradients, cast to FP8 as they are computed: never written in 16 bits.

What casts.quantize_both would make of them, bit for bit, in two passes that both compute what they round: the first
finds the largest magnitudes, the second one writes codes in both orientations. An element is computed in float32 and
rounded to the dtype of gate before it is cast, once, as torch.compile rounds what it fuses.

Of 16-bit elements, for each of gate: 4 + 4 bytes read and 1 + 1 written forward (12 by a SwiGLU that is written and
then cast), 6 + 6 read and 2 + 2 written backward (22). The torch twins, then the kernels.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .casts import (
    E4M3,
    E5M2,
    NAMES,
    Four,
    Rounded,
    check_cast,
    empty_both,
    load_parts,
    load_tile,
    magnitude_bits,
    quantize_both_twin,
    store_both,
)
from .launch import on_device_of
from .operators import operator
from .pieces import INTERPRETED


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up in float32, in their dtype."""
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def swiglu_gradient(grad: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Gradients of gate, then of up, [rows, 2 columns], from that of silu(gate) * up."""
    wide, gate32, up32 = grad.float(), gate.float(), up.float()
    of_gate = torch.ops.aten.silu_backward(wide * up32, gate32)
    return torch.cat((of_gate, wide * F.silu(gate32)), 1).to(gate.dtype)


# As in casts.py, but of two or three matrices. Two programs fit on a multiprocessor backward (199 registers a thread),
# so that one loads while the other computes.
LARGEST_ROWS, LARGEST_COLUMNS, LARGEST_STEPS = 32, 128, 8
ROUND_ROWS, ROUND_COLUMNS, ROUND_WARPS = 64, 64, 4


@triton.jit
def _held(x, DTYPE: tl.constexpr):
    """float32, rounded to what a dtype holds, to nearest even."""
    if INTERPRETED:
        if DTYPE == tl.bfloat16:  # which the interpreter truncates to
            bits = x.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
            return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def _silu(gate):
    return gate / (1.0 + tl.exp(-gate))


@triton.jit
def _gate_gradient(grad, gate, up):
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    return grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))


@triton.jit
def _largest_kernel(
    GRAD, GATE, UP, OF_ROWS, OF_COLUMNS, rows, columns, grad_stride, gate_stride, up_stride, across,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr, PER_ROW: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """Bits of the largest magnitudes, into what holds zeros."""
    DTYPE: tl.constexpr = GATE.dtype.element_ty
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(0) // across * (ROWS * STEPS)
    of_columns = tl.zeros([COLUMNS], tl.int32)
    of_more = tl.zeros([COLUMNS], tl.int32)
    for step in range(STEPS):
        row = first + step * ROWS + tl.arange(0, ROWS)
        gate = load_tile(GATE, row, column, rows, columns, gate_stride)
        up = load_tile(UP, row, column, rows, columns, up_stride)
        if BACKWARD:
            grad = load_tile(GRAD, row, column, rows, columns, grad_stride)
            bits = magnitude_bits(_held(_gate_gradient(grad, gate, up), DTYPE))
            more = magnitude_bits(_held(grad * _silu(gate), DTYPE))
            of_more = tl.maximum(of_more, tl.max(more, 0))
            of_rows = tl.max(tl.maximum(bits, more), 1)
        else:
            bits = magnitude_bits(_held(_silu(gate) * up, DTYPE))
            of_rows = tl.max(bits, 1)
        of_columns = tl.maximum(of_columns, tl.max(bits, 0))
        if PER_ROW:
            tl.atomic_max(OF_ROWS + row, of_rows, mask=row < rows, sem="relaxed")
    if PER_ROW:
        tl.atomic_max(OF_COLUMNS + column, of_columns, mask=column < columns, sem="relaxed")
        if BACKWARD:
            tl.atomic_max(OF_COLUMNS + columns + column, of_more, mask=column < columns, sem="relaxed")
    else:
        largest = tl.max(tl.maximum(of_columns, of_more), 0)
        tl.atomic_max(OF_ROWS, largest, sem="relaxed")
        tl.atomic_max(OF_COLUMNS, largest, sem="relaxed")


@triton.jit
def _round_kernel(
    GRAD, GATE, UP, OF_ROWS, OF_COLUMNS, CODES, SCALE, TURNED, TURNED_SCALE,
    rows, columns, padded, grad_stride, gate_stride, up_stride, across,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PER_ROW: tl.constexpr, NUMBER: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """One program computes one tile, backward that of both gradients, and writes it along rows and along columns."""
    DTYPE: tl.constexpr = GATE.dtype.element_ty
    right, down = tl.program_id(0) % across, tl.program_id(0) // across
    column = right * COLUMNS + tl.arange(0, COLUMNS)
    within = column < columns
    gate0, gate1, gate2, gate3 = load_parts(GATE, down, column, rows, columns, gate_stride, ROWS)
    up0, up1, up2, up3 = load_parts(UP, down, column, rows, columns, up_stride, ROWS)
    if BACKWARD:
        grad0, grad1, grad2, grad3 = load_parts(GRAD, down, column, rows, columns, grad_stride, ROWS)
        store_both(
            _held(_gate_gradient(grad0, gate0, up0), DTYPE), _held(_gate_gradient(grad1, gate1, up1), DTYPE),
            _held(_gate_gradient(grad2, gate2, up2), DTYPE), _held(_gate_gradient(grad3, gate3, up3), DTYPE),
            column, within, right, down, OF_ROWS, OF_COLUMNS, CODES, SCALE, TURNED, TURNED_SCALE,
            rows, 2 * columns, padded, ROWS, PER_ROW, NUMBER,
        )  # fmt: skip
        store_both(
            _held(grad0 * _silu(gate0), DTYPE), _held(grad1 * _silu(gate1), DTYPE),
            _held(grad2 * _silu(gate2), DTYPE), _held(grad3 * _silu(gate3), DTYPE),
            columns + column, within, right + 1, down, OF_ROWS, OF_COLUMNS, CODES, SCALE, TURNED, TURNED_SCALE,
            rows, 2 * columns, padded, ROWS, PER_ROW, NUMBER,
        )  # fmt: skip
    else:
        store_both(
            _held(_silu(gate0) * up0, DTYPE), _held(_silu(gate1) * up1, DTYPE),
            _held(_silu(gate2) * up2, DTYPE), _held(_silu(gate3) * up3, DTYPE),
            column, within, right, down, OF_ROWS, OF_COLUMNS, CODES, SCALE, TURNED, TURNED_SCALE,
            rows, columns, padded, ROWS, PER_ROW, NUMBER,
        )  # fmt: skip


def swiglu_triton(
    grad: Tensor | None, gate: Tensor, up: Tensor, number: torch.dtype, per_row: bool
) -> tuple[Rounded, Rounded]:
    """The twin of both on a GPU; grad: of the result, for the gradients in its place. Of what is not finite the scales
    are NaN, the codes any."""
    backward = grad is not None
    grad, gate, up = (x if x.stride(1) == 1 else x.contiguous() for x in (grad if backward else gate, gate, up))
    (rows, columns), device = gate.shape, gate.device
    width = columns * (1 + backward)
    (codes, scale), (turned, turned_scale) = rounded = empty_both(rows, width, number, per_row, device)
    of_rows, of_columns = torch.zeros(rows + width, dtype=torch.int32, device=device).split((rows, width))
    padded, strides = turned.shape[1], (grad.stride(0), gate.stride(0), up.stride(0))
    with on_device_of(gate):
        across, down = triton.cdiv(columns, LARGEST_COLUMNS), triton.cdiv(rows, LARGEST_ROWS * LARGEST_STEPS)
        _largest_kernel[(across * down,)](
            grad, gate, up, of_rows, of_columns, rows, columns, *strides, across,
            ROWS=LARGEST_ROWS, COLUMNS=LARGEST_COLUMNS, STEPS=LARGEST_STEPS, PER_ROW=per_row, BACKWARD=backward,
            num_warps=4,
        )  # fmt: skip
        across, down = triton.cdiv(columns, ROUND_COLUMNS), triton.cdiv(padded, ROUND_ROWS)
        _round_kernel[(across * down,)](
            grad, gate, up, of_rows, of_columns,
            codes.view(torch.int8), scale, turned.view(torch.int32), turned_scale,
            rows, columns, padded, *strides, across,
            ROWS=ROUND_ROWS, COLUMNS=ROUND_COLUMNS, PER_ROW=per_row, NUMBER=NAMES[number], BACKWARD=backward,
            num_warps=ROUND_WARPS,
        )  # fmt: skip
    return rounded


def swiglu_twin(
    grad: Tensor | None, gate: Tensor, up: Tensor, number: torch.dtype, per_row: bool
) -> tuple[Rounded, Rounded]:
    """The same in torch: silu(gate) * up, or with its gradient the gradients of gate and up, in FP8."""
    return quantize_both_twin(swiglu(gate, up) if grad is None else swiglu_gradient(grad, gate, up), number, per_row)


def _quantize_swiglu(grad: Tensor | None, gate: Tensor, up: Tensor, number: torch.dtype, per_row: bool) -> Four:
    rounded, turned = (swiglu_triton if gate.is_cuda else swiglu_twin)(grad, gate, up, number, per_row)
    return *rounded, *turned


def _quantize_swiglu_fake(grad: Tensor | None, gate: Tensor, up: Tensor, number: torch.dtype, per_row: bool) -> Four:
    rows, columns = gate.shape
    rounded, turned = empty_both(rows, columns * (1 if grad is None else 2), number, per_row, gate.device)
    return *rounded, *turned


QUANTIZE_SWIGLU = operator(_quantize_swiglu, _quantize_swiglu_fake)


def quantize_swiglu(gate: Tensor, up: Tensor, number: torch.dtype, per_row: bool) -> tuple[Rounded, Rounded]:
    """silu(gate) * up in FP8, as it lies and turned, by one operator that torch.compile takes as one node.

    Args:
        gate, up: [rows, columns] each, bf16, fp16 or fp32, any strides. No gradient goes through.
        number: torch.float8_e4m3fn or torch.float8_e5m2.
        per_row: as of casts.quantize_both.

    Returns:
        As casts.quantize_both, of [rows, columns].

    Raises:
        TypeError, ValueError: as casts.quantize_both; ValueError also if shapes or dtypes are not the same.
    """
    return _call("quantize_swiglu", None, gate, up, number, per_row)


def quantize_swiglu_gradient(
    grad: Tensor, gate: Tensor, up: Tensor, number: torch.dtype, per_row: bool
) -> tuple[Rounded, Rounded]:
    """The gradients of gate and of up, side by side, in FP8, as they lie and turned, by one operator.

    Args:
        grad: of silu(gate) * up, [rows, columns].
        gate, up, number, per_row: as of quantize_swiglu.

    Returns:
        As casts.quantize_both, of [rows, 2 columns].

    Raises:
        TypeError, ValueError: as quantize_swiglu.
    """
    return _call("quantize_swiglu_gradient", grad, gate, up, number, per_row)


def _call(
    name: str, grad: Tensor | None, gate: Tensor, up: Tensor, number: torch.dtype, per_row: bool
) -> tuple[Rounded, Rounded]:
    check_cast(name, gate, number, (E4M3, E5M2))
    for x in (up, gate if grad is None else grad):
        if x.shape != gate.shape or x.dtype != gate.dtype:
            raise ValueError(
                f"{name} takes matrices of one shape and dtype, got {tuple(gate.shape)} in {gate.dtype} and "
                f"{tuple(x.shape)} in {x.dtype}"
            )
    codes, scale, turned, turned_scale = QUANTIZE_SWIGLU(grad, gate, up, number, per_row)
    return Rounded(codes, scale), Rounded(turned, turned_scale)
