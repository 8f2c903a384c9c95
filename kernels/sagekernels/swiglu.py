"""silu(gate) * up with gradients that one pass computes and leaves side by side: the torch twin, then Triton.

A matmul that reads both gradients as one matrix would join them first. torch.compile makes one kernel of that, which
computes every element of the joined matrix by itself. It reads gate and the gradient twice, five matrices in all. Here
three matrices are read and two written. The result itself stays plain torch, so that torch.compile can fuse it with the
operations before and after.

The kernels serve experts as well, there with weights of rows, other activations and biases (grouped_swiglu.py).
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .casts import DTYPES, largest_twin, magnitudes, tile_of, widened
from .grouped import TILE
from .launch import ceil_div, on_device_of
from .operators import by_device
from .refusals import differentiated_once, refuse_transforms

# A program takes so many rows and columns at a time, until its tile of TILE rows is done. It then leaves the largest
# magnitudes of its columns.
ROWS, COLUMNS, STAGES, WARPS = 8, 256, 3, 4


class Gate(NamedTuple):
    """An activation of gate and up: gate * sigmoid(slope * gate * (1 + cubic * gate^2)) * up."""

    slope: float = 1.0
    cubic: float = 0.0
    limit: float = 0.0
    """If it is not 0, gate is at most this number, and up is between both signs of it, plus 1."""


GATES = {
    "swiglu": Gate(),
    "geglu": Gate(2 * math.sqrt(2 / math.pi), 0.044715),
    "clamped_swiglu": Gate(1.702, limit=7.0),
}
"""The activations of experts by name: SwiGLU, GeGLU by the tanh form of GELU, and that of GPT-OSS."""


def swiglu_twin(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return silu(gate) * up and its largest magnitudes."""
    y = (F.silu(gate) * up).contiguous()
    return y, largest_twin(y)


