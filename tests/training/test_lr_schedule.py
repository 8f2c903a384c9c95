"""The learning rate as a function of tokens seen: closed forms at named points, continuity, the rule for batch
changes."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runs import write_config
from sagetrain.config import RunConfig, dump_config, load_config
from sagetrain.config.arithmetic import decay_tokens, warmup_tokens
from sagetrain.config.schema import ConstantTokens, LrScheduleConfig, OptimizerConfig, RampTokens, Stage, StagedTokens
from sagetrain.config.tokens_per_step import stages, tokens_per_step
from sagetrain.training.lr_schedule import curve, learning_rate
from sagetrain.training.resume import learning_rate_jump

TOTAL = 1000
OPTIMIZER = OptimizerConfig(lr=2.0)


@pytest.mark.parametrize(("shape", "points"), [
    ("cosine", {0: 0, 50: 1.0, 100: 2.0, 325: 0.5 + 1.5 * (1 + math.sqrt(0.5)) / 2, 550: 1.25, 1000: 0.5, 1500: 0.5}),
    ("linear", {0: 0, 50: 1.0, 100: 2.0, 325: 1.625, 550: 1.25, 1000: 0.5, 1500: 0.5}),
    ("wsd", {0: 0, 50: 1.0, 100: 2.0, 550: 2.0, 800: 2.0, 900: 1.25, 1000: 0.5, 1500: 0.5}),
    ("constant", {0: 0, 50: 1.0, 100: 2.0, 550: 2.0, 1000: 2.0, 1500: 2.0}),
])  # fmt: skip
def test_closed_form(shape, points):
    config = LrScheduleConfig(shape=shape, warmup_tokens=100, min_lr=0.5, decay_tokens=200 if shape == "wsd" else None)
    for tokens, expected in points.items():
        assert curve(2.0, config, tokens, TOTAL) == pytest.approx(expected, abs=1e-12), tokens
    decay = {"decay": 0.2, "decay_tokens": None} if shape == "wsd" else {}
    share = config.model_copy(update={"warmup": 0.1, "warmup_tokens": 0, **decay})
    for tokens in range(0, TOTAL + 1, 10):
        assert curve(2.0, share, tokens, TOTAL) == curve(2.0, config, tokens, TOTAL)


def test_a_shorter_run_has_a_shorter_warm_up():
    config = LrScheduleConfig(warmup=0.1)
    assert [curve(2.0, config, total // 20, total) for total in (TOTAL, TOTAL // 10)] == [1.0, 1.0]


def test_wsd_decays_over_the_last_tenth_by_default():
    config = LrScheduleConfig(shape="wsd")
    assert [curve(2.0, config, t, TOTAL) for t in (0, 900, 950, 1000)] == [2.0, 2.0, 1.0, 0.0]


@example(3, 50, 50)
@given(st.integers(1, 10**13), st.integers(0, 99), st.integers(0, 99))
def test_shares_that_fit_a_run_fit_in_whole_tokens(total, warmup, decay):
    """An odd number of tokens has no two halves."""
    parts = LrScheduleConfig(shape="wsd", warmup=warmup / 100, decay=min(decay, 100 - warmup) / 100)
    assert warmup_tokens(parts, total) < total
    assert warmup_tokens(parts, total) + decay_tokens(parts, total) <= total


def test_without_warmup_the_first_step_has_nearly_the_peak():
    assert learning_rate(OPTIMIZER, LrScheduleConfig(shape="linear"), 0, 10, TOTAL) == 2.0 * (1 - 5 / TOTAL)


def test_a_step_takes_the_value_at_the_middle_of_its_tokens():
    config = LrScheduleConfig(shape="linear", warmup_tokens=100)
    assert learning_rate(OPTIMIZER, config, 0, 100, TOTAL) == 1.0
    assert learning_rate(OPTIMIZER, config, 900, 100, TOTAL) == pytest.approx(2.0 * 50 / 900)


def test_the_last_step_counts_up_to_the_end_of_the_run_only():
    """A last step that passes the end still has a learning rate when min_lr is 0."""
    config = LrScheduleConfig(shape="linear")
    assert learning_rate(OPTIMIZER, config, 900, 400, TOTAL) == pytest.approx(2.0 * 50 / 1000)


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("sqrt", 0.5), ("linear", 0.25)])
def test_batch_rule(rule, factor):
    config = LrScheduleConfig(shape="constant", batch_rule=rule, reference_tokens_per_step=64)
    assert learning_rate(OPTIMIZER, config, 500, 64, TOTAL) == 2.0
    assert learning_rate(OPTIMIZER, config, 500, 16, TOTAL) == pytest.approx(2.0 * factor)
    assert learning_rate(OPTIMIZER, config, 500, 256, TOTAL) == pytest.approx(2.0 / factor)


def test_a_stage_added_later_changes_no_earlier_learning_rate():
    cfg = LrScheduleConfig(shape="constant", batch_rule="sqrt", reference_tokens_per_step=64)
    stages = [Stage(from_tokens=0, tokens=16), Stage(from_tokens=250, tokens=64), Stage(from_tokens=500, tokens=128)]
    for some in (stages[:2], stages):
        schedule = StagedTokens(schedule="stages", stages=some)
        rates = [learning_rate(OPTIMIZER, cfg, seen, tokens_per_step(schedule, seen), TOTAL) for seen in (0, 200, 300)]
        assert rates == [1.0, 1.0, 2.0]


def test_continuity_across_a_change_of_tokens_per_step():
    """The change leaves no jump under rule none. The jump under sqrt and linear is exactly the rule's factor."""
    before, after, at, total = 1000, 4000, 500_000, 1_000_000
    for rule, jump in (("none", 1.0), ("sqrt", 2.0), ("linear", 4.0)):
        config = LrScheduleConfig(
            shape="cosine", warmup_tokens=10_000, batch_rule=rule, reference_tokens_per_step=after
        )
        first = learning_rate(OPTIMIZER, config, at - before // 2, before, total)
        second = learning_rate(OPTIMIZER, config, at - after // 2, after, total)
        assert second / first == pytest.approx(jump, rel=1e-12)


configs = st.builds(
    LrScheduleConfig,
    shape=st.sampled_from(["cosine", "wsd", "linear", "constant"]),
    warmup_tokens=st.integers(0, 400_000),
    min_lr=st.floats(0, 1.9),
    decay_tokens=st.none() | st.integers(1, 500_000),
)


@settings(max_examples=200)
@given(config=configs, tokens=st.integers(0, 1_200_000))
def test_bounded_continuous_and_falling_after_the_warmup(config, tokens):
    total = 1_000_000
    here, next_ = (curve(2.0, config, t, total) for t in (tokens, tokens + 1))
    assert 0 <= here <= 2.0
    steepest = 2.0 / max(1, config.warmup_tokens) + 2.0 * math.pi / 2 / min(100_000, config.decay_tokens or 100_000)
    after_warmup_of_length_zero = config.warmup_tokens == 0 and tokens == 0
    assert abs(next_ - here) <= steepest * 1.0001 or after_warmup_of_length_zero
    if tokens >= config.warmup_tokens:
        assert next_ <= here + 1e-12
        assert here >= (2.0 if config.shape == "constant" else config.min_lr) - 1e-12


@pytest.mark.parametrize("shape", ["cosine", "linear", "wsd"])
def test_a_ramp_of_tokens_per_step_keeps_the_area(shape):
    """The sum of lr x tokens over a run agrees between 1-sequence steps and a coarse ramp, because the midpoint rule is
    used."""
    total = 2**20
    config = LrScheduleConfig(shape=shape, warmup_tokens=2**16)
    schedule = RampTokens(schedule="ramp", start=2**10, end=2**14, ramp_tokens=2**19)

    def area(plan):
        seen, result = 0, 0.0
        while seen < total:
            tokens = tokens_per_step(plan, seen)
            result += min(tokens, total - seen) * learning_rate(OPTIMIZER, config, seen, tokens, total)
            seen += tokens
        return result

    fine = area(ConstantTokens(schedule="constant", tokens=2**8))
    assert area(schedule) == pytest.approx(fine, rel=2e-4)
    assert len(stages(schedule, total, 2**10)) > 10


def planned(tmp_path, lr_schedule: dict, total: int, **optimizer: float) -> RunConfig:
    """Return a configuration, and write config.yaml as its checkpoint has it."""
    path = write_config(
        tmp_path / "c.yaml", tmp_path, tmp_path, lr_schedule=lr_schedule, training={"total_tokens": total}
    )
    cfg = load_config(path, [f"optimizer.{key}={value}" for key, value in optimizer.items()])
    (tmp_path / "config.yaml").write_text(dump_config(cfg))
    return cfg


@pytest.mark.parametrize(("shape", "tokens", "before", "now"), [
    ("cosine", 15360, 2.36e-06, 0.000439),
    ("linear", 15360, 5.36e-05, 0.00075),
    ("wsd", 15360, 0.0005, 0.003),
    ("cosine", 5120, 0.0025, 0.00264),
    ("wsd", 5120, None, None),  # The decay of this schedule comes later.
    ("constant", 15360, None, None),
])  # fmt: skip
def test_an_extended_run_says_how_far_the_learning_rate_jumps(tmp_path, shape, tokens, before, now):
    """The values by hand are the schedule at the middle of the last step of 512 tokens, and at the middle of the next
    step."""
    options = {"shape": shape, "warmup_tokens": 1024}
    longer = planned(tmp_path, options, 20480)
    planned(tmp_path, options, 15360)
    said = learning_rate_jump(longer, tmp_path, tokens, 512)
    if before is None:
        assert said is None
        return
    message, fix = said
    assert f"goes from {before:.3g} in the checkpoint's last step to {now:.3g} in the next one" in message, message
    assert "the run was to end at 15,360 tokens and now ends at 20,480" in message and "training.init_from" in fix
    assert learning_rate_jump(longer, tmp_path, 20480, 512) is None  # There is no next step.


def test_any_other_schedule_of_a_continued_run_is_said_too(tmp_path):
    lower = planned(tmp_path, {"shape": "constant"}, 15360, lr=1e-3)
    assert learning_rate_jump(lower, tmp_path, 5120, 512) is None
    planned(tmp_path, {"shape": "constant"}, 15360)
    message, _ = learning_rate_jump(lower, tmp_path, 5120, 512)
    assert "from 0.003 in the checkpoint's last step to 0.001 in the next one, 0.333 times as much;" in message
    assert learning_rate_jump(lower, tmp_path, 0, 0) is None  # An imported model has taken no step.
