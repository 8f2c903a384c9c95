"""The arithmetic that everything else agrees on, in one place: ranks, tokens of a micro-step, padded vocabulary.

tokens per step = micro_batch_size x seq_length x data-parallel ranks x accumulation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from sagetrain.config.schema import LinearConfig, LrScheduleConfig, PrecisionConfig, RunConfig

VOCAB_MULTIPLE = 128


def padded_vocab_size(vocab_size: int) -> int:
    """Rows of the embedding: the vocabulary rounded up to a multiple of 128, for matmuls and tensor parallelism."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def data_parallel_size(cfg: RunConfig, world_size: int) -> int:
    """Ranks, or groups of tensor- and context-parallel ranks, that work on sequences of their own."""
    return world_size // (cfg.parallel.tensor_parallel_size * cfg.parallel.context_parallel_size)


def token_multiple(cfg: RunConfig, data_parallel_size: int) -> int:
    """Tokens of one micro-step over all ranks. Tokens per step are a whole number of them: the accumulation."""
    return cfg.data.micro_batch_size * cfg.data.seq_length * data_parallel_size


def resolved_zero_stage(cfg: RunConfig) -> int:
    """ZeRO stage that really runs: bf16 at stage 0 runs as stage 1."""
    return 1 if cfg.training.dtype == "bf16" and cfg.parallel.zero_stage == 0 else cfg.parallel.zero_stage


def overlaps_reduction(cfg: RunConfig) -> bool:
    """deepspeed.zero_optimization.overlap_comm: whether gradients are reduced beside backward. Unless the YAML sets it,
    at ZeRO 1 in bf16, where it is not DeepSpeed that does it (engines/reduction.py), and at 3 (docs/gradients.md)."""
    stage = resolved_zero_stage(cfg)
    default = stage == 3 or (stage == 1 and cfg.training.dtype == "bf16")
    return bool(cfg.deepspeed.get("zero_optimization", {}).get("overlap_comm", default))


def own_reduction(cfg: RunConfig) -> bool:
    """Whether it is engines/reduction.py, not DeepSpeed, that reduces gradients, beside a step's last backward pass."""
    return resolved_zero_stage(cfg) == 1 and overlaps_reduction(cfg)


def checkpoint_tokens(cfg: RunConfig) -> int:
    """Tokens between checkpoints: a tenth of the run's, unless they are named."""
    return cfg.checkpoint.every_tokens or max(1, cfg.training.total_tokens // 10)


def decay_tokens(lr_schedule: LrScheduleConfig, total_tokens: int) -> int:
    """Tokens of the final decay of wsd: as configured, else a tenth of the run."""
    return lr_schedule.decay_tokens or max(1, total_tokens // 10)


def last_part(fraction: float, total_tokens: int) -> int:
    """Tokens at which the last part of a run begins that is so much of it."""
    return round(total_tokens * (1 - fraction))


def may_be_low_bit(cfg: RunConfig) -> bool:
    """Whether any linear layer may be in 8 bits. `auto` has nothing to choose from in fp32."""
    return cfg.linear.low_bit or (cfg.linear.precision == "auto" and cfg.training.dtype == "bf16")


def low_bit_linear(linear: LinearConfig, tokens: int, total_tokens: int) -> bool:
    """Whether linear layers multiply in 8 bits in a step before which `tokens` were seen."""
    begin, end = low_bit_part(linear, total_tokens)
    return linear.low_bit and begin <= tokens < end


def low_bit_part(linear: LinearConfig, total_tokens: int) -> tuple[int, float]:
    """Tokens from which on, and up to which, linear layers multiply in 8 bits: 0 and infinity if nothing bounds it."""
    first, last = linear.keep_first_fraction, linear.keep_last_fraction
    begin = 0 if first is None else max(1, round(total_tokens * first))  # the first step is in any first part
    return begin, math.inf if last is None else last_part(last, total_tokens)


def scheduled_rung(precision: PrecisionConfig, layer: int, num_layers: int, tokens: int, total_tokens: int) -> int:
    """The rung that a layer is at least on in a step before which `tokens` were seen: 0 is attention.recipe, then come
    those of precision.rungs."""
    found = [0]
    for floor in precision.floors:
        everywhere = not (floor.first_layers or floor.last_layers)
        here = everywhere or layer < floor.first_layers or layer >= num_layers - floor.last_layers
        if here and tokens >= last_part(floor.last_fraction or 1, total_tokens):
            found.append(precision.rungs.index(floor.rung) + 1)
    return max(found)


def layers_in_words(layers: Sequence[int]) -> str:
    """Rising numbers: `layer 3`, `layers 0, 5 to 11`."""
    runs = [[layer for _, layer in run] for _, run in groupby(enumerate(layers), lambda pair: pair[1] - pair[0])]
    words = ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
    return f"layer{'s' if len(layers) > 1 else ''} {words}"
