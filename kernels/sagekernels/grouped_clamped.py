"""The clamped SwiGLU of experts with biases, as GPT-OSS has it, and the bias of their last product.

(up + 1) * gate * sigmoid(1.702 gate), with gate at most 7 and up -7 to 7, of a product to which the expert's bias is
added. torch's operators compute it in float32 on every device, and torch.compile makes one pass of them each way.
The gradient of a bias is a product with the matrix that says whose each row is, so its sum has a fixed order.
"""

from typing import Any

import torch
from torch import Tensor

from .grouped import Rows
from .grouped_swiglu import check_swiglu, of_choices, of_rows
from .refusals import differentiated_once, refuse_transforms

ALPHA, LIMIT = 1.702, 7.0
"""The factor within the sigmoid, and where gate and up are clamped."""
_NAMED = "clamped_swiglu", "a loop over experts"


def _experts(places: Tensor, ends: Tensor) -> Tensor:
    """Return the expert of rows by their numbers, int64; for a number behind all rows, how many experts there are."""
    return torch.searchsorted(ends, places.int(), right=True)


def _clamped(gate_up: Tensor, bias: Tensor, expert: Tensor) -> tuple[Tensor, Tensor]:
    """Return gate and up with their biases, not clamped yet, in float32."""
    wide = torch.promote_types(gate_up.dtype, torch.float32)
    gate, up = (gate_up.to(wide) + bias[expert.clamp(max=len(bias) - 1)].to(wide)).chunk(2, 1)
    return gate, up


class _ClampedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate_up: Tensor, bias: Tensor, weights: Tensor, choice: Tensor, slot: Tensor, ends: Tensor
    ) -> Tensor:
        ctx.save_for_backward(gate_up, bias, weights, choice, slot, ends)
        expert = _experts(torch.arange(len(choice), device=choice.device), ends)
        gate, up = _clamped(gate_up, bias, expert)
        gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
        y = (up + 1) * gate * (ALPHA * gate).sigmoid() * of_rows(weights, choice, gate.dtype)
        return y.to(gate_up.dtype).masked_fill((choice < 0)[:, None], 0)

    @staticmethod
    @differentiated_once(*_NAMED)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate_up, bias, weights, choice, slot, ends = ctx.saved_tensors
        expert = _experts(torch.arange(len(choice), device=choice.device), ends)
        whole_gate, whole_up = _clamped(gate_up, bias, expert)
        gate, up = whole_gate.clamp(max=LIMIT), whole_up.clamp(-LIMIT, LIMIT)
        sigmoid = (ALPHA * gate).sigmoid()
        wide = grad.to(gate.dtype)
        of_weights = of_choices((wide * (up + 1) * gate * sigmoid).sum(1), slot).to(weights.dtype)
        wide = wide * of_rows(weights, choice, gate.dtype)
        of_gate = wide * (up + 1) * sigmoid * (1 + ALPHA * gate * (1 - sigmoid)) * (whole_gate <= LIMIT)
        of_up = wide * gate * sigmoid * (whole_up.abs() <= LIMIT)
        gradients = torch.cat((of_gate, of_up), 1).masked_fill((choice < 0)[:, None], 0).to(gate_up.dtype)
        whose = expert == torch.arange(len(bias), device=ends.device)[:, None]
        return gradients, whose.to(gradients.dtype) @ gradients, of_weights, None, None, None


def clamped_swiglu(gate_up: Tensor, bias: Tensor, weights: Tensor, rows: Rows) -> Tensor:
    """Return the clamped SwiGLU of each row times its weight: [R, 2 F] -> [R, F]. It is computed in float32 and rounded
    once. Empty rows are zeros.

    Args:
        gate_up: [R, 2 F], gate in the first half of the columns and up in the second, bf16, fp16 or fp32, without the
            bias. It is kept for the backward pass.
        bias: [E, 2 F] or the same memory as a vector, in the dtype of gate_up.
        weights: [T, k], the router's weight of each choice, fp32 as a rule.
        rows: of plan_rows.

    Raises:
        TypeError: another dtype, or the bias has another one than gate_up.
        ValueError: the shapes do not belong together.
        NotImplementedError: a second derivative, or a transform of torch.func.
    """
    refuse_transforms(*_NAMED)
    check_swiglu(gate_up.shape, gate_up.dtype, weights, rows)
    if bias.dtype != gate_up.dtype:
        raise TypeError(f"clamped_swiglu takes a bias in the dtype of gate_up, {gate_up.dtype}, got {bias.dtype}")
    of_experts = _of_experts(bias, gate_up.shape[1], rows)
    return _ClampedSwiGLU.apply(gate_up, of_experts, weights, rows.choice, rows.slot, rows.ends)


def combined_bias(bias: Tensor, weights: Tensor, rows: Rows) -> Tensor:
    """Return the sum of the biases of each token's experts times their weights, [T, H]. It belongs to a product whose
    rows have their weights already. Choices without a row add nothing.

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
    expert = _experts(rows.slot, rows.ends).clamp(max=len(of_experts) - 1)
    shares = weights.new_zeros(len(weights), len(of_experts)).scatter_add(1, expert, weights * there)
    return shares.to(bias.dtype) @ of_experts


def _of_experts(bias: Tensor, columns: int, rows: Rows) -> Tensor:
    """View a bias as [E, columns]."""
    if bias.numel() != len(rows.ends) * columns:
        raise ValueError(f"experts take a bias [{len(rows.ends)}, {columns}], got shape {tuple(bias.shape)}")
    return bias.view(-1, columns)
