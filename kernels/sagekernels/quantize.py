"""INT8 quantizers and smoothing: the torch twins, then the Triton kernels.

psi(X): one scale per group, `s = max|X| / 127`, codes = round to nearest even of X / s, in -127 .. 127 (A, section 3;
-128 would be a persistent negative bias). There is no epsilon in a scale: a group of zeros has scale 0 and codes 0. A
group with a NaN or an infinity has a non-finite scale, so that everything computed from it is NaN.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .pieces import (
    V_BITS,
    as_codes,
    block_d,
    in_operand_order,
    inverse_scale,
    largest_magnitude,
    load_tokens,
)

# So many tokens share a scale wherever "tile" is said: rows of P and dS along the keys, columns along the queries, and
# Q, K, V and dO in the recipe `paper`. Larger tiles cost accuracy (dQ at sigma 1: 0.0173 with 64, 0.0205 with 128).
TILE = 64
# Below this the reciprocal of a maximum leaves float32. Such a group counts as zero.
SMALLEST = 2.0**-119


class Codes(NamedTuple):
    """INT8 codes [B, heads, N, D] and float32 scales [B, heads, N], one per token (equal inside a tile if per tile)."""

    codes: Tensor
    scale: Tensor

    @classmethod
    def empty_for(cls, x: Tensor) -> "Codes":
        """Return memory for the codes and scales of x [B, N, heads, D]."""
        batch, n, heads, head_dim = x.shape
        codes = torch.empty((batch, heads, n, head_dim), dtype=torch.int8, device=x.device)
        return cls(codes, torch.empty((batch, heads, n), dtype=torch.float32, device=x.device))

    def dequantized(self) -> Tensor:
        """Return codes times scales, float32 [B, heads, N, D]."""
        return self.codes.float() * self.scale[..., None]


def tiles_of(tokens: int) -> int:
    """Return the number of tiles that cover so many tokens."""
    return -(-tokens // TILE)


def token_mean(x: Tensor) -> Tensor:
    """Return the mean over the tokens of a row, float32 [B, heads, 1, D] for x [B, N, heads, D]: K-smoothing (A,
    section 3).

    A packed row has one mean. Softmax ignores a constant per row, so every choice of the mean is exact.
    """
    return x.mean(1, dtype=torch.float32)[:, :, None]


def scale_and_inverse(largest: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale, and the factor to multiply by before rounding, from max|X| of a group. Zero and NaN give the
    factor 0."""
    inverse = torch.full_like(largest, 127.0) / largest  # `127.0 / largest` would round twice
    return largest / 127.0, torch.where(largest > SMALLEST, inverse, 0.0)


def quantize_twin(x: Tensor, *, mean: Tensor | None = None, per_tile: bool = False) -> Codes:
    """Compute psi of x [B, N, heads, D] (any floating dtype and strides), minus `mean` [B, heads, 1, D] when given.

    There is one scale per token, or one per TILE tokens counted from the start of the row.
    """
    values = x.transpose(1, 2).float().contiguous()
    n = values.shape[2]
    if mean is not None:
        values = values - mean
    largest = values.abs().amax(-1)
    if per_tile:
        tiles = torch.nn.functional.pad(largest, (0, -n % TILE)).unflatten(-1, (-1, TILE))
        largest = tiles.amax(-1).repeat_interleave(TILE, -1)[..., :n]
    scale, inverse = scale_and_inverse(largest)
    codes = torch.round(values * inverse[..., None])
    return Codes(codes.nan_to_num(0.0).to(torch.int8), scale)


