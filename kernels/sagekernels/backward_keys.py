"""The portable Triton kernel for dK and dV, which backward.py launches. It works on S^T, where a column of P and dS is
a row."""

import triton
import triton.language as tl

from .pieces import (
    MAGIC_BITS,
    as_codes,
    as_float,
    as_shifted_codes,
    dot16,
    in_operand_order,
    largest_magnitude,
    load_quads,
    load_tokens,
    load_transposed,
    load_vector,
    scale_and_inverse,
    scores_of,
)


@triton.jit
def dkdv_kernel(
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
