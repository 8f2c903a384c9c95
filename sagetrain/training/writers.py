"""Write a run's files of rows (metrics.jsonl, events.jsonl, samples.jsonl) and its progress bar, and measure throughput
and memory."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from pathlib import Path

import torch
from tqdm import tqdm

from sagetrain import __version__
from sagetrain.config.errors import in_notebook, to_stderr
from sagetrain.costs.hardware import PEAK_FLOPS, model_of
from sagetrain.data.token_file import write_atomic
from sagetrain.stability.controller import Event
from sagetrain.storage.local import read_rows


def peak_flops(device: torch.device) -> float | None:
    """Return the 16-bit peak of a device in FLOP/s; None if the figure is not known, and MFU is then not reported."""
    if device.type != "cuda":
        return None
    return PEAK_FLOPS.get(model_of(torch.cuda.get_device_name(device)))


def memory_gib(device: torch.device) -> float:
    """Return the peak memory in GiB: allocated on the GPU, or resident in the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def memory_retries(device: torch.device) -> int | None:
    """Return how often PyTorch has found a GPU full, given back the memory that it kept for later, and tried again.
    None on a CPU."""
    return torch.cuda.memory_stats(device).get("num_alloc_retries", 0) if device.type == "cuda" else None


_BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
"""The progress bar. Its longest line fits 80 columns, with four left for the bar itself."""


class Throughput:
    """The clock of tokens and FLOPs per second of training. Evaluation and saving stop the clock."""

    def __init__(self) -> None:
        self._tokens, self._flops, self._seconds = 0, 0.0, 0.0
        self._since, self._pauses = time.perf_counter(), 0

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the clock while the block does something other than training. It may be stopped already."""
        if not self._pauses:
            self._seconds += time.perf_counter() - self._since
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._since = time.perf_counter()

    def add(self, tokens: int, flops_per_token: float) -> None:
        """Count the tokens of a step."""
        self._tokens += tokens
        self._flops += tokens * flops_per_token

    def take(self) -> tuple[float, float]:
        """Return the tokens and the FLOPs per second since the last call."""
        seconds = max(self._seconds, 1e-9)
        rates = self._tokens / seconds, self._flops / seconds
        self._tokens, self._flops, self._seconds = 0, 0.0, 0.0
        return rates


class MetricsWriter:
    """The writer of a run's rows and of its progress. Only rank 0 makes one.

    When it is opened, it removes the rows past `step` that a killed run left behind, so that a resumed run has each
    step once. If a row cannot be written, an OSError names the file, and no part of the row is left in the file. With
    `tolerate` rows wait in memory for so many seconds while the disk is full. Lines for people go to `hears`. None:
    lines go to stderr, with a progress bar on a terminal. A notebook has the bar in either case.
    """

    def __init__(
        self,
        run_dir: Path,
        step: int,
        tokens: int,
        total_tokens: int,
        hears: Callable[[str], None] | None = None,
        tolerate: float = 0.0,
    ) -> None:
        self._tolerate = tolerate
        self._samples_path = run_dir / "samples.jsonl"
        for path in (run_dir / "metrics.jsonl", run_dir / "events.jsonl", self._samples_path):
            _drop_rows_after(path, step)
        self._rows, self._events = (RowFile(run_dir / f"{name}.jsonl", tolerate) for name in ("metrics", "events"))
        # Only few runs write samples.
        self._samples: RowFile | None = None
        self._total, self._hears = total_tokens, hears
        self._bar = None
        if (hears is None and sys.stderr.isatty()) or in_notebook():
            self._bar = tqdm(
                total=total_tokens,
                initial=min(tokens, total_tokens),
                unit_scale=True,
                dynamic_ncols=True,
                bar_format=_BAR,
            )

    def write(self, step: int, tokens: int, values: Mapping[str, float]) -> None:
        """Write one row of metrics.jsonl."""
        self._rows.row(step, tokens, values)

    def event(self, step: int, tokens: int, event: Event) -> None:
        """Write one row of events.jsonl: "kind", "text" and the event's fields."""
        self._events.row(step, tokens, {"kind": event.kind, "text": event.text, **event.fields})

    def sample(self, step: int, tokens: int, number: int, prompt: str, text: str) -> None:
        """Write one row of samples.jsonl. Samples are counted from 1."""
        self._samples = self._samples or RowFile(self._samples_path, self._tolerate)
        self._samples.row(step, tokens, {"number": number, "prompt": prompt, "text": text})

    def progress(self, step: int, tokens: int, loss: float, lr: float, rate: float) -> None:
        """Show the progress after a step, at `rate` tokens per second: a progress bar on a terminal, one line
        elsewhere."""
        if self._bar is None:
            left = timedelta(seconds=min(round(max(self._total - tokens, 0) / rate), 86_400 * timedelta.max.days))
            self.say(
                f"step {step} | {tokens:,} tokens | loss {loss:.4f} | lr {lr:.2e} | {rate:,.0f} tokens/s | {left} left"
            )
        else:
            shown = f"loss {loss:.4f}, lr {lr:.2e}, {tqdm.format_sizeof(rate)} tok/s"
            self._bar.set_postfix_str(shown, refresh=False)
            self._bar.update(min(tokens, self._total) - self._bar.n)

    def say(self, text: str) -> None:
        """Print a line on stderr, above a terminal's progress bar, or give it to `hears`."""
        if self._bar is None:
            (self._hears or to_stderr)(text)
        else:
            with self._bar.external_write_mode(file=sys.stderr):
                (self._hears or to_stderr)(text)

    def close(self) -> None:
        """End the line of the progress bar, so that the next message begins a new line, and close every file."""
        if self._bar is not None:
            self._bar.close()
        for records in (self._rows, self._events, self._samples):
            if records:
                records.close()


