"""Callbacks: hooks that a run calls when something happens. TensorBoard, Weights & Biases and the profiler are
callbacks, too.

A user's callbacks are given to `sagetrain.train`. If one raises an error on any rank, the run ends on all: the other
ranks learn of the error at the end of a step, a checkpoint is saved, and the error names the rank, the callback and its
hook.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sagetrain.cluster.failures import Failures
from sagetrain.config.schema import RunConfig
from sagetrain.engines.protocol import StepResult
from sagetrain.engines.step import Engine
from sagetrain.parallel.objects import of_rank_0
from sagetrain.stability.controller import Event


@dataclass(frozen=True)
class Position:
    """The position of a run."""

    step: int
    """The number of the last step, from 1; 0: none was taken."""
    tokens: int
    """The number of tokens that the run has seen after that step."""


@dataclass(frozen=True)
class RunStart:
    """The facts that a callback gets when a run begins or continues."""

    cfg: RunConfig
    """The run's configuration, as it was given."""
    run_dir: Path
    position: Position
    engine: Engine
    """The engine, which holds the model (`engine.model`) and makes the steps."""
    main: bool
    """Whether this is rank 0, which writes and speaks for all ranks."""
    say: Callable[[str], None]
    """Call this to print a line for people on rank 0, above the progress bar."""
    stop: Callable[[], None]
    """Call this to stop the run with a checkpoint, as a signal does. A call on one rank is enough, because all ranks
    stop together."""


class Callback:
    """The base class of callbacks. Derive from it and override the hooks that you need.

    Every rank has an object of its own and calls the hooks in the same order at the same places. The exceptions say so.
    A hook may therefore use collectives of torch.distributed, if it does the same on every rank. Training waits for
    each hook, so slow work belongs in a thread.
    """

    def on_start(self, start: RunStart) -> None:
        """Called when the model is built and loaded, before the first step of this start."""

    def on_step_begin(self, step: int) -> None:
        """Called when a step begins."""

    def on_step(self, position: Position, result: StepResult) -> None:
        """Called when a step has ended. `result.applied` says whether its update was made. A step that is interrupted
        by a signal ends without this call."""

    def on_row(self, position: Position, values: Mapping[str, float]) -> None:
        """Called when a row of numbers by name goes to metrics.jsonl. Only rank 0 calls this."""

    def on_sample(self, position: Position, number: int, prompt: str, text: str) -> None:
        """Called when the model has continued prompt `number` (from 1) of evaluation.samples_prompts. Only rank 0 calls
        this."""

    def on_evaluate(self, position: Position, losses: Mapping[str, float]) -> None:
        """Called when held-out losses were measured: valid/loss, and valid/<source>/loss if there are several
        sources."""

    def on_event(self, position: Position, event: Event) -> None:
        """Called when something happened that is not a number: a resume, a spike, a change of precision."""

    def on_save(self, position: Position) -> None:
        """Called when a checkpoint was taken. The checkpoint is still being written to disk."""

    def on_end(self, position: Position, finished: bool) -> None:
        """Called when the run ends, for whatever reason. `finished` says whether the run has reached
        training.total_tokens."""


class Latest(Callback):
    """A callback that keeps the newest value of each number."""

    def __init__(self) -> None:
        self._values: dict[str, float] = {}

    def on_row(self, position: Position, values: Mapping[str, float]) -> None:
        """Keep the numbers of a row."""
        self._values.update(values)

    def everywhere(self) -> dict[str, float]:
        """Return the numbers, which rank 0 has, on every rank; collective."""
        return of_rank_0(self._values)


class Callbacks:
    """The callbacks of one run on this rank.

    Args:
        own: SageTrain's callbacks. Their errors (a full disk, say) are errors of the run itself.
        failures: keeps the errors of the user's callbacks. After an error the run is to stop.
    """

    def __init__(self, own: Sequence[Callback], users: Sequence[Callback], failures: Failures | None = None) -> None:
        self._own, self._users, self._failures = own, users, failures or Failures()

    def tell(self, hook: Callable[..., None], *args: object) -> None:
        """Call a hook of Callback with these arguments, of every callback. After the first error of a user's function,
        which is kept, no callback of the user is called again."""
        for callback in self._own:
            getattr(callback, hook.__name__)(*args)
        self._tell_users(hook.__name__, *args)

    def _tell_users(self, hook: str, *args: object) -> None:
        for callback in self._users if self._failures.text is None else ():
            try:
                getattr(callback, hook)(*args)
            # Whatever the error is, a checkpoint is saved first.
            except Exception as error:  # noqa: BLE001
                self._failures.keep(f"the callback {type(callback).__name__} failed in {hook}", error)
                return

    def end(self, position: Position, finished: bool) -> None:
        """Call on_end of every callback, even if one of SageTrain's raises an error."""
        with contextlib.ExitStack() as stack:
            for callback in self._own:
                stack.callback(callback.on_end, position, finished)
            self._tell_users("on_end", position, finished)
