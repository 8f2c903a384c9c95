"""Rows of a table, inside of compiled code as well.

torch.compile would add the gradients of equal rows up by atomics, in another order at each call. Here torch's own
kernel does it, in an order that depends on the rows alone.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .operators import operator


def _rows_gradient(grad: Tensor, numbers: Tensor, count: int) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(grad, numbers, count, -1, False)


def _rows_gradient_fake(grad: Tensor, numbers: Tensor, count: int) -> Tensor:
    return grad.new_empty(count, grad.shape[1])


_GRADIENT = operator(_rows_gradient, _rows_gradient_fake)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, numbers: Tensor) -> Tensor:
        ctx.save_for_backward(numbers)
        ctx.count = len(table)
        return F.embedding(numbers, table)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _GRADIENT(grad, *ctx.saved_tensors, ctx.count), None


def rows_of(table: Tensor, numbers: Tensor) -> Tensor:
    """Return the rows of a table [rows, columns] with these numbers, int64 [n]: [n, columns]. The table itself is not
    kept for the backward pass."""
    rows: Tensor = _Rows.apply(table, numbers)  # type: ignore[no-untyped-call]
    return rows
