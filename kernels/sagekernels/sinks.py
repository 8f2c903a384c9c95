"""Attention sinks around the kernels: one more score for each head, whose value is zero, before and after each backend.

The kernels know of no sink. After the forward pass the log-sum-exp gets the sink's share and the output shrinks. Every
backward pass takes both from outside, so its P, delta and dS are those of attention with sinks. What is left to do is
the gradient of the sink and a term of dQ. K-smoothing shifts the scores, and a sink sees that, while a softmax alone
does not; `reference.entered` and `reference.left` are the specification, with the formulas.

Each function is one pass over its tensors.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference
from .call import RECIPES, BackwardCall, Call, Saved
from .launch import on_device_of
from .pieces import block_d, load_tokens
from .quantize import token_mean


def entered(call: Call, o: Tensor, saved: Saved) -> tuple[Tensor, Saved]:
    """Put the sinks of a call into the results of a forward pass without them, as the backward pass takes them. o and
    the log-sum-exp are overwritten."""
    mean = saved.k_mean
    if call.smooth_k and mean is None:
        mean = token_mean(call.k)
    shift = mean if RECIPES[call.recipe].int8_scores else None
    put = entered_triton if _by_kernel(o, call.backend) else reference.entered
    lse, share = put(o, saved.lse, call.q, shift, call.sinks, call.scale)
    return o, saved._replace(lse=lse, k_mean=mean, sink_share=share)


def left(call: BackwardCall, dq: Tensor) -> tuple[Tensor, Tensor]:
    """Return dQ, and the gradient of the sinks in float32 [H], from the dQ of a backward pass without them, which is
    overwritten."""
    take = left_triton if _by_kernel(dq, call.backend) else reference.left
    return take(call.do, call.o, call.saved.sink_share, dq.contiguous(), call.saved.k_mean, call.scale)


def _by_kernel(x: Tensor, backend: str | None) -> bool:
    return x.is_cuda and backend != "twin"


def _tile_of(head_dim: int) -> int:
    return 64 if head_dim <= 128 else 32


@triton.jit
def _enter_kernel(
    O, LSE, SHARE, Q, MEAN, SINKS, scale, heads, group, tokens, tiles, stride_b, stride_n, stride_h,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Put the sink into a tile of queries of one head."""
    tile = tl.program_id(0) % tiles
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = bh // heads, bh % heads
    t, d = tile * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK_D)
    own = tl.zeros([TILE], tl.float32) + tl.load(SINKS + head).to(tl.float32)
    if MEAN is not None:
        q = Q + batch * stride_b + head * stride_h
        q = load_tokens(q, tile * TILE, tokens, stride_n, TILE, HEAD_DIM, BLOCK_D, True).to(tl.float32)
        mean = MEAN + (batch * (heads // group) + head // group) * HEAD_DIM
        mean = tl.load(mean + d, mask=d < HEAD_DIM, other=0.0)
        own -= tl.sum(q * mean[None, :], 1) * scale
    lse = tl.load(LSE + bh * tokens + t, mask=t < tokens, other=0.0)
    # Relative to the larger one. A sink of minus infinity adds the logarithm of 1, which is 0.
    larger = tl.maximum(lse, own)
    both = larger + tl.log(tl.exp(lse - larger) + tl.exp(own - larger))
    tl.store(LSE + bh * tokens + t, both, mask=t < tokens)
    tl.store(SHARE + bh * tokens + t, tl.exp(own - both), mask=t < tokens)
    rows = O + (batch * tokens * heads + head) * HEAD_DIM + t.to(tl.int64)[:, None] * (heads * HEAD_DIM) + d[None, :]
    inside = (t < tokens)[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(rows, tl.load(rows, mask=inside, other=0.0).to(tl.float32) * tl.exp(lse - both)[:, None], mask=inside)


def entered_triton(
    o: Tensor, lse: Tensor, q: Tensor, mean: Tensor | None, sinks: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute reference.entered on a GPU."""
    batch, n, heads, head_dim = q.shape
    share, tile = torch.empty_like(lse), _tile_of(head_dim)
    q = q if q.stride(3) == 1 else q.contiguous()
    tiles, group = -(-n // tile), 1 if mean is None else heads // mean.shape[1]
    with on_device_of(o):
        _enter_kernel[(tiles * batch * heads,)](
            o, lse, share, q, mean, sinks.contiguous(), scale, heads, group, n, tiles, *q.stride()[:3],
            HEAD_DIM=head_dim, BLOCK_D=block_d(head_dim), TILE=tile, num_warps=4,
        )  # fmt: skip
    return lse, share


@triton.jit
def _leave_kernel(
    DO, O, SHARE, DQ, MEAN, PARTS, scale, heads, group, tokens, tiles, stride_b, stride_n, stride_h,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Finish dQ of a tile of queries of one head, and write the tile's part of the sink's gradient."""
    tile = tl.program_id(0) % tiles
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = bh // heads, bh % heads
    t, d = tile * TILE + tl.arange(0, TILE), tl.arange(0, BLOCK_D)
    do = DO + batch * stride_b + head * stride_h
    do = load_tokens(do, tile * TILE, tokens, stride_n, TILE, HEAD_DIM, BLOCK_D, True).to(tl.float32)
    first = (batch * tokens * heads + head) * HEAD_DIM
    o = load_tokens(O + first, tile * TILE, tokens, heads * HEAD_DIM, TILE, HEAD_DIM, BLOCK_D, True).to(tl.float32)
    share = tl.load(SHARE + bh * tokens + t, mask=t < tokens, other=0.0)
    weighted = share * tl.sum(do * o, 1)
    tl.store(PARTS + tl.program_id(0), -tl.sum(weighted, 0))
    if MEAN is not None:
        mean = MEAN + (batch * (heads // group) + head // group) * HEAD_DIM
        mean = tl.load(mean + d, mask=d < HEAD_DIM, other=0.0)
        rows = DQ + first + t.to(tl.int64)[:, None] * (heads * HEAD_DIM) + d[None, :]
        inside = (t < tokens)[:, None] & (d < HEAD_DIM)[None, :]
        dq = tl.load(rows, mask=inside, other=0.0).to(tl.float32)
        tl.store(rows, dq + (weighted * scale)[:, None] * mean[None, :], mask=inside)


def left_triton(
    do: Tensor, o: Tensor, share: Tensor, dq: Tensor, mean: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute reference.left on a GPU. The parts of the tiles are added up in one order."""
    batch, n, heads, head_dim = do.shape
    tile = _tile_of(head_dim)
    do = do if do.stride(3) == 1 else do.contiguous()
    tiles, group = -(-n // tile), 1 if mean is None else heads // mean.shape[1]
    parts = torch.empty((batch, heads, tiles), dtype=torch.float32, device=do.device)
    with on_device_of(do):
        _leave_kernel[(tiles * batch * heads,)](
            do, o, share, dq, mean, parts, scale, heads, group, n, tiles, *do.stride()[:3],
            HEAD_DIM=head_dim, BLOCK_D=block_d(head_dim), TILE=tile, num_warps=4,
        )  # fmt: skip
    return dq, parts.sum((0, 2))