@triton.jit
def _quantize_kernel(
    X, MEAN, CODES, SCALE, heads, tokens, tiles, stride_b, stride_n, stride_h,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, PER_TILE: tl.constexpr,
):  # fmt: skip
    """Quantize one tile of tokens of one head per program."""
    tile = tl.program_id(0) % tiles
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    x = load_tokens(
        X + (bh // heads) * stride_b + (bh % heads) * stride_h,
        tile * TILE, tokens, stride_n, TILE, HEAD_DIM, BLOCK_D, True,
    ).to(tl.float32)  # fmt: skip
    t = tile * TILE + tl.arange(0, TILE)
    d = tl.arange(0, BLOCK_D)
    inside = (t < tokens)[:, None] & (d < HEAD_DIM)[None, :]
    if MEAN is not None:
        mean = tl.load(MEAN + bh * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)
        x = tl.where(inside, x - mean[None, :], 0.0)
    largest = largest_magnitude(x, PER_TILE)
    codes = as_codes(x * inverse_scale(largest)[:, None])
    tl.store(SCALE + bh * tokens + t, largest / 127.0, mask=t < tokens)
    tl.store(CODES + bh * tokens * HEAD_DIM + t[:, None] * HEAD_DIM + d[None, :], codes, mask=inside)


def quantize_triton(x: Tensor, *, mean: Tensor | None = None, per_tile: bool = False) -> Codes:
    """Compute quantize_twin on a GPU."""
    batch, n, heads, head_dim = x.shape
    if x.stride(3) != 1:
        x = x.contiguous()
    tiles, made = tiles_of(n), Codes.empty_for(x)
    _quantize_kernel[(tiles * batch * heads,)](
        x, mean, *made, heads, n, tiles, *x.stride()[:3],
        HEAD_DIM=head_dim, BLOCK_D=block_d(head_dim), TILE=TILE, PER_TILE=per_tile, num_warps=4,
    )  # fmt: skip
    return made


@triton.jit
def _transpose_kernel(
    CODES, TRANSPOSED, tokens, padded, tiles,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) % tiles
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    start = tile * TILE
    x = load_tokens(CODES + bh * tokens * HEAD_DIM, start, tokens, HEAD_DIM, TILE, HEAD_DIM, BLOCK_D, True)
    d = tl.arange(0, BLOCK_D)
    t = start + tl.arange(0, TILE)
    pointers = TRANSPOSED + bh * padded * HEAD_DIM + d[:, None] * padded + t[None, :]
    tl.store(pointers, in_operand_order(tl.trans(x)), mask=(d < HEAD_DIM)[:, None])


def transpose_codes(codes: Tensor) -> Tensor:
    """Transpose int8 [B, heads, N, D] to [B, heads, D, N padded to TILE], with zeros in the padding and the tokens in
    pieces.in_operand_order. INT8 matrix instructions want the dimension that is summed over to be contiguous."""
    batch, heads, n, head_dim = codes.shape
    tiles = tiles_of(n)
    out = torch.empty((batch, heads, head_dim, tiles * TILE), dtype=torch.int8, device=codes.device)
    _transpose_kernel[(tiles * batch * heads,)](
        codes, out, n, tiles * TILE, tiles,
        HEAD_DIM=head_dim, BLOCK_D=block_d(head_dim), TILE=TILE, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _dequantize_kernel(CODES, SCALE, OUT, total, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * TILE
    x = load_tokens(CODES, start, total, HEAD_DIM, TILE, HEAD_DIM, BLOCK_D, True).to(tl.float32)
    t = start + tl.arange(0, TILE)
    d = tl.arange(0, BLOCK_D)
    x *= tl.load(SCALE + t, mask=t < total, other=0.0)[:, None]
    tl.store(OUT + t[:, None] * HEAD_DIM + d[None, :], x, mask=(t < total)[:, None] & (d < HEAD_DIM)[None, :])


def dequantize_triton(codes: Codes) -> Tensor:
    """Compute codes.dequantized() in bfloat16, [B, heads, N, D]."""
    batch, heads, n, head_dim = codes.codes.shape
    total = batch * heads * n
    out = torch.empty(codes.codes.shape, dtype=torch.bfloat16, device=codes.codes.device)
    _dequantize_kernel[(tiles_of(total),)](
        *codes, out, total, HEAD_DIM=head_dim, BLOCK_D=block_d(head_dim), TILE=TILE, num_warps=4
    )
    return out


def in_half_units(v: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply v [B, N, heads, D] by powers of two so that its products may be added up in float16 (pieces.V_BITS).

    Return float16 [B, N, heads, D], and the largest finite magnitude of each head of v, float32 [B, heads]. The
    magnitude determines the power of a head (pieces.power_of_two, which this function computes in torch).
    """
    finite = v.nan_to_num(0.0, 0.0, 0.0)
    largest = torch.maximum(finite.amax((1, 3)), -finite.amin((1, 3))).abs().float()
    exponent = largest.view(torch.int32) >> 23
    up = torch.where(exponent == 0, 127, (253 + V_BITS.value - exponent).clamp(1, 253))
    halves = torch.empty(v.shape, dtype=torch.float16, device=v.device)
    return torch.mul(v, (up << 23).view(torch.float32)[:, None, :, None], out=halves), largest
