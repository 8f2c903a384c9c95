"""Hopper forward of the recipes `fine` and `scores`: hopper_forward.cu and what launches it.

Formulas and granularity are those of reference.twin_forward: INT8 Q K^T with one scale per token, P V in the 16 bits of
V. K is quantized here, in Triton; Q by the kernel itself. The schedule, its limits and what was measured are in
kernels/NOTES.md, section Forward.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .forward import document_bounds_triton
from .launch import on_device_of
from .nvrtc import load, tensor_map
from .pieces import LOG2E, as_codes, inverse_scale, max_or_nan
from .quantize import Codes
from .reference import RECIPES, Saved

SOURCE = "hopper_forward.cu"
# head dimension -> keys per tile, warpgroups of 64 queries, stages of the K and V pipeline
SCHEDULES = {64: (96, 3, 5), 128: (128, 2, 4)}
PER_HEAD_CACHE = 24 << 20  # bytes of K and V of the heads that are worked on together: half of the L2 cache


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
    X, SUMS, CODES, SCALE, ORDERED, COUNTER, heads, tokens, chunks, tiles, padded, stride_b, stride_n, stride_h,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, HAS_MEAN: tl.constexpr,
):  # fmt: skip
    """One program quantizes ROWS tokens of one head. ORDERED [B, heads, padded]: the scales as the consumers read them,
    position 4c + 2b + a of every 16 from token 8b + 2c + a. COUNTER: set to zero for the kernel that follows."""
    if tl.program_id(0) == 0:
        tl.store(COUNTER, 0)
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # what was summed last is still in the L2 cache
    tile = program % tiles
    bh = (program // tiles).to(tl.int64)
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
    codes = tl.where((largest < float("inf"))[:, None], as_codes(x * inverse_scale(largest)[:, None]), 0)
    tl.store(CODES + (bh * tokens + t)[:, None] * HEAD_DIM + d[None, :], codes, mask=inside)
    tl.store(SCALE + bh * tokens + t, largest / 127.0, mask=t < tokens)
    position = (t // 16) * 16 + ((t % 8) // 2) * 4 + ((t % 16) // 8) * 2 + t % 2
    tl.store(ORDERED + bh * padded + position, largest / 127.0, mask=t < padded)


def _quantize_keys(k: Tensor, smooth: bool, padded: int) -> tuple[Codes, Tensor, Tensor]:
    """quantize.quantize_twin of k [B, N, heads, D] per token, less its mean over tokens if `smooth`; the scales in the
    order of the consumers [B * heads * padded]; and an int32 zero."""
    batch, n, heads, head_dim = k.shape
    codes = torch.empty((batch, heads, n, head_dim), dtype=torch.int8, device=k.device)
    scale = torch.empty((batch, heads, n), dtype=torch.float32, device=k.device)
    ordered = torch.empty(batch * heads * padded, dtype=torch.float32, device=k.device)
    counter = torch.empty(1, dtype=torch.int32, device=k.device)
    chunks, sums = 0, None
    if smooth:
        per_chunk = max(512, triton.cdiv(triton.cdiv(n, 32), 64) * 64)
        chunks = triton.cdiv(n, per_chunk)
        sums = torch.empty((batch, heads, chunks, head_dim), dtype=torch.float32, device=k.device)
        _partial_sums_kernel[(batch * heads * chunks,)](
            k, sums, heads, n, chunks, per_chunk, *k.stride()[:3], HEAD_DIM=head_dim, ROWS=64, num_warps=8
        )
    tiles = triton.cdiv(padded, 64)
    _quantize_kernel[(batch * heads * tiles,)](
        k, sums, codes, scale, ordered, counter, heads, n, chunks, tiles, padded, *k.stride()[:3],
        HEAD_DIM=head_dim, ROWS=64, HAS_MEAN=smooth, num_warps=4,
    )  # fmt: skip
    return Codes(codes, scale), ordered, counter


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


def mappable(x: Tensor) -> Tensor:
    """x [B, N, H, D], copied if a tensor map cannot describe its strides."""
    strides = [x.stride(i) for i in range(3) if x.shape[i] > 1]
    odd = x.stride(3) != 1 or x.data_ptr() % 16 or any(s % 8 or s == 0 for s in strides)
    return x.clone(memory_format=torch.contiguous_format) if odd else x


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
    block_n, consumers, stages = SCHEDULES[head_dim]
    q, v = mappable(q), mappable(v)
    k = k if k.stride(3) == 1 else k.contiguous()
    with on_device_of(q):
        nk_padded = triton.cdiv(n_k, block_n) * block_n
        k_codes, k_ordered, counter = _quantize_keys(k, smooth_k, nk_padded)
        q_codes = Codes(
            torch.empty((batch, heads, n_q, head_dim), dtype=torch.int8, device=q.device),
            torch.empty((batch, heads, n_q), dtype=torch.float32, device=q.device),
        )
        o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty((batch, heads, n_q), dtype=torch.float32, device=q.device)
        starts, ends = (None, None) if cu_seqlens is None else document_bounds_triton(cu_seqlens, n_q)
        m_blocks = triton.cdiv(n_q, 64 * consumers)
        tiles = m_blocks * batch * heads
        per_group = max(1, PER_HEAD_CACHE // (n_k * head_dim * 3)) * (heads // kv_heads)
        defines = {
            "HEAD_DIM": head_dim, "BLOCK_N": block_n, "CONSUMERS": consumers, "STAGES": stages,
            "CAUSAL": int(causal), "PACKED": int(cu_seqlens is not None), "FP16": int(q.dtype == torch.float16),
        }  # fmt: skip
        shared_bytes = 64 * consumers * head_dim * 2 + stages * block_n * (3 * head_dim + 4) + 1024  # and barriers
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count
        load(SOURCE, "forward", defines).launch(
            (min(processors, tiles),), (128 * (consumers + 1),), shared_bytes,
            tensor_map(q, (1, 64, 1, 64)),
            tensor_map(k_codes.codes.view(-1, n_k, head_dim), (1, block_n, head_dim), head_dim),
            tensor_map(v, (1, block_n, 1, 64)),
            k_ordered, starts, ends, *q_codes, o, lse, scale * LOG2E.value,
            heads, kv_heads, batch * heads, n_q, n_k, nk_padded, m_blocks, per_group, tiles, counter,
        )  # fmt: skip
    return o, Saved(lse, q_codes, k_codes, None, None)
