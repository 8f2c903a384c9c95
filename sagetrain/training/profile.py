"""Profile a window of steps with torch's profiler: traces for a viewer, and the slowest operations for the log."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from sagetrain.config.schema import ProfileConfig
from sagetrain.engines.protocol import StepResult
from sagetrain.training.callbacks import Callback, Position

_ROWS = 10


class ProfileWindow(Callback):
    """A callback that profiles the steps of the section `profile`, as far as this start of the run takes them.

    Args:
        folder: the folder of the traces. rank-<rank>.json is for chrome://tracing or Perfetto.
        say: gets a line about the trace and the slowest operations, on rank 0.
    """

    def __init__(self, settings: ProfileConfig, folder: Path, rank: int, say: Callable[[str], None]) -> None:
        self._path, self._say = folder / f"rank-{rank}.json", say
        self._steps = range(0)
        if settings.all_ranks or rank == 0:
            self._steps = range(settings.from_step, settings.from_step + settings.steps)
        self._profiler: profile | None = None
        self._step = ExitStack()
        """The record of the step that is under way."""

    def on_step_begin(self, step: int) -> None:
        """Profile the step if it is in the window."""
        if step not in self._steps:
            # Steps of the window may have been dropped, even its last one.
            self._close()
            return
        if self._profiler is None:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self._profiler = profile(activities=activities)
            self._profiler.start()
        self._step.enter_context(record_function(f"step {step}"))

    def on_step(self, position: Position, result: StepResult) -> None:
        """End the record of the step, and write the trace after the window's last step."""
        self._step.close()
        if self._steps and position.step >= self._steps[-1]:
            self._close()

    def on_end(self, position: Position, finished: bool) -> None:
        """Write the trace if steps of the window were taken, because the run may end within the window."""
        self._close()

    def _close(self) -> None:
        self._step.close()
        if self._profiler is None:
            return
        self._profiler.stop()
        try:
            self._path.parent.mkdir(exist_ok=True)
            self._profiler.export_chrome_trace(str(self._path))
            written = f"trace in {self._path}"
        # A failed write is no reason to end a run, and must not hide the error that ended it.
        except OSError as error:
            written = f"no trace: {error}"
        averages = self._profiler.key_averages()
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        table = averages.table(sort_by=f"self_{kind}_time_total", row_limit=_ROWS, max_name_column_width=60)
        self._say(f"profile: {written}\n{table}")
        self._profiler, self._steps = None, range(0)
