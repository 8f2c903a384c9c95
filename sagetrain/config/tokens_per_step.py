"""Tokens per optimizer step as a pure function of the tokens seen: constant, linear ramp or stages, up and down.

Progress is counted in tokens: a step taken at `tokens_seen` moves the run to `tokens_seen + tokens_per_step`, and the
run ends with the first step that reaches total_tokens. Nothing here depends on a step counter or on the layout, so a
resumed run, or one on another number of ranks, finds its place from the tokens alone, and one YAML always takes the
same steps. That every one of them is a whole number of micro-steps is for config/rules to check.
"""

from __future__ import annotations

from typing import NamedTuple

from sagetrain.config.schema import ConstantTokens, NoiseAwareTokens, RampTokens, StagedTokens

Schedule = ConstantTokens | RampTokens | StagedTokens | NoiseAwareTokens


class ScheduleStage(NamedTuple):
    """A run of equal optimizer steps."""

    from_tokens: int
    tokens_per_step: int
    accumulation: int
    steps: int


def tokens_per_step(schedule: Schedule, tokens_seen: int) -> int:
    """Tokens of the optimizer step that starts at `tokens_seen`; those of a ramp are rounded down to its multiple.

    Of noise_aware, which stability/noise_aware.py decides while training, it is the start, as if nothing were decided.
    Integers throughout, so that every rank and every machine agrees.
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
    return (begun or schedule.stages)[-1].tokens  # that one begins at 0 is for config/rules to check


def change_at_resume(schedule: Schedule, tokens_seen: int, last: int) -> str | None:
    """What to say where a run of `tokens_seen` tokens, whose last step had `last`, is continued with another schedule.

    None if that step would be taken alike again, or the schedule is noise_aware, which goes on with what it decided.
    The steps taken are facts; those to come follow the tokens seen.
    """
    now = tokens_per_step(schedule, tokens_seen - last)
    if now == last or isinstance(schedule, NoiseAwareTokens):
        return None
    return (
        f"the checkpoint's last step had {last:,} tokens, which tokens_per_step of this run makes {now:,} (another "
        "schedule, or another rounding by its `multiple`); the run goes on from the tokens it has seen"
    )


def stages(schedule: Schedule, total_tokens: int, micro_step: int) -> list[ScheduleStage]:
    """The whole run as runs of equal steps, ending with the first step that reaches `total_tokens`.

    micro_step: tokens of one micro-step over all ranks (config/arithmetic.py, `token_multiple`), for the accumulation.
    Costs what the changes of the tokens per step are, not the steps.
    """
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
    """Whether a step may begin at `tokens` or later; of noise_aware, whatever it decides between floor and ceiling."""
    if isinstance(schedule, NoiseAwareTokens):
        return -(-tokens // schedule.ceiling) * schedule.floor < total_tokens
    last = stages(schedule, total_tokens, 1)[-1]
    return last.from_tokens + (last.steps - 1) * last.tokens_per_step >= tokens


def _next_change(schedule: Schedule, tokens_seen: int, end: int) -> int:
    """Smallest count of tokens after `tokens_seen` at which the tokens per step may differ; `end` if there is none."""
    if isinstance(schedule, StagedTokens):
        return min((s.from_tokens for s in schedule.stages if s.from_tokens > tokens_seen), default=end)
    if not isinstance(schedule, RampTokens) or tokens_seen >= schedule.ramp_tokens:
        return end
    now = tokens_per_step(schedule, tokens_seen)
    if tokens_per_step(schedule, schedule.ramp_tokens) == now:
        return end
    change = schedule.end - schedule.start
    if change > 0:  # up to the next multiple
        return -(-(now + schedule.rounding - schedule.start) * schedule.ramp_tokens // change)
    return (schedule.start - now) * schedule.ramp_tokens // -change + 1  # below this one
