"""The arguments of the model for recorded micro-steps, in memory that stays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 64
_RING = 3  # This is the number of micro-batches that the host may be ahead of the GPU.


class StaticInputs:
    """One place on a device for the micro-batches of a recording. Each comes in one copy from CPU memory, and has the
    shapes of `like`."""

    def __init__(self, like: Mapping[str, Any], device: torch.device) -> None:
        tensors = {name: value for name, value in like.items() if isinstance(value, Tensor)}
        self._ranges, size = dict[str, slice](), 0
        for name, value in tensors.items():
            self._ranges[name] = slice(size, size + value.nbytes)
            size += -(-value.nbytes // _ALIGNMENT) * _ALIGNMENT
        on_gpu = device.type == "cuda"
        self._row = torch.empty(size, dtype=torch.uint8, device=device)
        self._ring = [torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(_RING)]
        self._copied = [torch.cuda.Event() if on_gpu else None for _ in range(_RING)]
        self._turn = 0
        self._waiting = [self._views(row, tensors) for row in self._ring]
        self.arguments: dict[str, Any] = {**like, **self._views(self._row, tensors)}
        """The arguments of the model, whose tensors stay in the same memory."""

    def write(self, inputs: Mapping[str, Any]) -> None:
        """Put the arguments of another micro-batch in the place of those before, behind all that the current stream has
        to do. The tensors have the shapes of those before."""
        self._turn = (self._turn + 1) % _RING
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        for name, place in self._waiting[self._turn].items():
            place.copy_(inputs[name])
        self._row.copy_(self._ring[self._turn], non_blocking=True)
        if copied is not None:
            copied.record()

    def _views(self, row: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parts of a row, with the dtypes and shapes of these tensors."""
        return {name: row[self._ranges[name]].view(like.dtype).view(like.shape) for name, like in tensors.items()}


def shapes_of(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the shapes of tensors, and other arguments as they are."""
    return {name: tuple(value.shape) if isinstance(value, Tensor) else value for name, value in inputs.items()}
