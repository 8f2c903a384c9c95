"""The last kernel of the Hopper backward behind QK-norm and rotary embedding. It makes the gradient of the projection
that q, k and v came from, out of the sums of dQ and of dK.

In two steps, narrowing writes dQ in 16 bits and the gradient of QK-norm reads it, which moves 4 bytes an element more,
and dV is copied to its place beside the others. Here hopper_backward.cu writes dK and dV where the gradient of the
projection has its columns of k and v. One kernel then reads the sums of dQ and those dK, and writes the columns of q
and k. dQ is not rounded in between.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import observe
from .call import BackwardCall, Projection, ProjectionGradients
from .hopper_backward import hopper_sums, narrowed
from .launch import on_device_of
from .qk_norm_rope import gradients_of_rows, sum_rows, with_rows
from .quantize import TILE, tiles_of

ROWS = 16
"""Tokens of a program. The sums of so many tokens of a head lie together (hopper_backward._finish_dq_kernel)."""
WARPS, STAGES = 4, 3
"""Warps of a program, and heads whose loads are on their way."""


@triton.jit
def _half_of_sums(SUMS, HALF: tl.constexpr):
    """Load half of the columns of dQ, 16 tokens: [8 columns, lane / 4, lane % 4, 8 rows, 2 columns] -> rows."""
    x = tl.reshape(tl.load(SUMS + tl.arange(0, 16 * HALF)), [HALF // 8, 8, 4, 2, 2])
    return tl.reshape(tl.permute(x, (3, 1, 0, 2, 4)), [16, HALF])


@triton.jit
def _gradients_of_heads(
    SUMS, X, GAIN, OUT, PARTIAL, inside, cos, sin, scale, sums_of_head, eps,
    HEADS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the heads of 16 tokens, and what they add to the gain's. Without sums, the gradients of
    what became of the heads stand where those of the heads are written."""
    D: tl.constexpr = 2 * HALF
    SECOND: tl.constexpr = 16 * HALF if HALF < 64 else HALF * TILE  # The second half of 16 tokens begins here.
    half = tl.arange(0, HALF)
    gain_a, gain_b = tl.load(GAIN + half).to(tl.float32)[None, :], tl.load(GAIN + HALF + half).to(tl.float32)[None, :]
    sum_a, sum_b = tl.zeros([16, HALF], tl.float32), tl.zeros([16, HALF], tl.float32)
    for head in tl.range(0, HEADS, num_stages=STAGES):
        out = OUT + head * D
        if SUMS is not None:
            sums = SUMS + head * sums_of_head
            of_a, of_b = _half_of_sums(sums, HALF) * scale, _half_of_sums(sums + SECOND, HALF) * scale
        else:
            of_a = tl.load(out, mask=inside, other=0.0).to(tl.float32)
            of_b = tl.load(out + HALF, mask=inside, other=0.0).to(tl.float32)
        a = tl.load(X + head * D, mask=inside, other=1.0).to(tl.float32)
        b = tl.load(X + head * D + HALF, mask=inside, other=1.0).to(tl.float32)
        a, b, gain_sum_a, gain_sum_b = gradients_of_rows(a, b, of_a, of_b, cos, sin, gain_a, gain_b, eps, HALF)
        sum_a += gain_sum_a
        sum_b += gain_sum_b
        tl.store(out, a.to(OUT.dtype.element_ty), mask=inside)
        tl.store(out + HALF, b.to(OUT.dtype.element_ty), mask=inside)
    tl.store(PARTIAL + half, tl.sum(sum_a, 0))
    tl.store(PARTIAL + HALF + half, tl.sum(sum_b, 0))


@triton.jit
def _projection_gradients_kernel(
    SUMS, OUT, Q, K, Q_GAIN, K_GAIN, COS, SIN, PARTIAL, scale, tokens, tiles, q_stride, k_stride, eps,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, HALF: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program takes all heads of 16 tokens of a sequence."""
    D: tl.constexpr = 2 * HALF
    groups = tl.cdiv(tokens, 16)
    group, sequence = tl.program_id(0) % groups, (tl.program_id(0) // groups).to(tl.int64)
    row, half = group * 16 + tl.arange(0, 16), tl.arange(0, HALF)[None, :]
    inside = (row < tokens)[:, None] & (half >= 0)
    token = (sequence * tokens + row)[:, None]
    cos = tl.load(COS + token * HALF + half, mask=inside, other=0.0).to(tl.float32)
    sin = tl.load(SIN + token * HALF + half, mask=inside, other=0.0).to(tl.float32)
    sums_of_head = tl.cast(tiles, tl.int64) * (TILE * D)
    SUMS += (sequence * Q_HEADS * tiles + group // (TILE // 16)) * (TILE * D) + group % (TILE // 16) * (16 * 64)
    out = OUT + token * ((Q_HEADS + 2 * K_HEADS) * D) + half
    partial = PARTIAL + tl.program_id(0).to(tl.int64) * (2 * D)
    _gradients_of_heads(
        SUMS, Q + token * q_stride + half, Q_GAIN, out, partial, inside, cos, sin, scale, sums_of_head, eps,
        Q_HEADS, HALF, TILE, STAGES,
    )  # fmt: skip
    _gradients_of_heads(
        None, K + token * k_stride + half, K_GAIN, out + Q_HEADS * D, partial + D, inside, cos, sin, scale, 0, eps,
        K_HEADS, HALF, TILE, STAGES,
    )  # fmt: skip


def finish_projection(sums: Tensor, out: Tensor, scale: float, projection: Projection) -> Tensor:
    """Write the columns of q and k of `out`, [B, N, heads + 2 kv_heads, D], from the sums of dQ and from dK, which
    stands in the columns of k. Return the gradients of the gains, [2, D]."""
    q, k, q_gain, k_gain, cos, sin, eps = projection
    q, k = with_rows(q, k)
    batch, tokens, _, head_dim = out.shape
    programs = batch * triton.cdiv(tokens, ROWS)
    partial = torch.empty(programs, 2 * head_dim, dtype=torch.float32, device=out.device)
    _projection_gradients_kernel[(programs,)](
        sums, out, q, k, q_gain.contiguous(), k_gain.contiguous(), cos.contiguous(), sin.contiguous(), partial, scale,
        tokens, tiles_of(tokens), q.stride(0), k.stride(0), eps, Q_HEADS=q.shape[1] // head_dim,
        K_HEADS=k.shape[1] // head_dim, HALF=head_dim // 2, TILE=TILE, STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip
    return sum_rows(partial, q_gain.new_empty(2, head_dim))


def hopper_projection(call: BackwardCall, projection: Projection) -> ProjectionGradients:
    """Compute Backend.projection of `scores` where hopper.HOPPER takes the call."""
    batch, tokens, heads, head_dim = call.do.shape
    kv_heads = call.v.shape[2]
    with on_device_of(call.do):
        out = call.v.new_empty(batch, tokens, heads + 2 * kv_heads, head_dim)
        _, dk, dv = out.split([heads, kv_heads, kv_heads], 2)
        sums = hopper_sums(call, dk, dv)
        if observe.listening():
            observe.backward(call, (narrowed(sums, call), dk, dv))
        of_gains = finish_projection(sums, out, call.scale, projection)
    return out.view(batch * tokens, -1), of_gains
