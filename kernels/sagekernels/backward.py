"""The portable Triton backward: one kernel for dK and dV, one for dQ, no atomics. The formulas are in reference.py.

Both kernels recompute S from the saved codes and dP in 16 bits. Each accumulates into registers over the other side of
the scores, so the direction of its scales is a reduction inside a warp. dK and dV work on S^T, where a column of P and
dS is a row. dQ works on S.
"""

import torch
import triton
import triton.language as tl

from .call import RECIPES, BackwardCall, Gradients, bounds_of_keys
from .forward import ranges_of_keys
from .launch import half_sums, launch_tiles, on_device_of
from .pieces import (
    DO_BITS,
    LOG2E,
    MAGIC,
    MAGIC_BITS,
    V_BITS,
    as_codes,
    as_float,
    as_shifted_codes,
    block_d,
    dot16,
    in_operand_order,
    inverse_scale,
    largest_magnitude,
    load_quads,
    load_tokens,
    load_transposed,
    load_vector,
    max_or_nan,
    power_of_two,
    scale_and_inverse,
    scores_of,
)
from .quantize import TILE, dequantize_triton, in_half_units, tiles_of, transpose_codes


@triton.jit
def _queries_kernel(
    DO, O, LSE, Q_SCALE, LARGEST_V, SINK_SCORES, DELTA, BACK, QUERIES, DO8T, SHIFTED, DO16, SINK_TERMS,
    scale, heads, group, tokens, padded, tiles, stride_b, stride_n, stride_h,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr, PER_TILE: tl.constexpr,
    INT8_GRADIENTS: tl.constexpr, HALF_SUMS: tl.constexpr,
):  # fmt: skip
    """Prepare everything that a tile of queries of one head brings to the gradients.

    The kernel writes dO in the forms in which it is multiplied, delta = rowsum(dO o O), and four numbers a query
    (QUERIES), so that the kernel of dK and dV has nothing to compute for a query.

    step = s_Q scale log2(e) turns products into scores. With shift = lse - log s_dO (in log 2) and factor = s_Q / s_dO:
    P s_dO = exp2(S - shift), and dS s_Q = (P s_dO) (dP factor - share), share = delta factor. Where s_dO is 0 the whole
    row of dO is 0, and so are both results. Without INT8_GRADIENTS shift is lse and share is delta.

    HALF_SUMS: dO and V are multiplied by powers of two, which multiplies dP and delta too. factor divides by the powers
    again. The kernel of dQ divides by the power in BACK at its end.

    SINK_SCORES: the weight of the sink times delta goes to SINK_TERMS.
    """
    tile = tl.program_id(0) % tiles
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = bh // heads, bh % heads
    start = tile * TILE
    do = load_tokens(DO + batch * stride_b + head * stride_h, start, tokens, stride_n, TILE, HEAD_DIM, BLOCK_D, True)
    o = load_tokens(
        O + (batch * tokens * heads + head) * HEAD_DIM, start, tokens, heads * HEAD_DIM, TILE, HEAD_DIM, BLOCK_D, True
    )
    do = do.to(tl.float32)
    delta = tl.sum(do * o.to(tl.float32), 1)
    row, d = start + tl.arange(0, TILE), tl.arange(0, BLOCK_D)
    inside = row < tokens
    t = bh * tokens + row
    if SINK_SCORES is not None:
        own = tl.load(SINK_SCORES + t, mask=inside, other=0.0) - tl.load(LSE + t, mask=inside, other=0.0)
        tl.store(SINK_TERMS + t, tl.exp2(own * LOG2E) * delta, mask=inside)
    step = load_vector(Q_SCALE + bh * tokens, start, tokens, 0.0, TILE, True) * (scale * LOG2E)
    shift = load_vector(LSE + bh * tokens, start, tokens, 0.0, TILE, True) * LOG2E
    factor = tl.zeros_like(delta) + 1.0
    share = delta
    if INT8_GRADIENTS:
        largest = largest_magnitude(do, PER_TILE)
        codes = as_codes(do * inverse_scale(largest)[:, None])
        of_d = (d < HEAD_DIM)[:, None]
        pointers = DO8T + bh * padded * HEAD_DIM + d[:, None] * padded + row[None, :]
        tl.store(pointers, in_operand_order(tl.trans(codes)), mask=of_d)
        # The product of shifted codes bears the magic number. This sum turns it into a product of plain codes.
        if not PER_TILE:
            shifted = 127.0 * tl.sum(codes.to(tl.float32), 0) - MAGIC
            tl.store(SHIFTED + (bh * tiles + tile) * HEAD_DIM + d, shifted, mask=d < HEAD_DIM)
        do_scale = largest / 127.0
        factor = tl.where(do_scale == 0.0, 0.0, 1.0 / do_scale)
        factor *= load_vector(Q_SCALE + bh * tokens, start, tokens, 0.0, TILE, True)
        shift -= tl.log2(do_scale)
        share *= factor
        if HALF_SUMS:
            of_v, back_from_v = power_of_two(tl.load(LARGEST_V + batch * (heads // group) + head // group), V_BITS)
            of_do, back = power_of_two(max_or_nan(tl.abs(do), 1), DO_BITS)
            do16 = (do * of_do[:, None]).to(tl.float16)
            tl.store(DO16 + t[:, None] * HEAD_DIM + d[None, :], do16, mask=inside[:, None] & (d < HEAD_DIM)[None, :])
            tl.store(BACK + t, back, mask=inside)
            factor = factor * back * back_from_v
            delta = delta * of_do * of_v
    tl.store(DELTA + t, delta, mask=inside)
    tl.store(QUERIES + 4 * t, step, mask=inside)
    tl.store(QUERIES + 4 * t + 1, shift, mask=inside)
    tl.store(QUERIES + 4 * t + 2, factor, mask=inside)
    tl.store(QUERIES + 4 * t + 3, share, mask=inside)


@triton.jit
def _dkdv_kernel(
    Q8, Q8T, Q16, K8, K_SCALE, V, DO, DO8T, SHIFTED, QUERIES, QUERIES_AGAIN, STARTS, ENDS, DK, DV,
    scale, kv_heads, group, n_q, n_k, padded_q, tiles,
    stride_vb, stride_vn, stride_vh, stride_db, stride_dn, stride_dh,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, PACKED: tl.constexpr, PER_TILE: tl.constexpr,
    INT8_GRADIENTS: tl.constexpr, HALF_SUMS: tl.constexpr,
):  # fmt: skip
    """Compute one tile of keys of one key head, over all query heads that share it and all queries that see it."""
    tile = tl.program_id(0) % tiles
    bh_kv = (tl.program_id(0) // tiles).to(tl.int64)
    batch, kv_head = bh_kv // kv_heads, bh_kv % kv_heads
    heads = kv_heads * group
    first = tile * BLOCK_N
    keys = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    k8 = load_tokens(K8 + bh_kv * n_k * HEAD_DIM, first, n_k, HEAD_DIM, BLOCK_N, HEAD_DIM, BLOCK_D, True)
    k_scale = load_vector(K_SCALE + bh_kv * n_k, first, n_k, 0.0, BLOCK_N, True)
    V += batch * stride_vb + kv_head * stride_vh
    v = load_tokens(V, first, n_k, stride_vn, BLOCK_N, HEAD_DIM, BLOCK_D, True)

    # Queries lo .. a need a mask (the diagonal, the start of a document). Queries a .. b need none, and b .. hi need
    # one again (the ends of documents).
    offset = n_k - n_q
    lo = 0
    a = 0
    hi = n_q
    clear = n_q
    starts = keys
    ends = keys
    last = tl.minimum(first + BLOCK_N, n_k) - 1
    if IS_CAUSAL:
        lo = tl.maximum(first - offset, 0) // BLOCK_M * BLOCK_M
        a = tl.cdiv(tl.maximum(last - offset, 0), BLOCK_M) * BLOCK_M
    if PACKED:
        starts = tl.load(STARTS + keys, mask=keys < n_k, other=0)
        ends = tl.load(ENDS + keys, mask=keys < n_k, other=0)
        lo = tl.maximum(lo, tl.load(STARTS + first) // BLOCK_M * BLOCK_M)
        a = tl.maximum(a, tl.cdiv(tl.load(STARTS + last), BLOCK_M) * BLOCK_M)
        hi = tl.load(ENDS + last)
        clear = tl.load(ENDS + first)
    a = tl.minimum(a, tl.cdiv(hi, BLOCK_M) * BLOCK_M)
    b = tl.maximum(a, clear // BLOCK_M * BLOCK_M)
    bounds = (lo, a, b, hi)

    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for g in range(group):
        head = kv_head * group + g
        bh = batch * heads + head
        q_base = Q8 + bh * n_q * HEAD_DIM
        do_base = DO + batch * stride_db + head * stride_dh
        qt_base, q16_base, dot_base, shifted_base = Q8T, Q16, DO8T, SHIFTED
        if INT8_GRADIENTS:
            qt_base += bh * padded_q * HEAD_DIM
            dot_base += bh * padded_q * HEAD_DIM
            if not PER_TILE:
                shifted_base += bh * (padded_q // BLOCK_M) * HEAD_DIM
        else:
            q16_base += bh * n_q * HEAD_DIM
        queries, queries_again = QUERIES + bh * n_q * 4, QUERIES_AGAIN + bh * n_q * 4
        for part in tl.static_range(0 if IS_CAUSAL or PACKED else 1, 3):
            for i in tl.range(bounds[part], bounds[part + 1], BLOCK_M):  # The middle range needs no mask.
                i = tl.multiple_of(i, BLOCK_M)
                # SHIFTED is loaded here, where registers are free, because Triton does not copy it ahead.
                if INT8_GRADIENTS and not PER_TILE:
                    shifted = tl.load(shifted_base + (i // BLOCK_M) * HEAD_DIM + d, mask=d < HEAD_DIM, other=0.0)
                q8 = load_tokens(q_base, i, n_q, HEAD_DIM, BLOCK_M, HEAD_DIM, BLOCK_D, part != 1)
                step, shift, _, _ = load_quads(queries, i, n_q, BLOCK_M, part != 1)
                st = scores_of(k8, tl.trans(q8), k_scale[:, None])
                st = st * step[None, :]
                pt = tl.exp2(st - shift[None, :])
                if part != 1:
                    rows = i + tl.arange(0, BLOCK_M)
                    seen = (rows < n_q)[None, :]
                    if IS_CAUSAL:
                        seen = seen & (keys[:, None] <= rows[None, :] + offset)
                    if PACKED:
                        seen = seen & (rows[None, :] >= starts[:, None]) & (rows[None, :] < ends[:, None])
                    pt = tl.where(seen, pt, 0.0)
                if INT8_GRADIENTS:
                    p_scale, inverse = scale_and_inverse(largest_magnitude(pt, PER_TILE))
                    do8t = load_transposed(dot_base, i, padded_q, BLOCK_M, HEAD_DIM, BLOCK_D)
                    if PER_TILE:
                        p8 = as_codes(pt * inverse[:, None])
                        dv += as_float(tl.dot(in_operand_order(p8), tl.trans(do8t))) * p_scale[:, None]
                    else:
                        # SHIFTED makes floats of the product and adds the part that the shift of the codes by 127 took
                        # away.
                        p8 = as_shifted_codes(pt * (2.0 * inverse)[:, None])
                        product = tl.dot(in_operand_order(p8), tl.trans(do8t)) + MAGIC_BITS
                        product = product.to(tl.float32, bitcast=True) + shifted[None, :]
                        dv += product * (0.5 * p_scale)[:, None]
                do = load_tokens(do_base, i, n_q, stride_dn, BLOCK_M, HEAD_DIM, BLOCK_D, part != 1)
                dpt = dot16(v, tl.trans(do), HALF_SUMS=HALF_SUMS)
                # The same matrix is read under another name. If all four vectors were loaded at once, they would stay
                # in registers until here.
                _, _, factor, share = load_quads(queries_again, i, n_q, BLOCK_M, part != 1)
                if INT8_GRADIENTS:
                    dst = pt * (dpt * factor[None, :] - share[None, :])
                else:
                    dv = dot16(pt.to(DO.dtype.element_ty), do, dv)
                    dst = pt * (dpt - share[None, :])
                if INT8_GRADIENTS:
                    ds_scale, inverse = scale_and_inverse(largest_magnitude(dst, PER_TILE))
                    ds8 = as_codes(dst * inverse[:, None])
                    q8t = load_transposed(qt_base, i, padded_q, BLOCK_M, HEAD_DIM, BLOCK_D)
                    dk += as_float(tl.dot(in_operand_order(ds8), tl.trans(q8t))) * ds_scale[:, None]
                else:
                    q16 = load_tokens(q16_base, i, n_q, HEAD_DIM, BLOCK_M, HEAD_DIM, BLOCK_D, part != 1)
                    dk = dot16(dst.to(tl.bfloat16), q16, dk)

    stride = kv_heads * HEAD_DIM
    out = (batch * n_k * kv_heads + kv_head) * HEAD_DIM + keys.to(tl.int64)[:, None] * stride + d[None, :]
    inside = (keys < n_k)[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(DK + out, dk * scale, mask=inside)
    tl.store(DV + out, dv, mask=inside)


@triton.jit
def _dq_kernel(
    Q8, Q_SCALE, K8, K8T, K16, K_SCALE, K_MEAN, V, DO, LSE, DELTA, BACK, LARGEST_V, STARTS, ENDS, SINK_TERMS, DQ,
    scale, heads, group, n_q, n_k, padded_k, tiles, stride_vb, stride_vn, stride_vh, stride_db, stride_dn, stride_dh,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    IS_CAUSAL: tl.constexpr, PACKED: tl.constexpr, PER_TILE: tl.constexpr,
    INT8_GRADIENTS: tl.constexpr, HALF_SUMS: tl.constexpr,
):  # fmt: skip
    """Compute one tile of queries of one head, over all keys that it sees."""
    tile = tl.program_id(0) % tiles
    if IS_CAUSAL:  # The longest rows start first, so that short ones fill the end.
        tile = tiles - 1 - tile
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = bh // heads, bh % heads
    kv_head = head // group
    bh_kv = batch * (heads // group) + kv_head
    K8 += bh_kv * n_k * HEAD_DIM
    if INT8_GRADIENTS:
        K8T += bh_kv * padded_k * HEAD_DIM
    else:
        K16 += bh_kv * n_k * HEAD_DIM
    K_SCALE += bh_kv * n_k
    V += batch * stride_vb + kv_head * stride_vh
    if K_MEAN is not None:
        K_MEAN += bh_kv * HEAD_DIM

    first = tile * BLOCK_M
    offset = n_k - n_q
    rows = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    q8 = load_tokens(Q8 + bh * n_q * HEAD_DIM, first, n_q, HEAD_DIM, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    q_scale = load_vector(Q_SCALE + bh * n_q, first, n_q, 0.0, BLOCK_M, True) * (scale * LOG2E)
    do = load_tokens(DO + batch * stride_db + head * stride_dh, first, n_q, stride_dn, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    lse = load_vector(LSE + bh * n_q, first, n_q, float("inf"), BLOCK_M, True) * LOG2E
    delta = load_vector(DELTA + bh * n_q, first, n_q, 0.0, BLOCK_M, True)

    starts, ends, bounds = ranges_of_keys(STARTS, ENDS, rows, first, n_q, n_k, BLOCK_M, BLOCK_N, IS_CAUSAL, PACKED)

    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for part in tl.static_range(0 if PACKED else 1, 3):
        for n in tl.range(bounds[part], bounds[part + 1], BLOCK_N):  # The middle range needs no mask.
            n = tl.multiple_of(n, BLOCK_N)
            k8 = load_tokens(K8, n, n_k, HEAD_DIM, BLOCK_N, HEAD_DIM, BLOCK_D, part != 1)
            k_scale = load_vector(K_SCALE, n, n_k, 0.0, BLOCK_N, part != 1)
            s = scores_of(q8, tl.trans(k8), k_scale[None, :])
            s = s * q_scale[:, None]
            p = tl.exp2(s - lse[:, None])
            if part != 1:
                columns = n + tl.arange(0, BLOCK_N)
                seen = (columns < n_k)[None, :]
                if IS_CAUSAL:
                    seen = seen & (columns[None, :] <= rows[:, None] + offset)
                if PACKED:
                    seen = seen & (columns[None, :] >= starts[:, None]) & (columns[None, :] < ends[:, None])
                p = tl.where(seen, p, 0.0)
            v = load_tokens(V, n, n_k, stride_vn, BLOCK_N, HEAD_DIM, BLOCK_D, part != 1)
            ds = p * (dot16(do, tl.trans(v), HALF_SUMS=HALF_SUMS) - delta[:, None])
            if INT8_GRADIENTS:
                ds = ds * k_scale[None, :]
                ds_scale, inverse = scale_and_inverse(largest_magnitude(ds, PER_TILE))
                ds8 = as_codes(ds * inverse[:, None])
                k8t = load_transposed(K8T, n, padded_k, BLOCK_N, HEAD_DIM, BLOCK_D)
                dq += as_float(tl.dot(in_operand_order(ds8), tl.trans(k8t))) * ds_scale[:, None]
            else:
                k16 = load_tokens(K16, n, n_k, HEAD_DIM, BLOCK_N, HEAD_DIM, BLOCK_D, part != 1)
                dq = dot16(ds.to(tl.bfloat16), k16, dq)
    if HALF_SUMS:
        _, back_from_v = power_of_two(tl.load(LARGEST_V + bh_kv), V_BITS)
        dq = dq * back_from_v * load_vector(BACK + bh * n_q, first, n_q, 0.0, BLOCK_M, True)[:, None]
    if SINK_TERMS is not None:
        if K_MEAN is not None:  # A row of dS does not sum to zero.
            terms = load_vector(SINK_TERMS + bh * n_q, first, n_q, 0.0, BLOCK_M, True)
            dq += terms[:, None] * tl.load(K_MEAN + d, mask=d < HEAD_DIM, other=0.0)[None, :]
    out = DQ + (batch * n_q * heads + head) * HEAD_DIM + rows.to(tl.int64)[:, None] * (heads * HEAD_DIM) + d[None, :]
    tl.store(out, dq * scale, mask=(rows < n_q)[:, None] & (d < HEAD_DIM)[None, :])


def triton_backward(call: BackwardCall) -> Gradients:
    """Compute reference.twin_backward on a GPU, up to the order of float32 sums."""
    do, v, saved, scale, rules = call.do, call.v, call.saved, call.scale, RECIPES[call.recipe]
    batch, n_q, heads, head_dim = do.shape
    n_k, kv_heads = v.shape[1:3]
    group, held = heads // kv_heads, block_d(head_dim)
    do, v = (x if x.stride(3) == 1 else x.contiguous() for x in (do, v))
    half = rules.int8_gradients and half_sums(do.device)
    kind = {"HEAD_DIM": head_dim, "BLOCK_D": held, "PER_TILE": rules.per_tile, "HALF_SUMS": half}
    kind |= {"INT8_GRADIENTS": rules.int8_gradients}
    seen = {"IS_CAUSAL": call.causal, "PACKED": call.bounds is not None}
    with on_device_of(do):
        do8t = shifted = do16 = back = v_largest = q8t = k8t = q16 = k16 = None
        if rules.int8_gradients:
            q8t, k8t = transpose_codes(saved.q.codes), transpose_codes(saved.k.codes)
            do8t = torch.empty_like(q8t)
            if not rules.per_tile:
                shifted = torch.empty((batch, heads, tiles_of(n_q), head_dim), dtype=torch.float32, device=do.device)
        else:
            q16, k16 = dequantize_triton(saved.q), dequantize_triton(saved.k)
        delta = torch.empty_like(saved.lse)
        queries = torch.empty((*saved.lse.shape, 4), dtype=torch.float32, device=do.device)
        if half:
            v, v_largest = in_half_units(v)
            do16 = torch.empty((batch, heads, n_q, head_dim), dtype=torch.float16, device=do.device)
            back = torch.empty_like(delta)
        _queries_kernel[(tiles_of(n_q) * batch * heads,)](
            do, call.o, saved.lse, saved.q.scale, v_largest, saved.sink_scores,
            delta, back, queries, do8t, shifted, do16, call.sink_terms,
            scale, heads, group, n_q, tiles_of(n_q) * TILE, tiles_of(n_q), *do.stride()[:3],
            TILE=TILE, num_warps=4, **kind,
        )  # fmt: skip
        if half:
            do = do16.transpose(1, 2)
        starts, ends = (None, None) if call.bounds is None else call.bounds.unbind()
        dq = torch.empty(do.shape, dtype=v.dtype, device=do.device)
        dk, dv = (torch.empty(v.shape, dtype=v.dtype, device=do.device) for _ in range(2))
        strides = (*v.stride()[:3], *do.stride()[:3])

        tiles = launch_tiles("dkdv", do.device, held, exact=rules.per_tile)
        blocks = triton.cdiv(n_k, tiles.block_n)
        _dkdv_kernel[(blocks * batch * kv_heads,)](
            saved.q.codes, q8t, q16, *saved.k, v, do, do8t, shifted, queries, queries,
            *bounds_of_keys(call.bounds, n_q), dk, dv,
            scale, kv_heads, group, n_q, n_k, tiles_of(n_q) * TILE, blocks, *strides, **kind, **seen, **tiles.launch,
        )  # fmt: skip
        tiles = launch_tiles("dq", do.device, held, exact=rules.per_tile)
        blocks = triton.cdiv(n_q, tiles.block_m)
        _dq_kernel[(blocks * batch * heads,)](
            *saved.q, saved.k.codes, k8t, k16, saved.k.scale, saved.k_mean, v, do, saved.lse, delta, back, v_largest,
            starts, ends, call.sink_terms, dq,
            scale, heads, group, n_q, n_k, tiles_of(n_k) * TILE, blocks, *strides, **kind, **seen, **tiles.launch,
        )  # fmt: skip
    return dq, dk, dv
