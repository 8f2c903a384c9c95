"""The logits of a mixture's router in fp32, and their gradients, by products of bfloat16 on tensor cores.

Three numbers in bfloat16 hold one in fp32. Tokens are bfloat16 already. So three products, added up in fp32, give the
logits that a product in fp32 would, at several times its rate. The gradient of the weight is made of the three parts of
the logits' gradient. That of the tokens is rounded to bfloat16, for which the two larger parts of both operands do.
"""

from typing import Any

import torch
from torch import Tensor

from .operators import operator
from .refusals import differentiated_once, refuse_transforms


def parts_of(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tensors in bfloat16, the largest first, whose sum is x in fp32 up to 2^-24 of it."""
    high = x.bfloat16()
    rest = x - high.float()
    middle = rest.bfloat16()
    return high, middle, (rest - middle.float()).bfloat16()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply matrices in bfloat16 to one in fp32. The CPU has no such product."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _added(parts: Tensor, dim: int) -> Tensor:
    """Add up three parts that lie one behind the other along a dim, the smallest first."""
    high, middle, low = parts.chunk(3, dim)
    return high + (middle + low)


def logits_by_parts(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply tokens by the parts of the weight."""
    return _added(_product(x, torch.cat(parts_of(weight)).t()), 1)


def gradients_by_parts(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply the parts of the gradient of logits by those of the weight, and by tokens."""
    parts, (high, middle, _) = parts_of(grad), parts_of(weight)
    of_x = torch.cat((parts[0], parts[0], parts[1]), 1) @ torch.cat((high, middle, high))
    return of_x, _added(_product(torch.cat(parts, 1).t(), x), 0)


def _router_logits(x: Tensor, weight: Tensor) -> Tensor:
    return logits_by_parts(x, weight) if x.is_cuda else x.float() @ weight.t()


ROUTER_LOGITS = operator(_router_logits, lambda x, weight: weight.new_empty(x.shape[0], weight.shape[0]))


def _router_gradients(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    if x.is_cuda:
        return gradients_by_parts(grad, x, weight)
    return (grad @ weight).to(x.dtype), grad.t() @ x.float()


ROUTER_GRADIENTS = operator(_router_gradients, lambda grad, x, weight: (torch.empty_like(x), torch.empty_like(weight)))


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return ROUTER_LOGITS(x, weight)

    @staticmethod
    @differentiated_once("router_logits", "x.float() @ weight.t()")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return ROUTER_GRADIENTS(grad, *ctx.saved_tensors)


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Return the logits of tokens x [T, H] by a router's weight [E, H], in the dtype of the weight: [T, E].

    Tokens in bfloat16 are kept as they are for the backward pass. A GPU multiplies them on tensor cores, with fp32's
    error, and the CPU in fp32. Other dtypes are multiplied by torch in the dtype of the weight.

    Raises:
        NotImplementedError: a second derivative, or a transform of torch.func.
    """
    if (x.dtype, weight.dtype) != (torch.bfloat16, torch.float32):
        return x.to(weight.dtype) @ weight.t()
    refuse_transforms("router_logits", "x.float() @ weight.t()")
    return _Logits.apply(x, weight)
