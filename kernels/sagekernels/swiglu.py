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

from .casts import DTYPES
from .launch import on_device_of
from .operators import operator
from .refusals import differentiated_once, refuse_transforms

# A program takes so many rows and columns.
ROWS, COLUMNS, WARPS = 8, 256, 4


def swiglu_gradients_twin(grad: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Return the gradients of gate and of up, [rows, 2 columns], from that of silu(gate) * up. They are computed in
    float32 and rounded once."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    of_result, gate32, up32 = grad.to(wide), gate.to(wide), up.to(wide)
    of_gate = torch.ops.aten.silu_backward(of_result * up32, gate32)
    return torch.cat((of_gate, of_result * F.silu(gate32)), 1).to(gate.dtype)


@triton.jit
def _swiglu_gradients_kernel(
    GRAD, GATE, UP, OUT, rows, columns, grad_stride, gate_stride, up_stride, across,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) // across * ROWS + tl.arange(0, ROWS))[:, None]
    column = (tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (row < rows) & (column < columns)
    row = row.to(tl.int64)
    gate = tl.load(GATE + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(UP + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(GRAD + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    of_gate = grad * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    of_up = grad * (gate * sigmoid)
    out = OUT + row * (2 * columns) + column
    tl.store(out, of_gate.to(OUT.dtype.element_ty), mask=inside)
    tl.store(out + columns, of_up.to(OUT.dtype.element_ty), mask=inside)


def swiglu_gradients_triton(grad: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """Compute swiglu_gradients_twin on a GPU, within its rounding."""
    grad, gate, up = (x if x.stride(1) == 1 else x.contiguous() for x in (grad, gate, up))
    out = _swiglu_gradients_fake(grad, gate, up)
    rows, columns = gate.shape
    across, down = triton.cdiv(columns, COLUMNS), triton.cdiv(rows, ROWS)
    with on_device_of(gate):
        _swiglu_gradients_kernel[(across * down,)](
            grad, gate, up, out, rows, columns, grad.stride(0), gate.stride(0), up.stride(0), across,
            ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
        )  # fmt: skip
    return out


def _swiglu_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return (swiglu_gradients_triton if gate.is_cuda else swiglu_gradients_twin)(grad, gate, up)


def _swiglu_gradients_fake(grad: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape[0], 2 * gate.shape[1])


SWIGLU_GRADIENTS = operator(_swiglu_gradients, _swiglu_gradients_fake)


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
        return SWIGLU_GRADIENTS(grad, gate, up).split([gate.shape[1]] * 2, 1)


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
