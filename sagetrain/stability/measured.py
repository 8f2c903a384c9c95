"""What was measured about a run's stability, kept over its whole length: stability.json in the run folder."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sagetrain.stability.controller import Event, Taken

KEPT = ("quant/", "noise/", "quant_noise/")
"""Beginnings of the names of metrics that are measured now and then, and told at the end."""


class Measured:
    """A controller that decides nothing: of every number that the monitor and the noise scale have measured it
    remembers the last value, the mean and the extremes. It stands behind those that add to a step's numbers."""

    name = "measured"

    def __init__(self) -> None:
        self._metrics: dict[str, dict[str, float]] = {}

    def after_step(self, taken: Taken) -> list[Event]:
        """Take note of what this step has measured."""
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
        """{"metrics": {name: {"count", "mean", "last", "step", "tokens_per_step" (of the last), "min", ...}}}."""
        return {"metrics": {metric: dict(entry) for metric, entry in self._metrics.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._metrics = {metric: dict(entry) for metric, entry in state.get("metrics", {}).items()}
