"""dQ on Hopper, deterministic: queries are rows, S and dP are recomputed. See hopper_backward.py."""

# ruff: noqa: RUF059 (the tuples that kernels pass around are unpacked whole)

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .hopper_pieces import MAGIC, SIZES, column_vector, exp2, key_block, magic_float, short_scale, store_rows
from .pieces import LOG2E


@gluon.jit
def _key_range(row, rows, STARTS, ENDS, N_Q, N_K, K_TILES, IS_CAUSAL: gl.constexpr, PACKED: gl.constexpr):
    """Tiles of keys first .. last are seen by `rows` queries from `row` on; of these, clear .. blurred need no mask."""
    offset = N_K - N_Q
    first = 0
    clear = 0
    last = K_TILES
    blurred = N_K // 64
    if IS_CAUSAL:
        last = gl.minimum((gl.minimum(row + rows, N_Q) + offset + 63) // 64, K_TILES)
        blurred = gl.minimum((row + offset + 1) // 64, blurred)
    if PACKED:
        row = gl.minimum(row, N_Q - 1)
        last_row = gl.minimum(row + rows, N_Q) - 1
        first = gl.load(STARTS + row) // 64
        clear = (gl.load(STARTS + last_row) + 63) // 64
        blurred = gl.minimum(blurred, gl.load(ENDS + row) // 64)
        last = gl.minimum(last, (gl.load(ENDS + last_row) + 63) // 64)
    clear = gl.minimum(clear, last)
    return first, clear, gl.minimum(gl.maximum(blurred, clear), last), last


@gluon.jit
def _dq_producer(
    descs,
    shared,
    scalars,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    PACKED: gl.constexpr,
):
    q8_desc, do_desc, k8_desc, k_desc, v_desc, ks_desc = descs
    q8_s, do_s, k8_s, k_s, v_s, ks_s, q_full, full, free = shared
    STARTS, ENDS, KV_HEADS, GROUP, N_Q, N_K, K_TILES, BLOCKS, HEADS, HEADS_PER_GROUP, stride_vh, stride_dh = scalars
    bh, block = key_block(gl.program_id(0), BLOCKS, HEADS, HEADS_PER_GROUP)
    block = BLOCKS - 1 - block
    batch = bh // (KV_HEADS * GROUP)
    head = bh - batch * (KV_HEADS * GROUP)
    bh_kv = bh // GROUP
    kv_head = head // GROUP
    mbarrier.expect(q_full, CONSUMERS * 64 * HEAD_DIM * 3)
    for w in gl.static_range(CONSUMERS):
        row = (block * CONSUMERS + w) * 64
        tma.async_copy_global_to_shared(q8_desc, [bh * N_Q + row, 0], q_full, q8_s.index(w))
        tma.async_copy_global_to_shared(do_desc, [batch * N_Q + row, head * stride_dh], q_full, do_s.index(w))
    rows: gl.constexpr = CONSUMERS * 64
    begin, _, _, end = _key_range(block * rows, rows, STARTS, ENDS, N_Q, N_K, K_TILES, IS_CAUSAL, PACKED)
    for n in range(begin, end):
        stage = (n - begin) % STAGES
        bar = full.index(stage)
        mbarrier.wait(free.index(stage), (((n - begin) // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, 64 * HEAD_DIM * 5 + 256)
        tma.async_copy_global_to_shared(k8_desc, [bh_kv * N_K + n * 64, 0], bar, k8_s.index(stage))
        tma.async_copy_global_to_shared(ks_desc, [(bh_kv * K_TILES + n) * 64], bar, ks_s.index(stage))
        tma.async_copy_global_to_shared(v_desc, [batch * N_K + n * 64, kv_head * stride_vh], bar, v_s.index(stage))
        tma.async_copy_global_to_shared(k_desc, [bh_kv * N_K + n * 64, 0], bar, k_s.index(stage))


@gluon.jit
def _dq_step(
    dq,
    n,
    it,
    rows,
    starts,
    ends,
    qs,
    magic_qs,
    lse,
    delta,
    shared,
    N_Q,
    N_K,
    WG: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    PACKED: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Add one tile of 64 keys to dq of 64 queries."""
    q8_s, do_s, k8_s, k_s, v_s, ks_s, q_full, full, free = shared
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    f_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16]), 2)
    col: gl.constexpr = gl.SliceLayout(0, s_layout)
    zero_i = gl.zeros([64, 64], gl.int32, s_layout)
    zero_f = gl.zeros([64, 64], gl.float32, f_layout)
    stage = it % STAGES
    mbarrier.wait(full.index(stage), (it // STAGES) & 1)
    ks = column_vector(ks_s.index(stage), col)  # ahead of the products: behind them a load waits for them
    s = warpgroup_mma(q8_s.index(WG), k8_s.index(stage).permute((1, 0)), zero_i, use_acc=False, is_async=True)
    dp = warpgroup_mma(do_s.index(WG), v_s.index(stage).permute((1, 0)), zero_f, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, [s])
    p = exp2((magic_float(s) * qs[:, None] - magic_qs[:, None]) * ks[None, :] - lse[:, None])
    if MASKED:
        keys = n * 64 + gl.arange(0, 64, col)
        inside = (keys < N_K)[None, :]
        seen = inside
        if IS_CAUSAL:
            seen = seen & (keys[None, :] <= (rows + (N_K - N_Q))[:, None])
        if PACKED:
            seen = seen & (keys[None, :] >= starts[:, None]) & (keys[None, :] < ends[:, None])
        p = gl.where(seen, p, 0.0)
    dp, p = warpgroup_mma_wait(0, [dp, p])  # p keeps the wait behind the exponentials
    ds = gl.convert_layout(dp, s_layout, assert_trivial=True) - delta[:, None]
    if MASKED:
        ds = gl.where(inside, ds, 0.0)
    ds16 = gl.convert_layout((p * ds).to(k_s.dtype), a_layout, assert_trivial=True)
    dq = warpgroup_mma(ds16, k_s.index(stage), dq, is_async=True)
    dq = warpgroup_mma_wait(0, [dq])
    mbarrier.arrive(free.index(stage), count=1)
    return dq


@gluon.jit
def _skip(low, high, begin, full, free, STAGES: gl.constexpr):
    """Hand back tiles that only the other warpgroups need."""
    for n in range(low, high):
        it = n - begin
        mbarrier.wait(full.index(it % STAGES), (it // STAGES) & 1)
        mbarrier.arrive(free.index(it % STAGES), count=1)


@gluon.jit
def _dq_consumer(
    outputs,
    shared,
    scalars,
    WG: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    PACKED: gl.constexpr,
):
    QS, LSE, DELTA, DQ, scale, stride_ob, stride_on, stride_oh = outputs
    q8_s, do_s, k8_s, k_s, v_s, ks_s, q_full, full, free = shared
    STARTS, ENDS, KV_HEADS, GROUP, N_Q, N_K, K_TILES, BLOCKS, HEADS, HEADS_PER_GROUP, stride_vh, stride_dh = scalars
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    g_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    bh, block = key_block(gl.program_id(0), BLOCKS, HEADS, HEADS_PER_GROUP)
    block = BLOCKS - 1 - block
    batch = bh // (KV_HEADS * GROUP)
    head = bh - batch * (KV_HEADS * GROUP)
    first_row = (block * CONSUMERS + WG) * 64
    rows = first_row + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
    inside = rows < N_Q
    qs = short_scale(gl.load(QS + bh * N_Q + rows, mask=inside, other=0.0) * (scale * LOG2E))
    magic_qs = qs * MAGIC
    lse = gl.load(LSE + bh * N_Q + rows, mask=inside, other=float("inf")) * LOG2E
    delta = gl.load(DELTA + bh * N_Q + rows, mask=inside, other=0.0)
    starts = rows
    ends = rows
    if PACKED:
        starts = gl.load(STARTS + rows, mask=inside, other=0)
        ends = gl.load(ENDS + rows, mask=inside, other=0)
    all_rows: gl.constexpr = CONSUMERS * 64
    begin, _, _, end = _key_range(block * all_rows, all_rows, STARTS, ENDS, N_Q, N_K, K_TILES, IS_CAUSAL, PACKED)
    first, clear, blurred, last = _key_range(first_row, 64, STARTS, ENDS, N_Q, N_K, K_TILES, IS_CAUSAL, PACKED)

    mbarrier.wait(q_full, 0)
    dq = gl.zeros([64, HEAD_DIM], gl.float32, g_layout)
    if PACKED:
        _skip(begin, first, begin, full, free, STAGES)
        for n in range(first, clear):
            dq = _dq_step(
                dq,
                n,
                n - begin,
                rows,
                starts,
                ends,
                qs,
                magic_qs,
                lse,
                delta,
                shared,
                N_Q,
                N_K,
                WG,
                HEAD_DIM,
                STAGES,
                IS_CAUSAL,
                PACKED,
                True,
            )
    for n in range(clear, blurred):
        dq = _dq_step(
            dq,
            n,
            n - begin,
            rows,
            starts,
            ends,
            qs,
            magic_qs,
            lse,
            delta,
            shared,
            N_Q,
            N_K,
            WG,
            HEAD_DIM,
            STAGES,
            IS_CAUSAL,
            PACKED,
            False,
        )
    for n in range(blurred, last):
        dq = _dq_step(
            dq,
            n,
            n - begin,
            rows,
            starts,
            ends,
            qs,
            magic_qs,
            lse,
            delta,
            shared,
            N_Q,
            N_K,
            WG,
            HEAD_DIM,
            STAGES,
            IS_CAUSAL,
            PACKED,
            True,
        )
    _skip(last, end, begin, full, free, STAGES)

    rows = first_row + gl.arange(0, 64, gl.SliceLayout(1, g_layout))
    out = batch.to(gl.int64) * stride_ob + head * stride_oh
    store_rows(DQ + out, dq * scale, rows, N_Q, stride_on, g_layout)


@gluon.jit(do_not_specialize=SIZES + ["K_TILES"])
def dq_kernel(
    q8_desc,
    do_desc,
    k8_desc,
    k_desc,
    v_desc,
    ks_desc,
    QS,
    LSE,
    DELTA,
    STARTS,
    ENDS,
    DQ,
    scale,
    KV_HEADS,
    GROUP,
    N_Q,
    N_K,
    K_TILES,
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
    CONSUMERS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    PACKED: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    q8_s = gl.allocate_shared_memory(gl.int8, [CONSUMERS, 64, HEAD_DIM], q8_desc.layout)
    do_s = gl.allocate_shared_memory(do_desc.dtype, [CONSUMERS, 64, HEAD_DIM], do_desc.layout)
    k8_s = gl.allocate_shared_memory(gl.int8, [STAGES, 64, HEAD_DIM], k8_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 64, HEAD_DIM], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 64, HEAD_DIM], v_desc.layout)
    ks_s = gl.allocate_shared_memory(gl.float32, [STAGES, 64], ks_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=CONSUMERS)
    descs = (q8_desc, do_desc, k8_desc, k_desc, v_desc, ks_desc)
    shared = (q8_s, do_s, k8_s, k_s, v_s, ks_s, q_full, full, free)
    scalars = (STARTS, ENDS, KV_HEADS, GROUP, N_Q, N_K, K_TILES, BLOCKS, HEADS, HEADS_PER_GROUP, stride_vh, stride_dh)
    outputs = (QS, LSE, DELTA, DQ, scale, stride_ob, stride_on, stride_oh)
    W0: gl.constexpr = 0
    W1: gl.constexpr = 1
    W2: gl.constexpr = 2
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_dq_consumer, (outputs, shared, scalars, W0, HEAD_DIM, STAGES, CONSUMERS, IS_CAUSAL, PACKED)),
                (_dq_consumer, (outputs, shared, scalars, W1, HEAD_DIM, STAGES, CONSUMERS, IS_CAUSAL, PACKED)),
                (_dq_producer, (descs, shared, scalars, HEAD_DIM, STAGES, CONSUMERS, IS_CAUSAL, PACKED)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_dq_consumer, (outputs, shared, scalars, W0, HEAD_DIM, STAGES, CONSUMERS, IS_CAUSAL, PACKED)),
                (_dq_consumer, (outputs, shared, scalars, W1, HEAD_DIM, STAGES, CONSUMERS, IS_CAUSAL, PACKED)),
                (_dq_consumer, (outputs, shared, scalars, W2, HEAD_DIM, STAGES, CONSUMERS, IS_CAUSAL, PACKED)),
                (_dq_producer, (descs, shared, scalars, HEAD_DIM, STAGES, CONSUMERS, IS_CAUSAL, PACKED)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, 24],
        )
