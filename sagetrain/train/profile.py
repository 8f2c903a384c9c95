"""A window of steps under torch's profiler: traces for a viewer, and what took longest for the log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from sagetrain.config.schema import ProfileConfig

_ROWS = 10


class ProfileWindow:
    """The steps of `profile`, as far as this start of the run takes them.

    Args:
        settings: None: no step is profiled, and nothing is done.
        folder: of the traces, rank-<rank>.json: for chrome://tracing or Perfetto.
        say: hears of the trace and of what took longest, on rank 0.
    """

    def __init__(self, settings: ProfileConfig | None, folder: Path, rank: int, say: Callable[[str], None]) -> None:
        self._path, self._say = folder / f"rank-{rank}.json", say
        self._steps = range(0)
        if settings and (settings.all_ranks or rank == 0):
            self._steps = range(settings.from_step, settings.from_step + settings.steps)
        self._profiler: profile | None = None

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Around a step of the run (the first is 1)."""
        if number not in self._steps:
            self.close()  # steps of the window may have been dropped, its last too
            yield
            return
        if self._profiler is None:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self._profiler = profile(activities=activities)
            self._profiler.start()
        with record_function(f"step {number}"):
            yield
        if number == self._steps[-1]:
            self.close()

    def close(self) -> None:
        """Write the trace, if steps of the window were taken: the run may end within."""
        if self._profiler is None:
            return
        self._profiler.stop()
        try:
            self._path.parent.mkdir(exist_ok=True)
            self._profiler.export_chrome_trace(str(self._path))
            written = f"trace in {self._path}"
        except OSError as error:  # no reason to end a run, nor to hide what did
            written = f"no trace: {error}"
        averages = self._profiler.key_averages()
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        table = averages.table(sort_by=f"self_{kind}_time_total", row_limit=_ROWS, max_name_column_width=60)
        self._say(f"profile: {written}\n{table}")
        self._profiler, self._steps = None, range(0)
