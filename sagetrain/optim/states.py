"""The memory of an optimizer's state: in fp32, in bf16, or in 8 bits with a scale for each block of values.

Writing what was read changes no bit, in each of them. Checkpoints therefore hold fp32, and a resume is exact. Blocks
begin where a rank's piece begins, so at another layout 8 bits round in another way.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
from torch import Tensor

from sagetrain.optim.pieces import State

Moments = Literal["fp32", "bf16", "int8"]
BLOCK = 256
"""The number of consecutive values that share a scale in 8 bits."""
_DECADES = 7


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


class Int8:
    """State in 8 bits: each value is one of 256 levels times the largest magnitude of its block.

    Args:
        signed: whether values may be negative. If not, there are twice as many levels above zero, and no other number
            is rounded to zero.
    """

    def __init__(self, like: Tensor, signed: bool) -> None:
        self._levels, self._signed = levels(signed).to(like.device), signed
        zero = int(torch.searchsorted(self._levels, 0.0))
        self._codes = torch.full_like(like, zero, dtype=torch.uint8, requires_grad=False)
        self._largest = torch.zeros(-(-len(like) // BLOCK), device=like.device)

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return a copy in fp32."""
        values = self._levels[self._codes[start:stop].int()]
        first = start // BLOCK
        largest = self._largest[first : first - (-len(values) // BLOCK)].repeat_interleave(BLOCK)
        return values.mul_(largest[: len(values)])

    def write(self, values: Tensor, start: int = 0) -> None:
        """Set the state from position `start` on, a multiple of BLOCK, to the nearest levels."""
        blocks = torch.nn.functional.pad(values, (0, -len(values) % BLOCK)).view(-1, BLOCK)
        largest = blocks.abs().amax(1)
        # Smaller numbers are rounded by the division, so that reading and writing would not give the same bits.
        largest = torch.where(largest < torch.finfo(torch.float32).tiny, 0.0, largest)
        scaled = torch.where(largest[:, None] > 0, blocks / largest[:, None], 0.0)
        middle = (self._levels[1:] + self._levels[:-1]) / 2
        codes = torch.bucketize(scaled, middle, out_int32=True)
        if not self._signed:
            # A mean of squares that became zero, beside a mean of gradients that did not, would make an update of many
            # learning rates. The smallest level makes the update too small instead.
            codes.clamp_(min=(scaled > 0).int())
        self._codes[start : start + len(values)] = codes.view(-1)[: len(values)].to(torch.uint8)
        self._largest[start // BLOCK : start // BLOCK + len(largest)] = largest


@functools.lru_cache
def levels(signed: bool) -> Tensor:
    """Return 256 ascending levels in [-1, 1], or in [0, 1]. They are finer towards zero, by seven decades. Zero is
    among them, and so are the ends, so that the largest value of a block comes back exactly."""
    found = {0.0, 1.0}
    for exponent in range(_DECADES):
        edges = torch.linspace(0.1, 1, 2 ** (exponent + (not signed)) + 1, dtype=torch.float64)
        found |= {float(middle) * 10.0 ** (exponent + 1 - _DECADES) for middle in (edges[:-1] + edges[1:]) / 2}
    if signed:
        found |= {-level for level in found}
        # There is one level too many.
        found.remove(max(level for level in found if level < 0))
    return torch.tensor(sorted(found), dtype=torch.float32)


def state_of(moments: Moments, like: Tensor, signed: bool = True) -> State:
    """Return the memory of one kind of state, which is zero at first.

    Args:
        moments: the setting optimizer.moments.
        like: the weights that the state belongs to, 1-D.
        signed: whether values may be negative.
    """
    if moments == "int8":
        return Int8(like, signed)
    if moments == "bf16":
        return Bf16(like)
    return Fp32(torch.zeros_like(like, dtype=torch.float32, requires_grad=False))
