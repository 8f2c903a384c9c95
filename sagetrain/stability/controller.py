"""What decides, between two steps, how the run goes on: precision, tokens per step, spikes.

A controller reads the numbers of the steps taken (engines/protocol.StepResult.metrics), which are reduced over all
ranks and so equal on each, and nothing else of the run. That makes its decisions global without a collective of their
own, the same at every layout that gives the same numbers, and testable without a model. What it has to remember is a
plain dict in every checkpoint's manifest; a resumed run decides as one that never stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Taken:
    """A step that was taken; or that was left out (spikes.py), which only spikes.METRIC in `metrics` says."""

    step: int
    """Its number; the first is 1."""
    tokens: int
    """Tokens seen, this step included."""
    tokens_per_step: int
    metrics: dict[str, float]
    """Every number that was added while it ran, by name, over all ranks. A controller may make others of them: those
    after it read them, and they are logged."""

    @property
    def counted(self) -> int:
        """How many of its tokens count in the loss."""
        return round(self.tokens_per_step * self.metrics.get("train/counted_share", 1.0))

    @property
    def empty(self) -> bool:
        """No token of it counts in the loss: loss and gradient are 0, and say nothing about other steps."""
        return self.metrics.get("train/counted_share") == 0


@dataclass(frozen=True)
class Event:
    """Something that a controller did, for people and for `events.jsonl` in the run folder."""

    kind: str
    """One word: "precision", "tokens_per_step", "spike", ..."""
    text: str
    """One sentence: what, and why."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The same as values, JSON types only."""


class Controller(Protocol):
    """One of them. The trainer calls it between steps, on all ranks alike."""

    name: str
    """Key of its state in a checkpoint's manifest."""

    def after_step(self, taken: Taken) -> list[Event]:
        """Take note of a step, decide about those to come; what was decided."""
        ...

    def state(self) -> dict[str, Any]:
        """What it remembers, JSON types only."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned, maybe under other settings, or from {}: a checkpoint without it."""
        ...
