"""Differentiable collectives over the tensor-parallel group.

| function              | forward               | backward                        |
|-----------------------|-----------------------|---------------------------------|
| copy_to_region        | identity              | all-reduce                      |
| reduce_from_region    | all-reduce            | identity                        |
| gather_from_region    | all-gather, last dim  | own slice, last dim             |
| gather_tokens         | all-gather, dim 0     | reduce-scatter, dim 0           |
| reduce_scatter_tokens | reduce-scatter, dim 0 | all-gather, dim 0               |

The "region" is where tensors differ between the ranks of the group. The last two serve sequence parallelism:
activations are [tokens, ...] with the sequences of the micro-batch flattened, so that a shard along the sequence is
contiguous and travels without a copy. `enter_region` and `leave_region` choose the pair that a layer needs. All are
no-ops for a group of one.

The collectives are torch's functional ones, which torch.compile traces without a graph break; they are called as
operators because the names of the python functions around them change between torch releases.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup

from sagetrain.parallel.topology import ParallelGroups

_ops = torch.ops._c10d_functional


def start_all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum over the group, on its way: `finish` waits for it."""
    return _ops.all_reduce(x.contiguous(), "sum", group.group_name)


def start_all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """The ranks' x along dim 0, on its way."""
    return _ops.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name)


def start_reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    """Own part along dim 0 of the sum over the group, on its way."""
    return _ops.reduce_scatter_tensor(x.contiguous(), "sum", group.size(), group.group_name)


finish = _ops.wait_tensor


def _all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    return finish(start_all_reduce(x, group))


def _all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    return finish(start_all_gather(x, group))


def _reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    return finish(start_reduce_scatter(x, group))


class _CopyToRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad, ctx.group), None


class _ReduceFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: ProcessGroup) -> Tensor:
        return _all_reduce(x, group)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: ProcessGroup, rank: int) -> Tensor:
        ctx.rank, ctx.width = rank, x.shape[-1]
        # The collective concatenates along dim 0: gather there, then move the ranks next to the last dim.
        return _all_gather(x.unsqueeze(0), group).movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.narrow(-1, ctx.rank * ctx.width, ctx.width).contiguous(), None, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce_scatter(grad, ctx.group), None


class _ReduceScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        return _all_gather(grad, ctx.group), None


def copy_to_region(x: Tensor, groups: ParallelGroups) -> Tensor:
    """x unchanged; its gradient is summed over the group. For tensors that all ranks hold and use differently."""
    return x if groups.tp_size == 1 else _CopyToRegion.apply(x, groups.tp_group)


def reduce_from_region(x: Tensor, groups: ParallelGroups) -> Tensor:
    """Sum of x over the group."""
    return x if groups.tp_size == 1 else _ReduceFromRegion.apply(x, groups.tp_group)


def gather_from_region(x: Tensor, groups: ParallelGroups) -> Tensor:
    """The ranks' x, concatenated along the last dim: [..., n] -> [..., n * tp]. Every rank must use it alike."""
    return x if groups.tp_size == 1 else _GatherFromRegion.apply(x, groups.tp_group, groups.tp_rank)


def gather_tokens(x: Tensor, groups: ParallelGroups) -> Tensor:
    """The ranks' shards along dim 0, concatenated: [tokens / tp, ...] -> [tokens, ...]."""
    return x if groups.tp_size == 1 else _GatherTokens.apply(x, groups.tp_group)


def reduce_scatter_tokens(x: Tensor, groups: ParallelGroups) -> Tensor:
    """Own shard along dim 0 of the sum over the group: [tokens, ...] -> [tokens / tp, ...]."""
    return x if groups.tp_size == 1 else _ReduceScatterTokens.apply(x, groups.tp_group)


def enter_region(x: Tensor, groups: ParallelGroups, sequence_parallel: bool) -> Tensor:
    """What column-parallel layers read: all tokens, [tokens (/ tp), ...] -> [tokens, ...]."""
    return gather_tokens(x, groups) if sequence_parallel else copy_to_region(x, groups)


def leave_region(x: Tensor, groups: ParallelGroups, sequence_parallel: bool) -> Tensor:
    """What row-parallel layers return: the ranks' partial sums added up, [tokens, ...] -> [tokens (/ tp), ...]."""
    return reduce_scatter_tokens(x, groups) if sequence_parallel else reduce_from_region(x, groups)
