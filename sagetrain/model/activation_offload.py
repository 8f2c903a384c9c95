"""The tensors that blocks keep for their backward pass, in the host's memory until then (training.activation_offload).

A forward pass copies what a block keeps to pinned memory, beside the kernels of the next blocks. A backward pass copies
it back one block ahead, beside the kernels of the block behind. The order of copies and kernels is this:

- All copies are on one stream, so that a place in pinned memory gets new values only after its old ones have left it.
- A copy begins after all kernels that were launched before it. They have made what leaves the GPU, and have read what
  was in the memory that something comes back to.
- Kernels wait for a copy before they read what has come back, and before memory that has left is given back.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from sagetrain.model.backends import TokenLayout
from sagetrain.parallel.layers import linear_layers

_LEAST_BYTES = 2**16
"""Smaller tensors stay on the GPU."""


class HostCopies:
    """Copies between a GPU and the memory of its host, one after the other, beside kernels. On the CPU (None), copies
    are made at once."""

    def __init__(self, gpu: torch.device | None) -> None:
        self._gpu, self._stream = gpu, None if gpu is None else torch.cuda.Stream(gpu)

    def memory(self, like: Tensor) -> Tensor:
        """Return memory of the host for the values of a tensor: pinned, if there is a GPU."""
        return torch.empty_like(like, device="cpu", pin_memory=self._gpu is not None)

    def copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event | None:
        """Copy after all kernels that are launched by now, and return the event of the end. Both tensors have to live
        until somebody has waited for it."""
        if self._stream is None:
            target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._gpu))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event: torch.cuda.Event = self._stream.record_event()
        return event

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Let kernels that are launched from now on wait for a copy."""
        if event is not None:
            torch.cuda.current_stream(self._gpu).wait_event(event)


class _Kept:
    """A tensor that a block keeps. It lives as long as the autograd graph that has it.

    Args:
        tensor: the tensor, on the GPU.
        there: memory of the host for it, which goes back to `places` at the end.
        blocks: what the blocks of this micro-batch keep, with this block as the last one so far.
    """

    def __init__(
        self,
        tensor: Tensor,
        there: Tensor,
        places: list[Tensor],
        copies: HostCopies,
        blocks: list[list[weakref.ref[_Kept]]],
    ) -> None:
        self._here: Tensor | None = tensor
        self._there, self._places, self._copies, self._device = there, places, copies, tensor.device
        self._blocks, self._block = blocks, len(blocks) - 1
        self._event = copies.copy(there, tensor)

    def leave(self) -> None:
        """Give the memory on the GPU back when the copy has ended."""
        if self._here is not None:
            self._copies.wait(self._event)
            self._here = None

    def fetch(self) -> None:
        """Begin to copy the values to the GPU, unless they are there."""
        if self._here is None:
            self._here = torch.empty_like(self._there, device=self._device)
            self._event = self._copies.copy(self._here, self._there)

    def take(self) -> Tensor:
        """Return the tensor on the GPU, for kernels that are launched from now on. What the next block in the order of
        the backward pass needs is on its way then."""
        for number in range(self._block, max(self._block - 2, -1), -1):
            for kept in _living(self._blocks[number]):
                kept.fetch()
        self._copies.wait(self._event)
        assert self._here is not None
        return self._here

    def __del__(self) -> None:
        # The memory of the GPU must not get another use before a copy from it or to it has ended.
        self._copies.wait(self._event)
        self._places.append(self._there)


def _living(references: Iterable[weakref.ref[_Kept]]) -> Iterator[_Kept]:
    return filter(None, (reference() for reference in references))


class ActivationOffload:
    """The tensors that the blocks of a model keep for the backward pass of a micro-batch.

    Args:
        copies: the copies between the GPU and its host.
        least_bytes: tensors with fewer bytes stay where they are.
    """

    def __init__(self, copies: HostCopies, least_bytes: int = _LEAST_BYTES) -> None:
        self._copies, self._least_bytes = copies, least_bytes
        self._places: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
        """Pinned memory that no tensor uses now, by dtype, shape and strides."""
        self._blocks: list[list[weakref.ref[_Kept]]] = []
        self._stay: set[int] | None = None
        self._tables: set[int] = set()

    @classmethod
    def on(cls, device: torch.device) -> ActivationOffload:
        """Make it for a model on this device."""
        return cls(HostCopies(device if device.type == "cuda" else None))

    def begun(self, blocks: nn.Module, layouts: Iterable[Sequence[TokenLayout]]) -> ActivationOffload:
        """Begin with a micro-batch, and return this object.

        Args:
            blocks: the blocks, by number. The codes of weights that they keep stay on the GPU.
            layouts: the layouts of the tokens, which all blocks share. They stay as well.
        """
        every = (each for layout in itertools.chain(*layouts) for each in (layout, *(layout.chunks or ())))
        tables = (x for layout in every for x in layout if isinstance(x, Tensor))
        self._modules, self._blocks, self._tables = blocks, [], {x.untyped_storage().data_ptr() for x in tables}
        return self

    @contextmanager
    def block(self, number: int) -> Iterator[None]:
        """Return the context of the forward pass of the micro-batch's next block."""
        self._number, self._stay = number, None
        # The copies of the block before have hardly begun. Those of the block before that had the time of a block.
        for kept in _living(self._blocks[-2] if len(self._blocks) > 1 else ()):
            kept.leave()
        self._blocks.append([])
        with saved_tensors_hooks(self._put, self._take):
            yield

    def _put(self, tensor: Tensor) -> Tensor | _Kept:
        stays = tensor.nbytes < self._least_bytes or isinstance(tensor, nn.Parameter)
        # Compiled backward passes rely on strides, which only memory without gaps gets again.
        dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
        if stays or not dense or tensor.untyped_storage().data_ptr() in self._staying():
            return tensor
        places = self._places[tensor.dtype, tensor.shape, tensor.stride()]
        there = places.pop() if places else self._copies.memory(tensor)
        kept = _Kept(tensor.detach(), there, places, self._copies, self._blocks)
        self._blocks[-1].append(weakref.ref(kept))
        return kept

    def _staying(self) -> set[int]:
        """Return the addresses of memory that stays: tables, codes, which a block may make when it is entered, and
        weights. At ZeRO 3 a weight loses its memory behind the block, before a copy of a view of it may have ended."""
        if self._stay is None:
            block = self._modules.get_submodule(str(self._number))
            kept = (x for layer in linear_layers(block) for x in layer.kept)
            weights = (x for x in block.parameters() if type(x) is nn.Parameter)  # Others are shards.
            self._stay = self._tables | {x.untyped_storage().data_ptr() for x in (*kept, *weights)}
        return self._stay

    def _take(self, kept: Tensor | _Kept) -> Tensor:
        return kept.take() if isinstance(kept, _Kept) else kept
