"""Rotary position embedding in Llama's convention: dim i is rotated together with dim i + head_dim / 2."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sagetrain.config.schema import RopeScaling


def rotary_tables(positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotation angles, computed once per forward pass and shared by all blocks.

    The angle of pair i at position p is p * theta^(-2 i / head_dim), taken in float64: in fp32 the angles of a
    million-token context are off by several percent of a radian.

    Args:
        positions: integers [tokens].
        scaling: of the frequencies; None: as above.

    Returns:
        cos, sin: fp32 [tokens, 1, head_dim / 2]; the 1 broadcasts over heads.

    Raises:
        ValueError: head_dim is odd.
    """
    if head_dim % 2:
        raise ValueError(f"the rotary embedding needs an even head_dim, not {head_dim}")
    pairs = torch.arange(head_dim // 2, dtype=torch.float64, device=positions.device)
    frequencies, length = theta ** (-2 * pairs / head_dim), 1.0
    if scaling is not None:
        kept = _kept(scaling, pairs, head_dim, theta).clamp(0, 1)
        frequencies = frequencies * (kept + (1 - kept) / scaling.factor)
        if scaling.type == "yarn":  # of q and k alike: their products become larger by its square
            length = scaling.attention_factor or 0.1 * math.log(max(scaling.factor, 1)) + 1
    angles = positions.double().unsqueeze(-1) * frequencies
    return (length * angles.cos()).float().unsqueeze(1), (length * angles.sin()).float().unsqueeze(1)


def _kept(scaling: RopeScaling, pairs: Tensor, head_dim: int, theta: float) -> Tensor:
    """Which share of each frequency stays as it is: 1 and above for fast ones, 0 and below for slow ones."""
    turns = scaling.original_seq_length / (2 * math.pi)  # in that many tokens, at frequency 1
    if scaling.type == "llama3":  # linear in the turns
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        return (turns * theta ** (-2 * pairs / head_dim) - low) / (high - low)

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(turns / times) / (2 * math.log(theta))

    # linear in the number of the pair, between two whole numbers
    first = max(0, math.floor(pair_that_turns(scaling.beta_fast)))
    last = min(head_dim - 1, math.ceil(pair_that_turns(scaling.beta_slow)))
    return 1 - (pairs - first) / (last - first or 1e-3)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the heads: x [tokens, heads, head_dim] -> same shape and dtype; the arithmetic is fp32."""
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
