"""The arithmetic that everything else agrees on, in one place: padded vocabulary, parts of a schedule, halves of a
micro-batch, peak learning rates. That of ranks is in layout.py."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from sagetrain.config.schema import LinearConfig, LrScheduleConfig, OptimizerConfig, Recomputation, RunConfig

VOCAB_MULTIPLE = 128


def padded_vocab_size(vocab_size: int) -> int:
    """Return the number of rows of the embedding: the vocabulary rounded up to a multiple of 128, for fast matmuls and
    tensor parallelism."""
    return -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def idle_share(stages: int, chunks: int, micro_batches: int) -> float:
    """Return the share of a step in which a stage waits while the pipeline fills and drains."""
    idle = (stages - 1) / (chunks * micro_batches)
    return idle / (1 + idle)


def recomputed_blocks(how: Recomputation | Literal["auto"], num_layers: int) -> int:
    """Return how many blocks, from the first on, the backward pass recomputes as wholes
    (training.activation_checkpointing)."""
    return how if isinstance(how, int) else num_layers * (how == "full")


def checkpoint_tokens(cfg: RunConfig) -> int:
    """Return the tokens between checkpoints: as configured, or else a tenth of the run."""
    return cfg.checkpoint.every_tokens or max(1, cfg.training.total_tokens // 10)


def decay_tokens(lr_schedule: LrScheduleConfig, total_tokens: int) -> int:
    """Return the tokens of the final decay of a wsd schedule: as configured, or else the configured share of the run,
    or else a tenth of it. A share is rounded down where the warm-up leaves no room for more."""
    share = total_tokens // 10 if lr_schedule.decay is None else lr_schedule.decay * total_tokens
    fits = round(share) + warmup_tokens(lr_schedule, total_tokens) <= total_tokens
    return lr_schedule.decay_tokens or max(1, round(share) if fits else int(share))


def warmup_tokens(lr_schedule: LrScheduleConfig, total_tokens: int) -> int:
    """Return the tokens of the warm-up: as configured, or else the configured share of the run, of which it leaves a
    token."""
    return lr_schedule.warmup_tokens or min(round(lr_schedule.warmup * total_tokens), total_tokens - 1)


def last_part(fraction: float, total_tokens: int) -> int:
    """Return the tokens seen at which the last `fraction` of the run begins."""
    return round(total_tokens * (1 - fraction))


def may_be_low_bit(cfg: RunConfig) -> bool:
    """Whether any linear layer may be in 8 bits. In fp32 `auto` has nothing to choose from."""
    return cfg.linear.low_bit or (cfg.linear.precision == "auto" and cfg.training.dtype == "bf16")


def low_bit_linear(linear: LinearConfig, tokens: int, total_tokens: int) -> bool:
    """Whether linear layers multiply in 8 bits in a step that begins when `tokens` have been seen."""
    begin, end = low_bit_part(linear, total_tokens)
    return linear.low_bit and begin <= tokens < end


def low_bit_part(linear: LinearConfig, total_tokens: int) -> tuple[int, float]:
    """Return the tokens seen at which linear layers begin and stop to multiply in 8 bits: 0 and infinity without
    bounds."""
    first, last = linear.keep_first_fraction, linear.keep_last_fraction
    # The first step belongs to any first part, however short the part is.
    begin = 0 if first is None else max(1, round(total_tokens * first))
    return begin, math.inf if last is None else last_part(last, total_tokens)


def parts_of(tokens: int, tensor_parallel_size: int, overlap: bool) -> int:
    """Return the number of parts in which a rank's tokens go through the blocks: 2 if the ranks can shard each half,
    else 1."""
    return 2 if overlap and tensor_parallel_size > 1 and tokens % (2 * tensor_parallel_size) == 0 else 1


def attention_calls(num_sequences: int, tokens: int, tensor_parallel_size: int, overlap: bool) -> int:
    """Return the number of parts in which the tokens go through attention: those of parts_of if they are whole
    sequences, else 1."""
    parts = parts_of(tokens, tensor_parallel_size, overlap)
    return parts if num_sequences % parts == 0 else 1


class PeakRate(NamedTuple):
    """The peak learning rate of a kind of tensor."""

    key: str
    """The key that says it."""
    given: float
    """The value of the key."""
    rate: float
    """The rate at the width of the model (lr_base_width)."""


def peak_lr(optimizer: OptimizerConfig, kind: str, width: int, by_muon: bool = False) -> PeakRate:
    """Return the peak learning rate of a kind of tensor, a key of lr_of, where model.hidden_size is `width`."""
    own: float | None = getattr(optimizer.lr_of, kind)
    key, given = (f"optimizer.lr_of.{kind}", own) if own else ("optimizer.lr", optimizer.lr)
    if optimizer.lr_base_width is None or kind in ("embedding", "gain"):
        return PeakRate(key, given, given)
    # AdamW's updates of a matrix add up over its inputs; the singular values of Muon's are all alike, and grow
    # with the root of the width under match_rms_adamw.
    ratio = optimizer.lr_base_width / width
    if by_muon:
        ratio = 1.0 if optimizer.muon.adjust_lr == "original" else math.sqrt(ratio)
    return PeakRate(key, given, given * ratio)
