"""Small jit functions that every portable Triton kernel uses: loads, INT8 conversions, reductions that keep NaN."""

import os

import triton
import triton.language as tl

# Triton's CPU interpreter holds bfloat16 as bits, so products have to be widened there. The variable is read once, as
# Triton reads it.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
# Adding 1.5 * 2^23 rounds a float to the nearest even integer and leaves it in the low bits. Adding the same bits to an
# integer turns it into a float. Both are exact below 2^22 (127 * 127 * 256 is), and faster than the conversion
# instructions.
MAGIC = tl.constexpr(12582912.0)
MAGIC_BITS = tl.constexpr(0x4B400000)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
SMALLEST_INVERTIBLE = tl.constexpr(2.0**-119)
# Where products are added up in float16, V and dO are multiplied by powers of two, so that the largest V of a head
# comes below 2^V_BITS and the largest dO of a query below 2^DO_BITS. dP is then at most head_dim 2^6, and P V over 128
# keys at most 128 x 2^6. Both are far below 65504, and as far above the subnormal numbers of float16.
V_BITS = tl.constexpr(6)
DO_BITS = tl.constexpr(0)


@triton.jit
def as_float(x):
    """Convert int32 (below 2^22) to float32."""
    return (x + MAGIC_BITS).to(tl.float32, bitcast=True) - MAGIC


@triton.jit
def as_codes(x):
    """Round float32 in -127 .. 127 to int8, ties to even."""
    return (x + MAGIC).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def as_shifted_codes(x):
    """Round float32 in 0 .. 254 to int8 from -127 on, so that values that are never negative use all 255 codes."""
    return (x + (MAGIC - 127.0)).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def inverse_scale(largest):
    """Return 127 / max|X|, the factor to multiply by before rounding, and 0 for a group of zeros.

    The division is exact, because 16-bit inputs often lie half way between two codes, where the last bit decides.
    """
    return tl.where(largest > SMALLEST_INVERTIBLE, tl.div_rn(tl.zeros_like(largest) + 127.0, largest), 0.0)


@triton.jit
def scale_and_inverse(largest):
    """Return max|X| / 127, and the factor to multiply by before rounding, for X that comes from float32 sums.

    The reciprocal is approximate (within 2^-23): it takes one instruction, where an exact division calls a function. It
    is the reciprocal of the scale and not of the maximum, so that no intermediate result is subnormal.
    """
    scale = largest * (1.0 / 127.0)
    if INTERPRETED:
        inverse = 1.0 / scale
    else:
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [scale], dtype=tl.float32, is_pure=True, pack=1
        )
    return scale, tl.where(largest > SMALLEST_INVERTIBLE, inverse, 0.0)


@triton.jit
def _larger_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def max_or_nan(x, AXIS: tl.constexpr):
    """Return the maximum along AXIS, NaN when any element is."""
    if INTERPRETED:
        return tl.max(x, AXIS) + tl.sum(tl.where(x != x, x, 0.0), AXIS)
    else:
        return tl.reduce(x, AXIS, _larger_or_nan)


