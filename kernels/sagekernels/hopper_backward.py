"""Hopper backward of the recipe `scores` (Gluon): TMA, asynchronous warpgroup MMA, warp specialization.

S is recomputed from the INT8 codes of Q and K, the other four products are 16-bit with float32 sums. On this chip the
reductions, roundings and conversions that an INT8 P or dS costs take longer than the tensor time it saves; what was
measured, `fine` in the same design included, is in kernels/NOTES.md, section Backward.

dK and dV (hopper_dkdv.py): keys are the rows of every tile, S^T = K Q^T and dP^T = V dO^T, so P^T and dS^T become A
operands without leaving the registers. A consumer warpgroup owns 64 keys and walks over the queries that see them. dQ
is computed by a second kernel that recomputes S and dP with queries as rows (hopper_dq.py), or, FUSED, on the way: dS
goes to shared memory, is multiplied by K there and added to global memory, in no fixed order.

Vectors that belong to columns are stored so that a thread finds its values in 16-byte words: inside 16 tokens,
position 4c + 2b + d (c < 4, b < 2, d < 2) holds token 8b + 2c + d.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .forward import document_bounds_triton
from .hopper_dkdv import dkdv_kernel
from .hopper_dq import dq_kernel
from .launch import on_device_of
from .pieces import LOG2E
from .quantize import TILE, tiles_of
from .reference import RECIPES, Saved


@triton.jit
def _in_column_order(TILE: tl.constexpr):
    """Token that stands at each position of a column vector of a tile (module docstring)."""
    position = tl.arange(0, TILE)
    return (position // 16) * 16 + (position // 2 % 2) * 8 + (position // 4 % 4) * 2 + position % 2


@triton.jit
def _prepare_queries_kernel(
    DO, O, Q8, Q_SCALE, LSE, Q16, VECTORS, DELTA, scale_log2, heads, tokens, tiles,
    stride_b, stride_n, stride_h, HEAD_DIM: tl.constexpr, TILE: tl.constexpr, LOG2E: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO o O), Q in 16 bits as its codes say, and the column vectors s_Q, lse (in log 2) and delta."""
    tile = tl.program_id(0) % tiles
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = bh // heads, bh % heads
    t = tile * TILE + _in_column_order(TILE)
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
    lse = tl.load(LSE + bh * tokens + t, mask=inside, other=float("inf"))
    delta = tl.sum(do * o, 1)
    tl.store(DELTA + bh * tokens + t, delta, mask=inside)
    vectors = VECTORS + (bh * tiles + tile) * (3 * TILE) + tl.arange(0, TILE)
    tl.store(vectors, q_scale * scale_log2)
    tl.store(vectors + TILE, lse * LOG2E)
    tl.store(vectors + 2 * TILE, delta)