def _drop_rows_after(path: Path, step: int) -> None:
    if path.exists():
        kept = (row for row in read_rows(path) if row["step"] <= step)
        write_atomic(path, "".join(f"{json.dumps(row)}\n" for row in kept).encode())


class RunLog:
    """The file log.txt of a run: what the run says beside its steps, and what its start leaves out. Lines wait until
    the run has its folder. A line that cannot be written is left out: metrics.jsonl says that a disk is full."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._waiting: list[str] = []

    def open(self, path: Path) -> None:
        """Write the lines that wait, and from now on each line at once."""
        begun = f"---- {datetime.now():%Y-%m-%d %H:%M:%S}, sagetrain {__version__}"
        self._path, waiting = path, self._waiting
        self.write("\n".join([begun, *waiting]))

    def write(self, text: str) -> None:
        """Write a line, or several in one text."""
        if self._path is None:
            self._waiting.append(text)
            return
        with suppress(OSError), self._path.open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{text}\n")


class RowFile:
    """A file that grows by whole records. A record that a full disk cuts short is removed again. If the file was
    removed, writing is an error, because the run would otherwise train on to its next checkpoint and find no space for
    that either. With `tolerate` records wait in memory for so many seconds while there is no space."""

    def __init__(self, path: Path, tolerate: float = 0.0):
        self._path, self._file = path, path.open("ab", buffering=0)
        self._tolerate, self._waiting, self._full_since = tolerate, b"", math.inf

    def row(self, step: int, tokens: int, values: Mapping[str, object]) -> None:
        """Write a row of JSON: {"step", "tokens", "wall_time" (seconds since 1970), **values}."""
        row = {"step": step, "tokens": tokens, "wall_time": round(time.time(), 3), **values}
        self.write(json.dumps(row).encode() + b"\n")

    def write(self, record: bytes) -> None:
        """Write a record."""
        waiting = self._waiting + record
        try:
            self._write(waiting)
        except OSError as error:
            self._full_since = min(self._full_since, time.monotonic())
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if not full or time.monotonic() - self._full_since >= self._tolerate:
                raise
            self._waiting = waiting
        else:
            self._waiting, self._full_since = b"", math.inf

    def _write(self, record: bytes) -> None:
        before = self._file.seek(0, os.SEEK_END)
        try:
            # The part of a record for which there is room is written without an error. The rest says why it has none.
            while record:
                record = record[self._file.write(record) :]
            if not os.fstat(self._file.fileno()).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "removed while the run was writing to it")
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(before)
            error.filename = str(self._path)
            raise

    def close(self) -> None:
        """Write what waits, and close the file. Raises OSError if there is still no space."""
        try:
            if self._waiting:
                self._write(self._waiting)
        finally:
            self._file.close()
