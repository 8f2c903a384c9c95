"""The memory of an optimizer's state: in fp32, in bf16, or in 8 bits with a scale for each block of values.

Writing what was read changes no bit, in each of them. Checkpoints therefore hold fp32, and a resume is exact. Blocks
begin where a rank's piece begins, so at another layout 8 bits round in another way.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from sagekernels.adamw import BLOCK, Master, Moment, decode_twin, encode_twin, levels
from sagetrain.optim.pieces import State

Moments = Literal["fp32", "bf16", "int8"]


class Fp32:
    """State, or master weights, in fp32."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the memory itself."""
        return self._values[start:stop]

    def write(self, values: Tensor, start: int = 0, update: int = 0) -> None:
        """Set the values from position `start` on."""
        memory = self._values[start : start + len(values)]
        # An optimizer has changed the memory in place.
        if memory.data_ptr() != values.data_ptr():
            memory.copy_(values)

    def moment(self, start: int = 0, stop: int | None = None) -> Moment:
        """Return the memory for the kernel of the update: see pieces.State."""
        return Moment(self._values[start:stop])

    def master(self, update: int, start: int = 0, stop: int | None = None) -> Master:
        """Return the memory for the kernel of the update: see pieces.Weights."""
        return Master(self._values[start:stop])


class Bf16:
    """State in bf16, rounded to the nearest value."""

    def __init__(self, like: Tensor) -> None:
        self._values = torch.zeros_like(like, dtype=torch.bfloat16, requires_grad=False)

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return a copy in fp32."""
        return self._values[start:stop].float()

    def write(self, values: Tensor, start: int = 0) -> None:
        """Set the state from position `start` on."""
        self._values[start : start + len(values)] = values

    def moment(self, start: int = 0, stop: int | None = None) -> Moment:
        """Return the memory for the kernel of the update: see pieces.State."""
        return Moment(self._values[start:stop])


class Int8:
    """State in 8 bits: each value is one of 256 levels times the largest magnitude of its block.

    Args:
        signed: whether values may be negative. If not, there are twice as many levels above zero, and no other number
            is rounded to zero.
    """

    def __init__(self, like: Tensor, signed: bool) -> None:
        self._signed, zero = signed, int(torch.searchsorted(levels(signed), 0.0))
        self._codes = torch.full_like(like, zero, dtype=torch.uint8, requires_grad=False)
        self._largest = torch.zeros(-(-len(like) // BLOCK), device=like.device)

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return a copy in fp32."""
        codes, largest = self.moment(start, stop)
        assert largest is not None
        return decode_twin(codes, largest, self._signed)

    def write(self, values: Tensor, start: int = 0) -> None:
        """Set the state from position `start` on, a multiple of BLOCK, to the nearest levels."""
        _check_begin(start)
        codes, largest = encode_twin(values, self._signed)
        self._codes[start : start + len(values)] = codes
        self._largest[start // BLOCK : start // BLOCK + len(largest)] = largest

    def moment(self, start: int = 0, stop: int | None = None) -> Moment:
        """Return the memory for the kernel of the update: see pieces.State."""
        _check_begin(start)
        codes, first = self._codes[start:stop], start // BLOCK
        return Moment(codes, self._largest[first : first - (-len(codes) // BLOCK)])


def _check_begin(start: int) -> None:
    """Raise ValueError for a range that would share a scale with the values before it."""
    if start % BLOCK:
        raise ValueError(f"state in 8 bits begins at value {start}, which is no multiple of {BLOCK}")


def state_of(moments: Moments, like: Tensor, signed: bool = True) -> State:
    """Return the memory of one kind of state of 1-D weights, as optimizer.moments says, which is zero at first. Values
    may be negative if it is `signed`."""
    if moments == "int8":
        return Int8(like, signed)
    if moments == "bf16":
        return Bf16(like)
    return Fp32(torch.zeros_like(like, dtype=torch.float32, requires_grad=False))
