"""The weights that an engine on FSDP2 keeps whole, and renews in place right after each update.

FSDP's hooks would gather them in the forward pass of the first micro-step. There the GPU would be idle: nothing else is
queued, and the hooks take the host 2 ms a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from sagetrain.parallel.copies import connected


class _Group(NamedTuple):
    """The tensors that are gathered together."""

    leaves: list[Tensor]
    """The whole weights."""
    masters: list[Tensor]
    """This rank's rows of them."""
    ranks: dist.ProcessGroup
    """The ranks that have the shards between them."""
    sizes: list[int]
    """The most elements that a rank has of each (longest_shards)."""
    ready: torch.cuda.Event | None
    """It marks the end of a renewal on a GPU."""


class WholeWeights:
    """The whole weights of a tensor-parallel rank, each in a tensor whose memory stays.

    Args:
        groups: the whole weights by name, in groups that are gathered together, in the order of a forward pass.
        masters: this rank's rows of each weight, by name. They may be in the host's memory.
        ranks: the ranks that have the shards of each group between them.
    """

    def __init__(
        self,
        groups: Sequence[Mapping[str, Tensor]],
        masters: Mapping[str, Tensor],
        ranks: Sequence[dist.ProcessGroup],
    ) -> None:
        first = next(iter(groups[0].values()))
        self._device = first.device
        self._stream = torch.cuda.Stream(self._device) if first.is_cuda else None
        self._groups = [
            _Group(
                list(group.values()),
                [masters[name].view(-1) for name in group],
                own,
                longest_shards(group.values(), own.size()),
                torch.cuda.Event() if self._stream else None,
            )
            for group, own in zip(groups, ranks, strict=True)
        ]

    @torch.no_grad()
    def renew(self) -> None:
        """Start to write the masters of all ranks into the weights, behind all that the current stream has to do;
        collective."""
        if self._stream is None:
            for number in range(len(self._groups)):
                self._renew(number)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for number, group in enumerate(self._groups):
                self._renew(number)
                assert group.ready is not None
                group.ready.record()

    def wait(self, number: int) -> None:
        """Let the current stream wait for the weights of the group with this number."""
        if ready := self._groups[number].ready:
            ready.wait()

    def _renew(self, number: int) -> None:
        leaves, masters, ranks, sizes, _ = self._groups[number]
        # Masters in the host's memory are still read when this returns. The host writes them in the next update, when
        # it has gradients that the GPU computed from these weights.
        masters = [master.to(self._device, non_blocking=True) for master in masters]
        if ranks.size() == 1:
            torch._foreach_copy_([leaf.view(-1) for leaf in leaves], masters)
            return
        whole = torch.empty(ranks.size(), sum(sizes), dtype=leaves[0].dtype, device=self._device)
        own, copies = whole[ranks.rank()], connected.get(ranks.group_name)
        parts = [part[: len(master)] for part, master in zip(own.split(sizes), masters, strict=True)]
        torch._foreach_copy_(parts, masters)
        if copies and number:  # The first group has the largest parts, and would need the largest slots.
            copies.gather_into(whole, own)
        else:
            dist.all_gather_into_tensor(whole.view(-1), own, group=ranks)
        place(whole, leaves, sizes)


def place(whole: Tensor, leaves: Sequence[Tensor], sizes: Sequence[int]) -> None:
    """Copy gathered rows to their places in whole weights. `whole` has a row for each rank, with its rows of all
    weights: at most `sizes` elements of each weight (longest_shards)."""
    ranks = len(whole)
    even = [leaf.numel() == ranks * size for leaf, size in zip(leaves, sizes, strict=True)]
    # The parts of other weights are longer than the weights.
    targets = [
        leaf.view(ranks, size) if fits else whole.new_empty(ranks, size)
        for leaf, size, fits in zip(leaves, sizes, even, strict=True)
    ]
    torch.split_with_sizes_copy(whole, list(sizes), dim=1, out=targets)
    for leaf, target, fits in zip(leaves, targets, even, strict=True):
        if not fits:
            leaf.view(-1).copy_(target.view(-1)[: leaf.numel()])


def longest_shards(leaves: Iterable[Tensor], ranks: int) -> list[int]:
    """Return the most elements that one of so many ranks has of each whole weight. The last ranks may have less, or
    nothing."""
    return [-(-len(leaf) // ranks) * (leaf.numel() // len(leaf)) for leaf in leaves]
