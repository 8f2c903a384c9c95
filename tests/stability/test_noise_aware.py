"""Tokens per step decided by measured ratios: bounds, rate, hysteresis, causes, and a state from which a run
continues."""

import json
from itertools import pairwise

import pytest

from probed import LOW, Probe, ProbedRun
from sagetrain.config.schema import NoiseAwareTokens
from sagetrain.stability.controller import Taken
from sagetrain.stability.noise_aware import NoiseAware


def schedule(**keys: float) -> NoiseAwareTokens:
    base = {"start": 1024, "floor": 256, "ceiling": 4096, "hold_tokens": 1, "multiple": 128}
    return NoiseAwareTokens.model_validate({"schedule": "noise_aware", **base, **keys})


def run(**keys: float) -> ProbedRun:
    return ProbedRun(NoiseAware(schedule(**keys)))


def ready(probe: Probe, **keys: float) -> ProbedRun:
    """Return a run that has seen this probe twice. The next probe decides."""
    it = run(**keys)
    assert [it.take(probe) for _ in range(2)] == [[], []]
    return it


BETWEEN, HIGH = {"0": (0.07, 0.0)}, {"0": (0.3, 0.2)}


def test_a_decision_takes_effect_one_step_later_and_says_why() -> None:
    probe = {"0": (0.05, 0.0), "11": (0.31, 0.2), "all": (9.0, 9.0)}  # The entry `all` is no layer.
    it = ready(probe)
    assert it.take(None) == []
    (event,) = it.take(probe)
    assert event.kind == "tokens_per_step"
    assert event.text == (
        "tokens per step from 1,024 to 768 as of step 6: quantization adds 0.31 of the gradient noise that is left in "
        "layer 11, above the margin of 0.1"
    )
    assert event.fields == {"from": 1024, "to": 768, "first_step": 6, "layer": "11", "ratio": 0.31}
    for _ in range(3):
        it.take(None)
    assert it.sizes == [1024] * 5 + [768, 768]


def test_more_tokens_are_taken_where_the_bias_leaves_room() -> None:
    """The bias is 0.02 of the ratio 0.045 at 1,024 tokens. It would be 0.03 at 1,536 tokens and the ratio 0.055, past
    half of the margin. A bias of 0.01 would lead to a ratio of 0.05."""
    assert ready({"0": (0.045, 0.02)}).take({"0": (0.045, 0.02)}) == []
    probe = {"0": (0.045, 0.01), "head": (0.02, 0.0)}
    (event,) = ready(probe).take(probe)
    assert (event.fields["from"], event.fields["to"]) == (1024, 1536)
    assert event.fields["ratio"] == pytest.approx(0.05)
    assert "there quantization adds 0.05 of the gradient noise that is left in layer 0, at most 0.05" in event.text
    # An estimate of a square may be negative. It must not let a ratio fall with more tokens.
    below = {"0": (0.045, -0.1)}
    (event,) = ready(below).take(below)
    assert event.fields["ratio"] == 0.045


def test_between_headroom_and_margin_nothing_moves() -> None:
    it = run()
    assert [it.take(BETWEEN) for _ in range(5)] == [[]] * 5
    assert set(it.sizes) == {1024}


def test_one_probe_of_three_decides_nothing() -> None:
    """Two probes do. Each is scaled from the tokens per step at which it was measured: a bias of 0.2 in a ratio of 0.3
    at 1,024 tokens is 0.15 at 768."""
    it = ready(BETWEEN)
    assert [it.take(probe) for probe in (HIGH, BETWEEN, LOW, BETWEEN, BETWEEN, HIGH)] == [[]] * 6
    (event,) = it.take(HIGH)
    assert (event.fields["to"], event.fields["ratio"]) == (768, 0.3)
    it.take(None)
    (event,) = it.take({"0": (0.0, 0.0)})
    assert (event.fields["from"], event.fields["to"], event.fields["ratio"]) == (768, 512, pytest.approx(0.25))


