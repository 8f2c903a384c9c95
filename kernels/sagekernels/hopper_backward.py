"""The Hopper backward of the recipe `scores`: a CUDA kernel (hopper_backward.cu), a kernel that prepares its inputs,
and one that narrows dQ.

S is recomputed from the INT8 codes of Q and K. The other four products are 16-bit with float32 sums. On this chip the
reductions, roundings and conversions that an INT8 P or dS costs take longer than the tensor time it saves. The
measurements, `fine` included, are in kernels/NOTES.md, section Backward.

For each query the kernel gets -delta, the scale of Q and lse. At head_dim 128 they are a row of 16 bytes, with -delta
as a sum of two TF32 numbers, which a product with ones adds to dP. At 64 they are vectors, stored so that a thread
finds its values in 16-byte words: inside 16 tokens, position 4c + 2b + d (c < 4, b < 2, d < 2) holds token 8b + 2c + d.
Sums of dQ lie as the accumulators do.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import nvrtc
from .call import BackwardCall, Gradients
from .hopper_forward import ARCHITECTURE
from .launch import multiprocessors, on_device_of
from .pieces import LOG2E
from .quantize import TILE, tiles_of

SOURCE = "hopper_backward.cu"
KEYS = {64: 192, 128: 128}  # A program has so many keys, by head dimension: 64 for each of its consumer warpgroups.
# A query has so many values, by head dimension, in vectors or a row (see the module docstring).
FLOATS = {64: 3, 128: 4}
# Operands and sums of the heads that run at one time should stay in the L2 cache. Blocks run in order of keys, so a
# causal block starts late if many blocks of one head run at one time. That costs more than the cache saves.
L2_BYTES = 40 << 20
L2_BYTES_IN_ORDER = 200 << 20
# The first blocks of a causal head have twice the mean of work. With fewer blocks a multiprocessor than ONE_GROUP all
# heads run at one time, because multiprocessors would wait longer for the long blocks of a last group.
ONE_GROUP = 3
# With fewer programs a multiprocessor than ENOUGH, the query heads of a block of keys are divided among a cluster of at
# most LARGEST_CLUSTER programs. Each more program costs as much as 6 to 8 tiles of queries: sums of dK and dV, and what
# comes before the first tile. So blocks with equal work are divided only where multiprocessors have none.
ENOUGH = {"causal": 1.75, "equal": 0.5}
LARGEST_CLUSTER = 8


@triton.jit
def _in_column_order(TILE: tl.constexpr):
    """Return the token that stands at each position of a column vector of a tile (module docstring)."""
    position = tl.arange(0, TILE)
    return (position // 16) * 16 + (position // 2 % 2) * 8 + (position // 4 % 4) * 2 + position % 2


@triton.jit
def _prepare_queries_kernel(
    DO, O, Q8, Q_SCALE, LSE, SINK_SCORES, Q16, VECTORS, SUM, TURNS, SINK_TERMS, scale_log2, heads, tokens, tiles,
    stride_b, stride_n, stride_h, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, LOG2E: tl.constexpr,
    FLOATS: tl.constexpr,
):  # fmt: skip
    """Write Q in 16 bits, as its codes say, and empty sums of dQ. For each query write s_Q, lse (in log 2) and -delta =
    -rowsum(dO o O), and with sinks the sink's weight times delta."""
    tile = tl.program_id(0) % tiles
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = bh // heads, bh % heads
    t = tile * TILE + (_in_column_order(TILE) if FLOATS == 3 else tl.arange(0, TILE))
    d = tl.arange(0, HEAD_DIM)
    inside = t < tokens
    rows = DO + batch * stride_b + head * stride_h + t.to(tl.int64)[:, None] * stride_n + d[None, :]
    do = tl.load(rows, mask=inside[:, None], other=0.0).to(tl.float32)
    rows = O + (batch * tokens * heads + head) * HEAD_DIM + t.to(tl.int64)[:, None] * (heads * HEAD_DIM) + d[None, :]
    o = tl.load(rows, mask=inside[:, None], other=0.0).to(tl.float32)
    rows = bh * tokens * HEAD_DIM + t[:, None] * HEAD_DIM + d[None, :]
    q_scale = tl.load(Q_SCALE + bh * tokens + t, mask=inside, other=0.0)
    q = tl.load(Q8 + rows, mask=inside[:, None], other=0).to(tl.float32) * q_scale[:, None]
    tl.store(Q16 + rows, q, mask=inside[:, None])
    q_scale *= scale_log2
    lse = tl.load(LSE + bh * tokens + t, mask=inside, other=float("inf"))
    delta = -tl.sum(do * o, 1)
    if SINK_SCORES is not None:
        own = tl.load(SINK_SCORES + bh * tokens + t, mask=inside, other=0.0)
        tl.store(SINK_TERMS + bh * tokens + t, tl.exp2((own - lse) * LOG2E) * -delta, mask=inside)
    lse *= LOG2E
    vectors = VECTORS + (bh * tiles + tile) * (FLOATS * TILE)
    if FLOATS == 3:
        tl.store(vectors + tl.arange(0, TILE), q_scale)
        tl.store(vectors + TILE + tl.arange(0, TILE), lse)
        tl.store(vectors + 2 * TILE + tl.arange(0, TILE), delta)
    else:
        # Probabilities are still zero. The product meets this number too, so it is finite.
        lse = tl.where(tl.abs(lse) == float("inf"), 1e30, lse)
        upper = (delta.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
        # A row is upper, the rest, q_scale and lse.
        rows = tl.join(tl.join(upper, q_scale), tl.join(delta - upper, lse))
        tl.store(vectors + tl.arange(0, 4 * TILE), tl.reshape(rows, [4 * TILE]))
    sums = SUM + (bh * tiles + tile) * (TILE * HEAD_DIM) + tl.arange(0, TILE * HEAD_DIM)
    tl.store(sums, tl.zeros([TILE * HEAD_DIM], tl.float32))
    if TURNS is not None:
        PARTS: tl.constexpr = HEAD_DIM // 64
        tl.store(TURNS + (bh * tiles + tile) * PARTS + tl.arange(0, PARTS), tl.zeros([PARTS], tl.int32))


@triton.jit
def _finish_dq_kernel(SUM, SINK_TERMS, MEAN, DQ, scale, heads, group, tokens, tiles, HEAD_DIM: tl.constexpr):
    """Narrow sums of dQ [heads, tiles, 64 columns, warp, 8 columns, lane / 4, lane % 4, 8 rows, 2 columns] to dQ, in
    rows. With sinks and a mean of K, dQ gains their product."""
    tile = tl.program_id(0) % tiles
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    t = tile * 64 + tl.arange(0, 64)
    x = tl.load(SUM + (bh * tiles + tile) * (64 * HEAD_DIM) + tl.arange(0, 64 * HEAD_DIM))
    x = tl.permute(tl.reshape(x, [HEAD_DIM // 64, 4, 8, 8, 4, 2, 2]), (1, 5, 3, 0, 2, 4, 6))
    rows = DQ + ((bh // heads * tokens + t) * heads + bh % heads) * HEAD_DIM
    d = tl.arange(0, HEAD_DIM)
    x = tl.reshape(x, [64, HEAD_DIM]) * scale
    if MEAN is not None:
        terms = tl.load(SINK_TERMS + bh * tokens + t, mask=t < tokens, other=0.0) * scale
        mean = tl.load(MEAN + (bh // heads * (heads // group) + bh % heads // group) * HEAD_DIM + d)
        x += terms[:, None] * mean[None, :]
    tl.store(rows[:, None] + d[None, :], x, mask=(t < tokens)[:, None])


def _map(x: Tensor, rows: int) -> nvrtc.TensorMap:
    """Describe x [B, heads, N, D] for copies of so many tokens and 128 bytes; outside of x the copies hold zeros."""
    columns = min(x.shape[3], 128 // x.element_size())
    return nvrtc.tensor_map(x, (1, 1, rows, columns), columns * x.element_size())


@functools.cache
def defines_of(head_dim: int, half: bool, cluster: int = 1) -> dict[str, int]:
    """Return the macros of hopper_backward.cu. SHARED_BYTES is the size of its struct Shared."""
    keys, stages = KEYS[head_dim], 2 if head_dim == 128 else 3
    stage = TILE * (head_dim * 5 + FLOATS[head_dim] * 4)
    tiles = keys * head_dim * 5 + 2 * keys * TILE * 2 + keys * TILE * 4 + stages * stage
    shared = -(-(tiles + 8 * (5 + keys // 32 + 4 * stages)) // 1024) * 1024
    return {"HEAD_DIM": head_dim, "FP16": int(half), "CLUSTER": cluster, "SHARED_BYTES": shared}


def heads_at_once(heads: int, bytes_of_head: int, blocks: int, processors: int, work: str, in_order: bool) -> int:
    """Return how many of the heads of K run at one time, for so many blocks of keys of all of them: all, or the size of
    the fewest equal groups that the L2 cache holds. `in_order` says that causal blocks wait for each other."""
    if work == "causal" and not in_order and blocks < ONE_GROUP * processors:
        return heads
    largest = max(1, (L2_BYTES_IN_ORDER if in_order else L2_BYTES) // bytes_of_head)
    return -(-heads // -(-heads // largest))


def cluster_of(blocks: int, group: int, processors: int, work: str) -> int:
    """Return among how many programs the query heads of a block of keys are divided, for so many blocks of keys of all
    key heads: a divisor of the group, the smallest one that makes ENOUGH programs for each multiprocessor."""
    sizes = [size for size in range(1, LARGEST_CLUSTER + 1) if group % size == 0]
    return next((size for size in sizes if size * blocks >= ENOUGH[work] * processors), sizes[-1])


def hopper_sums(call: BackwardCall, dk: Tensor, dv: Tensor, *, deterministic: bool | None = None) -> Tensor:
    """Compute dK and dV of `scores` into tensors of v's shape and dtype, with any strides that TMA takes.

    deterministic: add up dQ in a fixed order, key blocks from the first to the last. None asks
    torch.are_deterministic_algorithms_enabled(). dK and dV are always the same bits.

    Returns:
        The sums of dQ, float32, as _finish_dq_kernel reads them. Times call.scale they are dQ.
    """
    do, v, saved, bounds, scale = call.do, call.v, call.saved, call.bounds, call.scale
    batch, n_q, heads, head_dim = do.shape
    n_k, kv_heads = v.shape[1:3]
    q_tiles = tiles_of(n_q)
    do, v = nvrtc.mappable(do), nvrtc.mappable(v)
    deterministic = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
    new = functools.partial(torch.empty, device=do.device)
    # The dtype is bfloat16 for all inputs, because float16 has no room for dS, and both operands of a product have one
    # type.
    q16 = new(saved.q.codes.shape, dtype=torch.bfloat16)
    vectors = new(batch * heads * q_tiles * TILE * FLOATS[head_dim], dtype=torch.float32)
    dq_sum = new(batch * heads * q_tiles * TILE * head_dim, dtype=torch.float32)
    turns = new(batch * heads * q_tiles * (head_dim // 64), dtype=torch.int32) if deterministic else None
    _prepare_queries_kernel[(q_tiles * batch * heads,)](
        do, call.o, *saved.q, saved.lse, saved.sink_scores, q16, vectors, dq_sum, turns, call.sink_terms,
        scale * LOG2E.value,
        heads, n_q, q_tiles, *do.stride()[:3], HEAD_DIM=head_dim, TILE=TILE, LOG2E=LOG2E.value,
        FLOATS=FLOATS[head_dim], num_warps=4,
    )  # fmt: skip
    starts, ends = (None, None) if bounds is None else bounds.unbind()
    keys = KEYS[head_dim]
    blocks, group = -(-n_k // keys) * batch * kv_heads, heads // kv_heads
    work = "causal" if call.causal and bounds is None else "equal"
    processors, in_order = multiprocessors(do.device), deterministic and call.causal
    cluster = cluster_of(blocks, group, processors, work)
    at_once = heads_at_once(batch * kv_heads, n_q * group * head_dim * 9, blocks, processors, work, in_order)
    defines = defines_of(head_dim, v.dtype == torch.float16, cluster)
    nvrtc.load(SOURCE, "hopper_backward", defines, ARCHITECTURE).launch(
        (blocks * cluster,), (keys * 2 + 128,), defines["SHARED_BYTES"],
        _map(saved.q.codes, TILE), _map(q16, TILE), _map(do.transpose(1, 2), TILE), _map(saved.k.codes, keys),
        _map(v.transpose(1, 2), keys), _map(dk.transpose(1, 2), 64), _map(dv.transpose(1, 2), 64),
        vectors, saved.k.scale, starts, ends, dq_sum, turns, scale,
        kv_heads, group, n_q, n_k, q_tiles, batch * kv_heads, at_once, int(call.causal),
    )  # fmt: skip
    return dq_sum


def narrowed(sums: Tensor, call: BackwardCall) -> Tensor:
    """Return dQ in the dtype of v, in rows, from what hopper_sums returned."""
    batch, n_q, heads, head_dim = call.do.shape
    dq, tiles = torch.empty(call.do.shape, dtype=call.v.dtype, device=sums.device), tiles_of(n_q)
    mean = None if call.sink_terms is None else call.saved.k_mean
    _finish_dq_kernel[(tiles * batch * heads,)](
        sums, call.sink_terms, mean, dq, call.scale, heads, heads // call.v.shape[2], n_q, tiles, HEAD_DIM=head_dim
    )
    return dq


def hopper_backward(call: BackwardCall, *, deterministic: bool | None = None) -> Gradients:
    """Compute reference.twin_backward of `scores` where hopper.HOPPER takes the call, up to the order of float32 sums.
    `deterministic` is that of hopper_sums."""
    with on_device_of(call.do):
        dk, dv = (torch.empty(call.v.shape, dtype=call.v.dtype, device=call.v.device) for _ in range(2))
        return narrowed(hopper_sums(call, dk, dv, deterministic=deterministic), call), dk, dv
