"""Reduce the gradients of ZeRO 1 to the ranks that own them, while the last backward pass runs.

DeepSpeed's BF16_Optimizer all-reduces its fp32 sums after the last backward pass. A rank updates only the weights that
it owns, so a reduce to each owner suffices and sends half the bytes. The sums are also final long before that pass
ends, those of the last layers first (docs/gradients.md). If there are many ranks and each owns little, a bucket of
several owners is all-reduced, because a reduce goes from rank to rank.

This is the one module that replaces members of DeepSpeed. REPLACED lists the members. `check` tests at the start of a
run that DeepSpeed still calls each of them, so a version that renames one is refused there.

This module may be removed if a measurement on two GPUs shows no loss of speed at ZeRO 1 when DeepSpeed all-reduces
after the last backward pass. On one host the speed without this module was 0.98 of the speed with it.
"""

from __future__ import annotations

import bisect
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sagetrain.config.errors import ConfigError
from sagetrain.model.accounting import one_owner
from sagetrain.parallel.topology import Mpu, ParallelGroups

REPLACED = {
    "_update_hp_grad": ("optimizer", "accumulate_hp_grads_and_remove_lp"),
    "reduce_gradients": ("engine", "allreduce_gradients"),
    "get_grads_for_norm": ("optimizer", "step"),
    "mpu": ("optimizer", "step"),
}
"""The replaced members of DeepSpeed's BF16_Optimizer. Each value is the object and the method that must call or read
the member: a method of the optimizer or of DeepSpeed's engine."""
READ = "bf16_groups", "fp32_groups_gradients", "fp32_groups_gradients_flat", "fp32_groups_has_gradients"
"""The members of the optimizer that are read."""
_AT_ONCE = 2
"""The number of buckets under way while the next one is rounded, if gradients travel in 16 bits. Each bucket has a
16-bit copy."""


@dataclass
class _Bucket:
    """A stretch of the flat fp32 sums of one group of parameters."""

    sums: Tensor
    owner: int | None
    """The replica that owns the stretch; None: several replicas own parts of it."""
    own: slice
    """The part of the stretch that this rank owns."""
    waits_for: int
    """The number of parameters that lie in the stretch."""
    first: int
    """The index in the model of the bucket's first parameter. Backward makes the gradient of this parameter last."""
    missing: int = 0
    """The number of the bucket's parameters whose gradients this backward pass has not made yet."""
    sent: Tensor = field(default_factory=lambda: torch.empty(0))
    work: dist.Work | None = None


def check(ds: Any) -> None:
    """Check that DeepSpeed's engine and its optimizer have, and use, the members that are replaced and read here.

    Raises:
        ConfigError: one of the members does not exist, or nothing calls it.
    """
    gone = [name for name in READ if not hasattr(ds.optimizer, name)]
    for name, (owner, method) in REPLACED.items():
        user = getattr({"engine": ds, "optimizer": ds.optimizer}[owner], method, None)
        if user is None or name not in _names(user):
            gone.append(f"{name} (in {method})")
    if gone:
        raise ConfigError(
            f"DeepSpeed {version('deepspeed')} is not one that ZeRO 1 in bf16 knows: its {type(ds.optimizer).__name__} "
            f"has no {', '.join(gone)}. Gradients would not be reduced as they must be (sagetrain/engines/reduction.py)"
            ": install the version of constraints.txt, or use parallel.zero_stage 2"
        )


def _names(function: Any) -> set[str]:
    """Return the names that a function reads, and those of the functions that its decorators hold."""
    function = inspect.unwrap(function)
    inside = filter(inspect.isfunction, inspect.getclosurevars(function).nonlocals.values())
    return set(function.__code__.co_names).union(*map(_names, inside))


