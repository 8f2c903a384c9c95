"""silu(gate) * up of a mixture's rows, times the weight that the router gave each row: the torch twin.

The weight is multiplied here, before the experts' last product. Its gradient then falls out of this backward pass, and
the result of that product is neither kept nor read again. gate and up are halves of one matrix, and so are their
gradients.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .casts import DTYPES
from .grouped import Rows
from .operators import operator
from .refusals import differentiated_once, refuse_transforms


def weighted_swiglu_twin(gate_up: Tensor, weights: Tensor, choice: Tensor) -> Tensor:
    """Return silu(gate) * up * weight, computed in float32 and rounded once; zeros for empty rows."""
    wide = torch.promote_types(gate_up.dtype, torch.float32)
    gate, up = gate_up.to(wide).chunk(2, 1)
    return (
        (F.silu(gate) * up * _of_rows(weights, choice, wide)).to(gate_up.dtype).masked_fill_((choice < 0)[:, None], 0)
    )


def weighted_swiglu_gradients_twin(
    grad: Tensor, gate_up: Tensor, weights: Tensor, choice: Tensor, slot: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up side by side, rounded once, and those of the weights [T, k] in float32; zeros
    for empty rows and for choices without one."""
    wide = torch.promote_types(gate_up.dtype, torch.float32)
    gate, up = gate_up.to(wide).chunk(2, 1)
    empty = (choice < 0)[:, None]
    of_rows = (grad.to(wide) * (F.silu(gate) * up)).sum(1)
    of_result = grad.to(wide) * _of_rows(weights, choice, wide)
    of_gate = torch.ops.aten.silu_backward(of_result * up, gate)
    gradients = torch.cat((of_gate, of_result * F.silu(gate)), 1).to(gate_up.dtype).masked_fill_(empty, 0)
    if not len(choice):
        return gradients, torch.zeros_like(weights, dtype=wide)
    of_weights = of_rows[slot.long().clamp(min=0)].masked_fill_(slot < 0, 0)
    return gradients, of_weights


def _of_rows(weights: Tensor, choice: Tensor, wide: torch.dtype) -> Tensor:
    return (
        weights.reshape(-1).to(wide)[choice.long()][:, None] if weights.numel() else weights.new_zeros(len(choice), 1)
    )


def _weighted_swiglu(gate_up: Tensor, weights: Tensor, choice: Tensor) -> Tensor:
    return weighted_swiglu_twin(gate_up, weights, choice)


def _weighted_swiglu_fake(gate_up: Tensor, weights: Tensor, choice: Tensor) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


WEIGHTED_SWIGLU = operator(_weighted_swiglu, _weighted_swiglu_fake)


def _weighted_swiglu_gradients(
    grad: Tensor, gate_up: Tensor, weights: Tensor, choice: Tensor, slot: Tensor
) -> tuple[Tensor, Tensor]:
    return weighted_swiglu_gradients_twin(grad, gate_up, weights, choice, slot)


def _weighted_swiglu_gradients_fake(
    grad: Tensor, gate_up: Tensor, weights: Tensor, choice: Tensor, slot: Tensor
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(gate_up.dtype, torch.float32)
    return gate_up.new_empty(gate_up.shape), weights.new_empty(weights.shape, dtype=wide)


WEIGHTED_SWIGLU_GRADIENTS = operator(_weighted_swiglu_gradients, _weighted_swiglu_gradients_fake)

_NAMED = "weighted_swiglu", "F.silu(gate) * up * weight"


class _WeightedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor, choice: Tensor, slot: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weights, choice, slot)
        return WEIGHTED_SWIGLU(gate_up, weights, choice)

    @staticmethod
    @differentiated_once(*_NAMED)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # Recomputed blocks give them once.
        of_gate_up, of_weights = WEIGHTED_SWIGLU_GRADIENTS(grad, *saved)
        return of_gate_up, of_weights.to(saved[1].dtype), None, None


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
    if gate_up.dtype not in (*DTYPES, torch.float64) or not weights.is_floating_point():
        raise TypeError(f"weighted_swiglu takes bf16, fp16 or fp32, got {gate_up.dtype} and weights in {weights.dtype}")
    if (
        gate_up.dim() != 2
        or gate_up.shape[1] % 2
        or len(gate_up) != len(rows.choice)
        or weights.shape != rows.slot.shape
    ):
        raise ValueError(
            f"weighted_swiglu takes [{len(rows.choice)}, 2 F] and weights {list(rows.slot.shape)}, got shapes "
            f"{tuple(gate_up.shape)} and {tuple(weights.shape)}"
        )
    return _WeightedSwiGLU.apply(gate_up, weights, rows.choice, rows.slot)
