"""The mean of gradients over replicas, as an engine without FSDP's hooks reduces them: once a step at ZeRO 0 and 1, in
every micro-step at ZeRO 2 and 3."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sagetrain.engines.sharding import Unit
from sagetrain.engines.whole_weights import longest_shards


class Reduction:
    """Means of the gradients of units, each reduced as soon as the backward pass has all of the unit.

    A unit is packed into one vector, the part of each rank in one piece, as FSDP2 packs it, and reduced on a stream of
    its own beside the rest of the backward pass. Two packed units at most are there at once.

    Args:
        units: the tensors that are reduced together, with their ranks.
        leaves: whole tensors by name, of which the shapes count.
        masters: this rank's rows of each tensor, by name. If they are in the host's memory, the means come there.
        adds: every pass of a step is reduced, and its means are added to those of the passes before.
    """

    def __init__(
        self, units: Sequence[Unit], leaves: Mapping[str, Tensor], masters: Mapping[str, Tensor], adds: bool
    ) -> None:
        self.units, self._masters, self.adds = units, masters, adds
        self._sizes = dict[str, int]()
        for unit in units:
            of_unit = longest_shards((leaves[name] for name in unit.names), unit.ranks.shards.size())
            self._sizes |= zip(unit.names, of_unit, strict=True)
        self._device = next(iter(leaves.values())).device
        self._to_host = self._device.type == "cuda" and any(master.is_cpu for master in masters.values())
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._means: list[tuple[Tensor, Tensor] | None] = [None] * len(units)
        self._under_way = deque[tuple[Any, Tensor, Tensor]]()

    def allocate_all(self) -> None:
        """Allocate the means of all units."""
        for number in range(len(self.units)):
            self.allocate(number)

    def allocate(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the mean of the unit with this number, and where the update reads it. Both stay until `free`."""
        if (found := self._means[number]) is None:
            size = sum(self._sizes[name] for name in self.units[number].names)
            mean = torch.empty(size, dtype=torch.float32, device=self._device)
            read = torch.empty(size, dtype=torch.float32, pin_memory=True) if self._to_host else mean
            found = self._means[number] = mean, read
        return found

    def clear(self) -> None:
        """Begin to add up means at zero."""
        self.allocate_all()
        torch._foreach_zero_([mean for mean, _ in filter(None, self._means)])

    def free(self) -> None:
        """Give the memory of all means back."""
        self._means = [None] * len(self.units)

    def begin(self) -> None:
        """Begin a pass. The pass before may have been interrupted."""
        self._under_way.clear()

    @torch.no_grad()
    def start(self, number: int, gradients: list[Tensor]) -> None:
        """Start to reduce a unit. Its gradients may be given away when this returns; collective."""
        (mean, read), unit = self.allocate(number), self.units[number]
        shards = unit.ranks.shards.size()
        if len(self._under_way) == 2:
            self._under_way.popleft()[0].wait()
        found = torch.empty_like(mean) if self.adds else mean
        packed = mean.new_empty(shards * len(mean)) if shards > 1 else found
        torch._chunk_cat(gradients, dim=0, num_chunks=shards, out=packed.view(shards, -1))
        if self._stream is None:
            self._reduce(unit, packed, found)
            if self.adds:
                mean.add_(found)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._reduce(unit, packed, found)
            if self.adds:
                mean.add_(found)
            if read is not mean:
                read.copy_(mean, non_blocking=True)
            self._under_way.append((self._stream.record_event(), packed, found))

    def _reduce(self, unit: Unit, packed: Tensor, mean: Tensor) -> None:
        ranks = unit.ranks
        # Gloo has no mean.
        averages = self._stream is not None and unit.divisor == ranks.mesh.size()
        how = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        if packed is not mean:
            dist.reduce_scatter_tensor(mean, packed, how, group=ranks.shards)
        if ranks.copies:
            dist.all_reduce(mean, how, group=ranks.copies)
        if not averages:
            mean.div_(unit.divisor)

    def finish(self) -> None:
        """Let the current stream wait for all units."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._under_way.clear()

    def means(self) -> dict[str, Tensor]:
        """Return this rank's rows of the means by name, in the dtype of the masters. The next `start` overwrites
        them."""
        if self._to_host and self._stream is not None:
            self._stream.synchronize()
        found = {}
        for number, unit in enumerate(self.units):
            _, read = self.allocate(number)
            parts = read.split([self._sizes[name] for name in unit.names])
            for name, part in zip(unit.names, parts, strict=True):
                master = self._masters[name]
                found[name] = part[: master.numel()].view(master.shape).to(master.dtype)
        return found
