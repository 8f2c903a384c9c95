"""Controllers decide between two steps how the run goes on: precision, tokens per step, spikes.

A controller reads the numbers of the steps taken (engines/protocol.StepResult.metrics) and nothing else of the run.
These numbers are reduced over all ranks, so they are equal on each. The decisions of a controller are therefore global
without a collective of their own, are the same at every layout that gives the same numbers, and can be tested without a
model. What a controller has to remember is a plain dict in every checkpoint's manifest. A resumed run decides as a run
that never stopped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Taken:
    """A step that was taken, or that was left out (spikes.py). Only spikes.METRIC in `metrics` says which."""

    step: int
    """Number of the step; the first is 1."""
    tokens: int
    """Tokens seen, this step included."""
    tokens_per_step: int
    metrics: dict[str, float]
    """Every number that was added while the step ran, by name, over all ranks. A controller may turn numbers into
    others. The controllers after it read these, and these are logged."""

    @property
    def counted(self) -> int:
        """The number of the step's tokens that count in the loss."""
        return round(self.tokens_per_step * self.metrics.get("train/counted_share", 1.0))

    @property
    def empty(self) -> bool:
        """Whether no token of the step counts in the loss. Loss and gradient are then 0, and say nothing about other
        steps."""
        return self.metrics.get("train/counted_share") == 0


@dataclass(frozen=True)
class Event:
    """Something that a controller did, for people and for `events.jsonl` in the run folder."""

    kind: str
    """The kind in one word: "precision", "tokens_per_step", "spike", ..."""
    text: str
    """One sentence that says what was done, and why."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The content of the sentence as values, JSON types only."""


class Controller:
    """The base class of controllers. The trainer calls them between steps, on all ranks alike."""

    name: str
    """Key of the controller's state in a checkpoint's manifest."""
    of_sequences: bool = False
    """Whether it remembers measurements that hold for sequences of one length. A part of a run (config/run_parts.py)
    begins without them."""

    def after_step(self, taken: Taken) -> list[Event]:
        """Take note of a step, and decide about the steps to come. Returns the decisions."""
        raise NotImplementedError

    def state(self) -> dict[str, Any]:
        """Return what the controller remembers, in JSON types only. By default that is nothing."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`, maybe under other settings. {} stands for a checkpoint without this
        state."""
