"""INT8 quantizers and smoothing: the torch twins, then the Triton kernels.

psi(X): one scale per group, `s = max|X| / 127`, codes = round to nearest even of X / s, in -127 .. 127 (A, section 3;
-128 would be a persistent negative bias). There is no epsilon in a scale: a group of zeros has scale 0 and codes 0. A
group with a NaN or an infinity has a non-finite scale, so that everything computed from it is NaN.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# Tokens that share a scale wherever "tile" is said: rows of P and dS along the keys, columns along the queries, and
# Q, K, V and dO in the recipe `paper`. Larger tiles cost accuracy (dQ at sigma 1: .0173 with 64, .0205 with 128).
TILE = 64
# Below this the reciprocal of a maximum leaves float32; such a group counts as zero.
SMALLEST = 2.0**-119


class Codes(NamedTuple):
    """INT8 codes [B, heads, N, D] and float32 scales [B, heads, N], one per token (equal inside a tile if per tile)."""

    codes: Tensor
    scale: Tensor

    def dequantized(self) -> Tensor:
        """Float32 [B, heads, N, D]."""
        return self.codes.float() * self.scale[..., None]


def tiles_of(tokens: int) -> int:
    """Number of tiles that cover so many tokens."""
    return -(-tokens // TILE)


def token_mean(x: Tensor) -> Tensor:
    """Mean over the tokens of a row, float32 [B, heads, 1, D] for x [B, N, heads, D]: K-smoothing (A, section 3).

    A packed row has one mean: softmax ignores a constant per row, so every choice is exact.
    """
    return x.mean(1, dtype=torch.float32)[:, :, None]


def tile_means(x: Tensor) -> Tensor:
    """Mean of each tile of TILE tokens, float32 [B, heads, ceil(N / TILE), D] for x [B, N, heads, D]: Q-smoothing."""
    n = x.shape[1]
    padded = torch.nn.functional.pad(x.float(), (0, 0, 0, 0, 0, -n % TILE)).unflatten(1, (-1, TILE))
    counts = torch.full((padded.shape[1],), TILE, device=x.device)
    if n % TILE:
        counts[-1] = n % TILE
    return (padded.sum(2) / counts[:, None, None]).transpose(1, 2).contiguous()


def scale_and_inverse(largest: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and what to multiply by before rounding, from max|X| of a group. Zero and NaN give the inverse 0."""
    return largest / 127.0, torch.where(largest > SMALLEST, 127.0 / largest, 0.0)


def quantize_twin(x: Tensor, *, mean: Tensor | None = None, per_tile: bool = False) -> Codes:
    """psi of x [B, N, heads, D] (any floating dtype and strides), minus `mean` [B, heads, 1 or tiles, D] when given.

    One scale per token, or one per TILE tokens counted from the start of the row.
    """
    values = x.transpose(1, 2).float().contiguous()
    n = values.shape[2]
    if mean is not None:
        values = values - (mean if mean.shape[2] == 1 else mean.repeat_interleave(TILE, 2)[:, :, :n])
    largest = values.abs().amax(-1)
    if per_tile:
        tiles = torch.nn.functional.pad(largest, (0, -n % TILE)).unflatten(-1, (-1, TILE))
        largest = tiles.amax(-1).repeat_interleave(TILE, -1)[..., :n]
    scale, inverse = scale_and_inverse(largest)
    codes = torch.round(values * inverse[..., None])
    return Codes(codes.nan_to_num(0.0).to(torch.int8), scale)
