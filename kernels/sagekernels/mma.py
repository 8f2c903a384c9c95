"""CUDA kernels by mma.sync for GPUs of compute capability 8.0 to 12.0: recipe `fine`, forward of `scores` too.

The formulas and the granularity are those of reference.py. NVRTC compiles each kernel for the GPU that it runs on. The
kernels use only instructions of sm_80. Where tensor cores sum in float16 faster than in float32 (GeForce), P V and dP
are float16 products with float16 sums over a tile. Their values are in units of powers of two, which costs no accuracy.
The design and the measurements are in kernels/NOTES.md, section "CUDA kernels of sm_80".
"""

import functools

import torch
from torch import Tensor

from . import launch
from .backward import triton_backward
from .call import RECIPES, Backend, BackwardCall, Call, Gradients, Saved, scores_by_token
from .launch import on_device_of
from .nvrtc import load, mappable
from .pieces import LOG2E
from .quantize import TILE, tiles_of
from .quantize_keys import quantize_keys
from .sinks import sink_scores

CAPABILITIES = ((8, 0), (8, 6), (8, 9), (9, 0), (12, 0))
"""The compute capabilities that the tests compile the kernels for."""

QUERIES = 128  # A block of the forward owns so many queries and walks over tiles of TILE keys.
# A block of the backward owns so many keys, by head dimension, and walks over tiles of TILE queries.
KEYS = {64: 64, 128: 128}


def forward_defines(
    head_dim: int, causal: bool, packed: bool, half: bool, half_sums: bool = False, sinks: bool = False
) -> dict[str, int]:
    """Return the macros of mma_forward.cu."""
    return {
        "HEAD_DIM": head_dim, "CAUSAL": int(causal), "PACKED": int(packed), "FP16": int(half),
        "HALF_SUMS": int(half_sums), "SINKS": int(sinks), "SHARED_BYTES": 2 * TILE * (3 * head_dim + 8),
    }  # fmt: skip


def backward_defines(head_dim: int, half: bool, half_sums: bool, stages: int, blocks: int) -> dict[str, int]:
    """Return the macros of mma_backward.cu."""
    keys = KEYS[head_dim]
    shared = (2 + stages) * keys * head_dim + TILE * keys + stages * TILE * (5 * head_dim + 16) + 8 * keys + 16
    return {
        "HEAD_DIM": head_dim, "FP16": int(half), "HALF_SUMS": int(half_sums), "STAGES": stages,
        "BLOCKS": blocks, "SHARED_BYTES": shared,
    }  # fmt: skip