def swiglu_gradients_twin(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and of up, [rows, 2 columns], from that of silu(gate) * up, and their largest
    magnitudes. Gradients are computed in float32 and rounded once."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    of_result, gate32, up32 = grad.to(wide), gate.to(wide), up.to(wide)
    of_gate = torch.ops.aten.silu_backward(of_result * up32, gate32)
    gradients = torch.cat((of_gate, of_result * F.silu(gate32)), 1).to(gate.dtype)
    return gradients, largest_twin(gradients)


@triton.jit
def _load_bias(BIAS, expert, column, columns):
    """Load the biases of an expert's gate and up as float32, if there are any."""
    of_gate, of_up = 0.0, 0.0
    if BIAS is not None:
        at, inside = BIAS + expert * 2 * columns + column, (column < columns) & (expert >= 0)
        of_gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)[None, :]
        of_up = tl.load(at + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    return of_gate, of_up


@triton.jit
def _limited(gate, up, LIMIT: tl.constexpr):
    """Clamp gate and up of Gate.limit. NaN stays."""
    if LIMIT > 0:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
    return gate, up


@triton.jit
def _sigmoid(gate, SLOPE: tl.constexpr, CUBIC: tl.constexpr):
    """Return the sigmoid of Gate, and gate times the derivative of what is in the sigmoid."""
    inner = SLOPE * gate
    steep = inner
    if CUBIC > 0:
        square = CUBIC * gate * gate
        steep = inner * (1.0 + 3.0 * square)
        inner *= 1.0 + square
    return 1.0 / (1.0 + tl.exp(-inner)), steep


@triton.jit
def _load_halves(GATE, UP, BIAS, of_gate, of_up, WEIGHTS, CHOICE, row, own, column, columns, gate_stride, up_stride):
    """Load weight, gate and up of some rows as float32, with zeros for rows that are not `own`, and add biases. Without
    WEIGHTS the weight is 1. Without UP, up lies behind gate."""
    weight = 1.0
    if WEIGHTS is not None:
        choice = tl.load(CHOICE + row, mask=own, other=0)
        weight = tl.load(WEIGHTS + choice, mask=own, other=0.0).to(tl.float32)[:, None]
    inside = own[:, None] & (column < columns)[None, :]
    long = row.to(tl.int64)[:, None]
    at = GATE + long * gate_stride + column[None, :]
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    at = at + columns if UP is None else UP + long * up_stride + column[None, :]
    up = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if BIAS is not None:
        gate, up = gate + of_gate, up + of_up
    return weight, gate, up, inside


@triton.jit
def swiglu_kernel(
    GATE, UP, BIAS, WEIGHTS, CHOICE, TILES, OUT, LARGEST, rows, columns, gate_stride, up_stride, across,
    MEASURED: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    NARROW: tl.constexpr, SLOPE: tl.constexpr, CUBIC: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Compute a tile of rows by COLUMNS columns, of one matrix or of experts (casts.tile_of). MEASURED: leave largest
    magnitudes of rows, and of each expert's columns, of what is written (see casts.largest_kernel)."""
    expert, first, end = tile_of(TILES, tl.program_id(0) // across, rows, 0, TILE, False)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    of_columns = tl.zeros([ROWS, COLUMNS], tl.int16 if NARROW else tl.int32)
    of_gate, of_up = _load_bias(BIAS, expert, column, columns)
    for step in tl.range(TILE // ROWS, num_stages=STAGES):
        row = first + step * ROWS + tl.arange(0, ROWS)
        own = (row < end) & (expert >= 0)
        weight, gate, up, _ = _load_halves(
            GATE, UP, BIAS, of_gate, of_up, WEIGHTS, CHOICE, row, own, column, columns, gate_stride, up_stride
        )  # fmt: skip
        gate, up = _limited(gate, up, LIMIT)
        sigmoid, _ = _sigmoid(gate, SLOPE, CUBIC)
        y = (gate * sigmoid * up * weight).to(OUT.dtype.element_ty)
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
def swiglu_gradients_kernel(
    GRAD, GATE, UP, BIAS, WEIGHTS, CHOICE, TILES, OUT, PARTIAL, OF_BIAS, LARGEST,
    rows, columns, grad_stride, gate_stride, up_stride, across,
    MEASURED: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
    NARROW: tl.constexpr, SLOPE: tl.constexpr, CUBIC: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Compute both gradients of a tile of rows by COLUMNS columns, the part that these columns have of the weights'
    gradients, and the part that the tile has of the bias' gradient."""
    expert, first, end = tile_of(TILES, tl.program_id(0) // across, rows, 0, TILE, False)
    right = tl.program_id(0) % across
    column = right * COLUMNS + tl.arange(0, COLUMNS)
    of_gates = tl.zeros([ROWS, COLUMNS], tl.int16 if NARROW else tl.int32)
    of_ups = tl.zeros([ROWS, COLUMNS], tl.int16 if NARROW else tl.int32)
    gate_bias, up_bias = _load_bias(BIAS, expert, column, columns)
    gate_sums, up_sums = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in tl.range(TILE // ROWS, num_stages=STAGES):
        row = first + step * ROWS + tl.arange(0, ROWS)
        own = (row < end) & (expert >= 0)
        weight, whole_gate, whole_up, inside = _load_halves(
            GATE, UP, BIAS, gate_bias, up_bias, WEIGHTS, CHOICE, row, own, column, columns, gate_stride, up_stride
        )  # fmt: skip
        gate, up = _limited(whole_gate, whole_up, LIMIT)
        long = row.to(tl.int64)[:, None]
        grad = tl.load(GRAD + long * grad_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        sigmoid, steep = _sigmoid(gate, SLOPE, CUBIC)
        if WEIGHTS is not None:
            tl.store(
                PARTIAL + row.to(tl.int64) * across + right, tl.sum(grad * (gate * sigmoid) * up, 1), mask=row < end
            )
        grad *= weight
        of_gate, of_up = grad * up * sigmoid * (1.0 + steep * (1.0 - sigmoid)), grad * (gate * sigmoid)
        if LIMIT > 0:
            of_gate = tl.where(whole_gate > LIMIT, 0.0, of_gate)
            of_up = tl.where(tl.abs(whole_up) > LIMIT, 0.0, of_up)
        if BIAS is not None:
            gate_sums, up_sums = gate_sums + of_gate, up_sums + of_up
        of_gate, of_up = of_gate.to(OUT.dtype.element_ty), of_up.to(OUT.dtype.element_ty)
        out = OUT + long * (2 * columns) + column[None, :]
        inside = (row < end)[:, None] & (column < columns)[None, :]
        tl.store(out, of_gate, mask=inside)
        tl.store(out + columns, of_up, mask=inside)
        if MEASURED:
            gate_bits, up_bits = magnitudes(of_gate, NARROW), magnitudes(of_up, NARROW)
            of_gates, of_ups = tl.maximum(of_gates, gate_bits), tl.maximum(of_ups, up_bits)
            largest = widened(tl.max(tl.maximum(gate_bits, up_bits), 1), NARROW)
            tl.atomic_max(LARGEST + row, largest, mask=row < end, sem="relaxed")
    if BIAS is not None:
        of_bias = OF_BIAS + (tl.program_id(0) // across).to(tl.int64) * 2 * columns + column
        tl.store(of_bias, tl.sum(gate_sums, 0), mask=column < columns)
        tl.store(of_bias + columns, tl.sum(up_sums, 0), mask=column < columns)
    if MEASURED:
        of_columns = LARGEST + rows + expert * 2 * columns + column
        inside = (column < columns) & (expert >= 0)
        tl.atomic_max(of_columns, widened(tl.max(of_gates, 0), NARROW), mask=inside, sem="relaxed")
        tl.atomic_max(of_columns + columns, widened(tl.max(of_ups, 0), NARROW), mask=inside, sem="relaxed")


class Experts(NamedTuple):
    """The rows of a mixture whose activation has weights, as the kernels read them."""

    bias: Tensor | None = None
    weights: Tensor | None = None
    choice: Tensor | None = None
    tiles: Tensor | None = None
    count: int = 1
    gate: Gate = GATES["swiglu"]


_DENSE = Experts()


def launched(
    grad: Tensor | None, gate: Tensor, up: Tensor | None, experts: Experts = _DENSE, measured: bool = True
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Launch the kernel of the gradients, or without `grad` that of the result. Without `up` gate has the columns of
    both.

    Returns:
        The result [rows, columns], or gradients [rows, 2 columns]; their largest magnitudes, if they are to be
        `measured`; and the parts of the gradients of weights and of the bias, if there are any.
    """
    grad, gate, up = (x if x is None or x.stride(1) == 1 else x.contiguous() for x in (grad, gate, up))
    rows, columns = len(gate), gate.shape[1] // (2 if up is None else 1)
    out = gate.new_empty(rows, columns if grad is None else 2 * columns)
    numbers = rows + experts.count * out.shape[1] if measured else 0
    largest = torch.zeros(numbers, dtype=torch.int32, device=out.device)
    across, down = ceil_div(columns, COLUMNS), ceil_div(rows, TILE) if experts.tiles is None else len(experts.tiles)
    sizes = (gate.stride(0), 0 if up is None else up.stride(0), across)
    how = {"MEASURED": measured, "TILE": TILE, "ROWS": ROWS, "COLUMNS": COLUMNS, "STAGES": STAGES}
    how |= {"NARROW": out.dtype == torch.bfloat16, "num_warps": WARPS}
    how |= {name.upper(): number for name, number in experts.gate._asdict().items()}
    partial = of_bias = None
    with on_device_of(out):
        if grad is None:
            swiglu_kernel[(across * down,)](gate, up, *experts[:4], out, largest, rows, columns, *sizes, **how)
        else:
            if experts.weights is not None:
                partial = torch.empty(rows, across, dtype=torch.float32, device=out.device)
            if experts.bias is not None:
                of_bias = torch.empty(down, 2 * columns, dtype=torch.float32, device=out.device)
            swiglu_gradients_kernel[(across * down,)](
                grad, gate, up, *experts[:4], out, partial, of_bias, largest, rows, columns, grad.stride(0), *sizes,
                **how,
            )  # fmt: skip
    return out, largest, partial, of_bias


def swiglu_triton(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Compute swiglu_twin on a GPU. The result is within one rounding, and the largest magnitudes are exactly its."""
    return launched(None, gate, up)[:2]


def swiglu_gradients_triton(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Compute swiglu_gradients_twin on a GPU, within its rounding. The largest magnitudes are exactly those of the
    result."""
    return launched(grad, gate, up)[:2]


def _swiglu_fake(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = gate.shape
    return gate.new_empty(rows, columns), gate.new_empty(rows + columns, dtype=torch.int32)


def _swiglu_gradients_fake(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = gate.shape
    return gate.new_empty(rows, 2 * columns), gate.new_empty(rows + 2 * columns, dtype=torch.int32)


SWIGLU = by_device("swiglu", swiglu_twin, swiglu_triton, _swiglu_fake)
SWIGLU_GRADIENTS = by_device("swiglu_gradients", swiglu_gradients_twin, swiglu_gradients_triton, _swiglu_gradients_fake)


_NAMED = "swiglu", "F.silu(gate) * up"


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    @differentiated_once(*_NAMED)
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, ...]:
        gate, up = ctx.saved_tensors
        # The split names the sizes, because torch.compile then knows that the pieces, joined again, are the whole.
        return SWIGLU_GRADIENTS(grad, gate, up)[0].split([gate.shape[1]] * 2, 1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up. The gradients of gate and up are halves of one matrix, so that they can be read as one.

    Args:
        gate: [rows, columns], bf16, fp16 or fp32, any strides. It is kept for the backward pass, and so is `up`.
        up: the same.

    Returns:
        [rows, columns] in their dtype.

    Raises:
        TypeError: another dtype.
        ValueError: gate and up are no matrices of one shape and dtype.
        NotImplementedError: a second derivative, or a transform of torch.func.
    """
    refuse_transforms(*_NAMED)
    if gate.dtype not in DTYPES:
        raise TypeError(f"swiglu takes bf16, fp16 or fp32, got {gate.dtype}")
    if gate.dim() != 2 or gate.shape != up.shape or gate.dtype != up.dtype:
        found = " and ".join(f"{tuple(x.shape)} in {x.dtype}" for x in (gate, up))
        raise ValueError(f"swiglu takes matrices of one shape and dtype, got {found}")
    return _SwiGLU.apply(gate, up)
