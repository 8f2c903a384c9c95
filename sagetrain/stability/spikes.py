"""Steps that go wrong: a loss or gradient norm that is not finite, or far above those of the steps before.

A step is judged between the backward pass and the update, from numbers that are equal on every rank. It can therefore
still be left out as if it had never been: no weight, moment or step count knows of it.

A number is a spike if it is above median + threshold x spread of the last steps that were taken. The spread is 1.4826
times the median distance from the median, or a hundredth of the median if that is more. For normal numbers it is their
standard deviation; unlike the standard deviation, it is hardly moved by a spike among them. A gradient norm is compared
as if earlier steps had had as few tokens. The square of a norm is |G|^2 + tr(S) / tokens (arXiv 1812.06162), so the
norm of fewer tokens is larger by at most the square root of their ratio.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from sagetrain.config.schema import SpikesConfig
from sagetrain.stability.controller import Controller, Event, Taken

METRIC = "train/spike"
"""The metric that is 1.0 in Taken.metrics of a step that was a spike or not finite. If the step was left out, it is the
only one."""

_TO_DEVIATION = 1.4826
_LEAST_SPREAD = 0.01


@dataclass(frozen=True)
class Verdict:
    """The decision about a step whose update is not yet made."""

    apply: bool = True
    event: Event | None = None
    """The event that says what is wrong with the step, if anything is."""


class Spikes(Controller):
    """The detector of spikes, and the limit on how often it may act. The trainer calls `judge` before each update."""

    name, of_sequences = "spikes", True

    def __init__(self, settings: SpikesConfig):
        self.settings = settings
        self._window: deque[tuple[float, float, int]] = deque(maxlen=settings.window)
        self._acted: list[tuple[int, int]] = []

    def judge(self, metrics: Mapping[str, float], tokens: int) -> Verdict:
        """Judge a step of `tokens` tokens with these numbers, train/loss and train/grad_norm among them."""
        found = {"loss": metrics["train/loss"], "gradient norm": metrics["train/grad_norm"]}
        limits = self.limits(tokens)
        wrong = [f"{name} {value:.5g}" for name, value in found.items() if not math.isfinite(value)]
        finite = not wrong
        if finite:
            wrong = [
                f"{name} {value:.5g}, above {limits[name]:.5g}" for name, value in found.items() if value > limits[name]
            ]
        if not wrong:
            return Verdict()
        fields = {
            "finite": finite,
            "loss": plain(found["loss"]),
            "grad_norm": plain(found["gradient norm"]),
            "loss_limit": plain(limits["loss"]),
            "grad_norm_limit": plain(limits["gradient norm"]),
        }
        return Verdict(finite and self.settings.policy == "stop", Event("spike", " and ".join(wrong), fields))

    def limits(self, tokens: int) -> dict[str, float]:
        """Return the largest loss and gradient norm that a step of `tokens` tokens may have. They are inf while too few
        steps are known."""
        if len(self._window) < self.settings.grace_steps:
            return {"loss": math.inf, "gradient norm": math.inf}
        norms = [norm * math.sqrt(max(1.0, before / tokens)) for _, norm, before in self._window]
        return {"loss": self._limit([loss for loss, *_ in self._window]), "gradient norm": self._limit(norms)}

    def _limit(self, values: list[float]) -> float:
        middle = median(values)
        spread = _TO_DEVIATION * median(abs(value - middle) for value in values)
        return middle + self.settings.threshold * max(spread, _LEAST_SPREAD * abs(middle))

    def act(self, step: int, weights_of: int) -> None:
        """Record that `step` was left out, and that the run continues with the weights of step `weights_of`."""
        self._acted = [*self._lately(step), (step, weights_of)]

    def may_act(self, step: int) -> bool:
        """Whether the policy may leave out one more step, by max_events in `window` steps."""
        return len(self._lately(step)) < self.settings.max_events

    def may_go_back(self, step: int, checkpoint: int) -> bool:
        """Whether the run may go back from `step` to the checkpoint of a step. It may not go to the checkpoint that it
        went back to lately, nor to one with the same weights or with those that were given up."""
        return not any(weights_of <= checkpoint <= before for before, weights_of in self._lately(step))

    def _lately(self, step: int) -> list[tuple[int, int]]:
        return [entry for entry in self._acted if entry[0] > step - self.settings.window]

    def after_step(self, taken: Taken) -> list[Event]:
        """Add the step to those that later steps are compared with."""
        if "train/loss" in taken.metrics and not taken.empty:
            numbers = taken.metrics["train/loss"], taken.metrics["train/grad_norm"]
            self._window.append((*numbers, taken.tokens_per_step))
        return []

    def state(self) -> dict[str, Any]:
        return {"window": [list(entry) for entry in self._window], "acted": [list(entry) for entry in self._acted]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._window.clear()
        self._window.extend((loss, norm, tokens) for loss, norm, tokens in state.get("window", []))
        # A run that goes back to a checkpoint knows more often than the checkpoint does that it has acted.
        self._acted = sorted({*self._acted, *((step, weights_of) for step, weights_of in state.get("acted", []))})


def plain(value: float) -> float | str:
    """Return a number as JSON has it: a number that is not finite becomes text."""
    return value if math.isfinite(value) else str(value)