def test_changes_are_bounded_and_apart() -> None:
    """A change is at most a factor of 1.5 in multiples of 128, stays between 256 and 4096, and comes at least 4,000
    tokens after the last one."""
    it = run(hold_tokens=4000)
    changes = [(it.tokens, event.fields["from"], event.fields["to"]) for _ in range(60) for event in it.take(LOW)]
    assert [(old, new) for _, old, new in changes] == [(1024, 1536), (1536, 2304), (2304, 3456), (3456, 4096)]
    assert all(later[0] - earlier[0] >= 4000 for earlier, later in pairwise(changes))
    assert it.sizes[-1] == 4096
    it.tokens += 4000
    down = [event.fields["to"] for _ in range(90) for event in it.take(HIGH)]
    # The change to 256 comes once, and the value stays there.
    assert down == [2816, 1920, 1280, 896, 640, 512, 384, 256, 256]
    assert it.sizes[-1] == 256


def test_a_multiple_coarser_than_the_factor_still_lets_it_move() -> None:
    it = run(multiple=None, floor=1024, start=1024, ceiling=3072)
    assert [event.fields["to"] for _ in range(8) for event in it.take(LOW)] == [2048, 3072]
    assert [event.fields["to"] for _ in range(8) for event in it.take(HIGH)] == [2048, 1024, 1024]


def test_a_factor_is_the_number_that_was_written() -> None:
    """The binary number for 1.15 is below 1.15, so 100 units times it would be 114.99."""
    (event,) = ready(LOW, start=12800, ceiling=99968, max_factor=1.15).take(LOW)
    assert event.fields["to"] == 115 * 128
    (event,) = ready(HIGH, start=14720, ceiling=99968, max_factor=1.15).take(HIGH)
    assert event.fields["to"] == 100 * 128


def test_at_the_floor_it_says_once_that_the_ratio_is_high() -> None:
    it = ready(HIGH, start=256)
    (event,) = it.take(HIGH)
    assert event.text.startswith("tokens per step stay at their floor of 256, although quantization adds 0.3 of")
    assert [it.take(HIGH) for _ in range(3)] == [[]] * 3
    assert [it.take(probe) for probe in (BETWEEN, BETWEEN, HIGH)] == [[]] * 3
    assert len(it.take(HIGH)) == 1  # The message comes again after a better ratio.


def test_all_that_it_remembers_is_its_state() -> None:
    """The controller is stopped after any step, and another one continues from its state."""
    probes = [LOW, None, LOW, LOW, HIGH, None, HIGH, BETWEEN, HIGH, HIGH, None, LOW] * 3
    whole = run(hold_tokens=3000)
    events = [whole.take(probe) for probe in probes]
    assert len(set(whole.sizes)) > 3
    for stop in range(len(probes)):
        it = run(hold_tokens=3000)
        again = [it.take(probe) for probe in probes[:stop]]
        state = json.loads(json.dumps(it.controller.state()))
        it.controller = NoiseAware(schedule(hold_tokens=3000))
        it.controller.restore(state)
        again += [it.take(probe) for probe in probes[stop:]]
        assert (it.sizes, again) == (whole.sizes, events)


def test_a_state_from_other_settings_is_made_to_fit() -> None:
    controller = NoiseAware(schedule(ceiling=2048, multiple=256))
    controller.restore({"now": 4096, "following": 1408, "changed": 10, "said": False})
    assert (controller.now, controller.following) == (2048, 1280)
    assert (
        controller.summary()
        == "2,048 tokens per step; the checkpoint had 4,096, which floor, ceiling and multiple forbid"
    )
    controller.restore({})
    assert (controller.now, controller.following) == (1024, 1024) and controller.summary() == "1,024 tokens per step"


def test_a_state_that_goes_back_to_the_same_tokens_is_equal() -> None:
    controller = NoiseAware(schedule(hold_tokens=1))
    controller.restore({"now": 512, "following": 1024})
    controller.after_step(Taken(1, 512, 512, {}))
    before, state = controller.summary(), controller.state()
    controller.restore(state)
    assert controller.summary() == before == "1,024 tokens per step"
