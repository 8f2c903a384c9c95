"""The memory and the time that DeepSpeed's ZeRO takes, as derived from the code of DeepSpeed 0.19. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sagetrain.config.layout import Layout
from sagetrain.config.schema import RunConfig
from sagetrain.costs.accounting import MemoryItem, rank_of

# DeepSpeed's default for zero_optimization.reduce_bucket_size, in elements. It also bounds the gradients that stage 1
# flattens.
_REDUCE_BUCKET = 500_000_000
# Bytes moved by ZeRO stage: per parameter of the rank in a micro-step, per parameter of the rank in a step, and per
# parameter that the rank updates in a step. These are for bf16.
#   1 (BF16_Optimizer): as soon as backward has made a gradient, writes it in fp32 (6) and adds that to its sum (12).
#     Step: flattening and scaling (20), norm (4), clipping (8), zeroing (4) of all; Adam (28) and new bf16 weights (6).
#   2: bucket copy, flatten, divide, convert to fp32 (18), add to the owned part (12, counted in full).
#     Step on the owned part alone: norm, flatten, clip, Adam, new weights.
#   0 (fp32): gradients accumulate in place (12). Step: flatten, scale and copy back (24), norm, clipping, Adam.
_STATE_BYTES = {0: (12, 64, 0), 1: (18, 36, 34), 2: (30, 0, 60)}
# With gradients that travel in bf16, stage 1 converts once a step, and stage 2 converts nothing.
_STATE_BYTES_BF16 = {1: (18, 44, 34), 2: (24, 0, 60)}
_CONVERTED = {0: 0, 1: 0, 2: 6}
"""Bytes of a micro-step, by ZeRO stage, that write a bf16 gradient in fp32."""


def reduce_bucket_size(parameters: int) -> int:
    """Return zero_optimization.reduce_bucket_size, in elements: DeepSpeed's default, but no more than the parameters of
    the rank, since stage 2 allocates the whole bucket."""
    return min(_REDUCE_BUCKET, parameters)


def state(cfg: RunConfig, layout: Layout, size: int, moments: str, moment_bytes: int) -> list[MemoryItem]:
    """Estimate weights, gradients and optimizer state of a rank with `size` parameters.

    Args:
        moments: the optimizer's moments in words.
        moment_bytes: the bytes of the moments before ZeRO.
    """
    dtype, stage, ranks = cfg.training.dtype, layout.zero_stage, layout.replicas
    share, element = -(-size // ranks), rank_of(cfg).element
    if stage == 0:  # DeepSpeed in fp32
        return [
            MemoryItem("weights", 4 * size, "fp32"),
            MemoryItem("gradients", 4 * size, "fp32"),
            MemoryItem("optimizer", moment_bytes, f"{moments}; the weights are their own master copy"),
        ]
    why = f"fp32 master copy and {moments}, 1/{ranks} of them"
    optimizer = MemoryItem("optimizer", 4 * share + -(-moment_bytes // ranks), why)
    if stage == 2:
        held = MemoryItem("gradients", 4 * share, f"fp32, 1/{ranks} of them")
    else:
        held = MemoryItem("gradients", 4 * size, "fp32")
    return [MemoryItem("weights", element * size, dtype), held, optimizer]


def reduction(cfg: RunConfig, layout: Layout, size: int) -> tuple[MemoryItem, MemoryItem, float]:
    """Estimate the gradients on their way to other ranks: see memory._reduction.

    Stage 2 in bf16 flattens its bucket, then converts it to fp32 if gradients travel in fp32. A bucket that holds all
    gradients is reduced after backward, as at stages 0 and 1. For such a bucket in bf16, only gradients that fit
    DeepSpeed's 5e8 elements are flattened into a copy, and gradients that travel in bf16 are converted.
    """
    stage, sixteen_bit = layout.zero_stage, cfg.training.dtype == "bf16"
    bucket, narrow = reduce_bucket_size(size), cfg.parallel.gradient_reduction == "bf16"
    if stage == 0:
        held, copied = 0, 4 * min(size, _REDUCE_BUCKET)
    elif stage == 1:
        flat = 2 * narrow * size + (4 * size if size <= _REDUCE_BUCKET else 0)
        held, copied = (0, flat) if sixteen_bit else (4 * bucket, 0)
    else:
        held, copied = (2 * bucket, (2 if narrow else 6) * bucket) if sixteen_bit else (4 * bucket, 8 * bucket)
    return (
        MemoryItem("bucket", held, "gradients on their way"),
        MemoryItem("reduction", copied, "copies of the gradients that go to other ranks"),
        0.0 if stage < 2 else 1 - bucket / size,
    )


def _bf16_gradients(cfg: RunConfig) -> bool:
    """Return whether gradients travel in bf16. In an fp32 run they never do; the setting is an error there, which a
    plan has to work with."""
    return cfg.parallel.gradient_reduction == "bf16" and cfg.training.dtype == "bf16"


def moved_bytes(cfg: RunConfig, stage: int) -> tuple[int, int, int]:
    """Return the bytes that passes over gradients, Adam and new weights move for each parameter: of the rank in a
    micro-step, of the rank in a step, and of those that the rank updates in a step."""
    return (_STATE_BYTES_BF16 if _bf16_gradients(cfg) else _STATE_BYTES)[stage]


def converted_bytes(cfg: RunConfig, stage: int) -> int:
    """Return the bytes of a parameter that a micro-step writes when it converts a bf16 gradient to fp32."""
    return _CONVERTED[stage] if cfg.training.dtype == "bf16" else 0


class Exchange(NamedTuple):
    """Calls of one collective between replicas."""

    purpose: str
    kind: str
    calls: int
    payload: int
    """Bytes of one call."""


def exchanges(cfg: RunConfig, layout: Layout, size: int, accumulation: int) -> Iterator[Exchange]:
    """Yield the collectives of a step of `accumulation` micro-steps, as engines/deepspeed has them. Nothing runs beside
    them. Gradients are all-reduced: at stages 0 and 1 once a step, behind the last backward pass; at 2 in every
    micro-step."""
    stage = layout.zero_stage
    buckets = -(-size // reduce_bucket_size(size)) if stage > 1 else 1
    wide = 2 if _bf16_gradients(cfg) else 4
    calls = accumulation * buckets if stage > 1 else buckets
    yield Exchange("gradients", "all-reduce", calls, wide * size // buckets)
    if stage > 0:
        yield Exchange("new weights", "all-gather", 1, rank_of(cfg).element * size)
