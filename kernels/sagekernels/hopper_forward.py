"""Hopper forward of the recipes `fine` and `scores`: the launcher of hopper_forward.cu.

Formulas and granularity are those of reference.twin_forward: INT8 Q K^T with one scale per token, P V in the 16 bits of
V. quantize_keys.cu quantizes K, and the kernel itself quantizes Q. The schedule, its limits and the measurements are in
kernels/NOTES.md, section Forward.
"""

import torch
from torch import Tensor

from .call import Call, Saved
from .launch import multiprocessors, on_device_of
from .nvrtc import load, mappable, tensor_map
from .pieces import LOG2E
from .quantize_keys import quantize_keys
from .sinks import sink_scores

ARCHITECTURE = "sm_90a"
SOURCE = "hopper_forward.cu"
# The table maps head dimension -> keys per tile, warpgroups of 64 queries, stages of the K and V pipeline.
SCHEDULES = {64: (96, 3, 5), 128: (128, 2, 4)}
PER_HEAD_CACHE = 24 << 20  # The K and V of heads that are worked on together take so many bytes: half of the L2 cache.


def defines_of(head_dim: int, causal: bool, packed: bool, half: bool, sinks: bool = False) -> dict[str, int]:
    """Return the macros of hopper_forward.cu."""
    block_n, consumers, stages = SCHEDULES[head_dim]
    # The bytes are those of q, its codes, Part and the barriers.
    queries = 64 * (head_dim * (2 if head_dim == 128 else 3) + 4) + 2 * 32 + 3 * 8
    keys = block_n * (head_dim * 3 + 4) + 3 * 8
    shared = -(-(consumers * queries + stages * keys) // 1024) * 1024
    return {
        "HEAD_DIM": head_dim, "BLOCK_N": block_n, "CONSUMERS": consumers, "STAGES": stages, "CAUSAL": int(causal),
        "PACKED": int(packed), "FP16": int(half), "SINKS": int(sinks), "SHARED_BYTES": shared,
    }  # fmt: skip


def hopper_forward(call: Call) -> tuple[Tensor, Saved]:
    """Compute reference.twin_forward where hopper.HOPPER takes the call, up to the order of float32 sums."""
    q, k, v, bounds = call.q, call.k, call.v, call.bounds
    batch, n_q, heads, head_dim = q.shape
    n_k, kv_heads = k.shape[1:3]
    block_n, consumers, _ = SCHEDULES[head_dim]
    q, v = mappable(q), mappable(v)
    with on_device_of(q):
        nk_padded = -(-n_k // block_n) * block_n
        k_codes, k_ordered, counter, mean = quantize_keys(
            k, call.smooth_k, nk_padded, ARCHITECTURE, mean=call.sinks is not None
        )
        own = sink_scores(call, mean)
        o, lse, q_codes = call.empty_results()
        starts, ends = (None, None) if bounds is None else bounds.unbind()
        m_blocks = -(-n_q // (64 * consumers))
        tiles = m_blocks * batch * heads
        per_group = max(1, PER_HEAD_CACHE // (n_k * head_dim * 3)) * (heads // kv_heads)
        defines = defines_of(head_dim, call.causal, bounds is not None, q.dtype == torch.float16, own is not None)
        load(SOURCE, "forward", defines, ARCHITECTURE).launch(
            (min(multiprocessors(q.device), tiles),), (128 * (consumers + 1),), defines["SHARED_BYTES"],
            tensor_map(q, (1, 64, 1, 64)),
            tensor_map(k_codes.codes.view(-1, n_k, head_dim), (1, block_n, head_dim), head_dim),
            tensor_map(v, (1, block_n, 1, 64)), tensor_map(q_codes.codes, (1, 1, 64, head_dim), head_dim),
            k_ordered, starts, ends, own, q_codes.scale, o, lse, call.scale * LOG2E.value,
            heads, kv_heads, batch * heads, n_q, n_k, nk_padded, m_blocks, per_group, tiles, counter,
        )  # fmt: skip
    return o, Saved(lse, q_codes, k_codes, mean, own)
