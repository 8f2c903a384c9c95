"""Hopper forward of the recipes `fine` and `scores`, in Gluon: TMA, asynchronous warpgroup MMA, warp specialization.

Formulas and granularity are those of reference.twin_forward: INT8 Q K^T with one scale per token, P V in the 16 bits of
V. The grid is persistent. One warp fetches; each of two warpgroups owns 64 queries. A consumer issues the scores of the
next key tile and P V of this one together and runs the softmax of the next tile under P V. The queue never drains
between blocks of queries: the first scores of the next block stand behind the last P V of this one. The schedule, its
limits and what was measured are in kernels/NOTES.md, section Forward.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .forward import document_bounds_triton
from .launch import on_device_of
from .pieces import LOG2E, as_codes, inverse_scale, max_or_nan
from .quantize import Codes
from .reference import RECIPES, Saved

# Arguments that change from call to call; a value of one would otherwise be compiled in.
_SIZES = ["H", "KV_HEADS", "HEADS", "N_Q", "N_K", "NK_PAD", "M_BLOCKS", "HEADS_PER_GROUP", "TILES", "stride_vh"]
CONSUMERS = gl.constexpr(2)  # warpgroups of 64 queries
LOWEST = gl.constexpr(-1e30)  # finite, so that a row that has seen no key yet needs no special case


@gluon.jit
def _exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _row_max(t, row_layout: gl.constexpr):
    """Maximum of each row of t [64, BLOCK_N], as a tree inside the thread before lanes are combined."""
    for _ in gl.static_range(3):
        left, right = gl.split(gl.permute(gl.reshape(t, [64, 2, t.shape[1] // 2]), (0, 2, 1)))
        t = gl.maximum(left, right)
    return gl.convert_layout(gl.max(t, 1), row_layout)


@gluon.jit
def _load_key_scales(memory, s_layout: gl.constexpr, BLOCK_N: gl.constexpr):
    """Scales of BLOCK_N keys, stored so that a thread finds its own four of every 16 side by side."""
    bases: gl.constexpr = [[1], [2], [16], [32], [64]] if BLOCK_N == 128 else [[1], [2], [16], [32]]
    load: gl.constexpr = gl.DistributedLinearLayout(bases, [[4], [8], [0], [0], [0]], [[0], [0]], [], [BLOCK_N])
    scales = gl.permute(gl.reshape(memory.load(load), [BLOCK_N // 16, 4, 2, 2]), (0, 2, 1, 3))
    return gl.convert_layout(gl.reshape(scales, [BLOCK_N]), gl.SliceLayout(0, s_layout))


@gluon.jit
def _load_q_scale(Q_SCALE, head, row0, rows, N_Q, factor):
    """log2 units of a score, per row. A row of zeros gets any value but zero: zero times a masked -inf is NaN."""
    q_scale = gl.load(Q_SCALE + head.to(gl.int64) * N_Q + row0 + rows, mask=row0 + rows < N_Q, other=1.0) * factor
    return gl.where(q_scale == 0.0, 1.0, q_scale)


@gluon.jit
def _decode(tile, M_BLOCKS, HEADS, HEADS_PER_GROUP):
    """Head and block of queries: groups of heads whose K and V fit the L2 cache, the longest blocks first in each."""
    group = tile // (M_BLOCKS * HEADS_PER_GROUP)
    rest = tile - group * (M_BLOCKS * HEADS_PER_GROUP)
    heads = gl.minimum(HEADS_PER_GROUP, HEADS - group * HEADS_PER_GROUP)
    return group * HEADS_PER_GROUP + rest % heads, M_BLOCKS - 1 - rest // heads


@gluon.jit
def _key_range(
    block, documents, N_Q, N_K, BLOCK_N: gl.constexpr, IS_CAUSAL: gl.constexpr, PACKED: gl.constexpr
):  # fmt: skip
    """First key tile that a block of queries sees, and their number."""
    BLOCK_M: gl.constexpr = 64 * CONSUMERS
    if PACKED:
        STARTS, ENDS = documents
        last = gl.minimum((block + 1) * BLOCK_M, N_Q) - 1
        first_tile = gl.load(STARTS + block * BLOCK_M) // BLOCK_N
        end = gl.load(ENDS + last)
        if IS_CAUSAL:
            end = gl.minimum(end, last + 1)
        return first_tile, gl.cdiv(end, BLOCK_N) - first_tile
    elif IS_CAUSAL:
        return 0, gl.cdiv(gl.minimum((block + 1) * BLOCK_M + N_K - N_Q, N_K), BLOCK_N)
    else:
        return 0, gl.cdiv(N_K, BLOCK_N)


@gluon.jit
def _row_bounds(documents, row0, rows, N_Q, PACKED: gl.constexpr):
    """First key of each row's document, and one past its last."""
    if PACKED:
        STARTS, ENDS = documents
        inside = row0 + rows < N_Q
        starts = gl.load(STARTS + row0 + rows, mask=inside, other=0)
        return starts, gl.load(ENDS + row0 + rows, mask=inside, other=1)
    else:
        return rows, rows


