"""A linear layer's matmuls as a value: y = x W^T, the gradient of x and the gradient of W, each in a precision of its
own.

All linear layers and the output projection compute with a Matmul. The class in this file multiplies in the dtype of its
operands. A recipe in fewer bits is another class with the same methods (lowbit.py). It is handed to a layer (`matmul=`)
and decides about rounding and scaling. It also decides which rounded weights are kept from one optimizer step to the
next. Layers may share a Matmul or have their own: torch.compile makes one graph for all of a class whose fields are
equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from .add_norm import ADD_NORM, ADD_NORM_GRADIENTS
from .casts import LARGEST_OF
from .refusals import differentiated_once
from .swiglu import SWIGLU, SWIGLU_GRADIENTS, swiglu

Collective = Callable[[Tensor, ProcessGroup], Tensor] | None
"""A function that starts a collective over the group. None: there is nothing to start."""


Pending = tuple[Tensor, Tensor | None]
"""A functional collective of torch that is under way: its input and its result.

The result must not be read before it is finished. None: the result is the input. The input carries the gradient, which
has the shape of the input and is itself under way in the backward pass.
"""


class Measured(NamedTuple):
    """A matrix x [tokens, columns] with the largest magnitudes of its rows and columns (casts.largest_twin), which were
    left by the kernel that made it."""

    x: Tensor
    largest: Tensor


def measured(x: Tensor | Measured | Pending, wanted: bool) -> Tensor | Measured | Pending:
    """Return x with its largest magnitudes, or without them. Where they are wanted and not known, a pass finds them."""
    if isinstance(x, Measured):
        return x if wanted else x.x
    return Measured(x, LARGEST_OF(x.detach())) if wanted and isinstance(x, Tensor) else x


@dataclass(frozen=True)
class Matmul:
    """Products in the dtype of their operands, for weights [out, in] that read one x [tokens, in].

    Args:
        joined: join the gradients of several weights, and the weights. The gradient of x and the gradients of the
            weights then take one matmul each. Tensor parallelism makes the matrices thin, and several thin matmuls take
            longer than a wide one and its copies. Whole matrices are as fast one by one, which saves the copies. The
            two ways round differently: apart, each product is rounded to the dtype before the products are added.
            Scales of low-bit weights cannot be joined like this.
    """

    joined: bool = False
    differentiable: ClassVar[bool] = True
    """Whether torch can differentiate the gradients once more. It cannot where values are rounded to codes."""

    def keep(self, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the tensors that the products read in place of the weights, as long as the weights do not change. This
        class keeps nothing."""
        return ()

    def pack(self, x: Tensor) -> Tensor:
        """Return the tensor [tokens, n] that travels in place of x [tokens, in] to the ranks that multiply it. Here it
        is x itself."""
        return x

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return x [tokens, in] from the tensor that `pack` made."""
        return packed

    @property
    def gradient_travels(self) -> bool:
        """Whether the gradients of what `forward` returned may be gathered packed (packing.py)."""
        return False

    @property
    def measured(self) -> bool:
        """Whether `read` and `prepare` are spared work by the largest magnitudes of what they are given."""
        return False

    def read(self, x: Tensor, largest: Tensor | None = None) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return the tensors of x [tokens, in] that `forward` multiplies, and those that `weight_gradients` multiplies.

        Only the second ones are kept for the backward pass. Here both are x itself.

        Args:
            largest: the largest magnitudes of x (Measured), if they are known.
        """
        return (x,), (x,)

    def operand(self, x: Tensor) -> Sequence[Tensor]:
        """Return only the first tensors that `read` makes, for a forward pass without gradients."""
        return self.read(x)[0]

    def forward(
        self, operand: Sequence[Tensor], weights: Sequence[Tensor], kept: Sequence[Tensor] = ()
    ) -> tuple[Tensor, ...]:
        """Return x W^T of each weight: [tokens, out] each.

        Args:
            operand: the tensors that `operand` made, or the first ones of `read`.
            kept: the tensors that `keep` returned, if it was called.
        """
        (x,) = operand
        return tuple(x @ weight.t() for weight in weights)

    def prepare(self, grads: Sequence[Tensor], largest: Tensor | None = None) -> Sequence[Tensor]:
        """Return the tensors from which both gradients are computed, made once from the gradients [tokens, out] of each
        output.

        Args:
            largest: the largest magnitudes of the gradients (Measured), if they are known. They then come as one.
        """
        return (torch.cat(list(grads), 1),) if self.joined and len(grads) > 1 else grads

    def input_gradient(
        self,
        prepared: Sequence[Tensor],
        weights: Sequence[Tensor],
        out: Tensor | None = None,
        kept: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return the gradient of x, [tokens, in]. The caller may write to it.

        Args:
            out: the tensor for the result; only for one weight.
        """
        if len(prepared) < len(weights):
            weights = (torch.cat(list(weights)),)
        # Autograd adds products up from the last one to the first. The same order gives the same rounding.
        *others, last = zip(prepared, weights, strict=True)
        total = torch.mm(*last, out=out)
        for grad, weight in reversed(others):
            total += grad @ weight
        return total

    def weight_gradients(
        self, prepared: Sequence[Tensor], saved: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return the gradient of each weight, in its shape, from the second tensors that `read` made."""
        (x,) = saved
        products: Sequence[Tensor] = [grad.t() @ x for grad in prepared]
        if len(products) < len(weights):
            products = products[0].split([len(weight) for weight in weights])
        return products

    def add_weight_gradient(self, total: Tensor, prepared: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
        """Add the gradient of one weight to an fp32 total. A 16-bit sum over parts of the tokens would lose the
        precision that a sum within a matmul keeps."""
        a, b = prepared[0].t(), saved[0]
        if a.dtype == total.dtype:
            total.addmm_(a, b)
        elif a.is_cuda:
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
        else:
            total.addmm_(a.float(), b.float())


def linear(
    x: Tensor | Measured | Pending,
    weights: Sequence[Tensor],
    matmul: Matmul,
    back: Collective = None,
    group: ProcessGroup | None = None,
    kept: Sequence[Tensor] = (),
) -> tuple[Tensor, ...]:
    """Return x W^T of each weight: [tokens, in] -> [tokens, out] each. An x that is under way is finished first.

    Args:
        back: the collective that the gradient of x starts, over the group, before the gradients of the weights are
            computed.
        kept: the tensors that matmul.keep returned for the present weights, if it was called.
    """
    return _node(x, weights, matmul, back, group, kept)


def normed_linear(
    x: Tensor | Measured,
    weight: Tensor,
    matmul: Matmul,
    stream: Tensor,
    gain: Tensor,
    eps: float,
    kept: Sequence[Tensor] = (),
) -> tuple[Tensor, Measured]:
    """Return stream + x W^T, and its RMSNorm times a gain: [tokens, in] -> [tokens, out] each.

    The kernels of the addition and the norm leave largest magnitudes behind: that of the result for the next layer,
    that of the gradients for this one, in one node of autograd.

    Args:
        stream: [tokens, out], in the dtype of the weight.
        gain: [out].
    """
    summed, normed, largest = _node(x, (weight,), matmul, None, None, kept, (stream, gain), eps=eps)
    return summed, Measured(normed, largest)


def gated_linear(
    x: Tensor | Measured | Pending,
    weights: Sequence[Tensor],
    matmul: Matmul,
    back: Collective = None,
    group: ProcessGroup | None = None,
    kept: Sequence[Tensor] = (),
) -> Tensor | Measured:
    """Return silu(x W^T) * x V^T of two weights W and V: [tokens, in] -> [tokens, out]. Arguments are those of
    `linear`.

    With a matmul that reads largest magnitudes, both kernels of SwiGLU leave them behind: that of the result for the
    next layer, that of the gradients for this one, in one node of autograd.
    """
    if not (matmul.measured and torch.is_grad_enabled()):
        gate, up = linear(x, weights, matmul, back, group, kept)
        # torch.compile computes separate gradients in one pass by itself, and as fast. Joined ones need the kernel.
        return swiglu(gate, up) if matmul.joined else F.silu(gate) * up
    return Measured(*_node(x, weights, matmul, back, group, kept, gated=True))


def _node(
    x: Tensor | Measured | Pending,
    weights: Sequence[Tensor],
    matmul: Matmul,
    back: Collective,
    group: ProcessGroup | None,
    kept: Sequence[Tensor],
    beside: tuple[Tensor, ...] = (),
    gated: bool = False,
    eps: float | None = None,
) -> tuple[Tensor, ...]:
    known: tuple[Tensor, ...] = ()
    if isinstance(x, Measured):
        x, largest = x
        known = (largest,) if matmul.measured else ()
    given, result = x if isinstance(x, tuple) else (x, None)
    plan = _Plan(matmul, back, group, len(weights), torch.is_grad_enabled(), len(known), gated, eps)
    node = _Linear if matmul.differentiable else _RoundedLinear
    y: tuple[Tensor, ...] = node.apply(plan, given, result, *known, *beside, *weights, *kept)  # type: ignore[no-untyped-call]
    return y


class _Plan(NamedTuple):
    matmul: Matmul
    back: Collective
    group: ProcessGroup | None
    weights: int
    backward: bool
    """Whether there will be a backward pass."""
    known: int
    """1 if the largest magnitudes of x are known, else 0."""
    gated: bool
    """Whether SwiGLU of two products follows, with its largest magnitudes."""
    eps: float | None
    """The eps of the RMSNorm that follows an addition to a stream, with its largest magnitudes. None: neither follows.
    Stream and gain come before the weights."""


class _Linear(torch.autograd.Function):
    """Autograd's node of `linear`, `normed_linear` and `gated_linear`. It keeps the tensors that the matmuls read of x,
    the weights themselves, before SwiGLU the products, and before a norm the sum and the gain. Views of the weights
    would not do, because ZeRO-3 takes away their content in between."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: Any) -> tuple[Tensor, ...]:
        # Without gradients torch.compile 2.13 loses the first argument of a Function that gets as many arguments as its
        # forward names. Here there are always more.
        given, result, *read = tensors
        known, read = read[: plan.known], read[plan.known :]
        beside, read = ([], read) if plan.eps is None else (read[:2], read[2:])
        weights, kept = read[: plan.weights], read[plan.weights :]
        x = given if result is None else plan.matmul.unpack(torch.ops._c10d_functional.wait_tensor(result), given.dtype)
        operand, saved = plan.matmul.read(x, *known) if plan.backward else (plan.matmul.operand(x), ())
        made = plan.matmul.forward(operand, weights, kept)
        ctx.plan, ctx.count = plan, len(saved)
        if plan.eps is not None:
            stream, gain = beside
            y: tuple[Tensor, ...] = ADD_NORM(stream, *made, gain, plan.eps)
            made = y[0], gain
        elif plan.gated:
            y = SWIGLU(*made)
        else:
            ctx.save_for_backward(*saved, *read)
            return made
        ctx.save_for_backward(*saved, *read, *made)
        ctx.mark_non_differentiable(y[-1])
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        matmul, back, group, count, _, known, gated, eps = ctx.plan
        tensors = ctx.saved_tensors
        of_beside: tuple[Tensor, ...] = ()
        if eps is not None:
            *tensors, stream, gain = tensors
            whole, of_gain, largest = ADD_NORM_GRADIENTS(*grads[:2], stream, gain, eps)
            prepared, of_beside = matmul.prepare((whole,), largest), (whole, of_gain)
        elif gated:
            *tensors, gate, up = tensors
            whole, largest = SWIGLU_GRADIENTS(grads[0], gate, up)
            prepared = matmul.prepare((whole,), largest)
        else:
            prepared = matmul.prepare(grads)
        saved, read = tensors[: ctx.count], tensors[ctx.count :]
        weights, kept = read[:count], read[count:]
        grad_x = matmul.input_gradient(prepared, weights, kept=kept)
        if back is not None:
            grad_x = back(grad_x, group)
        gradients = matmul.weight_gradients(prepared, saved, weights)
        return None, grad_x, None, *(None,) * known, *of_beside, *gradients, *(None,) * len(kept)


class _RoundedLinear(_Linear):
    """The node of a Matmul that rounds."""

    backward = staticmethod(differentiated_once("a linear layer in 8 bits (Linear8bit)", "nn.Linear")(_Linear.backward))
