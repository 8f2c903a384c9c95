"""The measurements of a run's stability over its whole length: stability.json in the run folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sagetrain.stability.controller import Controller, Event, Taken

KEPT = ("quant/", "noise/", "quant_noise/")
"""Prefixes of the metrics that are measured now and then, and reported at the end."""


class Measured(Controller):
    """A controller that decides nothing. It remembers the last value, the mean and the extremes of every number that
    the monitor and the noise scale have measured. It comes after the controllers that add to a step's numbers."""

    name = "measured"

    def __init__(self) -> None:
        self._metrics: dict[str, dict[str, float]] = {}

    def after_step(self, taken: Taken) -> list[Event]:
        """Record what this step has measured."""
        for metric, value in taken.metrics.items():
            if metric.startswith(KEPT) and math.isfinite(value):
                entry = self._metrics.setdefault(metric, {"count": 0, "min": math.inf, "max": -math.inf})
                entry["count"] += 1
                before = entry.get("mean", value)
                entry["mean"] = before + (value - before) / entry["count"]
                entry |= {"last": value, "step": taken.step, "tokens_per_step": taken.tokens_per_step}
                if value < entry["min"]:
                    entry |= {"min": value, "min_step": taken.step}
                if value > entry["max"]:
                    entry |= {"max": value, "max_step": taken.step}
        return []

    def state(self) -> dict[str, Any]:
        """Return {"metrics": {name: {"count", "mean", "last", "step", "tokens_per_step" (of the last), "min",
        ...}}}."""
        return {"metrics": {metric: dict(entry) for metric, entry in self._metrics.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._metrics = {metric: dict(entry) for metric, entry in state.get("metrics", {}).items()}