@functools.cache
def architecture_of(device: torch.device) -> str:
    """Return NVRTC's name of a GPU's architecture."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


@functools.cache
def shared_memory_of(device: torch.device) -> int:
    """Return the bytes of shared memory of a multiprocessor. A block takes 1 KiB beside its own."""
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


def schedule(head_dim: int, memory: int) -> tuple[int, int]:
    """Return how many tiles of queries a block of the backward keeps in shared memory, and how many blocks run on a
    multiprocessor with so much of it. At head_dim 128 the registers are for one."""
    choices = [(2, 1), (1, 1)] if head_dim == 128 else [(2, 3), (1, 3), (1, 2)]

    def takes(choice: tuple[int, int]) -> int:
        return choice[1] * (backward_defines(head_dim, False, False, *choice)["SHARED_BYTES"] + 1024)

    return next((choice for choice in choices if takes(choice) <= memory), choices[-1])


def _values(v: Tensor, tiles: int, architecture: str) -> tuple[Tensor, Tensor]:
    """Return v [B, N, heads, D] in float16, each tile of a head in units of a power of two, and the units of so many
    tiles."""
    batch, n, heads, head_dim = v.shape
    rows = torch.empty(v.shape, dtype=torch.float16, device=v.device)
    units = torch.empty(batch * heads * tiles, dtype=torch.float32, device=v.device)
    defines = {"HEAD_DIM": head_dim, "FP16": int(v.dtype == torch.float16), "HALF_SUMS": 1}
    load("mma_prepare.cu", "values", defines, architecture).launch(
        (batch * heads * tiles,), (128,), 16, v, rows, units, heads, n, tiles, *v.stride()[:3]
    )
    return rows, units


def mma_forward(call: Call, *, half_sums: bool | None = None) -> tuple[Tensor, Saved]:
    """Compute reference.twin_forward where MMA takes the call, up to the order of float32 sums.

    half_sums: sum P V in float16. None asks launch.half_sums.
    """
    q, k, v, bounds = call.q, call.k, call.v, call.bounds
    batch, n_q, heads, head_dim = q.shape
    n_k, kv_heads = k.shape[1:3]
    q, v = mappable(q), mappable(v)
    with on_device_of(q):
        architecture = architecture_of(q.device)
        tiles = tiles_of(n_k)
        k_codes, k_pairs, _, mean = quantize_keys(
            k, call.smooth_k, tiles * TILE, architecture, pairs=True, mean=call.sinks is not None
        )
        own = sink_scores(call, mean)
        half_sums = launch.half_sums(q.device) if half_sums is None else half_sums
        values, units = _values(v, tiles, architecture) if half_sums else (v, None)
        o, lse, q_codes = call.empty_results()
        starts, ends = (None, None) if bounds is None else bounds.unbind()
        blocks = -(-n_q // QUERIES)
        half, sinks = q.dtype == torch.float16, own is not None
        defines = forward_defines(head_dim, call.causal, bounds is not None, half, half_sums, sinks)
        load("mma_forward.cu", "forward", defines, architecture).launch(
            (blocks * batch * heads,), (128,), defines["SHARED_BYTES"],
            q, k_codes.codes, k_pairs, values, units, starts, ends, own, *q_codes, o, lse, call.scale * LOG2E.value,
            heads, heads // kv_heads, n_q, n_k, tiles * TILE, blocks, *q.stride()[:3], *values.stride()[:3],
        )  # fmt: skip
    return o, Saved(lse, q_codes, k_codes, mean, own)


def mma_backward(call: BackwardCall, *, half_sums: bool | None = None) -> Gradients:
    """Compute reference.twin_backward of `fine` where MMA takes the call, up to the order of float32 sums.

    half_sums: sum dP in float16. None asks launch.half_sums.
    """
    do, v, saved, bounds, scale = call.do, call.v, call.saved, call.bounds, call.scale
    batch, n_q, heads, head_dim = do.shape
    n_k, kv_heads = v.shape[1:3]
    do, v = mappable(do), mappable(v)
    q_tiles, keys = tiles_of(n_q), KEYS[head_dim]
    blocks = -(-n_k // keys)
    k_tiles = blocks * (keys // TILE)
    with on_device_of(do):
        architecture = architecture_of(do.device)
        half_sums = launch.half_sums(do.device) if half_sums is None else half_sums
        new = functools.partial(torch.empty, device=do.device)
        rows = batch * heads * q_tiles * TILE
        queries = new(rows * (5 * head_dim + 16), dtype=torch.uint8)
        k_turned = new(batch * kv_heads * k_tiles * TILE * head_dim, dtype=torch.int8)
        units, sums = (new(n, dtype=torch.float32) for n in (rows, rows * head_dim))
        dq, dk, dv = new(do.shape, dtype=v.dtype), new(v.shape, dtype=v.dtype), new(v.shape, dtype=v.dtype)
        half = v.dtype == torch.float16
        prepare = {"HEAD_DIM": head_dim, "FP16": int(half), "HALF_SUMS": int(half_sums)}
        codes_bytes = TILE * (head_dim + 4)
        load("mma_prepare.cu", "queries", prepare, architecture).launch(
            (batch * heads * q_tiles,), (128,), 2 * codes_bytes,
            do, call.o, *saved.q, saved.lse, saved.sink_scores, queries, units, sums, call.sink_terms,
            scale, scale * LOG2E.value, heads, n_q, q_tiles, *do.stride()[:3],
        )  # fmt: skip
        load("mma_prepare.cu", "keys", prepare, architecture).launch(
            (batch * kv_heads * k_tiles,), (128,), codes_bytes, saved.k.codes, k_turned, n_k, k_tiles
        )
        values, value_units = _values(v, k_tiles, architecture) if half_sums else (v, None)
        starts, ends = (None, None) if bounds is None else bounds.unbind()
        cache = torch.cuda.get_device_properties(do.device).L2_cache_size
        heads_at_once = max(1, cache * 3 // 4 // (n_q * heads // kv_heads * head_dim * 9))
        defines = backward_defines(head_dim, half, half_sums, *schedule(head_dim, shared_memory_of(do.device)))
        load("mma_backward.cu", "backward", defines, architecture).launch(
            (blocks * batch * kv_heads,), (2 * keys,), defines["SHARED_BYTES"],
            queries, *saved.k, k_turned, values, value_units, starts, ends, sums, dk, dv, scale,
            kv_heads, heads // kv_heads, n_q, n_k, q_tiles, k_tiles, batch * kv_heads, heads_at_once,
            int(call.causal), *values.stride()[:3],
        )  # fmt: skip
        load("mma_prepare.cu", "narrow", prepare, architecture).launch(
            (batch * heads * q_tiles,), (128,), 0,
            sums, units, call.sink_terms, None if call.sink_terms is None else saved.k_mean, dq, scale,
            heads, heads // kv_heads, n_q, q_tiles,
        )  # fmt: skip
    return dq, dk, dv


def backward(call: BackwardCall) -> Gradients:
    """Compute the gradients of `fine` by the kernel. Those of `scores`, and all under deterministic algorithms, are
    left to the portable kernels, because the kernel has five INT8 products and adds dQ up in any order."""
    own = RECIPES[call.recipe].int8_gradients and not torch.are_deterministic_algorithms_enabled()
    return (mma_backward if own else triton_backward)(call)


MMA = Backend(
    "mma",
    serves=lambda capability: capability in CAPABILITIES,
    head_dims=frozenset(KEYS),
    takes=scores_by_token,
    forward=mma_forward,
    backward=backward,
)
