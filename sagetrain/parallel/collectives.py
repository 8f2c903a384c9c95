"""Differentiable collectives over the tensor-parallel group, and around attention over the context-parallel group.

| function              | forward               | backward                        |
|-----------------------|-----------------------|---------------------------------|
| reduce_from_region    | all-reduce            | identity                        |
| gather_from_region    | all-gather, last dim  | own slice, last dim             |
| enter                 | identity              | all-reduce                      |
| enter (sequence)      | all-gather, dim 0     | reduce-scatter, dim 0           |
| leave                 | all-reduce            | identity                        |
| leave (sequence)      | reduce-scatter, dim 0 | all-gather, dim 0               |

The "region" is the part of the model where tensors differ between the ranks of the group. Under sequence parallelism,
activations outside of the region are shards of [tokens, ...]. The sequences of the micro-batch are flattened, so that a
shard is contiguous and travels without a copy. Every collective does nothing for a group of one rank.

Layers enter and leave the region in two steps, `start_*` and `finish_*`. Work between the two steps runs beside the
collective. In the backward pass, the part of autograd's tape that was recorded between the two steps runs beside it as
well. Every collective that was started has to be finished.

Context parallelism follows DeepSpeed-Ulysses (arXiv 2309.14509). A rank holds a slice of every sequence, with all
heads. `scatter_heads` turns the slices into whole sequences with a share of the heads, and attention needs nothing
else. `gather_heads` turns them back. Both are one all-to-all, forward and backward. Up to as many ranks as query heads
may share a sequence: where they are more than the key/value heads, these are repeated before the exchange. Beyond that
the ranks are u that exchange heads times g that gather keys and values (`gather_sequences`), while their queries stay.

The collectives are torch's functional ones, which torch.compile traces without a graph break. They are called as
operators because the names of their Python functions change between torch releases. The collectives of sequence
parallelism go by the GPUs' copy engines where these reach the whole group (copies.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from sagekernels.casts import MULTIPLE
from sagekernels.matmul import Collective, Pending
from sagekernels.packing import pack, unpack
from sagetrain.parallel.copies import connected
from sagetrain.parallel.topology import ParallelGroups

_ops, _copies = torch.ops._c10d_functional, torch.ops.sagetrain
_Started = Callable[[Tensor, ProcessGroup], Tensor]
"""A function that starts a collective over a group. `finish` waits for its result."""


def start_all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Start to sum x over the group. `finish` waits for the result, which has the shape of x."""
    y: Tensor = _ops.all_reduce(x.contiguous(), "sum", group.group_name)
    return y


def start_all_gather(x: Tensor, group: ProcessGroup) -> Tensor:
    """Start to gather the ranks' x along dim 0. `finish` waits for the result [size * dim 0, ...]."""
    gather = _copies.all_gather if group.group_name in connected else _ops.all_gather_into_tensor
    y: Tensor = gather(x.contiguous(), group.size(), group.group_name)
    return y


def start_reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    """Start to sum x over the group and keep this rank's part along dim 0. `finish` waits for the result [dim 0 / size,
    ...]."""
    y: Tensor
    if group.group_name in connected:
        y = _copies.reduce_scatter(x.contiguous(), group.size(), group.group_name)
    else:
        y = _ops.reduce_scatter_tensor(x.contiguous(), "sum", group.size(), group.group_name)
    return y


finish = _ops.wait_tensor


def _start_all_to_all(x: Tensor, group: ProcessGroup) -> Tensor:
    """Start to exchange the parts of x [size, ...]. Part i goes to rank i, and part i of the result comes from rank
    i."""
    parts = [1] * group.size()
    y: Tensor = _ops.all_to_all_single(x.contiguous(), parts, parts, group.group_name)
    return y


class _EndBackward(torch.autograd.Function):
    """Return x, and finish the collective of the backward pass.

    With `packed`, that collective moves packed bytes (packing.py), viewed as a matrix in the dtype of x. Autograd would
    not accept a matrix of another shape as the gradient of x, so an empty matrix in the packed shape stands for x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: bool) -> Tensor:
        ctx.packed = packed
        return x.new_empty(len(x), (x.shape[1] + MULTIPLE) // x.itemsize) if packed else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = finish(grad)
        return unpack(grad.view(torch.uint8), grad.dtype) if ctx.packed else grad, None


class _Finish(torch.autograd.Function):
    """Finish the collective of the forward pass, and start the collective of the backward pass."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, result: Tensor | None, back: Collective, group: ProcessGroup) -> Tensor:
        ctx.back, ctx.group = back, group
        # With packed gradients, _EndBackward returned an empty matrix in the packed shape.
        ctx.packed = result is not None and result.shape[1:] != given.shape[1:]
        return given.view_as(given) if result is None else finish(result)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.packed:
            grad = pack(grad).view(grad.dtype)
        return (grad if ctx.back is None else ctx.back(grad, ctx.group)), None, None, None


