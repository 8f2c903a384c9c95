"""The whole weights of blocks at ZeRO 3, which have memory while a pass is in their block or in the one before it.

Once a step each rank rounds its rows of all blocks to the dtype of the model (`renew`). A pass copies the rows of all
ranks from there to their places. Where copy engines reach the other ranks' memory, they do that without any kernel, and
without a meeting of ranks: nobody writes rows while a pass reads them. Otherwise a collective gathers a block's rows.

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
        groups: the whole weights of each block by name, in the order of a forward pass.
        masters: this rank's rows of each weight, by name.
        ranks: the ranks that have the shards between them.
    """

    def __init__(
        self, groups: Sequence[Mapping[str, Tensor]], masters: Mapping[str, Tensor], ranks: dist.ProcessGroup
    ) -> None:
        first = next(iter(groups[0].values()))
        self._ranks, self._rank, self._size, self._dtype = ranks, ranks.rank(), ranks.size(), first.dtype
        self._blocks, elements = list[_Block](), 0
        for group in groups:
            sizes = longest_shards(group.values(), self._size)
            self._blocks.append(_Block([leaf.data for leaf in group.values()], sizes, elements))
            elements += sum(sizes)
        self._memory = memory_of(ranks)
        if self._memory:
            # The addresses hold as long as these buffers.
            self._buffers = self._memory.allocate(elements * first.itemsize)
            self._rows = self._buffers[self._rank].view(first.dtype)
        else:
            self._rows = first.new_empty(elements)
        names, sizes = (
            [name for group in groups for name in group],
            [size for block in self._blocks for size in block.sizes],
        )
        self._masters = [masters[name].view(-1) for name in names]
        parts = zip(self._rows.split(sizes), self._masters, strict=True)
        self._parts = [part[: len(master)] for part, master in parts]
        self._stream = torch.cuda.Stream(first.device) if first.is_cuda and not self._memory else None
        self._present: dict[int, Any] = {}
        """The blocks that have memory, each with what a pass has to wait for. None: it has waited."""
        for number in range(len(groups)):
            self._present[number] = None
            self._give_back(number)

    @torch.no_grad()
    def renew(self) -> None:
        """Round this rank's rows of all blocks, from the masters; collective. No block has memory behind it."""
        for number in list(self._present):
            self._give_back(number)
        # Ranks read the rows of others until their last pass ends, and before the next one begins all rows are there.
        self._meet(0)
        torch._foreach_copy_(self._parts, self._masters)
        self._meet(1)

    def begin(self, number: int, following: int) -> None:
        """Let the current stream wait for the weights of a block, and start to copy those of the following block, if
        there is one with this number. All other blocks give their memory back; collective."""
        wanted = {number, following} & set(range(len(self._blocks)))
        for other in self._present.keys() - wanted:
            self._give_back(other)
        self._bring(number)
        self._wait(number)
        for other in wanted:
            self._bring(other)

    def begin_all(self) -> None:
        """Let the current stream wait for the weights of all blocks; collective."""
        for number in range(len(self._blocks)):
            self._bring(number)
            self._wait(number)

    def _meet(self, part: int) -> None:
        if self._memory:
            self._memory.wait(self._memory.send([part]))

    def _give_back(self, number: int) -> None:
        self._wait(number)
        del self._present[number]
        for leaf in self._blocks[number].leaves:
            leaf.untyped_storage().resize_(0)

    def _wait(self, number: int) -> None:
        event, self._present[number] = self._present[number], None
        if event is not None and self._memory:
            self._memory.wait(event)
        elif event is not None:
            event.wait()

    @torch.no_grad()
    def _bring(self, number: int) -> None:
        if number in self._present:
            return
        block = self._blocks[number]
        for leaf in block.leaves:
            leaf.untyped_storage().resize_(leaf.nbytes)
        if self._memory:
            self._present[number] = self._memory.send(self._copies(block))
        elif self._stream is None:
            self._gather(block)
            self._present[number] = None
        else:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                self._gather(block)
                self._present[number] = self._stream.record_event()

    def _copies(self, block: _Block) -> list[tuple[int, int, int]]:
        """Return the copies of a block's rows: target and source addresses, and bytes."""
        width, steps = block.leaves[0].itemsize, list[tuple[int, int, int]]()
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
