"""The portable Triton forward: one program computes one tile of queries of one head (FlashAttention-2's schedule)."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .call import RECIPES, Call, Saved
from .launch import half_sums, launch_tiles, on_device_of
from .pieces import (
    LN2,
    LOG2E,
    V_BITS,
    as_codes,
    as_float,
    block_d,
    dot16,
    in_operand_order,
    load_tokens,
    load_transposed,
    load_vector,
    power_of_two,
    scores_of,
)
from .quantize import TILE, in_half_units, quantize_triton, token_mean, transpose_codes
from .sinks import sink_scores


@triton.jit
def _documents_kernel(CU_SEQLENS, STARTS, ENDS, documents, tokens, window, halvings, BLOCK: tl.constexpr):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], tl.int32)  # Halving keeps cu_seqlens[low] <= t < cu_seqlens[high].
    high = tl.zeros([BLOCK], tl.int32) + documents
    for _ in range(halvings):
        middle = (low + high) // 2
        before = tl.load(CU_SEQLENS + middle) <= t
        low = tl.where(before & (middle > low), middle, low)
        high = tl.where(before, high, tl.maximum(middle, low + 1))
    tl.store(STARTS + t, tl.maximum(tl.load(CU_SEQLENS + low), t - window + 1), mask=t < tokens)
    tl.store(ENDS + t, tl.minimum(tl.load(CU_SEQLENS + high), t + window), mask=t < tokens)


def document_bounds_triton(cu_seqlens: Tensor, length: int, window: int | None = None) -> Tensor:
    """Compute reference.document_bounds in one launch: each token finds its document on the device."""
    bounds = torch.empty((2, length), dtype=torch.int32, device=cu_seqlens.device)
    documents = cu_seqlens.numel() - 1
    halvings = documents.bit_length() + 1
    window = length if window is None else min(window, length)  # A window of the whole row hides nothing.
    with on_device_of(cu_seqlens):
        _documents_kernel[(-(-length // 256),)](
            cu_seqlens.contiguous(), *bounds.unbind(), documents, length, window, halvings, BLOCK=256
        )
    return bounds


@triton.jit
def ranges_of_keys(
    STARTS, ENDS, rows, first, n_q, n_k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IS_CAUSAL: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """Return the first key and one past the last key of a tile's queries, and the bounds lo, a, b, hi of all its keys.

    Keys lo .. a need a mask (a document starts among the rows). Keys a .. b need none, and b .. hi need one again (the
    diagonal, the end). Without documents lo .. a is empty.
    """
    offset = n_k - n_q
    lo = 0
    hi = n_k
    clear = n_k
    starts = rows
    ends = rows
    a = 0
    if IS_CAUSAL:
        hi = tl.minimum(n_k, first + BLOCK_M + offset)
        clear = first + offset + 1
    if PACKED:
        last = tl.minimum(first + BLOCK_M, n_q) - 1
        starts = tl.load(STARTS + rows, mask=rows < n_q, other=0)
        ends = tl.load(ENDS + rows, mask=rows < n_q, other=0)
        lo = tl.load(STARTS + first) // BLOCK_N * BLOCK_N
        a = tl.cdiv(tl.load(STARTS + last), BLOCK_N) * BLOCK_N
        hi = tl.minimum(hi, tl.load(ENDS + last))
        clear = tl.minimum(clear, tl.load(ENDS + first))
        a = tl.minimum(a, tl.cdiv(hi, BLOCK_N) * BLOCK_N)
    b = tl.maximum(a, tl.minimum(clear, n_k) // BLOCK_N * BLOCK_N)
    return starts, ends, (lo, a, b, hi)


@triton.jit
def _forward_kernel(
    Q8, Q_SCALE, K8, K_SCALE, V, V8T, V_SCALE, LARGEST_V, STARTS, ENDS, SINK_SCORES, O, LSE,
    scale, heads, group, n_q, n_k, padded_k, tiles, stride_vb, stride_vn, stride_vh,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, PACKED: tl.constexpr, INT8_PV: tl.constexpr, HALF_SUMS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) % tiles
    if IS_CAUSAL:  # The longest rows start first, so that short ones fill the end.
        tile = tiles - 1 - tile
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = bh // heads, bh % heads
    kv_heads = heads // group
    bh_kv = batch * kv_heads + head // group
    Q8 += bh * n_q * HEAD_DIM
    Q_SCALE += bh * n_q
    K8 += bh_kv * n_k * HEAD_DIM
    K_SCALE += bh_kv * n_k
    V += batch * stride_vb + (head // group) * stride_vh
    if INT8_PV:
        V8T += bh_kv * padded_k * HEAD_DIM
        V_SCALE += bh_kv * n_k

    first = tile * BLOCK_M
    offset = n_k - n_q
    rows = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q8 = load_tokens(Q8, first, n_q, HEAD_DIM, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    q_scale = load_vector(Q_SCALE, first, n_q, 0.0, BLOCK_M, True) * (scale * LOG2E)
    # A row of zeros has the scale 0, which would turn a masked score into NaN; any other number does.
    q_scale = tl.where(q_scale == 0.0, 1e-30, q_scale)

    starts, ends, bounds = ranges_of_keys(STARTS, ENDS, rows, first, n_q, n_k, BLOCK_M, BLOCK_N, IS_CAUSAL, PACKED)

    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for part in tl.static_range(0 if PACKED else 1, 3):
        # The online softmax over a range of key tiles, of which the middle one needs no mask. Scores are in units of
        # log 2, by q_scale.
        for n in tl.range(bounds[part], bounds[part + 1], BLOCK_N):
            n = tl.multiple_of(n, BLOCK_N)
            k8 = load_tokens(K8, n, n_k, HEAD_DIM, BLOCK_N, HEAD_DIM, BLOCK_D, part != 1)
            k_scale = load_vector(K_SCALE, n, n_k, 0.0, BLOCK_N, part != 1)
            s = scores_of(q8, tl.trans(k8), k_scale[None, :])
            # This saves a multiplication: the row's scale goes into the exponential's factor.
            factor = q_scale[:, None]
            if part != 1:
                columns = n + tl.arange(0, BLOCK_N)
                seen = (columns < n_k)[None, :]
                if IS_CAUSAL:
                    seen = seen & (columns[None, :] <= rows[:, None] + offset)
                if PACKED:
                    seen = seen & (columns[None, :] >= starts[:, None]) & (columns[None, :] < ends[:, None])
                s = tl.where(seen, s, float("-inf"))
            tile_m = tl.max(s, 1) * q_scale
            new_m = tl.maximum(m, tile_m)
            if part != 1:  # A row may have seen no key yet.
                finite_m = tl.where(new_m == float("-inf"), 0.0, new_m)
                finite_tile_m = tl.where(tile_m == float("-inf"), 0.0, tile_m)
            else:
                finite_m = new_m
                finite_tile_m = tile_m
            alpha = tl.exp2(m - finite_m)
            if INT8_PV:
                p = tl.exp2(s * factor - finite_tile_m[:, None])
                beta = tl.exp2(tile_m - finite_m)
                v8t = load_transposed(V8T, n, padded_k, BLOCK_N, HEAD_DIM, BLOCK_D)
                product = as_float(tl.dot(in_operand_order(as_codes(p * 127.0)), tl.trans(v8t)))
                acc = acc * alpha[:, None] + product * (beta * (tl.load(V_SCALE + n) / 127.0))[:, None]
                l = l * alpha + tl.sum(p, 1) * beta
            else:
                p = tl.exp2(s * factor - finite_m[:, None])
                v = load_tokens(V, n, n_k, stride_vn, BLOCK_N, HEAD_DIM, BLOCK_D, part != 1)
                acc = acc * alpha[:, None]
                if HALF_SUMS:  # Sums are in float16 inside a tile and in float32 between tiles.
                    acc += dot16(p.to(tl.float16), v, HALF_SUMS=True)
                else:
                    acc = dot16(p.to(V.dtype.element_ty), v, acc)
                l = l * alpha + tl.sum(p, 1)
            m = new_m

    lse = (m + tl.log2(l)) * LN2
    if SINK_SCORES is not None:
        own = tl.load(SINK_SCORES + bh * n_q + rows, mask=rows < n_q, other=0.0)
        # Relative to the larger one. A sink of minus infinity adds the logarithm of 1, which is 0.
        larger = tl.maximum(lse, own)
        both = larger + tl.log2(tl.exp2((lse - larger) * LOG2E) + tl.exp2((own - larger) * LOG2E)) * LN2
        shrink = tl.exp2((lse - both) * LOG2E)
        lse = both
    tl.store(LSE + bh * n_q + rows, lse, mask=rows < n_q)
    if HALF_SUMS:
        _, back = power_of_two(tl.load(LARGEST_V + bh_kv), V_BITS)
        acc *= back
    out = O + (batch * n_q * heads + head) * HEAD_DIM + rows.to(tl.int64)[:, None] * (heads * HEAD_DIM) + d[None, :]
    acc = acc / l[:, None]
    if SINK_SCORES is not None:
        acc *= shrink[:, None]
    tl.store(out, acc, mask=(rows < n_q)[:, None] & (d < HEAD_DIM)[None, :])


def triton_forward(call: Call) -> tuple[Tensor, Saved]:
    """Compute reference.twin_forward on a GPU, up to the order of float32 sums."""
    q, k, v, rules = call.q, call.k, call.v, RECIPES[call.recipe]
    batch, n_q, heads, head_dim = q.shape
    n_k, kv_heads = k.shape[1:3]
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    with on_device_of(q):
        k_mean = token_mean(k) if call.smooth_k else None
        q_codes = quantize_triton(q, per_tile=rules.per_tile)
        k_codes = quantize_triton(k, mean=k_mean, per_tile=rules.per_tile)
        v8t = v_scale = None
        if rules.int8_pv:
            v_codes, v_scale = quantize_triton(v, per_tile=True)
            v8t = transpose_codes(v_codes)
        half, v_largest = not rules.int8_pv and half_sums(q.device), None
        if half:
            v, v_largest = in_half_units(v)
        starts, ends = (None, None) if call.bounds is None else call.bounds.unbind()
        own = sink_scores(call, k_mean)
        o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty((batch, heads, n_q), dtype=torch.float32, device=q.device)
        tiles = launch_tiles("forward", q.device, block_d(head_dim), exact=rules.int8_pv)
        blocks = triton.cdiv(n_q, tiles.block_m)
        _forward_kernel[(blocks * batch * heads,)](
            *q_codes, *k_codes, v, v8t, v_scale, v_largest,
            starts, ends, own, o, lse,
            call.scale, heads, heads // kv_heads, n_q, n_k, triton.cdiv(n_k, TILE) * TILE, blocks, *v.stride()[:3],
            HEAD_DIM=head_dim, BLOCK_D=block_d(head_dim), IS_CAUSAL=call.causal, PACKED=call.bounds is not None,
            INT8_PV=rules.int8_pv, HALF_SUMS=half, **tiles.launch,
        )  # fmt: skip
    return o, Saved(lse, q_codes, k_codes, None if own is None else k_mean, own)