@triton.jit
def _prepare_keys_kernel(K8, K_SCALE, K16, VECTORS, tokens, tiles, HEAD_DIM: tl.constexpr, TILE: tl.constexpr):
    """K in 16 bits as its codes say, and its scales as column vectors."""
    tile = tl.program_id(0) % tiles
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    t = tile * TILE + _in_column_order(TILE)
    inside = t < tokens
    rows = bh * tokens * HEAD_DIM + t[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    scale = tl.load(K_SCALE + bh * tokens + t, mask=inside, other=0.0)
    k = tl.load(K8 + rows, mask=inside[:, None], other=0).to(tl.float32) * scale[:, None]
    tl.store(K16 + rows, k, mask=inside[:, None])
    tl.store(VECTORS + (bh * tiles + tile) * TILE + tl.arange(0, TILE), scale)


@triton.jit
def _finish_dq_kernel(SUM, DQ, scale, heads, tokens, tiles, stride_b, stride_n, stride_h):
    """The sums of _add_dq, from fragment order to rows."""
    tile = tl.program_id(0) % tiles
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    t = tile * 64 + tl.arange(0, 64)
    x = tl.load(SUM + (bh * tiles + tile) * 4096 + tl.arange(0, 4096))
    x = tl.permute(tl.reshape(x, [8, 4, 8, 4, 2, 2]), (1, 4, 2, 0, 3, 5))
    rows = DQ + (bh // heads) * stride_b + (bh % heads) * stride_h + t.to(tl.int64)[:, None] * stride_n
    tl.store(rows + tl.arange(0, 64)[None, :], tl.reshape(x, [64, 64]) * scale, mask=(t < tokens)[:, None])


_GLUON_TYPES = {torch.int8: gl.int8, torch.float32: gl.float32, torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def _descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, block, gl.NVMMASharedLayout.get_default_for(block, _GLUON_TYPES[x.dtype]))


def _rows_view(x: Tensor) -> tuple[Tensor, int]:
    """[B, N, H, D] as the matrix that a TMA descriptor needs, [B * N, columns], and the columns between heads."""
    batch, n, heads, head_dim = x.shape
    columns = (heads - 1) * x.stride(2) + head_dim
    is_matrix = x.stride(3) == 1 and x.stride(0) == n * x.stride(1) and x.stride(1) >= columns
    if not is_matrix or x.stride(1) % 8 or x.data_ptr() % 16:
        x = x.contiguous()
        columns = heads * head_dim
    return x.as_strided((batch * n, columns), (x.stride(1), 1)), x.stride(2)


# Operands of the programs that run at one time should stay in the L2 cache.
L2_BYTES = 24 << 20


class Schedule(NamedTuple):
    """Depth of the dK and dV pipeline, whether K's codes wait in registers, depth and warpgroups of the dQ kernel."""

    stages: int
    k_in_registers: bool
    dq_stages: int
    dq_consumers: int


SCHEDULES = {64: Schedule(3, True, 4, 3), 128: Schedule(2, False, 3, 2)}


def supported(do: Tensor, v: Tensor, saved: Saved, *, recipe: str) -> bool:
    """Whether hopper_backward takes this call; the portable kernels take every other."""
    rules = RECIPES[recipe]
    return (
        not rules.per_tile
        and not rules.int8_gradients
        and saved.q_mean is None
        and do.shape[3] in SCHEDULES
        and do.dtype == v.dtype
        and v.dtype in (torch.bfloat16, torch.float16)
        and do.is_cuda
        and torch.cuda.get_device_capability(do.device) == (9, 0)
        and max(do.numel(), v.numel()) < 2**31
    )


def hopper_backward(
    do: Tensor,
    k: Tensor | None,
    v: Tensor,
    o: Tensor,
    saved: Saved,
    *,
    causal: bool,
    scale: float,
    cu_seqlens: Tensor | None,
    recipe: str,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """reference.twin_backward on Hopper where `supported` says so: same arguments, same results up to float32 sums.

    deterministic=False allows dQ to be added up in no fixed order where that is faster (head dimension 64).
    """
    batch, n_q, heads, head_dim = do.shape
    n_k, kv_heads = v.shape[1:3]
    q_tiles, k_tiles = tiles_of(n_q), tiles_of(n_k)
    plan = SCHEDULES[head_dim]
    fused = head_dim == 64 and not deterministic
    do = do if do.stride(3) == 1 else do.contiguous()
    new = functools.partial(torch.empty, device=do.device)
    with on_device_of(do):
        # bfloat16 whatever the inputs are: float16 has no room for dS, and both operands of a product have one type.
        q16 = new((batch * heads * n_q, head_dim), dtype=torch.bfloat16)
        k16 = new((batch * kv_heads * n_k, head_dim), dtype=torch.bfloat16)
        vectors = new(batch * heads * q_tiles * 3 * TILE, dtype=torch.float32)
        k_vectors = new(batch * kv_heads * k_tiles * TILE, dtype=torch.float32)
        delta = torch.empty_like(saved.lse)
        _prepare_queries_kernel[(q_tiles * batch * heads,)](
            do, o, *saved.q, saved.lse, q16, vectors, delta, scale * LOG2E.value,
            heads, n_q, q_tiles, *do.stride()[:3], HEAD_DIM=head_dim, TILE=TILE, LOG2E=LOG2E.value, num_warps=4,
        )  # fmt: skip
        _prepare_keys_kernel[(k_tiles * batch * kv_heads,)](
            *saved.k, k16, k_vectors, n_k, k_tiles, HEAD_DIM=head_dim, TILE=TILE, num_warps=4
        )
        do_rows, stride_dh = _rows_view(do)
        v_rows, stride_vh = _rows_view(v)
        dq, dk, dv = new(do.shape, dtype=v.dtype), new(v.shape, dtype=v.dtype), new(v.shape, dtype=v.dtype)
        dq_sum = dq
        if fused:
            dq_sum = torch.zeros(batch * heads * q_tiles * TILE * head_dim, dtype=torch.float32, device=do.device)
        packed = cu_seqlens is not None
        starts, ends = document_bounds_triton(cu_seqlens, n_q) if packed else (None, None)
        box = [TILE, head_dim]
        q8_desc = _descriptor(saved.q.codes.view(-1, head_dim), box)
        k8_desc = _descriptor(saved.k.codes.view(-1, head_dim), box)
        do_desc, v_desc = _descriptor(do_rows, box), _descriptor(v_rows, box)
        blocks = triton.cdiv(n_k, 128)
        per_group = max(1, L2_BYTES // (n_q * heads // kv_heads * head_dim * 5))
        dkdv_kernel[(blocks * batch * kv_heads,)](
            q8_desc, _descriptor(q16, box), do_desc, _descriptor(vectors, [TILE]), k8_desc, v_desc,
            _descriptor(k16, [2 * TILE, head_dim]), saved.k.scale, starts, ends, dk, dv, dq_sum, scale,
            kv_heads, heads // kv_heads, n_q, n_k, q_tiles, blocks, batch * kv_heads, per_group, stride_vh, stride_dh,
            *dk.stride()[:3],
            HEAD_DIM=head_dim, STAGES=plan.stages, IS_CAUSAL=causal, PACKED=packed, FUSED=fused,
            K_REGS=plan.k_in_registers, num_warps=4, maxnreg=168,
        )  # fmt: skip
        if fused:
            _finish_dq_kernel[(q_tiles * batch * heads,)](dq_sum, dq, scale, heads, n_q, q_tiles, *dq.stride()[:3])
            return dq, dk, dv
        consumers = plan.dq_consumers
        blocks = triton.cdiv(n_q, 64 * consumers)
        per_group = max(1, L2_BYTES // (n_k * head_dim * 5)) * (heads // kv_heads)
        dq_kernel[(blocks * batch * heads,)](
            q8_desc, do_desc, k8_desc, _descriptor(k16, box), v_desc, _descriptor(k_vectors, [TILE]),
            saved.q.scale, saved.lse, delta, starts, ends, dq, scale,
            kv_heads, heads // kv_heads, n_q, n_k, k_tiles, blocks, batch * heads, per_group, stride_vh, stride_dh,
            *dq.stride()[:3],
            HEAD_DIM=head_dim, STAGES=plan.dq_stages, CONSUMERS=consumers, IS_CAUSAL=causal, PACKED=packed,
            REGISTERS={2: 240, 3: 160}[consumers], num_warps=4, maxnreg={2: 168, 3: 128}[consumers],
        )  # fmt: skip
    return dq, dk, dv
