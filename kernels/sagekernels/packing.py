"""Activations and their gradients in 8 bits while they travel: e4m3 with a scale for each token.

A value that was rounded once to e4m3, with a power of two as its scale, is not rounded again by e4m3 with another such
scale, unless it is among the smallest. This holds along tokens as well. Layers that round to e4m3 themselves, in both
orientations, therefore read the same values from a packed tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .casts import E4M3, MULTIPLE, quantize

# An fp32 has this many mantissa bits, below its exponent.
_MANTISSA = 23


def pack(x: Tensor) -> Tensor:
    """Pack x [tokens, columns] into uint8 [tokens, columns + 16]: codes, then the exponent of the token's scale. The
    exponent is repeated, so that rows stay aligned."""
    codes, scale = quantize(x, E4M3)
    exponent = (scale.view(torch.int32) >> _MANTISSA).to(torch.uint8)
    return torch.cat([codes.view(torch.uint8), exponent.expand(-1, MULTIPLE)], 1)


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [tokens, columns] from a tensor that `pack` made."""
    codes, exponent = packed[:, :-MULTIPLE].view(E4M3), packed[:, -MULTIPLE:][:, :1]
    return (codes.float() * (exponent.to(torch.int32) << _MANTISSA).view(torch.float32)).to(dtype)