@gluon.jit
def _clear_range(
    row0, lo, n, documents, N_Q, N_K, BLOCK_N: gl.constexpr, IS_CAUSAL: gl.constexpr, PACKED: gl.constexpr
):  # fmt: skip
    """Of key tiles 1 .. n (from tile lo), those that all 64 rows see whole: from, to."""
    begin = 1
    end = N_K // BLOCK_N
    if PACKED:
        STARTS, ENDS = documents
        begin = gl.cdiv(gl.load(STARTS + gl.minimum(row0 + 63, N_Q - 1)), BLOCK_N) - lo
        begin = gl.minimum(gl.maximum(begin, 1), n)
        keys = gl.load(ENDS + gl.minimum(row0, N_Q - 1))
        if IS_CAUSAL:
            keys = gl.minimum(keys, row0 + 1)
        end = gl.minimum(keys // BLOCK_N - lo, n)
    elif IS_CAUSAL:
        end = gl.minimum(n, (row0 + N_K - N_Q + 1) // BLOCK_N)
    return begin, gl.maximum(end, begin)


@gluon.jit
def _producer(
    descs, documents, shared, sizes,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, IS_CAUSAL: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = 64 * CONSUMERS
    q_desc, k_desc, v_desc, ks_desc = descs
    q_s, k_s, v_s, ks_s, q_full, q_free, kv_full, kv_free = shared
    H, KV_HEADS, HEADS, N_Q, N_K, NK_PAD, M_BLOCKS, HEADS_PER_GROUP, TILES, stride_vh = sizes
    it = 0
    for tile in range(gl.program_id(0), TILES, gl.num_programs(0)):
        turn = tile // gl.num_programs(0)
        head, block = _decode(tile, M_BLOCKS, HEADS, HEADS_PER_GROUP)
        batch = head // H
        kv_head = (head % H) // (H // KV_HEADS)
        kv = batch * KV_HEADS + kv_head
        for w in gl.static_range(CONSUMERS):
            slot = (turn % 2) * CONSUMERS + w
            mbarrier.wait(q_free.index(slot), ((turn // 2) & 1) ^ 1)
            mbarrier.expect(q_full.index(slot), 64 * HEAD_DIM)
            tma.async_copy_global_to_shared(
                q_desc, [head * N_Q + block * BLOCK_M + w * 64, 0], q_full.index(slot), q_s.index(slot)
            )
        lo, n = _key_range(block, documents, N_Q, N_K, BLOCK_N, IS_CAUSAL, PACKED)
        for j in range(lo, lo + n):
            stage = it % STAGES
            mbarrier.wait(kv_free.index(stage), ((it // STAGES) & 1) ^ 1)
            full = kv_full.index(stage)
            mbarrier.expect(full, 3 * BLOCK_N * HEAD_DIM + 4 * BLOCK_N)
            tma.async_copy_global_to_shared(k_desc, [kv * N_K + j * BLOCK_N, 0], full, k_s.index(stage))
            tma.async_copy_global_to_shared(ks_desc, [kv * NK_PAD + j * BLOCK_N], full, ks_s.index(stage))
            tma.async_copy_global_to_shared(v_desc, [batch, j * BLOCK_N, kv_head * stride_vh], full, v_s.index(stage))
            it += 1


@gluon.jit
def _scores(
    s, k_scale, rows, starts, ends, row0, key0, N_Q, N_K,
    s_layout: gl.constexpr, BLOCK_N: gl.constexpr, IS_CAUSAL: gl.constexpr, PACKED: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    t = s.to(gl.float32) * k_scale[None, :]
    if MASKED:
        keys = key0 + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
        end = N_K
        if IS_CAUSAL:
            end = gl.minimum(row0 + N_K - N_Q + 1, N_K)
        if PACKED:
            last = ends - 1
            if IS_CAUSAL:
                last = gl.minimum(rows + row0, last)
            t = gl.where((keys[None, :] >= starts[:, None]) & (keys[None, :] <= last[:, None]), t, float("-inf"))
        elif key0 + BLOCK_N > end:
            last = rows * 0 + (N_K - 1)
            if IS_CAUSAL:
                last = gl.minimum(rows + (row0 + N_K - N_Q), last)
            t = gl.where(keys[None, :] <= last[:, None], t, float("-inf"))
    return t


@gluon.jit
def _softmax(t, top, q_scale, m, l):
    """Probabilities relative to the running maximum of the row, and the factor for what was relative to the old one."""
    new_m = gl.maximum(m, top)
    alpha = _exp2(m - new_m)
    p = _exp2(t * q_scale[:, None] - new_m[:, None])
    return p, alpha, new_m, l * alpha + gl.sum(p, 1)


@gluon.jit
def _store(o, m, l, head, row0, outputs, H, N_Q, row_s: gl.constexpr, o_layout: gl.constexpr, HEAD_DIM: gl.constexpr):
    _, _, O, LSE, stride_ob, stride_on, stride_oh = outputs
    row_o: gl.constexpr = gl.SliceLayout(1, o_layout)
    rows = row0 + gl.arange(0, 64, row_o)
    d = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, o_layout))
    base = O + (head // H).to(gl.int64) * stride_ob + (head % H).to(gl.int64) * stride_oh
    pointers = base + rows.to(gl.int64)[:, None] * stride_on + d[None, :]
    o = o * gl.convert_layout(1.0 / l, row_o)[:, None]
    gl.store(pointers, o.to(O.dtype.element_ty), mask=(rows < N_Q)[:, None])
    rows_s = row0 + gl.arange(0, 64, row_s)
    lse = (m + gl.log2(l)) * 0.6931471805599453
    gl.store(LSE + head.to(gl.int64) * N_Q + rows_s, lse, mask=rows_s < N_Q)


@gluon.jit
def _step(
    p, o, m, l, q_scale, rows, starts, ends, row0, key0, it, q_slot, q_phase, wait_q, wait_kv, store, store_head,
    store_row0, shared, outputs, H, N_Q, N_K,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, IS_CAUSAL: gl.constexpr, PACKED: gl.constexpr,
    EDGE: gl.constexpr,
):  # fmt: skip
    """P V of key tile `it`, under it scores and softmax of the next one (keys from key0, rows from row0).

    EDGE: the next tile may need a mask, or belong to the next block of queries (store: write this one's result).
    """
    q_s, k_s, v_s, ks_s, q_full, _, kv_full, kv_free = shared
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    row_s: gl.constexpr = gl.SliceLayout(1, s_layout)
    stage = it % STAGES
    it += 1
    following = it % STAGES
    if EDGE:
        mbarrier.wait(q_full.index(q_slot), q_phase, pred=wait_q)
        mbarrier.wait(kv_full.index(following), (it // STAGES) & 1, pred=wait_kv)
    else:
        mbarrier.wait(kv_full.index(following), (it // STAGES) & 1)
    # Before the products: behind them in the queue of the memory unit these loads would wait for the tensor cores.
    k_scale = _load_key_scales(ks_s.index(following), s_layout, BLOCK_N)
    zero = gl.zeros([64, BLOCK_N], gl.int32, s_layout)
    s = warpgroup_mma(q_s.index(q_slot), k_s.index(following).permute((1, 0)), zero, use_acc=False, is_async=True)
    o = warpgroup_mma(p, v_s.index(stage).reshape([BLOCK_N, HEAD_DIM]), o, is_async=True)
    s = warpgroup_mma_wait(1, [s])
    t = _scores(
        s, k_scale, rows, starts, ends, row0, key0, N_Q, N_K, s_layout, BLOCK_N, IS_CAUSAL, PACKED, EDGE
    )  # fmt: skip
    top = _row_max(t, row_s) * q_scale
    o, top = warpgroup_mma_wait(0, [o, top])
    mbarrier.arrive(kv_free.index(stage), count=1)
    if EDGE:
        if store:
            _store(o, m, l, store_head, store_row0, outputs, H, N_Q, row_s, o_layout, HEAD_DIM)
            o = gl.zeros([64, HEAD_DIM], gl.float32, o_layout)
            l = gl.zeros([64], gl.float32, row_s)
            m = gl.full([64], LOWEST, gl.float32, row_s)
    p, alpha, m, l = _softmax(t, top, q_scale, m, l)
    o = o * gl.convert_layout(alpha, gl.SliceLayout(1, o_layout))[:, None]
    return gl.convert_layout(p.to(v_s.dtype), gl.DotOperandLayout(0, o_layout, 2)), o, m, l, it


@gluon.jit
def _consumer(
    outputs, documents, shared, sizes,
    WG: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, IS_CAUSAL: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = 64 * CONSUMERS
    q_s, k_s, v_s, ks_s, q_full, q_free, kv_full, _ = shared
    Q_SCALE, factor, _, _, _, _, _ = outputs
    H, _, HEADS, N_Q, N_K, _, M_BLOCKS, HEADS_PER_GROUP, TILES, _ = sizes
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    row_s: gl.constexpr = gl.SliceLayout(1, s_layout)
    rows = gl.arange(0, 64, row_s)
    it = 0
    q_slot = WG + 0
    q_phase = 0

    tile = gl.program_id(0)
    head, block = _decode(tile, M_BLOCKS, HEADS, HEADS_PER_GROUP)
    row0 = block * BLOCK_M + WG * 64
    lo, n = _key_range(block, documents, N_Q, N_K, BLOCK_N, IS_CAUSAL, PACKED)
    starts, ends = _row_bounds(documents, row0, rows, N_Q, PACKED)
    mbarrier.wait(q_full.index(WG), 0)
    mbarrier.wait(kv_full.index(0), 0)
    zero = gl.zeros([64, BLOCK_N], gl.int32, s_layout)
    s = warpgroup_mma(q_s.index(WG), k_s.index(0).permute((1, 0)), zero, use_acc=False, is_async=True)
    k_scale = _load_key_scales(ks_s.index(0), s_layout, BLOCK_N)
    q_scale = _load_q_scale(Q_SCALE, head, row0, rows, N_Q, factor)
    s = warpgroup_mma_wait(0, [s])
    t = _scores(
        s, k_scale, rows, starts, ends, row0, lo * BLOCK_N, N_Q, N_K, s_layout, BLOCK_N, IS_CAUSAL, PACKED, True
    )  # fmt: skip
    o = gl.zeros([64, HEAD_DIM], gl.float32, o_layout)
    l = gl.zeros([64], gl.float32, row_s)
    m = gl.full([64], LOWEST, gl.float32, row_s)
    p, _, m, l = _softmax(t, _row_max(t, row_s) * q_scale, q_scale, m, l)
    p = gl.convert_layout(p.to(v_s.dtype), gl.DotOperandLayout(0, o_layout, 2))

    while tile < TILES:
        a, b = _clear_range(row0, lo, n, documents, N_Q, N_K, BLOCK_N, IS_CAUSAL, PACKED)
        if PACKED:
            for j in range(1, a):
                p, o, m, l, it = _step(
                    p, o, m, l, q_scale, rows, starts, ends, row0, (lo + j) * BLOCK_N, it, q_slot, 0, False, True,
                    False, head, row0, shared, outputs, H, N_Q, N_K, HEAD_DIM, BLOCK_N, STAGES, IS_CAUSAL, PACKED, True,
                )  # fmt: skip
        for j in range(a, b):
            p, o, m, l, it = _step(
                p, o, m, l, q_scale, rows, starts, ends, row0, (lo + j) * BLOCK_N, it, q_slot, 0, False, True, False,
                head, row0, shared, outputs, H, N_Q, N_K, HEAD_DIM, BLOCK_N, STAGES, IS_CAUSAL, PACKED, False,
            )  # fmt: skip
        next_tile = tile + gl.num_programs(0)
        more = next_tile < TILES
        next_head, next_block = _decode(gl.minimum(next_tile, TILES - 1), M_BLOCKS, HEADS, HEADS_PER_GROUP)
        next_row0 = next_block * BLOCK_M + WG * 64
        next_lo, next_n = _key_range(next_block, documents, N_Q, N_K, BLOCK_N, IS_CAUSAL, PACKED)
        next_starts, next_ends = _row_bounds(documents, next_row0, rows, N_Q, PACKED)
        next_q_scale = _load_q_scale(Q_SCALE, next_head, next_row0, rows, N_Q, factor)
        next_slot = q_slot + CONSUMERS
        next_phase = q_phase
        if next_slot >= 2 * CONSUMERS:
            next_slot = WG + 0
            next_phase = q_phase ^ 1
        for j in range(b, n + 1):
            last = j == n
            if last:
                q_scale = next_q_scale
                if PACKED:
                    starts = next_starts
                    ends = next_ends
            p, o, m, l, it = _step(
                p, o, m, l, q_scale, rows, starts, ends, gl.where(last, next_row0, row0),
                gl.where(last, next_lo, lo + j) * BLOCK_N, it, gl.where(last, next_slot, q_slot), next_phase,
                last & more, (j < n) | more, last, head, row0, shared, outputs, H, N_Q, N_K,
                HEAD_DIM, BLOCK_N, STAGES, IS_CAUSAL, PACKED, True,
            )  # fmt: skip
        mbarrier.arrive(q_free.index(q_slot), count=1)
        tile = next_tile
        head = next_head
        block = next_block
        row0 = next_row0
        lo = next_lo
        n = next_n
        q_slot = next_slot
        q_phase = next_phase


@gluon.jit(do_not_specialize=_SIZES)
def _forward_kernel(
    q_desc, k_desc, v_desc, ks_desc, Q_SCALE, STARTS, ENDS, O, LSE, factor,
    H, KV_HEADS, HEADS, N_Q, N_K, NK_PAD, M_BLOCKS, HEADS_PER_GROUP, TILES, stride_vh, stride_ob, stride_on, stride_oh,
    HEAD_DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, IS_CAUSAL: gl.constexpr, PACKED: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    q_s = gl.allocate_shared_memory(gl.int8, [2 * CONSUMERS, 64, HEAD_DIM], q_desc.layout)
    k_s = gl.allocate_shared_memory(gl.int8, [STAGES, BLOCK_N, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, BLOCK_N, HEAD_DIM], v_desc.layout)
    ks_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_N], ks_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2 * CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [2 * CONSUMERS, 1], mbarrier.MBarrierLayout())
    kv_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    kv_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_free.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(kv_full.index(i), count=1)
        mbarrier.init(kv_free.index(i), count=CONSUMERS)

    descs = (q_desc, k_desc, v_desc, ks_desc)
    shared = (q_s, k_s, v_s, ks_s, q_full, q_free, kv_full, kv_free)
    documents = (STARTS, ENDS)
    outputs = (Q_SCALE, factor, O, LSE, stride_ob, stride_on, stride_oh)
    sizes = (H, KV_HEADS, HEADS, N_Q, N_K, NK_PAD, M_BLOCKS, HEADS_PER_GROUP, TILES, stride_vh)
    W0: gl.constexpr = 0
    W1: gl.constexpr = 1
    gl.warp_specialize([
        (_consumer, (outputs, documents, shared, sizes, W0, HEAD_DIM, BLOCK_N, STAGES, IS_CAUSAL, PACKED)),
        (_consumer, (outputs, documents, shared, sizes, W1, HEAD_DIM, BLOCK_N, STAGES, IS_CAUSAL, PACKED)),
        (_producer, (descs, documents, shared, sizes, HEAD_DIM, BLOCK_N, STAGES, IS_CAUSAL, PACKED)),
    ], [4, 1], [REGISTERS, 24])  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "chunks", "per_chunk"])
def _partial_sums_kernel(
    X, SUMS, heads, tokens, chunks, per_chunk, stride_b, stride_n, stride_h, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr
):
    """Sums of one chunk of tokens of one head, for the mean of K. SUMS [B, heads, chunks, D]."""
    chunk = tl.program_id(0) % chunks
    bh = (tl.program_id(0) // chunks).to(tl.int64)
    d = tl.arange(0, HEAD_DIM)
    base = X + (bh // heads) * stride_b + (bh % heads) * stride_h + d[None, :]
    first = chunk * per_chunk
    end = tl.minimum(first + per_chunk, tokens)
    total = tl.zeros([ROWS, HEAD_DIM], tl.float32)
    for start in range(first, end, ROWS):
        t = start + tl.arange(0, ROWS)
        total += tl.load(base + t.to(tl.int64)[:, None] * stride_n, mask=(t < end)[:, None], other=0.0).to(tl.float32)
    tl.store(SUMS + (bh * chunks + chunk) * HEAD_DIM + d, tl.sum(total, 0))


@triton.jit(do_not_specialize=["tokens", "chunks", "tiles", "padded"])
def _quantize_kernel(
    X, SUMS, CODES, SCALE, ORDERED, heads, tokens, chunks, tiles, padded, stride_b, stride_n, stride_h,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_ORDERED: tl.constexpr,
):  # fmt: skip
    """One program quantizes ROWS tokens of one head. ORDERED [B, heads, padded]: the scales as the consumers read them,
    position 4c + 2b + a of every 16 from token 8b + 2c + a."""
    tile = tl.program_id(0) % tiles
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    d = tl.arange(0, HEAD_DIM)
    t = tile * ROWS + tl.arange(0, ROWS)
    inside = (t < tokens)[:, None]
    base = X + (bh // heads) * stride_b + (bh % heads) * stride_h + d[None, :]
    x = tl.load(base + t.to(tl.int64)[:, None] * stride_n, mask=inside, other=0.0).to(tl.float32)
    if HAS_MEAN:
        total = tl.zeros([16, HEAD_DIM], tl.float32)
        for start in range(0, chunks, 16):
            c = start + tl.arange(0, 16)
            sums = SUMS + (bh * chunks + c)[:, None] * HEAD_DIM + d[None, :]
            total += tl.load(sums, mask=(c < chunks)[:, None], other=0.0)
        x = tl.where(inside, x - (tl.sum(total, 0) / tokens)[None, :], 0.0)
    largest = max_or_nan(tl.abs(x), 1)
    codes = as_codes(x * inverse_scale(largest)[:, None])
    tl.store(CODES + (bh * tokens + t)[:, None] * HEAD_DIM + d[None, :], codes, mask=inside)
    tl.store(SCALE + bh * tokens + t, largest / 127.0, mask=t < tokens)
    if HAS_ORDERED:
        position = (t // 16) * 16 + ((t % 8) // 2) * 4 + ((t % 16) // 8) * 2 + t % 2
        tl.store(ORDERED + bh * padded + position, largest / 127.0, mask=t < padded)


def _quantize(x: Tensor, smooth: bool, padded: int) -> tuple[Codes, Tensor | None]:
    """quantize.quantize_twin of x [B, N, heads, D] per token, less its mean over tokens if `smooth`; with `padded` also
    the scales in operand order [B * heads * padded]."""
    batch, n, heads, head_dim = x.shape
    codes = torch.empty((batch, heads, n, head_dim), dtype=torch.int8, device=x.device)
    scale = torch.empty((batch, heads, n), dtype=torch.float32, device=x.device)
    ordered = torch.empty(batch * heads * padded, dtype=torch.float32, device=x.device) if padded else None
    strides = x.stride()[:3]
    rows = 64
    chunks, sums = 0, None
    if smooth:
        per_chunk = max(512, triton.cdiv(triton.cdiv(n, 32), 64) * 64)
        chunks = triton.cdiv(n, per_chunk)
        sums = torch.empty((batch, heads, chunks, head_dim), dtype=torch.float32, device=x.device)
        _partial_sums_kernel[(batch * heads * chunks,)](
            x, sums, heads, n, chunks, per_chunk, *strides, HEAD_DIM=head_dim, ROWS=64, num_warps=8
        )
    tiles = triton.cdiv(max(n, padded), rows)
    _quantize_kernel[(batch * heads * tiles,)](
        x, sums, codes, scale, ordered, heads, n, chunks, tiles, padded, *strides,
        HEAD_DIM=head_dim, ROWS=rows, HAS_MEAN=smooth, HAS_ORDERED=ordered is not None, num_warps=4,
    )  # fmt: skip
    return Codes(codes, scale), ordered


_GLUON_TYPES = {torch.int8: gl.int8, torch.float32: gl.float32, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def _descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, block, gl.NVMMASharedLayout.get_default_for(block, _GLUON_TYPES[x.dtype]))


def _values_view(v: Tensor) -> tuple[Tensor, int]:
    """v [B, N, H, D] as the [B, N, columns] that a TMA descriptor takes, and the columns between heads."""
    if v.stride(3) != 1 or v.data_ptr() % 16 or any(v.stride(i) % 8 or v.stride(i) == 0 for i in range(3)):
        v = v.contiguous()
    columns = (v.shape[2] - 1) * v.stride(2) + v.shape[3]
    return v.as_strided((v.shape[0], v.shape[1], columns), (v.stride(0), v.stride(1), 1)), v.stride(2)


# head dimension -> keys per tile, stages of the K and V pipeline
SCHEDULES = {64: (128, 4), 128: (128, 3)}
# Registers of a consumer thread, and the limit under which all twelve warps of a block can start.
REGISTERS, START_REGISTERS = 240, 168


def supported(q: Tensor, k: Tensor, v: Tensor, *, smooth_q: bool, cu_seqlens: Tensor | None, recipe: str) -> bool:
    """Whether hopper_forward takes this call; the portable kernels take every other."""
    rules = RECIPES[recipe]
    return (
        not rules.per_tile
        and not rules.int8_pv
        and not smooth_q
        and q.shape[3] in SCHEDULES
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.is_cuda
        and torch.cuda.get_device_capability(q.device) == (9, 0)
        and max(q.numel(), k.numel()) < 2**31
    )


def hopper_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    smooth_k: bool,
    smooth_q: bool,
    cu_seqlens: Tensor | None,
    recipe: str,
) -> tuple[Tensor, Saved]:
    """reference.twin_forward on Hopper where `supported` says so: same arguments, same results up to float32 sums."""
    batch, n_q, heads, head_dim = q.shape
    n_k, kv_heads = k.shape[1:3]
    q, k = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k))
    block_n, stages = SCHEDULES[head_dim]
    with on_device_of(q):
        nk_pad = triton.cdiv(n_k, block_n) * block_n
        q_codes, _ = _quantize(q, False, 0)
        k_codes, k_ordered = _quantize(k, smooth_k, nk_pad)
        values, stride_vh = _values_view(v)
        o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty((batch, heads, n_q), dtype=torch.float32, device=q.device)
        # Without documents any pointer will do: nothing is read.
        starts, ends = (lse, lse) if cu_seqlens is None else document_bounds_triton(cu_seqlens, n_q)
        m_blocks = triton.cdiv(n_q, 64 * CONSUMERS.value)
        tiles = m_blocks * batch * heads
        per_group = max(1, (24 << 20) // (n_k * head_dim * 3)) * (heads // kv_heads)
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count
        _forward_kernel[(min(processors, tiles),)](
            _descriptor(q_codes.codes.view(-1, head_dim), [64, head_dim]),
            _descriptor(k_codes.codes.view(-1, head_dim), [block_n, head_dim]),
            _descriptor(values, [1, block_n, head_dim]), _descriptor(k_ordered, [block_n]),
            q_codes.scale, starts, ends, o, lse, scale * LOG2E.value,
            heads, kv_heads, batch * heads, n_q, n_k, nk_pad, m_blocks, per_group, tiles, stride_vh, *o.stride()[:3],
            HEAD_DIM=head_dim, BLOCK_N=block_n, STAGES=stages, IS_CAUSAL=causal,
            PACKED=cu_seqlens is not None, REGISTERS=REGISTERS, num_warps=4, maxnreg=START_REGISTERS,
        )  # fmt: skip
    return o, Saved(lse, q_codes, k_codes, None, None)
