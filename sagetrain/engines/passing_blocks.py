"""The whole weights of blocks at ZeRO 3, which have the memory of two blocks in turn.

Once a step each rank rounds its rows of all blocks to the dtype of the model (`renew`). A pass copies the rows of all
ranks from there to their places. Where copy engines reach the other ranks' memory, they do that without any kernel, and
without a meeting of ranks: nobody writes rows while a pass reads them. Otherwise a collective gathers a block's rows.

Block i comes to slot i mod 2, and stays there until another block comes. A backward pass ends with the blocks that a
forward pass begins with. So a micro-step finds what it needs, leaves nothing under way, and has the same addresses each
time: a CUDA graph can repeat it.

FSDP's hooks cast the fp32 rows of a block for every gather, and copy them to a buffer and out of another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sagetrain.engines.whole_weights import longest_shards, place
from sagetrain.parallel.copies import memory_of

_SLOTS = 2
_ALIGNMENT = 256  # the elements of a slot between the begins of weights are a multiple of this


class _Block(NamedTuple):
    """The weights of a block."""

    leaves: list[Tensor]
    """The whole weights, without autograd, which would notice what is written to them."""
    sizes: list[int]
    """The most elements that a rank has of each."""
    start: int
    """The position of this rank's rows of the first weight in the rows of all blocks."""


class PassingBlocks:
    """The whole weights of blocks, one group of tensors for each block.

    Args:
        groups: the whole weights of each block by name, in the order of a forward pass. They have no memory.
        masters: this rank's rows of each weight, by name.
        ranks: the ranks that have the shards between them.
    """

    def __init__(
        self, groups: Sequence[Mapping[str, Tensor]], masters: Mapping[str, Tensor], ranks: dist.ProcessGroup
    ) -> None:
        first = next(iter(groups[0].values()))
        self._ranks, self._rank, self._size = ranks, ranks.rank(), ranks.size()
        room = [sum(_room(leaf) for leaf in group.values()) for group in groups]
        slots = [first.new_empty(max(room)) for _ in groups[:_SLOTS]]
        self._blocks, elements = list[_Block](), 0
        for number, group in enumerate(groups):
            places = slots[number % _SLOTS][: room[number]].split([_room(leaf) for leaf in group.values()])
            for leaf, memory in zip(group.values(), places, strict=True):
                leaf.data = memory[: leaf.numel()].view(leaf.shape)
            sizes = longest_shards(group.values(), self._size)
            self._blocks.append(_Block([leaf.data for leaf in group.values()], sizes, elements))
            elements += sum(sizes)
        self._held: list[int | None] = [None] * len(slots)
        """The block in each slot."""
        self._under_way: list[Any] = [None] * len(slots)
        """The copies to each slot that a pass has to wait for. None: it has waited."""
        self._memory = memory_of(ranks)
        if self._memory:
            # The addresses hold as long as these buffers.
            self._buffers = self._memory.allocate(elements * first.itemsize)
            self._rows = self._buffers[self._rank].view(first.dtype)
            self._copies = [self._copies_of(block) for block in self._blocks]
        else:
            self._rows = first.new_empty(elements)
        self._masters = [masters[name].view(-1) for group in groups for name in group]
        every = self._rows.split([size for block in self._blocks for size in block.sizes])
        self._parts = [part[: len(master)] for part, master in zip(every, self._masters, strict=True)]
        self._stream = torch.cuda.Stream(first.device) if first.is_cuda and not self._memory else None

    @torch.no_grad()
    def renew(self) -> None:
        """Round this rank's rows of all blocks, from the masters; collective. No slot has a block behind it."""
        for slot in range(len(self._held)):
            self._wait(slot)
            self._held[slot] = None
        # Ranks read the rows of others until their last pass ends, and before the next one begins all rows are there.
        self._meet(0)
        torch._foreach_copy_(self._parts, self._masters)
        self._meet(1)

    def begin(self, number: int, following: int) -> None:
        """Let the current stream wait for the weights of a block, and start to copy those of the following block, if
        there is one with this number; collective."""
        self._bring(number)
        self._wait(number % _SLOTS)
        if 0 <= following < len(self._blocks):
            self._bring(following)

    def begin_micro_step(self) -> None:
        """Let the current stream wait for the blocks that a micro-step begins with, and ends with; collective."""
        for number in range(len(self._held)):
            self._bring(number)
            self._wait(number)

    def interrupt(self) -> None:
        """Forget what a recording of a micro-step did that was not ended. Nothing of it was copied."""
        for slot in range(len(self._held)):
            self._held[slot], self._under_way[slot] = slot, None

    def _meet(self, part: int) -> None:
        if self._memory:
            self._memory.wait(self._memory.send([part]))

    def _wait(self, slot: int) -> None:
        event, self._under_way[slot] = self._under_way[slot], None
        if event is not None and self._memory:
            self._memory.wait(event)
        elif event is not None:
            event.wait()

    @torch.no_grad()
    def _bring(self, number: int) -> None:
        slot = number % _SLOTS
        if self._held[slot] == number:
            return
        self._wait(slot)
        self._held[slot] = number
        if self._memory:
            self._under_way[slot] = self._memory.send(self._copies[number])
        elif self._stream is None:
            self._gather(self._blocks[number])
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._gather(self._blocks[number])
                self._under_way[slot] = self._stream.record_event()

    def _copies_of(self, block: _Block) -> list[tuple[int, int, int]]:
        """Return the copies of a block's rows: target and source addresses, and bytes."""
        width, steps = self._rows.itemsize, list[tuple[int, int, int]]()
        # The order differs between ranks, so that no two ranks copy from the same rank at once.
        for rank in ((self._rank + step) % self._size for step in range(1, self._size + 1)):
            source = self._buffers[rank].data_ptr() + block.start * width
            for leaf, size in zip(block.leaves, block.sizes, strict=True):
                rows = max(0, min(size, leaf.numel() - rank * size))
                steps += [(leaf.data_ptr() + rank * size * width, source, rows * width)] * (rows > 0)
                source += size * width
        return steps

    def _gather(self, block: _Block) -> None:
        own = self._rows[block.start : block.start + sum(block.sizes)]
        whole = own.new_empty(self._size, len(own))
        dist.all_gather_into_tensor(whole.view(-1), own, group=self._ranks)
        place(whole, block.leaves, block.sizes)


def _room(leaf: Tensor) -> int:
    """Return the elements of a slot that a weight takes."""
    return -(-leaf.numel() // _ALIGNMENT) * _ALIGNMENT
