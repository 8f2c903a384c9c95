"""Rotary position embedding in Llama's convention: dim i is rotated together with dim i + head_dim / 2."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sagetrain.config.schema import RopeScaling


def rotary_tables(
    positions: Tensor, head_dim: int, theta: float, scaling: RopeScaling | None, stretch: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of the rotation angles. They are computed once per forward pass and shared by all
    blocks. Raises ValueError if head_dim is odd.

    The angle of pair i at position p is p * theta^(-2 i / head_dim), computed in float64: in fp32 the angles of a
    million-token context are off by several percent of a radian.

    Args:
        positions: integers [tokens].
        scaling: how the frequencies are scaled for long sequences. None: the frequencies are as above.
        stretch: a factor on the results, and so on q and k.

    Returns:
        cos, sin: fp32 [tokens, 1, head_dim / 2]; the 1 broadcasts over heads.
    """
    if head_dim % 2:
        raise ValueError(f"the rotary embedding needs an even head_dim, not {head_dim}")
    pairs = torch.arange(head_dim // 2, dtype=torch.float64, device=positions.device)
    frequencies, length = theta ** (-2 * pairs / head_dim), length_of(scaling, stretch)
    if scaling is not None:
        kept = _kept(scaling, pairs, head_dim, theta).clamp(0, 1)
        frequencies = frequencies * (kept + (1 - kept) / scaling.factor)
    angles = positions.double().unsqueeze(-1) * frequencies
    return (length * angles.cos()).float().unsqueeze(1), (length * angles.sin()).float().unsqueeze(1)


def length_of(scaling: RopeScaling | None, stretch: float) -> float:
    """Return the factor by which the rotation lengthens q and k, so that scores grow by its square."""
    if scaling is None or scaling.type != "yarn":
        return stretch
    return stretch * (scaling.attention_factor or 0.1 * math.log(max(scaling.factor, 1)) + 1)


def _kept(scaling: RopeScaling, pairs: Tensor, head_dim: int, theta: float) -> Tensor:
    """Return the share of each frequency that is not scaled: 1 and above for fast frequencies, 0 and below for slow
    ones."""
    if scaling.type == "linear":
        return torch.zeros_like(pairs)
    turns = scaling.original_seq_length / (2 * math.pi)  # the angle of frequency 1 after the original length, in turns
    if scaling.type == "llama3":  # the share is linear in the turns
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        return (turns * theta ** (-2 * pairs / head_dim) - low) / (high - low)

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(turns / times) / (2 * math.log(theta))

    # The share is linear in the number of the pair.
    first, last = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(0, first), min(head_dim - 1, last)
    return 1 - (pairs - first) / (last - first or 1e-3)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the heads of x [tokens, heads, head_dim]. The result has the shape and dtype of x; the arithmetic is
    fp32."""
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
