"""Tokens per step as a function of tokens seen, and the steps of a run against brute force."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sagetrain.config.schema import ConstantTokens, RampTokens, Stage, StagedTokens
from sagetrain.config.tokens_per_step import change_at_resume, stages, tokens_per_step


def staged(*pairs: tuple[int, int]) -> StagedTokens:
    return StagedTokens(schedule="stages", stages=[Stage(from_tokens=f, tokens=t) for f, t in pairs])


def ramp(start: int, end: int, tokens: int, multiple: int | None = 1) -> RampTokens:
    return RampTokens(schedule="ramp", start=start, end=end, ramp_tokens=tokens, multiple=multiple)


def constant(tokens: int) -> ConstantTokens:
    return ConstantTokens(schedule="constant", tokens=tokens)


@pytest.mark.parametrize(("schedule", "seen", "tokens"), [
    (constant(4096), 0, 4096), (constant(4096), 10**12, 4096), (ramp(1000, 3000, 10_000), 0, 1000),
    (ramp(1000, 3000, 10_000), 5_000, 2000), (ramp(1000, 3000, 10_000), 9_999, 2999),
    (ramp(1000, 3000, 10_000), 10_000, 3000), (ramp(1000, 3000, 10_000), 10**15, 3000),
    (ramp(3000, 1000, 10_000), 0, 3000), (ramp(3000, 1000, 10_000), 5_000, 2000),
    (ramp(3000, 1000, 10_000), 10_000, 1000), (staged((0, 8), (100, 16), (300, 4)), 0, 8),
    (staged((0, 8), (100, 16), (300, 4)), 99, 8), (staged((0, 8), (100, 16), (300, 4)), 100, 16),
    (staged((0, 8), (100, 16), (300, 4)), 299, 16), (staged((0, 8), (100, 16), (300, 4)), 300, 4),
])  # fmt: skip
def test_closed_form(schedule, seen, tokens):
    assert tokens_per_step(schedule, seen) == tokens


def test_a_ramp_is_rounded_down_to_a_divisor_of_both_ends():
    assert tokens_per_step(ramp(1024, 3072, 10_000, 512), 5_400) == 2048  # The line is at 2,129 there.
    assert [tokens_per_step(ramp(1024, 4096, 9_000, None), seen) for seen in (2_999, 3_000, 8_999, 9_000)] == [
        1024,
        2048,
        3072,
        4096,
    ]
    assert tokens_per_step(ramp(300, 900, 1000, 512), 0) == 512  # A step is never empty.


@pytest.mark.parametrize("schedule", [ramp(1024, 4096, 20_000, None), ramp(4096, 1024, 20_000, 512)])
def test_the_steps_of_a_ramp_do_not_depend_on_the_ranks(schedule):
    """One YAML with micro-steps of 1, 2 and 4 sequences of 128 tokens gives one course of steps and learning rates."""
    walks = [[row._replace(accumulation=0) for row in stages(schedule, 60_000, micro)] for micro in (128, 256, 512)]
    assert walks[0] == walks[1] == walks[2]
    assert len(walks[0]) > 3


def test_a_run_continued_with_another_rounding_is_told_so():
    """The last step began at 4,096 tokens seen. The ramp was rounded to 512 there, and is rounded to 1,024 now."""
    schedule = ramp(1024, 4096, 20_000, 512)
    assert tokens_per_step(schedule, 4096) == 1536
    assert change_at_resume(schedule, 4096 + 1536, 1536) is None
    said = change_at_resume(ramp(1024, 4096, 20_000, None), 4096 + 1536, 1536)
    assert said.startswith("the checkpoint's last step had 1,536 tokens, which tokens_per_step of this run makes 1,024")
    assert "goes on from the tokens it has seen" in said


def test_stage_boundaries_fall_on_whole_steps():
    rows = stages(staged((0, 8), (100, 16), (300, 4)), 320, 4)
    assert rows == [(0, 8, 2, 13), (104, 16, 4, 13), (312, 4, 1, 2)]
    assert rows[-1].from_tokens + rows[-1].tokens_per_step * rows[-1].steps == 320


def test_a_stage_shorter_than_one_step_is_passed_over():
    assert stages(staged((0, 100), (10, 7), (20, 50)), 200, 1) == [(0, 100, 100, 1), (100, 50, 50, 2)]


def test_a_run_ends_with_the_first_step_that_reaches_the_total():
    assert stages(constant(100), 250, 50) == [(0, 100, 2, 3)]
    assert stages(constant(100), 300, 50) == [(0, 100, 2, 3)]
    assert stages(constant(100), 301, 50) == [(0, 100, 2, 4)]


def test_a_long_run_is_walked_in_no_time():
    rows = stages(ramp(2**18, 2**21, 10**12, 2**15), 10**13, 2**15)
    assert sum(row.tokens_per_step * row.steps for row in rows) >= 10**13
    assert [row.accumulation for row in rows] == list(range(8, 65))


sizes = st.integers(1, 500)
multiples = st.none() | st.integers(1, 64)
schedules = (
    sizes.map(constant)
    | st.builds(ramp, sizes, sizes, st.integers(1, 5000), multiples)
    | st.lists(st.tuples(st.integers(1, 4000), sizes), max_size=5, unique_by=lambda pair: pair[0]).flatmap(
        lambda pairs: sizes.map(lambda first: staged((0, first), *sorted(pairs)))
    )
)


@settings(max_examples=300)
@given(schedule=schedules, micro_step=st.integers(1, 64), total=st.integers(1, 6000))
def test_the_walk_is_what_a_trainer_would_do(schedule, micro_step, total):
    steps, seen = [], 0
    while seen < total:
        steps.append((seen, tokens_per_step(schedule, seen)))
        assert 0 < steps[-1][1] <= max(schedule.named_tokens.values())
        seen += steps[-1][1]
    rows = stages(schedule, total, micro_step)
    walked = [
        (row.from_tokens + i * row.tokens_per_step, row.tokens_per_step) for row in rows for i in range(row.steps)
    ]
    assert walked == steps
    assert all(row.accumulation == row.tokens_per_step // micro_step for row in rows)


@settings(max_examples=100)
@given(start=sizes, end=sizes, tokens=st.integers(1, 5000), multiple=st.just(1) | st.none())
def test_a_ramp_is_monotone_and_stays_between_its_ends(start, end, tokens, multiple):
    schedule = ramp(start, end, tokens, multiple)
    values = [tokens_per_step(schedule, seen) for seen in range(0, tokens + 2, max(1, tokens // 50))]
    values.append(tokens_per_step(schedule, tokens))
    assert values[0] == start
    assert values[-1] == end
    assert values == sorted(values, reverse=end < start)
