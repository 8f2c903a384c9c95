"""The learning rate as a pure function of the tokens seen: warm-up, decay, and the rule for changes of tokens per
step."""

from __future__ import annotations

import math

from sagetrain.config.arithmetic import decay_tokens, warmup_tokens
from sagetrain.config.schema import LrScheduleConfig, OptimizerConfig

_BATCH_RULE_POWER = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


def learning_rate(
    optimizer: OptimizerConfig,
    lr_schedule: LrScheduleConfig,
    tokens_seen: int,
    tokens_per_step: int,
    total_tokens: int,
) -> float:
    """Return the learning rate of the step that takes the run from `tokens_seen` to `tokens_seen + tokens_per_step`.

    The curve is read at the middle of the step's tokens. The first step (warm-up from 0) and the last step (decay to 0)
    are therefore not wasted. A change of the tokens per step leaves the area under the curve, learning rate × tokens,
    as it was.

    batch_rule then multiplies by (tokens_per_step / reference_tokens_per_step) to the power of 0, 0.5 or 1. Without a
    reference the factor is 1; config/rules does not allow training without one.
    """
    # The last step may pass the end.
    middle = (tokens_seen + min(tokens_seen + tokens_per_step, total_tokens)) / 2
    value = curve(optimizer.lr, lr_schedule, middle, total_tokens)
    reference = lr_schedule.reference_tokens_per_step or tokens_per_step
    factor: float = (tokens_per_step / reference) ** _BATCH_RULE_POWER[lr_schedule.batch_rule]
    return value * factor


def curve(peak: float, lr_schedule: LrScheduleConfig, tokens: float, total_tokens: int) -> float:
    """Return the value of the curve at `tokens`: 0 at 0, `peak` after the warm-up, min_lr at total_tokens and beyond.

    The curve is continuous. `constant` stays at `peak`. `wsd` stays at `peak` until decay_tokens before the end.
    """
    warmup = warmup_tokens(lr_schedule, total_tokens)
    if tokens < warmup:
        return peak * tokens / warmup
    if lr_schedule.shape == "constant":
        return peak
    start = warmup
    if lr_schedule.shape == "wsd":
        start = total_tokens - decay_tokens(lr_schedule, total_tokens)
    progress = min(1.0, max(0.0, (tokens - start) / max(1, total_tokens - start)))
    remaining = (1 + math.cos(math.pi * progress)) / 2 if lr_schedule.shape == "cosine" else 1 - progress
    return lr_schedule.min_lr + (peak - lr_schedule.min_lr) * remaining
