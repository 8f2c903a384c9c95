"""Tokens per optimizer step as a pure function of the tokens seen: constant, linear ramp or stages, up and down.

Progress is counted in tokens: a step taken at `tokens_seen` moves the run to `tokens_seen + tokens_per_step`, and the
run ends with the first step that reaches total_tokens. Nothing here depends on a step counter, so a resumed run, or
one on another number of ranks, finds its place from the tokens alone.

`multiple` is the number of tokens of one micro-step over all ranks (config/arithmetic.py, `token_multiple`); every
result is a whole number of them, which is the gradient accumulation.
"""

from __future__ import annotations

from typing import NamedTuple

from sagetrain.config.schema import ConstantTokens, RampTokens, StagedTokens

Schedule = ConstantTokens | RampTokens | StagedTokens


class ScheduleStage(NamedTuple):
    """A run of equal optimizer steps."""

    from_tokens: int
    tokens_per_step: int
    accumulation: int
    steps: int


def requested_tokens(schedule: Schedule, tokens_seen: int) -> int:
    """What the schedule asks for at `tokens_seen`, before rounding to whole micro-steps.

    Integers throughout, so that every rank and every machine agrees.
    """
    if isinstance(schedule, ConstantTokens):
        return schedule.tokens
    if isinstance(schedule, RampTokens):
        progress = min(tokens_seen, schedule.ramp_tokens)
        return schedule.start + (schedule.end - schedule.start) * progress // schedule.ramp_tokens
    return [stage.tokens for stage in schedule.stages if stage.from_tokens <= tokens_seen][-1]


def tokens_per_step(schedule: Schedule, tokens_seen: int, multiple: int) -> int:
    """Tokens of the optimizer step that starts at `tokens_seen`: rounded down to whole micro-steps, at least one."""
    return max(1, requested_tokens(schedule, tokens_seen) // multiple) * multiple


def stages(schedule: Schedule, total_tokens: int, multiple: int) -> list[ScheduleStage]:
    """The whole run as runs of equal steps, ending with the first step that reaches `total_tokens`.

    Costs O(log) per change of the tokens per step, not O(steps).
    """
    result: list[ScheduleStage] = []
    seen = 0
    while seen < total_tokens:
        tokens = tokens_per_step(schedule, seen, multiple)
        until = min(_next_change(schedule, seen, multiple), total_tokens)
        steps = -(-(until - seen) // tokens)
        result.append(ScheduleStage(seen, tokens, tokens // multiple, steps))
        seen += steps * tokens
    return result


def _next_change(schedule: Schedule, tokens_seen: int, multiple: int) -> float:
    """Smallest count of tokens after `tokens_seen` at which the tokens per step may differ; infinity if none."""
    if isinstance(schedule, StagedTokens):
        return min((s.from_tokens for s in schedule.stages if s.from_tokens > tokens_seen), default=float("inf"))
    if isinstance(schedule, ConstantTokens) or tokens_seen >= schedule.ramp_tokens:
        return float("inf")
    now = tokens_per_step(schedule, tokens_seen, multiple)
    if tokens_per_step(schedule, schedule.ramp_tokens, multiple) == now:
        return float("inf")
    low, high = tokens_seen, schedule.ramp_tokens  # a ramp is monotone: bisect; unchanged at low, changed at high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if tokens_per_step(schedule, middle, multiple) == now else (low, middle)
    return high
