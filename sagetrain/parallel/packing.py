"""Activations and their gradients in 8 bits while they travel: e4m3 with a scale for each token.

What e4m3 has rounded once, with a power of two for a scale, no other such scale rounds again, along tokens either, but
among the smallest. So layers that round to e4m3 themselves, in both orientations, read the same from what travelled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sagekernels.casts import E4M3, MULTIPLE, quantize

_MANTISSA = 23  # bits of an fp32 below its exponent


def pack(x: Tensor) -> Tensor:
    """uint8 [tokens, columns + 16] of x [tokens, columns]: codes, then the exponent of the token's scale, as often as
    keeps rows aligned."""
    codes, scale = quantize(x, E4M3, per_row=True)
    exponent = (scale.view(torch.int32) >> _MANTISSA).to(torch.uint8)
    return torch.cat([codes.view(torch.uint8), exponent.expand(-1, MULTIPLE)], 1)


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """[tokens, columns] of what `pack` made."""
    codes, exponent = packed[:, :-MULTIPLE].view(E4M3), packed[:, -MULTIPLE:][:, :1]
    return (codes.float() * (exponent.to(torch.int32) << _MANTISSA).view(torch.float32)).to(dtype)
