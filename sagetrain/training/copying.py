"""The copies in memory (checkpoint/in_memory.py) of a run that trains: when they are taken, and what waits for them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from sagetrain.checkpoint.ledger import TrainState
from sagetrain.engines.protocol import Observers, StepResult
from sagetrain.parallel.rng import rng_state
from sagetrain.stability.spikes import Verdict
from sagetrain.training.run import Run

_BUSY = "perf/ranks_copying"
"""The name of the number of ranks whose copy in memory is still under way."""
_STEPS = 8
"""The number of steps without a copy whose times tell how long the next one takes."""
_IN_A_ROW = 16
"""The number of steps in a row after which a copy is taken. The next step is left out, to be timed without one."""


class Copying:
    """The copies of a run. Without checkpoint.in_memory_every all methods do nothing."""

    def __init__(self, run: Run) -> None:
        self._run, self._copies, self._metrics = run, run.met.copies, run.engine.groups.metrics
        self._ended, self._takes, self._in_a_row = time.monotonic(), deque[float](maxlen=_STEPS), 0

    def tell(self) -> None:
        """Let the step's reduction take along whether this rank can copy, because all ranks copy the same steps. The
        host asks this when it has launched the step, long before a GPU ends it. The step is expected to take as long
        as the shortest one lately. Steps after a copy do not count, because their updates may have waited for it."""
        if self._copies:
            late = self._copies.late(self._ended + min(self._takes, default=0.0))
            self._metrics.sum(_BUSY, float(late or self._in_a_row >= _IN_A_ROW))

    def watched(self, observers: Observers) -> Observers:
        """Return the observers of a step, whose update begins when the state is copied."""
        return replace(observers, judge=partial(self._judge, observers.judge)) if self._copies else observers

    def _judge(self, judge: Callable[[Mapping[str, float]], Verdict], metrics: Mapping[str, float]) -> Verdict:
        self.settle()
        return judge(metrics)

    def settle(self) -> None:
        """Let the state change no earlier than it is copied."""
        if self._copies:
            self._copies.settle()

    def after_step(self, state: TrainState, result: StepResult) -> None:
        """Begin to copy the state after a step, if a copy is due and every rank can."""
        run, now = self._run, time.monotonic()
        if not self._in_a_row:
            self._takes.append(now - self._ended)
        self._ended, before, self._in_a_row = now, self._in_a_row, 0
        if self._copies and self._copies.due(state.step) and not result.metrics[_BUSY]:
            state.controllers = run.controllers.state()
            self._copies.take(run.record(state), run.saver.published_step, rng_state())
            self._in_a_row = before + 1

    def end(self) -> None:
        """Remove the copies, because a checkpoint has the state; collective."""
        if self._copies:
            self._copies.end()
