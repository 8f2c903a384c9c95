"""Tokens per step that follow the measured error of quantization: as many as leave enough noise to hide the error, and
no fewer than that takes.

The worst layer decides at every probe (quant_noise.py), by its ratio at other tokens per step (earlier_run.Ratio). The
ratio of a layer is the median of its last PROBES. If it is above the margin at the present tokens per step, they are
lowered. If it would be at most `headroom` of the margin at more tokens per step, they are raised to those. A ratio
between the two changes nothing. A change is by at most max_factor (or by one `multiple`, if that is more), stays
between floor and ceiling, and comes at least hold_tokens after the change before.

The first step of a new size is the one after the next, because the next step is already being prepared when a decision
is made.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from sagetrain.config.earlier_run import ALL, Ratio
from sagetrain.config.schema import NoiseAwareTokens
from sagetrain.stability.controller import Controller, Event, Taken

_Probe = dict[str, tuple[float, float, int]]
"""The ratio of each layer: the fields of an earlier_run.Ratio."""
PROBES = 3
"""Number of probes that a decision waits for and takes the median of. By chance the worst layer of a single probe has
up to four times its usual ratio, which would shrink the steps of a run without a problem (results/noise-aware)."""


class NoiseAware(Controller):
    """A controller of the tokens per step. It comes after QuantNoise, whose ratios it reads."""

    name = "tokens_per_step"
    now: int
    """Tokens of the next step."""
    following: int
    """Tokens of the steps after it, as far as they are decided."""

    def __init__(self, schedule: NoiseAwareTokens) -> None:
        self._schedule = schedule
        # As a fraction, 100 units times 1.15 are 115. In floats they would be 114.
        self._factor = Fraction(str(schedule.max_factor))
        self._changed: int | None
        self._said: bool
        self._probes: list[_Probe]
        self.restore({})

    def after_step(self, taken: Taken) -> list[Event]:
        """Decide, if this step had a probe and the last change is long enough ago."""
        self.now = self._restored = now = self.following
        probe = _probe(taken)
        self._probes = [*self._probes, probe][-PROBES:] if probe else self._probes
        held = self._changed is not None and taken.tokens - self._changed < self._schedule.hold_tokens
        if held or not probe or len(self._probes) < PROBES:
            return []
        margin, (layer, ratio) = self._schedule.margin, self._worst(now)
        if ratio > margin:
            new, cause = self._less(now), f"{_in_words(layer, ratio)}, above the margin of {margin:g}"
            if new == now:
                return self._stay_at_floor(layer, ratio, cause)
        else:
            new, limit = self._more(now), self._schedule.headroom * margin
            layer, ratio = self._worst(new)
            if new == now or ratio > limit:
                self._said = False
                return []
            cause = f"there {_in_words(layer, ratio)}, at most {limit:g}"
        self.following, self._changed, self._said = new, taken.tokens, False
        first = taken.step + 2
        fields = {"from": now, "to": new, "first_step": first, "layer": layer, "ratio": ratio}
        return [Event(self.name, f"tokens per step from {now:,} to {new:,} as of step {first:,}: {cause}", fields)]

    def _worst(self, tokens: int) -> tuple[str, float]:
        """Return the layer with the largest ratio at `tokens` tokens per step, and that ratio."""
        ratios = {}
        for layer in self._probes[-1]:
            seen = [probe[layer] for probe in self._probes if layer in probe]
            ratios[layer] = statistics.median(Ratio(*each).at(tokens) for each in seen)
        layer = max(ratios, key=ratios.__getitem__)
        return layer, ratios[layer]

    def _stay_at_floor(self, layer: str, ratio: float, cause: str) -> list[Event]:
        said, self._said = self._said, True
        floor = self._schedule.floor
        fields = {"from": floor, "to": floor, "layer": layer, "ratio": ratio}
        text = f"tokens per step stay at their floor of {floor:,}, although {cause} (said once)"
        return [] if said else [Event(self.name, text, fields)]

    def _less(self, now: int) -> int:
        unit = self._schedule.rounding
        allowed = math.ceil(now / self._factor / unit) * unit
        return max(self._schedule.floor, min(allowed, now - unit))

    def _more(self, now: int) -> int:
        unit = self._schedule.rounding
        allowed = int(now * self._factor / unit) * unit
        return min(self._schedule.ceiling, max(allowed, now + unit))

    def state(self) -> dict[str, Any]:
        return {
            "now": self.now,
            "following": self.following,
            "changed": self._changed,
            "said": self._said,
            "probes": self._probes,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`. Sizes that other settings do not allow become the nearest that these
        allow."""
        start = self._schedule.start
        self.now, self.following = (self._allowed(state.get(key, start)) for key in ("now", "following"))
        self._changed = state.get("changed")
        self._said = state.get("said", False)
        self._probes = state.get("probes", [])
        self._restored = state.get("now", self.now)

    def summary(self) -> str:
        """Return the tokens per step after `restore`, in words, and those of the checkpoint if the settings do not
        allow them."""
        words = f"{self.now:,} tokens per step"
        if self.now == self._restored:
            return words
        return f"{words}; the checkpoint had {self._restored:,}, which floor, ceiling and multiple forbid"

    def _allowed(self, tokens: int) -> int:
        unit = self._schedule.rounding
        return min(self._schedule.ceiling, max(self._schedule.floor, tokens // unit * unit))


def _probe(taken: Taken) -> _Probe:
    """Return the ratios that this step has measured."""
    probe: _Probe = {}
    for name, ratio in taken.metrics.items():
        if name.startswith("quant_noise/") and name.endswith("/ratio"):
            _, layer, _ = name.split("/")
            if layer != ALL:
                bias = taken.metrics[f"quant_noise/{layer}/bias_ratio"]  # An estimate of 0 may be below 0.
                probe[layer] = ratio, max(0.0, bias), taken.tokens_per_step
    return probe


def _in_words(layer: str, ratio: float) -> str:
    return f"quantization adds {ratio:.3g} of the gradient noise that is left in layer {layer}"
