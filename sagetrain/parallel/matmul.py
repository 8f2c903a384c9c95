"""A linear layer's matmuls as a value: y = x W^T, the gradient of x and that of W, each in the precision it chooses.

All linear layers and the output projection compute with a Matmul. The one here multiplies in the dtype of its operands.
A recipe in fewer bits is another class with its methods (lowbit.py): handed to a layer (`matmul=`), it decides what is
rounded and how it is scaled, and what of the weights is kept rounded from one optimizer step to the next. Layers may
share one or have their own: torch.compile makes one graph for all of a class whose fields are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from sagetrain.parallel.collectives import Collective, Pending, finish


@dataclass(frozen=True)
class Matmul:
    """Products in the dtype of their operands, for weights [out, in] that read one x [tokens, in].

    Args:
        joined: take the gradients of several weights, and the weights, together: one matmul each for the gradient of x
            and for those of the weights. Tensor parallelism makes them thin, and several thin matmuls take longer than
            a wide one and the copies it needs; whole ones are as fast one by one, which saves the copies. The two
            round differently: apart, each product is rounded to the dtype before they are added. Scales of low-bit
            weights cannot be joined like this.
    """

    joined: bool = False

    def keep(self, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What the products read in place of the weights for as long as these do not change; nothing here."""
        return ()

    def pack(self, x: Tensor) -> Tensor:
        """What of x [tokens, in] has to travel to the ranks that multiply it: [tokens, n]; here all of it."""
        return x

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """What `pack` made, as x again."""
        return packed

    @property
    def gradient_travels(self) -> bool:
        """Whether the gradients of what `forward` returned may be gathered packed (packing.py)."""
        return False

    def read(self, x: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """What of x [tokens, in] `forward` multiplies, and what `weight_gradients` does, which is all of x that is kept
        for the backward pass; here both times x itself."""
        return (x,), (x,)

    def operand(self, x: Tensor) -> Sequence[Tensor]:
        """The first of what `read` makes, alone: no gradient will be wanted."""
        return self.read(x)[0]

    def forward(
        self, operand: Sequence[Tensor], weights: Sequence[Tensor], kept: Sequence[Tensor] = ()
    ) -> tuple[Tensor, ...]:
        """x W^T of each weight: [tokens, out] each. operand: what `operand` made, or `read` first. kept: what `keep`
        gave, if it was called."""
        (x,) = operand
        return tuple(x @ weight.t() for weight in weights)

    def prepare(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        """What both gradients are made of, made once: of the gradients [tokens, out] of what `forward` returned."""
        return (torch.cat(list(grads), 1),) if self.joined and len(grads) > 1 else grads

    def input_gradient(
        self,
        prepared: Sequence[Tensor],
        weights: Sequence[Tensor],
        out: Tensor | None = None,
        kept: Sequence[Tensor] = (),
    ) -> Tensor:
        """[tokens, in], into `out` if given (for one weight); the caller may write to it."""
        if len(prepared) < len(weights):
            weights = (torch.cat(list(weights)),)
        # The last one first, as autograd adds them up.
        *others, last = zip(prepared, weights, strict=True)
        total = torch.mm(*last, out=out)
        for grad, weight in reversed(others):
            total += grad @ weight
        return total

    def weight_gradients(
        self, prepared: Sequence[Tensor], saved: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Of each weight, in its shape. saved: the second that `read` made."""
        (x,) = saved
        products: Sequence[Tensor] = [grad.t() @ x for grad in prepared]
        if len(products) < len(weights):
            products = products[0].split([len(weight) for weight in weights])
        return products

    def add_weight_gradient(self, total: Tensor, prepared: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
        """Add that of one weight to an fp32 total: a sum over parts of the tokens in 16 bits would lose what the sum
        within a matmul keeps."""
        a, b = prepared[0].t(), saved[0]
        if a.dtype == total.dtype:
            total.addmm_(a, b)
        elif a.is_cuda:
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
        else:
            total.addmm_(a.float(), b.float())


def linear(
    x: Tensor | Pending,
    weights: Sequence[Tensor],
    matmul: Matmul,
    back: Collective = None,
    group: ProcessGroup | None = None,
    kept: Sequence[Tensor] = (),
) -> tuple[Tensor, ...]:
    """x W^T of each weight, [tokens, in] -> [tokens, out] each, x finished first if it is on its way.

    back: the collective that the gradient of x starts, over the group, before the gradients of the weights are
    computed. kept: what matmul.keep gave for these weights as they are now, if it was called.
    """
    given, result = x if isinstance(x, tuple) else (x, None)
    plan = _Plan(matmul, back, group, len(weights), torch.is_grad_enabled())
    y: tuple[Tensor, ...] = _Linear.apply(plan, given, result, *weights, *kept)  # type: ignore[no-untyped-call]
    return y


class _Plan(NamedTuple):
    matmul: Matmul
    back: Collective
    group: ProcessGroup | None
    weights: int
    backward: bool
    """Whether there will be a backward pass."""


class _Linear(torch.autograd.Function):
    """Keeps what the matmuls read of x, and the weights themselves, not views of them: ZeRO-3 takes away what is in
    them in between."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: Any) -> tuple[Tensor, ...]:
        # (Without gradients torch.compile 2.13 loses the first argument of a Function that takes as many as this one
        # has names. There are always more.)
        given, result, *read = tensors
        weights, kept = read[: plan.weights], read[plan.weights :]
        x = given if result is None else plan.matmul.unpack(finish(result), given.dtype)
        operand, saved = plan.matmul.read(x) if plan.backward else (plan.matmul.operand(x), ())
        ctx.plan, ctx.count = plan, len(saved)
        ctx.save_for_backward(*saved, *read)
        return plan.matmul.forward(operand, weights, kept)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        matmul, back, group, count, _ = ctx.plan
        tensors = ctx.saved_tensors
        saved, read = tensors[: ctx.count], tensors[ctx.count :]
        weights, kept = read[:count], read[count:]
        prepared = matmul.prepare(grads)
        grad_x = matmul.input_gradient(prepared, weights, kept=kept)
        if back is not None:
            grad_x = back(grad_x, group)
        return None, grad_x, None, *matmul.weight_gradients(prepared, saved, weights), *(None,) * len(kept)
