"""The scores of attention sinks: one more score of each head, whose value is zero, beside those of each query.

The kernels take them from outside. A forward pass counts them in the log-sum-exp, and shrinks its output. A backward
pass weighs them by delta, for their gradient and for a term of dQ. reference.sink_scores and reference.twin_backward
have the formulas.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .call import Call
from .launch import on_device_of
from .pieces import block_d, load_tokens

ROWS = 64
"""The queries of a program."""


@triton.jit
def _scores_kernel(
    Q, MEAN, SINKS, SCORES, scale, heads, group, tokens, tiles, stride_b, stride_n, stride_h,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) % tiles
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    batch, head = bh // heads, bh % heads
    t, d = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    own = tl.zeros([ROWS], tl.float32) + tl.load(SINKS + head).to(tl.float32)
    if MEAN is not None:
        q = Q + batch * stride_b + head * stride_h
        q = load_tokens(q, tile * ROWS, tokens, stride_n, ROWS, HEAD_DIM, BLOCK_D, True).to(tl.float32)
        mean = MEAN + (batch * (heads // group) + head // group) * HEAD_DIM
        own -= tl.sum(q * tl.load(mean + d, mask=d < HEAD_DIM, other=0.0)[None, :], 1) * scale
    tl.store(SCORES + bh * tokens + t, own, mask=t < tokens)


def sink_scores(call: Call, mean: Tensor | None) -> Tensor | None:
    """Compute reference.sink_scores of a call on a GPU, with the mean that was taken from K, or return None if the call
    has no sinks."""
    if call.sinks is None:
        return None
    q = call.q
    batch, n, heads, head_dim = q.shape
    scores = torch.empty((batch, heads, n), dtype=torch.float32, device=q.device)
    q = q if q.stride(3) == 1 else q.contiguous()
    tiles, group = -(-n // ROWS), 1 if mean is None else heads // mean.shape[1]
    with on_device_of(q):
        _scores_kernel[(tiles * batch * heads,)](
            q, mean, call.sinks.contiguous(), scores, call.scale, heads, group, n, tiles, *q.stride()[:3],
            HEAD_DIM=head_dim, BLOCK_D=block_d(head_dim), ROWS=ROWS, num_warps=4,
        )  # fmt: skip
    return scores