class _GatherFromRegion(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, rank: int) -> Tensor:
        ctx.rank, ctx.width = rank, x.shape[-1]
        # The collective concatenates along dim 0. So gather there, then move the ranks next to the last dim.
        parts = _ops.all_gather_into_tensor(x.contiguous().unsqueeze(0), group.size(), group.group_name)
        y: Tensor = finish(parts).movedim(0, -2).flatten(-2)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.narrow(-1, ctx.rank * ctx.width, ctx.width).contiguous(), None, None


class _Exchange(torch.autograd.Function):
    """Run a collective in the forward pass and its counterpart in the backward pass, and wait for each at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, there: _Started, back: _Started) -> Tensor:
        ctx.group, ctx.back = group, back
        y: Tensor = finish(there(x, group))
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return finish(ctx.back(grad, ctx.group)), None, None, None


class _GatherSequences(torch.autograd.Function):
    """Gather chunks of sequences: rank i of g has the chunks i and 2 g - 1 - i."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        parts = finish(_ops.all_gather_into_tensor(x.contiguous().unsqueeze(0), group.size(), group.group_name))
        first, last = parts.unflatten(2, (2, -1)).unbind(2)  # [g, B, S / 2g, ...] each
        y: Tensor = torch.cat((first, last.flip(0))).movedim(0, 1).flatten(1, 2)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        first, last = grad.unflatten(1, (2 * ctx.group.size(), -1)).chunk(2, 1)  # [B, g, S / 2g, ...] each
        by_rank = torch.stack((first, last.flip(1)), 2).flatten(2, 3).movedim(1, 0)
        return finish(_start_all_to_all(by_rank, ctx.group)).sum(0, dtype=torch.float32).to(grad.dtype), None


def _start(
    x: Tensor,
    groups: ParallelGroups,
    there: Collective,
    back: Collective,
    pack: Callable[[Tensor], Tensor] | None = None,
    packed_back: bool = False,
) -> Pending:
    assert groups.tp_group is not None
    sent = x.detach() if pack is None or there is None else pack(x.detach())
    result = None if there is None else there(sent, groups.tp_group)
    return (x if back is None else _EndBackward.apply(x, packed_back)), result  # type: ignore[no-untyped-call]


def _finish(x: Tensor | Pending, groups: ParallelGroups, back: Collective) -> Tensor:
    """Finish the collective that _start began. A group of one rank has begun nothing."""
    if isinstance(x, Tensor):
        assert groups.tp_size == 1
        return x
    y: Tensor = _Finish.apply(*x, back, groups.tp_group)  # type: ignore[no-untyped-call]
    return y


class Region(NamedTuple):
    """The region of a rank's tensor-parallel group, which layers enter and leave, and where their parameters are."""

    groups: ParallelGroups
    sharded: bool = False
    """Whether the ranks have shards of the tokens outside of it: sequence parallelism."""
    dtype: torch.dtype = torch.float32
    """The dtype of parameters."""
    device: torch.device | None = None
    """The device of parameters. None: the CPU."""

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        """Return a parameter without values, in the region's dtype unless another one is given."""
        return nn.Parameter(torch.empty(shape, dtype=dtype or self.dtype, device=self.device))

    @property
    def entering(self) -> tuple[Collective, Collective]:
        """The collectives that enter the region, forward and backward. In the other order they leave it."""
        return (start_all_gather, start_reduce_scatter) if self.sharded else (None, start_all_reduce)


def reduce_from_region(x: Tensor, groups: ParallelGroups) -> Tensor:
    """Return the sum of x over the group, in the shape of x."""
    region = Region(groups)
    return finish_leave(start_leave(x, region), region)


def gather_from_region(x: Tensor, groups: ParallelGroups) -> Tensor:
    """Return the ranks' x, concatenated along the last dim: [..., n] -> [..., n * tp]. Every rank must use the result
    alike."""
    y: Tensor = x if groups.tp_size == 1 else _GatherFromRegion.apply(x, groups.tp_group, groups.tp_rank)  # type: ignore[no-untyped-call]
    return y


def start_enter(x: Tensor, region: Region, pack: Callable[[Tensor], Tensor] | None = None) -> Tensor | Pending:
    """Start to bring x into the region, where column-parallel layers read it: [tokens (/ tp), ...] -> [tokens, ...].

    Without sequence parallelism the result is x itself. Any tensor that all ranks hold and use differently may then
    enter. The backward pass waits for the sum of its gradient at the place of this call.

    Args:
        pack: turns x into the tensor that is gathered (Matmul.pack of the layers that read it). None: x is gathered.
    """
    return x if region.groups.tp_size == 1 else _start(x, region.groups, *region.entering, pack)


def finish_enter(x: Tensor | Pending, region: Region) -> Tensor:
    """Finish what start_enter began. ColumnParallelLinear does this itself."""
    return _finish(x, region.groups, region.entering[1])


