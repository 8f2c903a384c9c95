"""SwiGLU between two linear layers in 8 bits: rounded as it is computed, forward and backward (sagekernels/swiglu.py).

    gate, up = x W^T            linear(..., gated=True)
    silu(gate) * up, times V^T  gated_linear

The layer that follows reads silu(gate) * up in codes that no tensor in 16 bits stood behind, and makes of its gradient
the codes that the layer before multiplies with. Autograd hands on a gradient in the shape and dtype of what it belongs
to, so the layer before has more results, empty ones, in those of codes and scales: they carry the gradient, and gate
and up carry none. Nothing else may read them, or gate and up with a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sagetrain.parallel.lowbit import LowBit

Gated = tuple[Tensor, ...]
"""gate and up, [tokens, inner] each, and what carries their gradient."""


def gated_linear(gated: Gated, weight: Tensor, matmul: LowBit, kept: Sequence[Tensor] = ()) -> Tensor:
    """(silu(gate) * up) W^T: [tokens, out]. matmul: also that of the layer before. kept: as of linear."""
    y: Tensor = _GatedLinear.apply(matmul, weight, *gated, *kept)  # type: ignore[no-untyped-call]
    return y


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matmul: LowBit, weight: Tensor, gate: Tensor, up: Tensor, *more: Tensor) -> Tensor:
        kept = more[4:]
        operand, saved = matmul.read_gated(gate, up)
        ctx.matmul = matmul
        ctx.save_for_backward(gate, up, weight, *saved, *kept)
        (y,) = matmul.forward(operand, (weight,), kept)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        matmul = ctx.matmul
        gate, up, weight, codes, scale, *kept = ctx.saved_tensors
        prepared = matmul.prepare((grad,))
        grad_y = matmul.input_gradient(prepared, (weight,), kept=kept)
        (grad_weight,) = matmul.weight_gradients(prepared, (codes, scale), (weight,))
        empty = (x.new_empty(()).expand_as(x) for x in (gate, up))
        return None, grad_weight, *empty, *matmul.prepare_gated(grad_y, gate, up), *(None,) * len(kept)
