"""Rotary position embedding in Llama's convention: dim i is rotated together with dim i + head_dim / 2."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotation angles, computed once per forward pass and shared by all blocks.

    The angle of pair i at position p is p * theta^(-2 i / head_dim), taken in float64: in fp32 the angles of a
    million-token context are off by several percent of a radian.

    Args:
        positions: integers [tokens].

    Returns:
        cos, sin: fp32 [tokens, 1, head_dim / 2]; the 1 broadcasts over heads.

    Raises:
        ValueError: head_dim is odd.
    """
    if head_dim % 2:
        raise ValueError(f"the rotary embedding needs an even head_dim, not {head_dim}")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim
    angles = positions.double().unsqueeze(-1) * theta**-exponents
    return angles.cos().float().unsqueeze(1), angles.sin().float().unsqueeze(1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the heads: x [tokens, heads, head_dim] -> same shape and dtype; the arithmetic is fp32."""
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
