"""The reduction of gradients in every micro-step by copy engines inside a host, at ZeRO 3 without FSDP's hooks.

NCCL's reduce-scatter holds multiprocessors beside the backward pass, for as long as that of a block takes: in a trace
of 3B on two H200s it ran for 225 of a micro-step's 350 ms. Here each rank copies the rows of its gradients into the
memory of the ranks that own these rows, in the dtype of the gradients. A kernel adds up what has come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sagekernels.sums import add_parts
from sagetrain.config.layout import Layout
from sagetrain.engines.reduction import Reduction
from sagetrain.engines.sharding import Unit
from sagetrain.parallel.copies import Memory, memory_of


def reduction_of(
    layout: Layout, units: Sequence[Unit], leaves: Mapping[str, Tensor], masters: Mapping[str, Tensor]
) -> Reduction | None:
    """Return the reduction of an engine without FSDP's hooks. None: a single replica has nothing to reduce."""
    if layout.reduced == "never":
        return None
    if layout.zero_stage == 3 and (memory := memory_of(units[0].ranks.shards)):
        return CopiedReduction(units, leaves, masters, memory)
    return Reduction(units, leaves, masters, adds=layout.reduced == "in every micro-step")


class _Sent(NamedTuple):
    """A unit whose gradients are on their way."""

    arrived: Any
    gradients: list[Tensor]
    """They have to live until they are copied."""
    mean: Tensor
    parts: Tensor
    """The gradients of this rank's rows, [ranks, elements], when they have come."""
    share: float


class CopiedReduction(Reduction):
    """A Reduction of every pass, in memory of the ranks that shard all units. The outermost unit, which is the largest,
    goes through a collective.

    Each unit meets twice. At the first meeting all ranks have added up what had come of the unit before, so that the
    memory holds one unit. At the second one all parts are there.
    """

    def __init__(
        self, units: Sequence[Unit], leaves: Mapping[str, Tensor], masters: Mapping[str, Tensor], memory: Memory
    ) -> None:
        super().__init__(units, leaves, masters, adds=True)
        ranks, some = units[0].ranks.shards, next(iter(leaves.values()))
        self._memory, self._rank, self._size = memory, ranks.rank(), ranks.size()
        largest = max(sum(self._sizes[name] for name in unit.names) for unit in units[1:])
        self._buffers = memory.allocate(self._size * largest * some.itemsize)
        self._sent: _Sent | None = None

    def begin(self) -> None:
        """Begin a pass: see Reduction."""
        super().begin()
        self._sent = None

    @torch.no_grad()
    def start(self, number: int, gradients: list[Tensor]) -> None:
        """Start to reduce a unit: see Reduction."""
        self._add()
        if not number:
            super().start(number, gradients)
            return
        unit, (mean, _) = self.units[number], self.allocate(number)
        gradients = [gradient.contiguous() for gradient in gradients]
        arrived = self._memory.send([0, *self._copies(unit, gradients, len(mean)), 1])
        bytes_ = self._size * len(mean) * gradients[0].itemsize
        parts = self._buffers[self._rank][:bytes_].view(gradients[0].dtype).view(self._size, -1)
        self._sent = _Sent(arrived, gradients, mean, parts, 1 / unit.divisor)

    def finish(self) -> None:
        """Let the current stream wait for all units: see Reduction."""
        self._add()
        super().finish()

    def _copies(self, unit: Unit, gradients: Sequence[Tensor], elements: int) -> list[tuple[int, int, int]]:
        """Return the copies of a unit's rows to their owners: target and source addresses, and bytes."""
        width, steps = gradients[0].itemsize, list[tuple[int, int, int]]()
        # The order differs between ranks, so that no two ranks copy to the same rank at once.
        for owner in ((self._rank + step) % self._size for step in range(1, self._size + 1)):
            target = self._buffers[owner].data_ptr() + self._rank * elements * width
            for name, gradient in zip(unit.names, gradients, strict=True):
                size = self._sizes[name]
                count = max(0, min(size, gradient.numel() - owner * size))
                steps += [(target, gradient.data_ptr() + owner * size * width, count * width)] * (count > 0)
                target += size * width
        return steps

    def _add(self) -> None:
        """Add up the unit that is on its way, if there is one."""
        if self._sent is None:
            return
        arrived, _, mean, parts, share = self._sent
        self._memory.wait(arrived)
        add_parts(mean, parts, share)
        self._sent = None
