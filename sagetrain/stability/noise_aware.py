"""Tokens per step that follow the measured cost of quantization: noise to hide it in, but no more than it takes.

At every probe (quant_noise.py) the worst layer decides. Of a step of T tokens each layer's ratio and bias_ratio are
known; at N tokens its ratio would be

    ratio - bias_ratio + bias_ratio N / T

because a bias stays while the noise of the gradient averages out. A layer's is the median of its last PROBES. Where
that is above the margin for the present tokens per step, they are lowered; where for more of them it is at most
`headroom` of the margin, they are raised to those. What lies between changes nothing. A change is by max_factor at most
(or by one `multiple`, where that is more), stays between floor and ceiling, and comes no sooner than hold_tokens after
the one before.

The first step of a new size is the one after next: the next is being prepared already when a decision is made.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from sagetrain.config.earlier_run import ALL
from sagetrain.config.schema import NoiseAwareTokens
from sagetrain.stability.controller import Event, Taken

_Probe = dict[str, list[float]]
"""Layer -> [ratio, the part of it that is bias and no less than 0, the tokens per step at which they were measured]."""
PROBES = 3
"""A decision waits for so many and takes their median. By chance the worst layer of a single one has up to four times
its usual ratio, which would shrink the steps of a run that is well (results/noise-aware)."""


class NoiseAware:
    """A controller of the tokens per step. It comes after QuantNoise, whose ratios it reads."""

    name = "tokens_per_step"
    now: int
    """Tokens of the step to come."""
    following: int
    """Tokens of those after it, as far as is decided."""

    def __init__(self, schedule: NoiseAwareTokens) -> None:
        self._schedule = schedule
        self._factor = Fraction(str(schedule.max_factor))  # 100 units times 1.15 are 115; in floats, 114
        self._changed: int | None
        self._said: bool
        self._probes: list[_Probe]
        self.restore({})

    def after_step(self, taken: Taken) -> list[Event]:
        """Decide, if this step had a probe, and the last change is long enough ago."""
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
        """The layer with the largest ratio at so many tokens per step, and that ratio."""
        ratios = {}
        for layer in self._probes[-1]:
            seen = [probe[layer] for probe in self._probes if layer in probe]
            ratios[layer] = statistics.median(ratio + bias * (tokens / measured - 1) for ratio, bias, measured in seen)
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
        """Sizes that other settings do not allow become the nearest that these do."""
        start = self._schedule.start
        self.now, self.following = (self._allowed(state.get(key, start)) for key in ("now", "following"))
        self._changed = state.get("changed")
        self._said = state.get("said", False)
        self._probes = state.get("probes", [])
        self._restored = state.get("now", self.now)

    def summary(self) -> str:
        """Where `restore` has left it, in words; and what the checkpoint had, if the settings do not allow that."""
        words = f"{self.now:,} tokens per step"
        if self.now == self._restored:
            return words
        return f"{words}; the checkpoint had {self._restored:,}, which floor, ceiling and multiple forbid"

    def _allowed(self, tokens: int) -> int:
        unit = self._schedule.rounding
        return min(self._schedule.ceiling, max(self._schedule.floor, tokens // unit * unit))


def _probe(taken: Taken) -> _Probe:
    """What this step has measured."""
    probe: _Probe = {}
    for name, ratio in taken.metrics.items():
        if name.startswith("quant_noise/") and name.endswith("/ratio"):
            _, layer, _ = name.split("/")
            if layer != ALL:
                bias = taken.metrics[f"quant_noise/{layer}/bias_ratio"]  # an estimate of 0 may be below it
                probe[layer] = [ratio, max(0.0, bias), taken.tokens_per_step]
    return probe


def _in_words(layer: str, ratio: float) -> str:
    return f"quantization adds {ratio:.3g} of the gradient noise that is left in layer {layer}"
