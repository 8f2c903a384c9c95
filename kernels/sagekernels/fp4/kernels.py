"""FP4 attention on a GPU: Triton kernels that quantize as quantize.py does, bit for bit, and then attend.

On GPUs whose tensor cores take FP4, tl.dot_scaled computes the products. Elsewhere the numbers that the codes stand for
are made in registers, exact in bfloat16, and multiplied. Both ways multiply the same values in the same tiles and
differ only in the order of sums. FMA is off, because a fused multiply-add would change the rounding of a scale.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..call import Call
from ..forward import mean_bias
from ..launch import on_device_of
from ..pieces import LOG2E, block_d, dot16, load_vector, max_or_nan
from ..quantize import TILE, tile_means, token_mean
from .quantize import FORMATS, Fp4, head_unit

# These codes stand for scales that are no number.
E4M3_NAN = tl.constexpr(0x7F)
E8M0_NAN = tl.constexpr(0xFF)


# -- numbers -----------------------------------------------------------------------------------------------------


@triton.jit
def scale_codes(largest, E8M0: tl.constexpr):
    """Return the codes (int32, 0 .. 255) of the scales of groups with these max|X|, float32. A value that is not finite
    has the code of NaN. E4M3: round_e4m3 of a sixth; otherwise e8m0_scale."""
    finite = largest < float("inf")
    if E8M0:
        code = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - 2, 0)
        return tl.where(finite, code, E8M0_NAN)
    else:
        x = tl.minimum(largest * (1.0 / 6.0), 448.0)
        # The steps of float32 near 24576 are 2^-9, those of subnormal e4m3 numbers.
        subnormal = ((x + 24576.0) - 24576.0) * 512.0
        bits = x.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # The exponent bias goes from 127 to 7.
        code = tl.where(x < 0.015625, subnormal.to(tl.int32), normal)
        return tl.where(finite, code, E4M3_NAN)


@triton.jit
def scales_of(codes, E8M0: tl.constexpr):
    """Return the scales, float32, of int32 codes."""
    if E8M0:
        bits = tl.where(codes > 0, codes << 23, 1 << 22)
        return tl.where(codes == E8M0_NAN, float("nan"), bits.to(tl.float32, bitcast=True))
    else:
        normal = ((codes + 960) << 20).to(tl.float32, bitcast=True)
        scale = tl.where(codes < 8, codes.to(tl.float32) * 0.001953125, normal)
        return tl.where(codes == E4M3_NAN, float("nan"), scale)


@triton.jit
def e2m1_codes(x, scale):
    """Compute quantize.e2m1_codes, as int32."""
    size = tl.abs(x)
    code = (size > 0.25 * scale).to(tl.int32) + (size >= 0.75 * scale).to(tl.int32)
    code += (size > 1.25 * scale).to(tl.int32) + (size >= 1.75 * scale).to(tl.int32)
    code += (size > 2.5 * scale).to(tl.int32) + (size >= 3.5 * scale).to(tl.int32)
    code += (size > 5.0 * scale).to(tl.int32)
    code = tl.where(scale > 0, code, 0)
    return tl.where((x < 0) & (code > 0), code + 8, code)


@triton.jit
def e2m1_values(codes):
    """Return the float32 values of int32 codes."""
    size = codes & 7
    normal = (((size >> 1) + 126) << 23 | (size & 1) << 22).to(tl.float32, bitcast=True)
    value = tl.where(size < 2, size.to(tl.float32) * 0.5, normal)
    return tl.where(codes > 7, -value, value)


@triton.jit
def quantized(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, E8M0: tl.constexpr):
    """Quantize float32 x: return codes [ROWS, COLUMNS], and the codes of their scales [ROWS, COLUMNS / GROUP]."""
    groups = tl.reshape(x, [ROWS, COLUMNS // GROUP, GROUP])
    scale_code = scale_codes(max_or_nan(tl.abs(groups), 2), E8M0)
    codes = e2m1_codes(groups, scales_of(scale_code, E8M0)[:, :, None])
    return tl.reshape(codes, [ROWS, COLUMNS]), scale_code


@triton.jit
def packed(codes, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Pack codes into uint8 [ROWS, COLUMNS / 2]: neighbours share a byte, and the left one is in its low half."""
    low, high = tl.split(tl.reshape(codes, [ROWS, COLUMNS // 2, 2]))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def dequantized(codes, scale_code, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, E8M0: tl.constexpr):
    """Return the numbers of codes [ROWS, COLUMNS] in bfloat16, where every one of them is exact."""
    groups = tl.reshape(e2m1_values(codes), [ROWS, COLUMNS // GROUP, GROUP])
    values = groups * scales_of(scale_code, E8M0)[:, :, None]
    return tl.reshape(values, [ROWS, COLUMNS]).to(tl.bfloat16)


@triton.jit
def unpacked(pairs, scale_code, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, E8M0: tl.constexpr):
    """Return `dequantized` of packed codes, uint8 [ROWS, COLUMNS / 2], and scales, uint8."""
    pairs = pairs.to(tl.int32)
    codes = tl.reshape(tl.join(pairs & 15, pairs >> 4), [ROWS, COLUMNS])
    return dequantized(codes, scale_code.to(tl.int32), ROWS, COLUMNS, GROUP, E8M0)


@triton.jit
def as_scale(codes, E8M0: tl.constexpr):
    """Return the codes of scales as tl.dot_scaled takes them."""
    if E8M0:
        return codes.to(tl.uint8)
    else:
        return codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True)


# -- quantizer ---------------------------------------------------------------------------------------------------


@triton.jit
def _quantize_fp4_kernel(
    X, INVERSE_UNIT, CODES, SCALE, rows, columns, padded, row_tiles, rows_a_unit,
    TILE: tl.constexpr, GROUP: tl.constexpr, E8M0: tl.constexpr,
):  # fmt: skip
    """Quantize TILE x TILE numbers of a matrix per program, in groups along its rows."""
    r = (tl.program_id(0) % row_tiles).to(tl.int64) * TILE + tl.arange(0, TILE)
    c = (tl.program_id(0) // row_tiles) * TILE + tl.arange(0, TILE)
    inside = (r < rows)[:, None]
    x = tl.load(X + r[:, None] * columns + c[None, :], mask=inside & (c < columns)[None, :], other=0.0)
    inverse = tl.load(INVERSE_UNIT + r // rows_a_unit, mask=r < rows, other=1.0)
    codes, scale_code = quantized(x * inverse[:, None], TILE, TILE, GROUP, E8M0)
    half = (tl.program_id(0) // row_tiles) * (TILE // 2) + tl.arange(0, TILE // 2)
    group = (tl.program_id(0) // row_tiles) * (TILE // GROUP) + tl.arange(0, TILE // GROUP)
    tl.store(CODES + r[:, None] * (padded // 2) + half[None, :], packed(codes, TILE, TILE), mask=inside)
    tl.store(SCALE + r[:, None] * (padded // GROUP) + group[None, :], scale_code.to(tl.uint8), mask=inside)


def quantize_fp4_triton(x: Tensor, unit: Tensor, padded: int, *, format: str = "nvfp4") -> tuple[Tensor, Tensor]:
    """Quantize float32 x [..., M, N] as quantize_fp4 does, in groups along its last axis, with zeros up to `padded`, a
    multiple of TILE. Return packed codes, uint8 [..., M, padded / 2], and codes of the scales, uint8 [..., M, padded /
    group].

    unit: float32 [..., 1, 1], a power of two for each matrix; it is 1 for e8m0.
    """
    rules, (m, n) = FORMATS[format], x.shape[-2:]
    x = x.contiguous()
    codes = torch.empty((*x.shape[:-1], padded // 2), dtype=torch.uint8, device=x.device)
    scale = torch.empty((*x.shape[:-1], padded // rules.group), dtype=torch.uint8, device=x.device)
    rows = x.numel() // n
    row_tiles = triton.cdiv(rows, TILE)
    with on_device_of(x):
        _quantize_fp4_kernel[(row_tiles * (padded // TILE),)](
            x, unit.reciprocal().contiguous(), codes, scale, rows, n, padded, row_tiles, m,
            TILE=TILE, GROUP=rules.group, E8M0=rules.e8m0, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return codes, scale


def decoded(codes: Tensor, scale: Tensor, length: int, *, format: str = "nvfp4", unit: Tensor | float = 1.0) -> Fp4:
    """Decode the results of quantize_fp4_triton for rows of `length` numbers into the Fp4 that quantize_fp4 returns for
    them."""
    rules = FORMATS[format]
    values = scale.view(torch.float8_e8m0fnu if rules.e8m0 else torch.float8_e4m3fn).float() * unit
    split = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    return Fp4(split[..., :length], values[..., : triton.cdiv(length, rules.group)], rules.group)


# -- attention ---------------------------------------------------------------------------------------------------


@triton.jit
def _load_rows(BASE, start, rows, width: tl.constexpr, COUNT: tl.constexpr):
    """Load [COUNT, width] of a [rows, width] matrix of bytes, with zeros past its last row."""
    r = start + tl.arange(0, COUNT)
    pointers = BASE + r.to(tl.int64)[:, None] * width + tl.arange(0, width)[None, :]
    return tl.load(pointers, mask=(r < rows)[:, None], other=0)


@triton.jit
def _fp4_forward_kernel(
    Q4, Q_SCALE, Q_UNIT, K4, K_SCALE, K_UNIT, V4, V_SCALE, V_UNIT, K, Q_MEAN, K_MEAN, STARTS, ENDS, O,
    scale, largest_p, heads, group, n_q, n_k, padded_k, blocks, tiles, stride_kb, stride_kn, stride_kh,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PADDED_D: tl.constexpr, BLOCK_M: tl.constexpr, TILE: tl.constexpr,
    GROUP: tl.constexpr, E8M0: tl.constexpr, IS_CAUSAL: tl.constexpr, PACKED: tl.constexpr, SMOOTH_Q: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK_M queries, one tile or two, of one head per program, with online softmax in units of log 2."""
    block = tl.program_id(0) % blocks
    if IS_CAUSAL:  # The longest rows start first, so that short ones fill the end.
        block = blocks - 1 - block
    bh = (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = bh // heads, bh % heads
    bh_kv = batch * (heads // group) + head // group
    Q4 += bh * n_q * (PADDED_D // 2)
    Q_SCALE += bh * n_q * (PADDED_D // GROUP)
    K4 += bh_kv * n_k * (PADDED_D // 2)
    K_SCALE += bh_kv * n_k * (PADDED_D // GROUP)
    V4 += bh_kv * HEAD_DIM * (padded_k // 2)
    V_SCALE += bh_kv * HEAD_DIM * (padded_k // GROUP)

    first = block * BLOCK_M
    offset = n_k - n_q
    rows = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    to_log2 = scale * LOG2E
    unit = tl.load(Q_UNIT + bh) * to_log2 * tl.load(K_UNIT + bh_kv)
    v_unit = tl.load(V_UNIT + bh_kv) / largest_p
    q4 = _load_rows(Q4, first, n_q, PADDED_D // 2, BLOCK_M)
    q_scale = _load_rows(Q_SCALE, first, n_q, PADDED_D // GROUP, BLOCK_M)
    if not NATIVE:
        q = unpacked(q4, q_scale, BLOCK_M, PADDED_D, GROUP, E8M0)
    if SMOOTH_Q:
        K += batch * stride_kb + (head // group) * stride_kh
        K_MEAN += bh_kv * HEAD_DIM
        Q_MEAN += (bh * tiles + first // TILE) * HEAD_DIM
        q_mean = tl.load(Q_MEAN + d, mask=d < HEAD_DIM, other=0.0) * to_log2
        if BLOCK_M > TILE:
            second = (d < HEAD_DIM) & (first + TILE < n_q)
            second_mean = tl.load(Q_MEAN + HEAD_DIM + d, mask=second, other=0.0) * to_log2
    lo = 0
    hi = n_k
    if IS_CAUSAL:
        hi = tl.minimum(n_k, first + BLOCK_M + offset)
    if PACKED:
        last = tl.minimum(first + BLOCK_M, n_q) - 1
        starts = load_vector(STARTS, first, n_q, 0, BLOCK_M, True)
        ends = load_vector(ENDS, first, n_q, 0, BLOCK_M, True)
        lo = tl.load(STARTS + first) // TILE * TILE
        hi = tl.minimum(hi, tl.load(ENDS + last))

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if NATIVE:  # Triton 3.7 does not compile scaled products for Blackwell that are added to a constant.
        zero = scale * 0.0
        no_scores = tl.zeros([BLOCK_M, TILE], tl.float32) + zero
        no_product = acc + zero
    l = tl.zeros([BLOCK_M], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for n in tl.range(lo, hi, TILE):
        n = tl.multiple_of(n, TILE)
        k4 = _load_rows(K4, n, n_k, PADDED_D // 2, TILE)
        k_scale = _load_rows(K_SCALE, n, n_k, PADDED_D // GROUP, TILE)
        if NATIVE:
            q_scales, k_scales = as_scale(q_scale, E8M0), as_scale(k_scale, E8M0)
            s = tl.dot_scaled(q4, q_scales, "e2m1", tl.trans(k4), k_scales, "e2m1", no_scores)
        else:
            s = dot16(q, tl.trans(unpacked(k4, k_scale, TILE, PADDED_D, GROUP, E8M0)))
        s = s * unit
        if SMOOTH_Q:
            bias = mean_bias(q_mean, K, K_MEAN, n, n_k, stride_kn, TILE, HEAD_DIM, BLOCK_D)[None, :]
            if BLOCK_M > TILE:
                second_bias = mean_bias(second_mean, K, K_MEAN, n, n_k, stride_kn, TILE, HEAD_DIM, BLOCK_D)[None, :]
                bias = tl.where((rows < first + TILE)[:, None], bias, second_bias)
            s += bias
        columns = n + tl.arange(0, TILE)
        seen = (columns < n_k)[None, :]
        if IS_CAUSAL:
            seen = seen & (columns[None, :] <= rows[:, None] + offset)
        if PACKED:
            seen = seen & (columns[None, :] >= starts[:, None]) & (columns[None, :] < ends[:, None])
        s = tl.where(seen, s, float("-inf"))
        tile_m = tl.max(s, 1)
        new_m = tl.maximum(m, tile_m)
        finite_m = tl.where(new_m == float("-inf"), 0.0, new_m)  # A row may have seen no key yet.
        finite_tile_m = tl.where(tile_m == float("-inf"), 0.0, tile_m)
        alpha = tl.exp2(m - finite_m)
        beta = tl.exp2(tile_m - finite_m)
        p = tl.exp2(s - finite_tile_m[:, None])  # The largest P of a row is 1 here, as two-level P wants it.
        p_codes, p_scale = quantized(p * largest_p, BLOCK_M, TILE, GROUP, E8M0)

        v_rows = tl.arange(0, BLOCK_D)
        inside = (v_rows < HEAD_DIM)[:, None]
        half = n // 2 + tl.arange(0, TILE // 2)
        groups = n // GROUP + tl.arange(0, TILE // GROUP)
        v4 = tl.load(V4 + v_rows[:, None] * (padded_k // 2) + half[None, :], mask=inside, other=0)
        v_scale = tl.load(V_SCALE + v_rows[:, None] * (padded_k // GROUP) + groups[None, :], mask=inside, other=0)
        if NATIVE:
            p_scales, v_scales = as_scale(p_scale, E8M0), as_scale(v_scale, E8M0)
            p4 = packed(p_codes, BLOCK_M, TILE)
            product = tl.dot_scaled(p4, p_scales, "e2m1", tl.trans(v4), v_scales, "e2m1", no_product)
        else:
            p4 = dequantized(p_codes, p_scale, BLOCK_M, TILE, GROUP, E8M0)
            product = dot16(p4, tl.trans(unpacked(v4, v_scale, BLOCK_D, TILE, GROUP, E8M0)))
        acc = acc * alpha[:, None] + product * (beta * v_unit)[:, None]
        l = l * alpha + tl.sum(p, 1) * beta
        m = new_m

    out = O + (batch * n_q * heads + head) * HEAD_DIM + rows.to(tl.int64)[:, None] * (heads * HEAD_DIM) + d[None, :]
    tl.store(out, acc / l[:, None], mask=(rows < n_q)[:, None] & (d < HEAD_DIM)[None, :])


@functools.cache
def products(device: torch.device) -> tuple[bool, int]:
    """Return whether tl.dot_scaled computes the products, and the number of queries of a program. It does where the
    tensor cores take FP4 and this Triton knows how. Data center Blackwell (10.x), as of Triton 3.4, has scaled products
    of 128 queries only. Other Blackwell GPUs (12.x), as of 3.6, have smaller ones too. No other GPU has any."""
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    if major == 10 and version >= (3, 4):
        return True, 2 * TILE
    return major == 12 and version >= (3, 6), TILE


def triton_fp4_attention(call: Call) -> Tensor:
    """Compute FP4 attention with two-level P of a call in bfloat16 or float16; its recipe is a key of FORMATS."""
    q, k, v, format, rules = call.q, call.k, call.v, call.recipe, FORMATS[call.recipe]
    batch, n_q, heads, head_dim = q.shape
    n_k, kv_heads = k.shape[1:3]
    k = k if k.stride(3) == 1 else k.contiguous()
    k_mean = token_mean(k) if call.smooth_k else torch.zeros((batch, kv_heads, 1, head_dim), device=k.device)
    q_mean = tile_means(q) if call.smooth_q else None
    queries, keys, values = (x.transpose(1, 2).float() for x in (q, k, v))
    if call.smooth_k:
        keys = keys - k_mean
    if q_mean is not None:
        queries = queries - q_mean.repeat_interleave(TILE, 2)[:, :, :n_q]
    operands = []
    padded_d, padded_k = max(TILE, triton.next_power_of_2(head_dim)), triton.cdiv(n_k, TILE) * TILE
    for x, padded in ((queries, padded_d), (keys, padded_d), (values.mT, padded_k)):
        unit = torch.ones((*x.shape[:2], 1, 1), device=x.device) if rules.e8m0 else head_unit(x)
        operands += [*quantize_fp4_triton(x, unit, padded, format=format), unit]
    starts, ends = (None, None) if call.bounds is None else call.bounds.unbind()
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    native, block_m = products(q.device)
    blocks = triton.cdiv(n_q, block_m)
    with on_device_of(q):
        _fp4_forward_kernel[(blocks * batch * heads,)](
            *operands, k, q_mean, k_mean, starts, ends, o,
            call.scale, rules.largest, heads, heads // kv_heads, n_q, n_k, padded_k, blocks, triton.cdiv(n_q, TILE),
            *k.stride()[:3],
            HEAD_DIM=head_dim, BLOCK_D=block_d(head_dim), PADDED_D=padded_d, BLOCK_M=block_m, TILE=TILE,
            GROUP=rules.group, E8M0=rules.e8m0, IS_CAUSAL=call.causal, PACKED=call.bounds is not None,
            SMOOTH_Q=call.smooth_q,
            NATIVE=native, num_warps=4, num_stages=1, enable_fp_fusion=False,
        )  # fmt: skip
    return o
