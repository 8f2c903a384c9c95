"""Refuse what the operators of this package do not compute, by the name that the user called: transforms of
torch.func, second derivatives, and names that do not exist."""

import difflib
import functools
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx

Backward = Callable[..., Any]


def one_of(what: str, value: object, allowed: Iterable[str]) -> ValueError:
    """Return the error about an argument, such as "sage_attention: recipe", whose value is none of those that are
    allowed."""
    names = list(allowed)
    near = difflib.get_close_matches(str(value).lower(), names, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ValueError(f"{what} {value!r} is not one of {', '.join(names)}{hint}")


def refuse_transforms(name: str, instead: str) -> None:
    """Raise NotImplementedError under vmap, grad, jvp and the like of torch.func, and in forward-mode differentiation.
    The operators have one derivative, in reverse, and no rule for batches of calls.

    Args:
        name: the public function.
        instead: what to call there.
    """
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        raise NotImplementedError(
            f"{name} takes no transforms (vmap, grad, jvp and others of torch.func, forward-mode differentiation); "
            f"use {instead} there"
        )


# To torch.compile the answer is a constant, as that of backends.default_recipe. It would leave a node in the graph.
refuse_transforms._dynamo_marked_constant = True  # type: ignore[attr-defined]


def differentiated_once(name: str, instead: str) -> Callable[[Backward], Backward]:
    """Return a decorator for the `backward` of an autograd function whose gradients have no derivative themselves.

    With create_graph=True the gradients are right, and to differentiate them raises NotImplementedError. torch's
    once_differentiable does not name the function, and it lets gradients pass as constants where the gradient that
    comes in requires none, as that of a sum.

    Args:
        name: the public function.
        instead: what to call where gradients of gradients are needed.
    """

    def decorate(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def once(ctx: FunctionCtx, *grads: Any) -> Any:
            # Compiled code has no second derivative at all, and torch says so.
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():
                return backward(ctx, *grads)
            # Under activation checkpointing saved tensors can be asked for only once.
            seen = SimpleNamespace(**vars(ctx), saved_tensors=ctx.saved_tensors)
            with torch.no_grad():
                found = backward(seen, *grads)
            # The leaf is on the way of every backward pass. torch.autograd.grad goes only where its inputs came from.
            read = (torch.empty(0, requires_grad=True), *grads, *seen.saved_tensors)
            return _Refused.apply(name, instead, len(found), *found, *read)

        return once

    return decorate


class _Refused(torch.autograd.Function):
    """The node behind gradients that cannot be differentiated."""

    @staticmethod
    def forward(ctx: FunctionCtx, name: str, instead: str, count: int, *tensors: Any) -> tuple[Any, ...]:
        ctx.refused = name, instead
        return tuple(grad if grad is None else grad.detach() for grad in tensors[:count])

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Any) -> None:
        name, instead = ctx.refused
        raise NotImplementedError(
            f"{name} has no second derivative; use {instead} where gradients of gradients are needed"
        )