@triton.jit
def dot16(a, b, c=None, HALF_SUMS: tl.constexpr = False):
    """Multiply 16-bit matrices and add the product to c in float32. HALF_SUMS: there is no c, and sums are in
    float16."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), c, input_precision="ieee")
    elif HALF_SUMS:
        return tl.dot(a, b, out_dtype=tl.float16).to(tl.float32)
    else:
        return tl.dot(a, b, c)


@triton.jit
def power_of_two(largest, BITS: tl.constexpr):
    """Return the power of two that brings `largest` (float32, not negative) into 2^(BITS - 1) .. 2^BITS, and its
    inverse. Both are 1 for zeros and for values that are not finite."""
    exponent = largest.to(tl.int32, bitcast=True) >> 23
    up = tl.minimum(tl.maximum(-exponent + 253 + BITS, 1), 253)
    up = tl.where((exponent == 0) | (exponent == 255), 127, up)
    return (up << 23).to(tl.float32, bitcast=True), ((254 - up) << 23).to(tl.float32, bitcast=True)


@triton.jit
def scores_of(a, b, scale):
    """Multiply INT8 codes, with sums below 2^22, and apply `scale`, with one operation less than a conversion takes.
    The result is off by at most 0.75 * scale, the same for each score."""
    x = tl.dot(a, b)
    if INTERPRETED:  # Without fused multiply-add the product would be rounded far above x.
        return as_float(x) * scale
    else:
        return (x + MAGIC_BITS).to(tl.float32, bitcast=True) * scale - MAGIC * scale


@triton.jit
def load_tokens(
    base,
    start,
    tokens,
    stride,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BOUNDED: tl.constexpr,
):
    """Load [TILE, BLOCK_D] of a [tokens, HEAD_DIM] matrix with contiguous rows `stride` apart, with zeros outside.

    BOUNDED: the tile may pass the last token.
    """
    t = tl.arange(0, TILE)
    d = tl.arange(0, BLOCK_D)
    pointers = base + tl.cast(start, tl.int64) * stride + t[:, None] * stride + d[None, :]
    if BOUNDED:
        if BLOCK_D == HEAD_DIM:
            return tl.load(pointers, mask=(start + t < tokens)[:, None], other=0.0)
        else:
            return tl.load(pointers, mask=(start + t < tokens)[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
    else:
        if BLOCK_D == HEAD_DIM:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=(d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def load_transposed(base, start, padded, TILE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load [BLOCK_D, TILE] of a [HEAD_DIM, padded] matrix of codes. `padded` is a multiple of TILE, so no token is
    outside."""
    d = tl.arange(0, BLOCK_D)
    pointers = base + start + d[:, None] * padded + tl.arange(0, TILE)[None, :]
    if BLOCK_D == HEAD_DIM:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(d < HEAD_DIM)[:, None], other=0)


@triton.jit
def in_operand_order(x):
    """Put the columns of a tile in the order in which transposed codes hold tokens: place 16 h + 4 c + 2 a + b has
    column 16 h + 8 a + 2 c + b.

    A thread of a matrix instruction gets columns 2 c, 2 c + 1, 2 c + 8 and 2 c + 9 of a result, and wants four
    neighbours of an 8-bit operand. In this order a result is an operand where it lies, and nothing moves between
    threads.
    """
    parts = tl.reshape(x, (x.shape[0], x.shape[1] // 16, 2, 4, 2))
    return tl.reshape(tl.trans(parts, 0, 1, 3, 2, 4), x.shape)


@triton.jit
def load_vector(base, start, tokens, other, TILE: tl.constexpr, BOUNDED: tl.constexpr):
    """Load [TILE] of a vector of `tokens` entries, with `other` past its end."""
    t = tl.arange(0, TILE)
    if BOUNDED:
        return tl.load(base + start + t, mask=start + t < tokens, other=other)
    else:
        return tl.load(base + start + t)


@triton.jit
def load_quads(base, start, tokens, TILE: tl.constexpr, BOUNDED: tl.constexpr):
    """Load four [TILE] vectors from a [tokens, 4] matrix, zeros past its end: one copy of 16 bytes a token."""
    t = tl.arange(0, TILE)
    pair = tl.arange(0, 2)
    pointers = base + 4 * (start + t)[:, None, None] + 2 * pair[None, :, None] + pair[None, None, :]
    if BOUNDED:
        quads = tl.load(pointers, mask=(start + t < tokens)[:, None, None], other=0.0)
    else:
        quads = tl.load(pointers)
    even, odd = tl.split(quads)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def largest_magnitude(x, PER_TILE: tl.constexpr):
    """Return max|x| along the last axis of a tile, [rows]. PER_TILE: return that of the whole tile, repeated. NaN is
    kept."""
    rows = max_or_nan(tl.abs(x), 1)
    if PER_TILE:
        return tl.zeros_like(rows) + max_or_nan(rows, 0)
    else:
        return rows


def block_d(head_dim: int) -> int:
    """Return the head dimension as the kernels hold it: a power of two that INT8 matrix instructions accept."""
    return max(32, triton.next_power_of_2(head_dim))
