"""silu(gate) * up with gradients that one pass computes and leaves side by side: the torch twin, then Triton.

A matmul that reads both gradients as one matrix would join them first. torch.compile makes one kernel of that, which
computes every element of the joined matrix by itself. It reads gate and the gradient twice, five matrices in all. Here
three matrices are read and two written. The result itself stays plain torch, so that torch.compile can fuse it with the
operations before and after.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .casts import DTYPES, largest_twin, magnitudes, widened
from .launch import ceil_div, on_device_of
from .operators import by_device
from .refusals import differentiated_once, refuse_transforms

# A program takes so many rows and columns at a time, and STEPS such pieces, one below the other. It then leaves the
# largest magnitudes of its columns.
ROWS, COLUMNS, STEPS, STAGES, WARPS = 8, 256, 16, 3, 4


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
def _swiglu_kernel(
    GATE, UP, OUT, LARGEST, rows, columns, gate_stride, up_stride, across,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Compute silu(gate) * up, and leave the largest magnitudes of what is written (see casts.largest_kernel)."""
    first = tl.program_id(0) // across * (ROWS * STEPS)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    of_columns = tl.zeros([ROWS, COLUMNS], tl.int16 if NARROW else tl.int32)
    for step in tl.range(STEPS, num_stages=STAGES):
        row = first + step * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        long = row.to(tl.int64)[:, None]
        gate = tl.load(GATE + long * gate_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        up = tl.load(UP + long * up_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        y = (gate * (1.0 / (1.0 + tl.exp(-gate))) * up).to(OUT.dtype.element_ty)
        tl.store(OUT + long * columns + column[None, :], y, mask=inside)
        bits = magnitudes(y, NARROW)
        of_columns = tl.maximum(of_columns, bits)
        tl.atomic_max(LARGEST + row, widened(tl.max(bits, 1), NARROW), mask=row < rows, sem="relaxed")
    largest = widened(tl.max(of_columns, 0), NARROW)
    tl.atomic_max(LARGEST + rows + column, largest, mask=column < columns, sem="relaxed")


@triton.jit
def _swiglu_gradients_kernel(
    GRAD, GATE, UP, OUT, LARGEST, rows, columns, grad_stride, gate_stride, up_stride, across,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr, STAGES: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Compute both gradients, and leave the largest magnitudes of what is written."""
    first = tl.program_id(0) // across * (ROWS * STEPS)
    column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    of_gates = tl.zeros([ROWS, COLUMNS], tl.int16 if NARROW else tl.int32)
    of_ups = tl.zeros([ROWS, COLUMNS], tl.int16 if NARROW else tl.int32)
    for step in tl.range(STEPS, num_stages=STAGES):
        row = first + step * ROWS + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        long = row.to(tl.int64)[:, None]
        gate = tl.load(GATE + long * gate_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        up = tl.load(UP + long * up_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(GRAD + long * grad_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        of_gate = (grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))).to(OUT.dtype.element_ty)
        of_up = (grad * (gate * sigmoid)).to(OUT.dtype.element_ty)
        out = OUT + long * (2 * columns) + column[None, :]
        tl.store(out, of_gate, mask=inside)
        tl.store(out + columns, of_up, mask=inside)
        gate_bits, up_bits = magnitudes(of_gate, NARROW), magnitudes(of_up, NARROW)
        of_gates, of_ups = tl.maximum(of_gates, gate_bits), tl.maximum(of_ups, up_bits)
        largest = widened(tl.max(tl.maximum(gate_bits, up_bits), 1), NARROW)
        tl.atomic_max(LARGEST + row, largest, mask=row < rows, sem="relaxed")
    of_columns = LARGEST + rows + column
    tl.atomic_max(of_columns, widened(tl.max(of_gates, 0), NARROW), mask=column < columns, sem="relaxed")
    tl.atomic_max(of_columns + columns, widened(tl.max(of_ups, 0), NARROW), mask=column < columns, sem="relaxed")


def _launch(kernel: triton.JITFunction, parts: int, *inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Launch a kernel of matrices of one shape [rows, columns], and return its result [rows, parts columns] and the
    largest magnitudes."""
    inputs = tuple(x if x.stride(1) == 1 else x.contiguous() for x in inputs)
    rows, columns = inputs[0].shape
    out = inputs[-1].new_empty(rows, parts * columns)
    largest = torch.zeros(rows + parts * columns, dtype=torch.int32, device=out.device)
    across, down = ceil_div(columns, COLUMNS), ceil_div(rows, ROWS * STEPS)
    with on_device_of(out):
        kernel[(across * down,)](
            *inputs, out, largest, rows, columns, *(x.stride(0) for x in inputs), across,
            ROWS=ROWS, COLUMNS=COLUMNS, STEPS=STEPS, STAGES=STAGES, NARROW=out.dtype == torch.bfloat16, num_warps=WARPS,
        )  # fmt: skip
    return out, largest


def swiglu_triton(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Compute swiglu_twin on a GPU. The result is within one rounding, and the largest magnitudes are exactly its."""
    return _launch(_swiglu_kernel, 1, gate, up)


def swiglu_gradients_triton(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Compute swiglu_gradients_twin on a GPU, within its rounding. The largest magnitudes are exactly those of the
    result."""
    return _launch(_swiglu_gradients_kernel, 2, grad, gate, up)


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
