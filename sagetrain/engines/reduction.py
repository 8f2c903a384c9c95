"""Gradients of ZeRO 1 on their way to the ranks that own them, beside the last backward pass.

DeepSpeed's BF16_Optimizer all-reduces its fp32 sums when the last backward pass is over. Yet a rank updates only what
it owns of them, so that a reduce to each owner does, with half the bytes; and they are final long before that pass
ends, those of the last layers first (docs/gradients.md). Where ranks are many, and what one owns is little, a bucket of
several owners is all-reduced, because a reduce goes from rank to rank.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sagetrain.model.accounting import one_owner
from sagetrain.parallel.topology import Mpu, ParallelGroups

_AT_ONCE = 2
"""Buckets under way while the next one is rounded, if gradients travel in 16 bits: each has a copy."""


@dataclass
class _Bucket:
    """A stretch of the flat fp32 sums of one group of parameters."""

    sums: Tensor
    owner: int | None
    """None: several."""
    own: slice
    """What this rank owns of it."""
    waits_for: int
    """Parameters that lie in it."""
    first: int
    """Which of the model's parameters is the first of them: its gradient is the last one that backward makes."""
    missing: int = 0
    """Of those, which this backward pass has not come to."""
    sent: Tensor = field(default_factory=lambda: torch.empty(0))
    work: dist.Work | None = None


class Reduction:
    """Of one engine, at ZeRO 1 in bf16 with several replicas. Replaces what DeepSpeed's BF16_Optimizer does with
    gradients between backward and update: their mean over ranks, and their norm, of which each rank then has a part.

    `begin` before the last backward pass of a step, `added` at every gradient that is added to its sum; DeepSpeed calls
    `finish`, as `reduce_gradients`, when that pass is over.

    Args:
        optimizer: DeepSpeed's.
        size: of a bucket, in elements.
        dtype: what gradients travel and are summed in between ranks: float32 or bfloat16.
    """

    def __init__(self, optimizer: Any, model: nn.Module, groups: ParallelGroups, size: int, dtype: torch.dtype) -> None:
        self._groups, self._dtype, self._going = groups, dtype, False
        self._buckets: list[_Bucket] = []
        self._of: dict[tuple[int, int], list[_Bucket]] = {}
        place = {parameter: i for i, parameter in enumerate(model.parameters())}
        # A rank may own nothing that counts in the norm, and DeepSpeed's wants something.
        every, counted = [], [optimizer.fp32_groups_gradients_flat[0].new_zeros(1)]
        for group, parameters in enumerate(optimizer.bf16_groups):
            flat = optimizer.fp32_groups_gradients_flat[group]
            share = flat.numel() // groups.num_replicas
            mine = slice(groups.replica_rank * share, (groups.replica_rank + 1) * share)
            ends = list(accumulate(parameter.numel() for parameter in parameters))
            for start, stop, owner in _stretches(share, groups.num_replicas, size):
                here = _inside(ends, start, stop)
                if not here:  # the padding at the end
                    continue
                own = slice(max(start, mine.start) - start, max(start, min(stop, mine.stop)) - start)
                first = min(place[parameters[i]] for i in here)
                bucket = _Bucket(flat[start:stop], owner, own, len(here), first)
                self._buckets.append(bucket)
                for i in here:
                    self._of.setdefault((group, i), []).append(bucket)
            for i in _inside(ends, mine.start, mine.stop):
                start = ends[i] - parameters[i].numel()
                every.append(flat[max(start, mine.start) : min(ends[i], mine.stop)])
                if parameters[i].tensor_model_parallel or groups.tp_rank == 0:
                    counted.append(every[-1])
        self._buckets.sort(key=lambda bucket: -bucket.first)
        optimizer.get_grads_for_norm = lambda for_clipping=False: every if for_clipping else (counted, {})
        optimizer.mpu = _OverAll(groups)
        optimizer.reduce_gradients = self.finish

    def begin(self) -> None:
        """The backward pass to come is the last one of the step."""
        self._going, self._sent, self._received = True, 0, 0
        for bucket in self._buckets:
            bucket.missing = bucket.waits_for

    def added(self, group: int, place: int) -> None:
        """The gradient of this parameter, by DeepSpeed's numbers, is in its sum for this backward pass."""
        if not self._going:
            return
        for bucket in self._of[group, place]:
            if not bucket.missing:
                raise RuntimeError("a gradient came twice in one backward pass, when its sum was on its way")
            bucket.missing -= 1
        # In one order on all ranks, whatever that of autograd is.
        while self._sent < len(self._buckets) and not self._buckets[self._sent].missing:
            self._send()

    def finish(self, pipeline_parallel: bool = False) -> None:
        """Backward is over: what this rank owns becomes the mean over all ranks. The argument is DeepSpeed's."""
        if not self._going:
            self.begin()
        while self._sent < len(self._buckets):  # a parameter without a gradient holds up what comes behind it
            self._send()
        while self._received < len(self._buckets):
            self._receive()
        self._going = False

    @torch.no_grad()
    def _send(self) -> None:
        bucket, group = self._buckets[self._sent], self._groups.replica_group
        bucket.sent = bucket.sums.to(self._dtype)
        if bucket.owner is None:
            bucket.work = dist.all_reduce(bucket.sent, group=group, async_op=True)
        else:
            bucket.work = dist.reduce(bucket.sent, group=group, group_dst=bucket.owner, async_op=True)
        self._sent += 1
        if self._dtype != torch.float32 and self._sent - self._received > _AT_ONCE:
            self._receive()

    @torch.no_grad()
    def _receive(self) -> None:
        bucket = self._buckets[self._received]
        assert bucket.work is not None
        bucket.work.wait()
        own = bucket.sums[bucket.own]
        if bucket.sent is not bucket.sums:
            own.copy_(bucket.sent[bucket.own])
        own.mul_(1 / self._groups.num_replicas)
        bucket.sent, bucket.work = torch.empty(0), None
        self._received += 1


def _stretches(share: int, owners: int, size: int) -> list[tuple[int, int, int | None]]:
    """Where buckets begin and end in what `owners` own `share` elements each of, and the owner of each."""
    if not one_owner(share, size):
        return [(start, min(start + size, owners * share), None) for start in range(0, owners * share, size)]
    return [
        (start, min(start + size, (owner + 1) * share), owner)
        for owner in range(owners)
        for start in range(owner * share, (owner + 1) * share, size)
    ]


def _inside(ends: Sequence[int], start: int, stop: int) -> range:
    """Which parameters, that lie behind each other and end there, have elements in a stretch."""
    return range(bisect.bisect_right(ends, start), min(len(ends), bisect.bisect_left(ends, stop) + 1))


class _OverAll(Mpu):
    """For the norm: a rank has a part of its tensor-parallel slice, so that it is summed over all ranks."""

    def get_model_parallel_group(self) -> None:
        return None
