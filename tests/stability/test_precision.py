"""The precision ladder as a controller: it depends only on the numbers that it reads, and its state replays it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tiny
from sagetrain.config.arithmetic import layers_in_words, scheduled_rung
from sagetrain.config.schema import AttentionConfig, PrecisionConfig
from sagetrain.model.backends import Reference, Sage, Sdpa
from sagetrain.stability.controller import Event, Taken
from sagetrain.stability.precision import Ladder, rungs_of
from sagetrain.stability.spikes import METRIC as SPIKE

CPU = torch.device("cpu")
LAYERS, TOTAL, STEP = 6, 1000, 10
FUNCTIONS = {"paper": Sage("paper"), "fine": Sage("fine"), "gradients": Sage("gradients"), "sdpa": Sdpa()}
THRESHOLD = {"metric": "quant/*/dS/rel_l2", "above": 0.3, "below": 0.1, "cooldown_tokens": 3 * STEP}


def ladder_of(seen: int = 0, **settings: Any) -> tuple[Ladder, list[SimpleNamespace]]:
    layers = [SimpleNamespace(function=Sage("paper")) for _ in range(LAYERS)]
    precision = PrecisionConfig(rungs=["fine", "gradients", "sdpa"], **settings)
    return Ladder(precision, FUNCTIONS, layers, TOTAL, seen), layers


def walk(ladder: Ladder, rows: list[dict[str, float]], first: int = 1) -> list[tuple[int, Event]]:
    """Take steps with these numbers; the first of them is step `first`."""
    found = []
    for step, row in enumerate(rows, first):
        found += [(step, event) for event in ladder.after_step(Taken(step, step * STEP, STEP, dict(row)))]
    return found


def error(layer: int, value: float) -> dict[str, float]:
    return {f"quant/{layer}/dS/rel_l2": value}


# -- by schedule -------------------------------------------------------------------------------------------------


def test_floors_are_a_function_of_tokens_and_layer() -> None:
    precision = PrecisionConfig(
        rungs=["fine", "sdpa"],
        floors=[
            {"rung": "fine", "first_layers": 1, "last_layers": 2},
            {"rung": "sdpa", "last_layers": 1},
            {"rung": "sdpa", "last_fraction": 0.1},
        ],
    )
    at = {tokens: [scheduled_rung(precision, i, LAYERS, tokens, TOTAL) for i in range(LAYERS)] for tokens in (0, 899)}
    assert at[0] == at[899] == [1, 0, 0, 0, 1, 2]
    assert [scheduled_rung(precision, i, LAYERS, 900, TOTAL) for i in range(LAYERS)] == [2] * LAYERS


def test_a_schedule_moves_layers_for_the_next_step() -> None:
    ladder, layers = ladder_of(
        floors=[{"rung": "fine", "first_layers": 1, "last_layers": 1}, {"rung": "sdpa", "last_fraction": 0.1}]
    )
    assert ladder.summary() == "paper in layers 1 to 4; fine in layers 0, 5"
    assert [layer.function for layer in layers] == [FUNCTIONS["fine"], *[FUNCTIONS["paper"]] * 4, FUNCTIONS["fine"]]
    found = walk(ladder, [{}] * 95)
    assert [step for step, _ in found] == [90, 90]
    assert [event.fields["layers"] for _, event in found] == [[0, 5], [1, 2, 3, 4]]
    assert found[1][1].text == "attention of layers 1 to 4 from paper to sdpa: schedule"
    assert all(layer.function == Sdpa() for layer in layers)


# -- by measurement ----------------------------------------------------------------------------------------------


def test_a_layer_goes_up_above_the_threshold_once_a_cool_down() -> None:
    ladder, layers = ladder_of(threshold=THRESHOLD)
    found = walk(ladder, [error(2, 0.2), error(2, 0.31), error(2, 0.5), error(2, 0.5), error(2, 0.5)])
    assert [(step, event.fields["from"], event.fields["to"]) for step, event in found] == [
        (2, "paper", "fine"),
        (5, "fine", "gradients"),
    ]
    assert found[0][1].text == "attention of layer 2 from paper to fine: quant/*/dS/rel_l2 0.31 is above 0.3"
    assert ladder.rungs == ["paper", "paper", "gradients", "paper", "paper", "paper"]
    assert layers[2].function == Sage("gradients") and layers[1].function == Sage("paper")


def test_between_the_thresholds_nothing_moves() -> None:
    ladder, _ = ladder_of(threshold=THRESHOLD)
    assert len(walk(ladder, [error(0, 0.4), *[error(0, x) for x in (0.11, 0.29, 0.2, 0.3, 0.1) * 4]])) == 1
    assert ladder.rungs[0] == "fine"


def test_below_the_lower_threshold_a_layer_comes_back() -> None:
    ladder, _ = ladder_of(threshold=THRESHOLD, floors=[{"rung": "fine", "first_layers": 1}])
    both = error(0, 0.05) | error(1, 0.05)
    found = walk(ladder, [error(0, 0.4) | error(1, 0.4), *[both] * 12])
    assert [(step, event.fields["layers"], event.fields["to"]) for step, event in found] == [
        (1, [0], "gradients"),
        (1, [1], "fine"),
        (4, [0], "fine"),
        (4, [1], "paper"),
    ]
    assert "is below 0.1" in found[-1][1].text


def test_in_16_bits_a_layer_is_tried_lower_after_the_cool_down() -> None:
    rows = [error(0, 0.9)] * 8
    stays, _ = ladder_of(threshold={**THRESHOLD, "below": None})
    assert [event.fields["to"] for _, event in walk(stays, [*rows, *[{}] * 20])] == ["fine", "gradients", "sdpa"]
    tried, _ = ladder_of(threshold=THRESHOLD)
    found = walk(tried, [*rows, *[{}] * 20])
    assert [(step, event.fields["to"]) for step, event in found] == [
        (1, "fine"), (4, "gradients"), (7, "sdpa"), (10, "gradients"),
    ]  # fmt: skip


def test_a_number_that_is_none_counts_as_above() -> None:
    ladder, _ = ladder_of(threshold=THRESHOLD)
    assert [event.fields["to"] for _, event in walk(ladder, [error(3, float("nan"))])] == ["fine"]


def test_without_a_threshold_numbers_move_nothing() -> None:
    ladder, _ = ladder_of(spike_tokens=50)
    assert walk(ladder, [error(0, 9.0)] * 5) == []


# -- by spikes ---------------------------------------------------------------------------------------------------


def test_a_spike_lifts_all_layers_by_a_rung_for_a_while() -> None:
    ladder, layers = ladder_of(spike_tokens=5 * STEP, floors=[{"rung": "sdpa", "last_layers": 1}])
    found = walk(ladder, [{}, {SPIKE: 1.0}, {SPIKE: 0.0}, {SPIKE: 1.0}, *[{}] * 10])
    assert [(step, event.fields["from"], event.fields["to"], event.fields["cause"]) for step, event in found] == [
        (2, "paper", "fine", "a spike"),
        (4, "fine", "gradients", "a spike"),
        (7, "gradients", "fine", "no spike for 50 tokens"),
        (9, "fine", "paper", "no spike for 50 tokens"),
    ]
    assert found[0][1].fields["layers"] == [0, 1, 2, 3, 4]  # The last layer is at the top already.
    assert layers[0].function == Sage("paper") and layers[5].function == Sdpa()


def test_a_measurement_on_a_rung_above_lowers_no_layer() -> None:
    ladder, _ = ladder_of(threshold=THRESHOLD, spike_tokens=5 * STEP)
    found = walk(ladder, [error(0, 0.4), {SPIKE: 1.0}, *[error(0, 0.01)] * 4])
    assert ladder.rungs[0] == "gradients"
    assert {event.fields["cause"] for _, event in found[1:]} == {"a spike"}


# -- memory ------------------------------------------------------------------------------------------------------


def test_a_resumed_ladder_decides_as_one_that_never_stopped() -> None:
    settings = {
        "threshold": THRESHOLD,
        "spike_tokens": 7 * STEP,
        "floors": [{"rung": "gradients", "first_layers": 1}, {"rung": "sdpa", "last_fraction": 0.2}],
    }
    draw = torch.Generator().manual_seed(3)
    numbers = (torch.rand(95, LAYERS, generator=draw) * 0.5).tolist()
    rows = [
        {key: value for layer, x in enumerate(row) for key, value in error(layer, x).items()}
        | ({SPIKE: 1.0} if step % 17 == 11 else {})
        for step, row in enumerate(numbers)
    ]
    whole, _ = ladder_of(**settings)
    events = walk(whole, rows)
    assert len(events) > 50
    for stop in (1, 12, 13, 40, 80, 94):
        before, _ = ladder_of(**settings)
        first = walk(before, rows[:stop])
        again, layers = ladder_of(stop * STEP, **settings)
        again.restore(json.loads(json.dumps(before.state())))
        assert again.rungs == before.rungs and [FUNCTIONS[rung] for rung in again.rungs] == [x.function for x in layers]
        assert first + walk(again, rows[stop:], stop + 1) == events
        assert again.state() == whole.state()


def test_a_run_that_goes_back_remembers_spikes_and_tokens() -> None:
    ladder, _ = ladder_of(spike_tokens=20 * STEP)
    walk(ladder, [{}, {}])
    before = ladder.state()  # The run is rewound to this state twice.
    walk(ladder, [{}, {SPIKE: 1.0}], 3)
    ladder.restore(before)
    found = walk(ladder, [{SPIKE: 1.0}], 5)
    assert [(event.fields["from"], event.fields["to"]) for _, event in found] == [("fine", "gradients")]
    found = walk(ladder, [{}] * 20, 6)
    assert [(step, event.fields["to"]) for step, event in found] == [(24, "fine"), (25, "paper")]
    late, _ = ladder_of(floors=[{"rung": "fine", "last_fraction": 0.98}])
    before = late.state()
    walk(late, [{}] * 3)
    assert late.rungs == ["fine"] * LAYERS and TOTAL == 100 * STEP
    late.restore(before)  # The ladder does not forget what it has seen either.
    assert late.rungs == ["fine"] * LAYERS


def test_a_ladder_goes_on_under_other_settings() -> None:
    ladder, _ = ladder_of(threshold=THRESHOLD, spike_tokens=50)
    walk(ladder, [error(1, 0.4) | error(2, 0.4) | {SPIKE: 1.0}])
    assert ladder.rungs == ["fine", "gradients", "gradients", "fine", "fine", "fine"]
    state = ladder.state()
    shorter = PrecisionConfig(rungs=["sdpa"], threshold=THRESHOLD)
    layers = [SimpleNamespace(function=None) for _ in range(LAYERS)]
    other = Ladder(shorter, {"fine": Sage(), "sdpa": Sdpa()}, layers, TOTAL, 0)
    other.restore(state)
    # The layers are where the measurements left them. The spike has no effect, because it moves nothing.
    assert other.rungs == ["fine"] * LAYERS
    fixed, _ = ladder_of(floors=[{"rung": "fine", "last_layers": 1}])
    fixed.restore(state)
    assert fixed.rungs == [*["paper"] * 5, "fine"]


# -- rungs -------------------------------------------------------------------------------------------------------


def test_rungs_are_functions_with_the_settings_of_attention() -> None:
    attention = AttentionConfig(recipe="paper", smooth_k=False)
    precision = PrecisionConfig(rungs=["fine", "gradients", "reference"])
    found = rungs_of(precision, attention, tiny.config(1).model, device=CPU, dtype=torch.bfloat16)
    assert found == {
        "paper": Sage("paper", smooth_k=False),
        "fine": Sage("fine", smooth_k=False),
        "gradients": Sage("gradients", smooth_k=False),
        "reference": Reference(),
    }
    with pytest.raises(ValueError, match=r"stability\.precision\.rungs: flash cannot run here: .*needs a GPU"):
        rungs_of(PrecisionConfig(rungs=["flash"]), attention, tiny.config(1).model, device=CPU, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("layers", "words"), [([3], "layer 3"), ([0, 1], "layers 0, 1"), ([0, 2, 3, 4, 9], "layers 0, 2 to 4, 9")]
)
def test_layers_in_words(layers: list[int], words: str) -> None:
    assert layers_in_words(layers) == words
