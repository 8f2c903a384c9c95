"""Tokens per optimizer step as a pure function of the tokens seen: constant, linear ramp or stages, up and down.

Progress is counted in tokens. A step taken at `tokens_seen` moves the run to `tokens_seen + tokens_per_step`, and the
run ends with the first step that reaches total_tokens. Nothing here depends on a step counter or on the layout. A run
that is resumed, or that moves to another number of ranks, finds its place from the tokens alone, and one YAML always
takes the same steps. config/rules checks that every step is a whole number of micro-steps.
"""

from __future__ import annotations

from typing import NamedTuple

from sagetrain.config.schema import ConstantTokens, NoiseAwareTokens, RampTokens, StagedTokens

Schedule = ConstantTokens | RampTokens | StagedTokens | NoiseAwareTokens
MOST_SIZES = 1_000_000
"""The largest number of sizes that the steps of a schedule may have. Checks and plans go through all of them."""


class ScheduleStage(NamedTuple):
    """A sequence of equal optimizer steps."""

    from_tokens: int
    tokens_per_step: int
    accumulation: int
    steps: int


def sizes_of(schedule: Schedule) -> int:
    """Return the number of sizes that the steps of a ramp have, 1 for other schedules."""
    return abs(schedule.end - schedule.start) // schedule.rounding + 1 if isinstance(schedule, RampTokens) else 1


def tokens_per_step(schedule: Schedule, tokens_seen: int) -> int:
    """Return the tokens of the optimizer step that starts at `tokens_seen`. On a ramp they are rounded down to its
    multiple.

    For noise_aware, which stability/noise_aware.py decides while training, this is the start value, as if nothing were
    decided. All arithmetic is in integers, so that every rank and every machine agrees.
    """
    if isinstance(schedule, ConstantTokens):
        return schedule.tokens
    if isinstance(schedule, NoiseAwareTokens):
        return schedule.start
    if isinstance(schedule, RampTokens):
        progress = min(tokens_seen, schedule.ramp_tokens)
        on_the_line = schedule.start + (schedule.end - schedule.start) * progress // schedule.ramp_tokens
        return max(1, on_the_line // schedule.rounding) * schedule.rounding
    begun = [stage for stage in schedule.stages if stage.from_tokens <= tokens_seen]
    return (begun or schedule.stages)[-1].tokens  # config/rules checks that one stage begins at 0.


def change_at_resume(schedule: Schedule, tokens_seen: int, last: int) -> str | None:
    """Return a message if the schedule that continues a run differs from the last step before the checkpoint. That
    step had `last` tokens and ended at `tokens_seen`. None: the schedule gives the step as many, or is noise_aware,
    which continues with its last decision. The steps taken are facts. The steps to come follow from the tokens seen."""
    now = tokens_per_step(schedule, tokens_seen - last)
    if now == last or isinstance(schedule, NoiseAwareTokens):
        return None
    return (
        f"the checkpoint's last step had {last:,} tokens, which tokens_per_step of this run makes {now:,} (another "
        "schedule, or another rounding by its `multiple`); the run goes on from the tokens it has seen"
    )


def stages(schedule: Schedule, total_tokens: int, micro_step: int) -> list[ScheduleStage]:
    """Return the whole run as sequences of equal steps, up to the first step that reaches `total_tokens`. The time this
    takes grows with the number of changes, not of steps. `micro_step` is Layout.micro_step, for the accumulation."""
    result: list[ScheduleStage] = []
    seen = 0
    while seen < total_tokens:
        tokens = tokens_per_step(schedule, seen)
        until = min(_next_change(schedule, seen, total_tokens), total_tokens)
        steps = -(-(until - seen) // tokens)
        result.append(ScheduleStage(seen, tokens, tokens // micro_step, steps))
        seen += steps * tokens
    return result


def may_begin(schedule: Schedule, tokens: int, total_tokens: int) -> bool:
    """Whether a step may begin at `tokens` or later. For noise_aware, any decision between floor and ceiling is
    considered."""
    if isinstance(schedule, NoiseAwareTokens):
        return -(-tokens // schedule.ceiling) * schedule.floor < total_tokens
    last = stages(schedule, total_tokens, 1)[-1]
    return last.from_tokens + (last.steps - 1) * last.tokens_per_step >= tokens


def _next_change(schedule: Schedule, tokens_seen: int, end: int) -> int:
    """Return the smallest number of tokens after `tokens_seen` at which tokens per step may change, or `end` if there
    is none."""
    if isinstance(schedule, StagedTokens):
        return min((s.from_tokens for s in schedule.stages if s.from_tokens > tokens_seen), default=end)
    if not isinstance(schedule, RampTokens) or tokens_seen >= schedule.ramp_tokens:
        return end
    now = tokens_per_step(schedule, tokens_seen)
    if tokens_per_step(schedule, schedule.ramp_tokens) == now:
        return end
    change = schedule.end - schedule.start
    if change > 0:  # A rising ramp changes when it reaches the next multiple.
        return -(-(now + schedule.rounding - schedule.start) * schedule.ramp_tokens // change)
    # A falling ramp changes right below the present multiple.
    return (schedule.start - now) * schedule.ramp_tokens // -change + 1
