"""dK and dV on Hopper: keys are rows, S^T = K Q^T; with FUSED dQ as well. See hopper_backward.py."""

# ruff: noqa: RUF059 (the tuples that kernels pass around are unpacked whole)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_pieces import MAGIC, SIZES, column_vector, exp2, key_block, magic_float, short_scale, store_rows


@gluon.jit
def _query_range(
    block, STARTS, ENDS, N_Q, N_K, Q_TILES, IS_CAUSAL: gl.constexpr, PACKED: gl.constexpr, FUSED: gl.constexpr
):
    """Tiles of queries first .. last see a block of keys; of these, clear .. blurred need no mask."""
    offset = N_K - N_Q
    key = block * 128
    first = 0
    clear = 0
    last = Q_TILES
    blurred = N_Q // 64
    if IS_CAUSAL:
        first = gl.maximum(key - offset, 0) // 64
        clear = gl.maximum(key + 127 - offset + 63, 0) // 64
    if PACKED:
        last_key = gl.minimum(key + 127, N_K - 1)
        clear = gl.maximum(clear, (gl.load(STARTS + last_key) + 63) // 64)
        blurred = gl.minimum(blurred, gl.load(ENDS + key) // 64)
        last = (gl.load(ENDS + last_key) + 63) // 64
        if not IS_CAUSAL:
            first = gl.load(STARTS + key) // 64
    if FUSED:  # keys past the end must not add to dQ
        clear = gl.where(key + 128 > N_K, last, clear)
    clear = gl.minimum(clear, last)
    return first, clear, gl.maximum(blurred, clear), last


@gluon.jit
def _query_tile(i, first, clear, blurred, last):
    """Tile of the i-th step: first those that need a mask, on either side, then the others."""
    diagonal = clear - first
    masked = diagonal + last - blurred
    return gl.where(i < diagonal, first + i, gl.where(i < masked, blurred + i - diagonal, clear + i - masked))


@gluon.jit
def _dkdv_producer(
    descs,
    shared,
    scalars,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    PACKED: gl.constexpr,
    FUSED: gl.constexpr,
):
    q8_desc, q_desc, do_desc, vec_desc, k8_desc, v_desc, k_desc = descs
    k8_s, v_s, q8_s, q_s, do_s, vec_s, k_s, ds_s, kv_full, full, free, ds_full, ds_free = shared
    STARTS, ENDS, KV_HEADS, GROUP, N_Q, N_K, Q_TILES, BLOCKS, HEADS, HEADS_PER_GROUP, stride_vh, stride_dh = scalars
    bh_kv, block = key_block(gl.program_id(0), BLOCKS, HEADS, HEADS_PER_GROUP)
    batch = bh_kv // KV_HEADS
    kv_head = bh_kv - batch * KV_HEADS
    mbarrier.expect(kv_full, 128 * HEAD_DIM * (5 if FUSED else 3))
    for w in gl.static_range(2):
        row = block * 128 + w * 64
        tma.async_copy_global_to_shared(k8_desc, [bh_kv * N_K + row, 0], kv_full, k8_s.index(w))
        tma.async_copy_global_to_shared(v_desc, [batch * N_K + row, kv_head * stride_vh], kv_full, v_s.index(w))
    if FUSED:
        tma.async_copy_global_to_shared(k_desc, [bh_kv * N_K + block * 128, 0], kv_full, k_s)
    first, clear, blurred, last = _query_range(block, STARTS, ENDS, N_Q, N_K, Q_TILES, IS_CAUSAL, PACKED, FUSED)
    it = 0
    for g in range(GROUP):
        head = kv_head * GROUP + g
        bh = batch * KV_HEADS * GROUP + head
        for i in range(last - first):
            m = _query_tile(i, first, clear, blurred, last)
            stage = it % STAGES
            bar = full.index(stage)
            mbarrier.wait(free.index(stage), ((it // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, 64 * HEAD_DIM * 5 + 768)
            tma.async_copy_global_to_shared(q8_desc, [bh * N_Q + m * 64, 0], bar, q8_s.index(stage))
            for j in gl.static_range(3):
                tma.async_copy_global_to_shared(
                    vec_desc, [((bh * Q_TILES + m) * 3 + j) * 64], bar, vec_s.index(stage * 3 + j)
                )
            tma.async_copy_global_to_shared(do_desc, [batch * N_Q + m * 64, head * stride_dh], bar, do_s.index(stage))
            tma.async_copy_global_to_shared(q_desc, [bh * N_Q + m * 64, 0], bar, q_s.index(stage))
            it += 1


@gluon.jit
def _dkdv_step(
    dk,
    dv,
    k8,
    ks,
    magic_ks,
    keys,
    starts,
    ends,
    it,
    m,
    bh,
    DQ,
    shared,
    N_Q,
    N_K,
    Q_TILES,
    WG: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    PACKED: gl.constexpr,
    FUSED: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Add one tile of 64 queries to dk and dv of 64 keys, and to DQ when FUSED."""
    k8_s, v_s, q8_s, q_s, do_s, vec_s, k_s, ds_s, kv_full, full, free, ds_full, ds_free = shared
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    f_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16]), 2)
    col: gl.constexpr = gl.SliceLayout(0, s_layout)
    zero_i = gl.zeros([64, 64], gl.int32, s_layout)
    zero_f = gl.zeros([64, 64], gl.float32, f_layout)
    stage = it % STAGES
    mbarrier.wait(full.index(stage), (it // STAGES) & 1)
    qs = column_vector(vec_s.index(stage * 3), col)  # ahead of the products: behind them a load waits for them
    lse = column_vector(vec_s.index(stage * 3 + 1), col)
    if HEAD_DIM == 64:
        delta = column_vector(vec_s.index(stage * 3 + 2), col)
    s = warpgroup_mma(k8, q8_s.index(stage).permute((1, 0)), zero_i, use_acc=False, is_async=True)
    dp = warpgroup_mma(v_s.index(WG), do_s.index(stage).permute((1, 0)), zero_f, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, [s])
    p = exp2((magic_float(s) * ks[:, None] - magic_ks[:, None]) * qs[None, :] - lse[None, :])
    if MASKED:
        queries = m * 64 + gl.arange(0, 64, col)
        inside = (keys < N_K)[:, None] & (queries < N_Q)[None, :]
        seen = inside
        if IS_CAUSAL:
            seen = seen & (keys[:, None] <= (queries + (N_K - N_Q))[None, :])
        if PACKED:
            seen = seen & (queries[None, :] >= starts[:, None]) & (queries[None, :] < ends[:, None])
        p = gl.where(seen, p, 0.0)
    p16 = gl.convert_layout(p.to(do_s.dtype), a_layout, assert_trivial=True)
    dv = warpgroup_mma(p16, do_s.index(stage), dv, is_async=True)
    if HEAD_DIM == 128:  # no registers for it before
        delta = column_vector(vec_s.index(stage * 3 + 2), col)
    dp = warpgroup_mma_wait(1, [dp])
    ds = gl.convert_layout(dp, s_layout, assert_trivial=True) - delta[None, :]
    if MASKED:
        ds = gl.where(inside, ds, 0.0)
    ds = p * ds
    ds16 = ds.to(q_s.dtype)
    if FUSED:
        buf = it % 2
        mbarrier.wait(ds_free.index(buf), ((it // 2) & 1) ^ 1)
        ds_s.index(buf).slice(WG * 64, 64, 0).store(ds16)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(buf), count=1)
    ds16 = gl.convert_layout(ds16, a_layout, assert_trivial=True)
    dk = warpgroup_mma(ds16, q_s.index(stage), dk, is_async=True)
    dk, dv = warpgroup_mma_wait(0, [dk, dv])
    mbarrier.arrive(free.index(stage), count=1)
    if FUSED:
        if it % 2 == WG:  # the warpgroups take turns, each the product of all 128 keys
            _add_dq(DQ, bh * Q_TILES + m, ds_s, k_s, ds_full, ds_free, it, zero_f)
    return dk, dv


@gluon.jit
def _add_dq(DQ, block, ds_s, k_s, ds_full, ds_free, it, zero):
    """Add dS K of one tile to its [64, 64] block of DQ, which is stored as the accumulator's fragments lie."""
    flat: gl.constexpr = gl.DistributedLinearLayout(
        [[1], [2], [512], [1024], [2048]], [[4], [8], [16], [32], [64]], [[128], [256]], [], [4096]
    )
    mbarrier.wait(ds_full.index(it % 2), (it // 2) & 1)
    dq = warpgroup_mma(ds_s.index(it % 2).permute((1, 0)), k_s, zero, use_acc=False, is_async=True)
    dq = warpgroup_mma_wait(0, [dq])
    mbarrier.arrive(ds_free.index(it % 2), count=1)
    dq = gl.permute(gl.reshape(dq, [4, 2, 8, 8, 4, 2]), (3, 0, 2, 4, 1, 5))
    dq = gl.convert_layout(gl.reshape(dq, [4096]), flat, assert_trivial=True)
    gl.atomic_add(DQ + block.to(gl.int64) * 4096 + gl.arange(0, 4096, flat), dq, sem="relaxed")


@gluon.jit
def _dkdv_consumer(
    outputs,
    shared,
    scalars,
    WG: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    PACKED: gl.constexpr,
    FUSED: gl.constexpr,
    K_REGS: gl.constexpr,
):
    KS, DK, DV, DQ, scale, stride_ob, stride_on, stride_oh = outputs
    k8_s, v_s, q8_s, q_s, do_s, vec_s, k_s, ds_s, kv_full, full, free, ds_full, ds_free = shared
    STARTS, ENDS, KV_HEADS, GROUP, N_Q, N_K, Q_TILES, BLOCKS, HEADS, HEADS_PER_GROUP, stride_vh, stride_dh = scalars
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    g_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    bh_kv, block = key_block(gl.program_id(0), BLOCKS, HEADS, HEADS_PER_GROUP)
    batch = bh_kv // KV_HEADS
    kv_head = bh_kv - batch * KV_HEADS
    first_key = block * 128 + WG * 64
    keys = first_key + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    ks = short_scale(gl.load(KS + bh_kv * N_K + keys, mask=keys < N_K, other=0.0))
    magic_ks = ks * MAGIC
    starts = keys
    ends = keys
    if PACKED:
        starts = gl.load(STARTS + keys, mask=keys < N_K, other=0)
        ends = gl.load(ENDS + keys, mask=keys < N_K, other=0)
    first, clear, blurred, last = _query_range(block, STARTS, ENDS, N_Q, N_K, Q_TILES, IS_CAUSAL, PACKED, FUSED)

    mbarrier.wait(kv_full, 0)
    if K_REGS:
        k8 = k8_s.index(WG).load(gl.DotOperandLayout(0, s_layout, 4))
    else:
        k8 = k8_s.index(WG)
    dk = gl.zeros([64, HEAD_DIM], gl.float32, g_layout)
    dv = gl.zeros([64, HEAD_DIM], gl.float32, g_layout)
    masked = clear - first + last - blurred
    it = 0
    for g in range(GROUP):
        bh = bh_kv * GROUP + g
        for i in range(masked):
            m = _query_tile(i, first, clear, blurred, last)
            dk, dv = _dkdv_step(
                dk,
                dv,
                k8,
                ks,
                magic_ks,
                keys,
                starts,
                ends,
                it,
                m,
                bh,
                DQ,
                shared,
                N_Q,
                N_K,
                Q_TILES,
                WG,
                HEAD_DIM,
                STAGES,
                IS_CAUSAL,
                PACKED,
                FUSED,
                True,
            )
            it += 1
        for i in range(masked, last - first):
            m = _query_tile(i, first, clear, blurred, last)
            dk, dv = _dkdv_step(
                dk,
                dv,
                k8,
                ks,
                magic_ks,
                keys,
                starts,
                ends,
                it,
                m,
                bh,
                DQ,
                shared,
                N_Q,
                N_K,
                Q_TILES,
                WG,
                HEAD_DIM,
                STAGES,
                IS_CAUSAL,
                PACKED,
                FUSED,
                False,
            )
            it += 1

    keys = first_key + gl.arange(0, 64, gl.SliceLayout(1, g_layout))
    out = batch.to(gl.int64) * stride_ob + kv_head * stride_oh
    store_rows(DK + out, dk * scale, keys, N_K, stride_on, g_layout)
    store_rows(DV + out, dv, keys, N_K, stride_on, g_layout)


@gluon.jit(do_not_specialize=SIZES + ["Q_TILES"])
def dkdv_kernel(
    q8_desc,
    q_desc,
    do_desc,
    vec_desc,
    k8_desc,
    v_desc,
    k_desc,
    KS,
    STARTS,
    ENDS,
    DK,
    DV,
    DQ,
    scale,
    KV_HEADS,
    GROUP,
    N_Q,
    N_K,
    Q_TILES,
    BLOCKS,
    HEADS,
    HEADS_PER_GROUP,
    stride_vh,
    stride_dh,
    stride_ob,
    stride_on,
    stride_oh,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    PACKED: gl.constexpr,
    FUSED: gl.constexpr,
    K_REGS: gl.constexpr,
):
    k8_s = gl.allocate_shared_memory(gl.int8, [2, 64, HEAD_DIM], k8_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [2, 64, HEAD_DIM], v_desc.layout)
    q8_s = gl.allocate_shared_memory(gl.int8, [STAGES, 64, HEAD_DIM], q8_desc.layout)
    q_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 64, HEAD_DIM], q_desc.layout)
    do_s = gl.allocate_shared_memory(do_desc.dtype, [STAGES, 64, HEAD_DIM], do_desc.layout)
    vec_s = gl.allocate_shared_memory(gl.float32, [STAGES * 3, 64], vec_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ds_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(ds_full.index(i), count=2)
        mbarrier.init(ds_free.index(i), count=1)
    if FUSED:
        k_s = gl.allocate_shared_memory(k_desc.dtype, [128, HEAD_DIM], k_desc.layout)
        ds_s = gl.allocate_shared_memory(k_desc.dtype, [2, 128, 64], k_desc.layout)
    else:
        k_s = v_s
        ds_s = v_s
    descs = (q8_desc, q_desc, do_desc, vec_desc, k8_desc, v_desc, k_desc)
    shared = (k8_s, v_s, q8_s, q_s, do_s, vec_s, k_s, ds_s, kv_full, full, free, ds_full, ds_free)
    scalars = (STARTS, ENDS, KV_HEADS, GROUP, N_Q, N_K, Q_TILES, BLOCKS, HEADS, HEADS_PER_GROUP, stride_vh, stride_dh)
    outputs = (KS, DK, DV, DQ, scale, stride_ob, stride_on, stride_oh)
    W0: gl.constexpr = 0
    W1: gl.constexpr = 1
    gl.warp_specialize(
        [
            (_dkdv_consumer, (outputs, shared, scalars, W0, HEAD_DIM, STAGES, IS_CAUSAL, PACKED, FUSED, K_REGS)),
            (_dkdv_consumer, (outputs, shared, scalars, W1, HEAD_DIM, STAGES, IS_CAUSAL, PACKED, FUSED, K_REGS)),
            (_dkdv_producer, (descs, shared, scalars, HEAD_DIM, STAGES, IS_CAUSAL, PACKED, FUSED)),
        ],
        [4, 1],
        [240, 24],
    )
