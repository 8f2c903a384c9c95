"""Hooks into a run: what happens, told to whoever listens. TensorBoard, Weights & Biases and the profiler listen, too.

A user's callbacks are given to `sagetrain.train`. One that raises ends the run: the other ranks learn of it at the end
of a step, a checkpoint is saved, and the error names the callback and its hook.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sagetrain.config.errors import TrainingError
from sagetrain.config.schema import RunConfig
from sagetrain.engines.protocol import Engine, StepResult
from sagetrain.stability.controller import Event


@dataclass(frozen=True)
class Position:
    """Where a run stands."""

    step: int
    """The number of the last step, from 1; 0: none was taken."""
    tokens: int
    """All tokens that the run has seen by then."""


@dataclass(frozen=True)
class RunStart:
    """What a callback is told of a run that begins, or goes on."""

    cfg: RunConfig
    """The run's configuration, as it was given."""
    run_dir: Path
    position: Position
    engine: Engine
    """It holds the model (`engine.model`) and does the steps."""
    main: bool
    """Whether this is rank 0, which writes and speaks for all ranks."""
    say: Callable[[str], None]
    """Prints a line for people on rank 0, above the progress bar."""
    stop: Callable[[], None]
    """Asks the run to stop with a checkpoint, as a signal does. One rank is enough: all stop together."""


class Callback:
    """Derive from this and override the hooks that you need.

    Every rank has its own object, and calls the hooks in the same order at the same places, except for those that say
    otherwise. So a hook may use collectives of torch.distributed, if it does the same on every rank. Training waits for
    a hook: what takes long belongs into a thread.
    """

    def on_start(self, start: RunStart) -> None:
        """The model is built and loaded, and no step has been taken since."""

    def on_step_begin(self, step: int) -> None:
        """A step begins."""

    def on_step(self, position: Position, result: StepResult) -> None:
        """A step has ended; `result.applied` says whether its update was made. A step that a signal comes into ends
        without this call."""

    def on_row(self, position: Position, values: Mapping[str, float]) -> None:
        """A row of numbers by name goes to metrics.jsonl. Rank 0 alone calls this."""

    def on_sample(self, position: Position, number: int, prompt: str, text: str) -> None:
        """The model has continued prompt `number` (from 1) of evaluation.samples_prompts. Rank 0 alone calls this."""

    def on_evaluate(self, position: Position, losses: Mapping[str, float]) -> None:
        """Held-out losses were measured: valid/loss, and valid/<source>/loss where there are several sources."""

    def on_event(self, position: Position, event: Event) -> None:
        """Something happened that is no number: a resume, a spike, a change of precision."""

    def on_save(self, position: Position) -> None:
        """A checkpoint was taken. It is on its way to the disk."""

    def on_end(self, position: Position, finished: bool) -> None:
        """The run ends, for whatever reason. `finished`: it has reached training.total_tokens."""


class Callbacks:
    """The listeners of one run on this rank.

    Args:
        own: SageTrain's. What they raise is the run's own error (a full disk, say).
        users: the user's.
    """

    def __init__(self, own: Sequence[Callback], users: Sequence[Callback]) -> None:
        self._own, self._users = own, users
        self.failure: str | None = None
        """The first error of a user's callback, in words: the run is to stop."""
        self._cause: Exception | None = None

    def tell(self, hook: str, call: Callable[[Callback], None]) -> None:
        """Call a hook of every listener. What a user's callback raises is kept for `check`, and it is not called
        again.

        Args:
            hook: its name, for the error.
            call: calls it.
        """
        for callback in self._own:
            call(callback)
        for callback in self._users if self.failure is None else ():
            try:
                call(callback)
            except Exception as error:  # noqa: BLE001 - whatever it is, a checkpoint comes first
                name = type(callback).__name__
                self.failure = f"the callback {name} failed in {hook}: {type(error).__name__}: {error}"
                self._cause = error
                return

    def check(self) -> None:
        """Raise TrainingError if a user's callback has failed."""
        if self.failure is not None:
            raise TrainingError(self.failure) from self._cause

    def end(self, position: Position, finished: bool) -> None:
        """Call on_end of all of them, also where one raises."""
        with contextlib.ExitStack() as stack:
            for callback in self._own:
                stack.callback(callback.on_end, position, finished)
            own, self._own = self._own, ()
            try:
                self.tell("on_end", lambda callback: callback.on_end(position, finished))
            finally:
                self._own = own