def start_leave(x: Tensor, region: Region, *, packed: bool = False) -> Tensor | Pending:
    """Start to add up the ranks' partial sums: [tokens, ...] -> [tokens (/ tp), ...].

    Args:
        packed: gather the gradient of x [tokens, columns] in 8 bits (packing.py), where it is gathered at all and 8
            bits are fewer bytes.
    """
    if region.groups.tp_size == 1:
        return x
    packed = packed and region.sharded and x.shape[1] + MULTIPLE < x.shape[1] * x.itemsize
    back, there = region.entering
    return _start(x, region.groups, there, back, packed_back=packed)


def finish_leave(x: Tensor | Pending, region: Region) -> Tensor:
    """Finish what start_leave began."""
    return _finish(x, region.groups, region.entering[0])


def gather_tokens(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the tokens of all ranks of a group, [size * tokens, ...]. Every rank uses them in its own way, so their
    gradients are summed."""
    y: Tensor = _Exchange.apply(x, group, start_all_gather, start_reduce_scatter)  # type: ignore[no-untyped-call]
    return y


def scatter_sums(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return this rank's tokens of the sum over the ranks of a group: [size * tokens, ...] -> [tokens, ...]."""
    y: Tensor = _Exchange.apply(x, group, start_reduce_scatter, start_all_gather)  # type: ignore[no-untyped-call]
    return y


def scatter_heads(tensors: Sequence[Tensor], num_sequences: int, groups: ParallelGroups) -> list[Tensor]:
    """Turn slices of the sequences with all heads into whole sequences with this rank's heads, for several tensors at
    once.

    [B * S / u, heads, K] -> [B, S, heads / u, K] for each tensor, where u ranks exchange heads. The number of heads of
    each tensor is a multiple of u, or divides u. Rank i gets the i-th share of each tensor's heads, so that query heads
    stay with the key/value head that serves them. A tensor with fewer heads than ranks is repeated first: each of its
    heads goes to u / heads neighbouring ranks, and the gradients that come back from these ranks are summed.

    Ranks that gather keys have chunks of the sequences (Topology.places) in the place of the sequences.
    """
    if groups.ulysses_size == 1:
        return [x.unflatten(0, (num_sequences, -1)) for x in tensors]
    repeated = [_repeat(x, groups.ulysses_size // x.shape[1]) for x in tensors]
    by_rank = [x.unflatten(1, (groups.ulysses_size, -1)).movedim(1, 0) for x in repeated]
    assert groups.ulysses_group is not None
    slices = exchange(torch.cat(by_rank, 2), groups.ulysses_group)
    whole = slices.unflatten(1, (num_sequences, -1)).transpose(0, 1).flatten(1, 2)
    # Attention keeps some of the tensors for its backward pass. They are copied, because a view would keep the memory
    # of all.
    return [x.contiguous() for x in whole.split([x.shape[2] for x in by_rank], 2)]


def exchange(x: Tensor, group: ProcessGroup) -> Tensor:
    """Exchange the parts of x [size, ...] between the ranks of a group: part i goes to rank i, and part i of the result
    comes from rank i. So do their gradients."""
    y: Tensor = _Exchange.apply(x, group, _start_all_to_all, _start_all_to_all)  # type: ignore[no-untyped-call]
    return y


def exchanged(numbers: Tensor, group: ProcessGroup) -> Tensor:
    """Exchange the parts of whole numbers, as `exchange` does."""
    y: Tensor = finish(_start_all_to_all(numbers, group))
    return y


def _repeat(x: Tensor, copies: int) -> Tensor:
    """Repeat every head of x [tokens, heads, K], each next to its copies. torch sums the gradients of the copies in
    fp32, and rounds the sum once."""
    return x if copies < 2 else x.unsqueeze(2).expand(-1, -1, copies, -1).flatten(1, 2)


def gather_heads(x: Tensor, groups: ParallelGroups) -> Tensor:
    """Turn whole sequences with this rank's heads into slices with all heads: [B, S, heads / u, K] -> [B * S / u,
    heads, K]."""
    if groups.ulysses_size == 1:
        return x.flatten(0, 1)
    slices = x.unflatten(1, (groups.ulysses_size, -1)).movedim(1, 0).flatten(1, 2)
    assert groups.ulysses_group is not None
    return exchange(slices, groups.ulysses_group).movedim(0, 1).flatten(1, 2)


def gather_sequences(x: Tensor, groups: ParallelGroups) -> Tensor:
    """Gather the tokens of whole sequences over the ranks that gather keys, in their order: [B, S / g, heads, K] -> [B,
    S, heads, K]. A rank has two chunks of every sequence (Topology.places).

    The gradients that come back are those of every rank's queries. They are summed in fp32, and rounded once.
    """
    y: Tensor = _GatherSequences.apply(x, groups.gather_group)  # type: ignore[no-untyped-call]
    return y