class Reduction:
    """The reduction of gradients in one engine at ZeRO 1 in bf16. It replaces the accumulation, the mean over ranks and
    the norm of DeepSpeed's BF16_Optimizer. For the norm each rank has a part of the gradients.

    Call `begin` before the last backward pass of a step. DeepSpeed calls `add` as `_update_hp_grad` for each gradient,
    and `finish` as `reduce_gradients` after that pass.

    Args:
        ds: DeepSpeed's engine.
        beside: reduce while the backward pass runs. If False, DeepSpeed reduces after it, and gradients are only added
            here.
        size: the size of a bucket in elements.
        dtype: the dtype in which gradients are sent and summed between ranks, float32 or bfloat16.

    Raises:
        ConfigError: see `check`.
    """

    def __init__(
        self, ds: Any, model: nn.Module, groups: ParallelGroups, *, beside: bool, size: int, dtype: torch.dtype
    ) -> None:
        check(ds)
        self._optimizer, self._groups, self._dtype, self._going = ds.optimizer, groups, dtype, False
        self._buckets: list[_Bucket] = []
        self._of: dict[tuple[int, int], list[_Bucket]] = {}
        self._optimizer._update_hp_grad = self.add
        if beside:
            self._optimizer.reduce_gradients = self.finish
        # A single replica has nothing to reduce. DeepSpeed would copy each gradient, reduce it over one rank, and copy
        # it back.
        if beside and groups.num_replicas > 1:
            self._fill_buckets(model, size)

    def _fill_buckets(self, model: nn.Module, size: int) -> None:
        """Cut the fp32 sums into buckets, and limit the norm to the gradients that each rank owns."""
        optimizer, groups = self._optimizer, self._groups
        place = {parameter: i for i, parameter in enumerate(model.parameters())}
        # A rank may own nothing that counts in the norm, but DeepSpeed's norm needs at least one tensor.
        every, counted = [], [optimizer.fp32_groups_gradients_flat[0].new_zeros(1)]
        for group, parameters in enumerate(optimizer.bf16_groups):
            flat = optimizer.fp32_groups_gradients_flat[group]
            share = flat.numel() // groups.num_replicas
            mine = slice(groups.replica_rank * share, (groups.replica_rank + 1) * share)
            ends = list(accumulate(parameter.numel() for parameter in parameters))
            for start, stop, owner in _stretches(share, groups.num_replicas, size):
                here = _inside(ends, start, stop)
                # Only the padding at the end has no parameters.
                if not here:
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

    def begin(self) -> None:
        """Note that the backward pass to come is the last one of the step."""
        self._going, self._sent, self._received = bool(self._buckets), 0, 0
        for bucket in self._buckets:
            bucket.missing = bucket.waits_for

    @torch.no_grad()
    def add(self, parameter: nn.Parameter, group: int, place: int, clear_lp_grads: bool) -> None:
        """Add a parameter's gradient to its fp32 sum. The arguments are those of DeepSpeed's own method, which would
        write the gradient out in fp32 first. Here one kernel does the work of two, with fewer calls and the same
        bits."""
        if parameter.grad is None:
            return
        total = self._optimizer.fp32_groups_gradients[group][place]
        total.add_(parameter.grad.view(total.shape))
        parameter._hp_grad = total  # type: ignore[attr-defined]
        self._optimizer.fp32_groups_has_gradients[group][place] = True
        if clear_lp_grads:
            parameter.grad.zero_()
        if self._going:
            self._added(group, place)

    def _added(self, group: int, place: int) -> None:
        """Note that the sum of a parameter has its last gradient of the step. `group` and `place` are DeepSpeed's
        indices."""
        for bucket in self._of[group, place]:
            if not bucket.missing:
                raise RuntimeError("a gradient came twice in one backward pass, when its sum was on its way")
            bucket.missing -= 1
        # Buckets are sent in the same order on all ranks, whatever order autograd has.
        while self._sent < len(self._buckets) and not self._buckets[self._sent].missing:
            self._send()

    def finish(self, pipeline_parallel: bool = False) -> None:
        """Average the gradients that this rank owns over all ranks, after the last backward pass. The parameter is part
        of DeepSpeed's signature and is not used."""
        if not self._going:
            self.begin()
        # A parameter without a gradient has held up the buckets behind it.
        while self._sent < len(self._buckets):
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
    """Return the begin, the end and the owner of each bucket, where each of `owners` ranks owns `share` consecutive
    elements. The owner is None if a bucket has several."""
    if not one_owner(share, size):
        return [(start, min(start + size, owners * share), None) for start in range(0, owners * share, size)]
    return [
        (start, min(start + size, (owner + 1) * share), owner)
        for owner in range(owners)
        for start in range(owner * share, (owner + 1) * share, size)
    ]


def _inside(ends: Sequence[int], start: int, stop: int) -> range:
    """Return the indices of the parameters that have elements in a stretch. Parameters lie one behind the other and end
    at `ends`."""
    return range(bisect.bisect_right(ends, start), min(len(ends), bisect.bisect_left(ends, stop) + 1))


class _OverAll(Mpu):
    """The process groups that DeepSpeed uses for the norm. Each rank has a part of its tensor-parallel slice, so the
    norm is summed over all ranks."""

    def get_model_parallel_group(self) -> None:
        return None
