"""The reporter of a run: what it prints and writes while it runs. Rank 0 reports, and the calls do nothing on other
ranks."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from sagetrain.checkpoint import on_disk
from sagetrain.checkpoint.ledger import TrainState
from sagetrain.checkpoint.saving import Saver
from sagetrain.cluster.lifeline import death
from sagetrain.config.errors import to_stderr
from sagetrain.config.schema import LoggingConfig
from sagetrain.engines.protocol import StepResult
from sagetrain.stability.controller import Event
from sagetrain.storage.local import read_rows
from sagetrain.training.callbacks import Callback, Callbacks, Position
from sagetrain.training.start_times import StartTimes
from sagetrain.training.writers import (
    MetricsWriter,
    RunLog,
    Throughput,
    memory_gib,
    memory_retries,
    peak_flops,
)

FULL = (
    "the GPU is full: PyTorch gave back the memory that it kept for later and tried again, which slows steps down "
    "(perf/memory_retries). PYTORCH_ALLOC_CONF=expandable_segments:True keeps less, and so do a smaller "
    "data.micro_batch_size and training.activation_checkpointing"
)
"""A run says this where its GPU is full."""
At = TrainState | Position
"""The place of a row: a step, and the tokens seen after it."""


class Reporter:
    """The reporter of rows of numbers (MetricsWriter) and of lines on stderr, with or without a progress bar."""

    def __init__(self, main: bool, hears: Callable[[str], None] | None = None) -> None:
        """Make a reporter, which reports only on rank 0 (`main`). Lines go to `hears`. None: lines go to stderr, with a
        progress bar on a terminal. A notebook has the bar in either case."""
        self._main, self._hears, self._log = main, hears, RunLog()
        self._writer: MetricsWriter | None = None
        self._last_row: float | None = None

    def log_to(self, path: Path) -> None:
        """Begin the log of the run, which has all lines from the first one on."""
        if self._main:
            self._log.open(path)

    def keep(self, text: str) -> None:
        """Write a line to the log alone."""
        self._log.write(text)

    def open(
        self,
        run_dir: Path,
        state: TrainState,
        total_tokens: int,
        logging: LoggingConfig,
        flops_per_token: Callable[[float], float],
        seq_length: int,
        device: torch.device,
        callbacks: Callbacks,
        tolerate: float = 0.0,
    ) -> None:
        """Begin to write into `run_dir` after `state`. The clock of tokens per second starts now.

        Args:
            callbacks: the callbacks that get every row and sample.
            tolerate: the seconds for which rows wait in memory while the disk is full.
            flops_per_token: returns the FLOPs per token for a span (costs.accounting), for MFU.
        """
        self._logging, self._device, self._total, self._callbacks = logging, device, total_tokens, callbacks
        self._flops, self._full = flops_per_token, flops_per_token(seq_length)
        self.clock = Throughput()
        self._retries: int | None = None
        self._told_full = False
        self._latest: dict[str, float] = {}
        self._held: Callable[[], None] | None = None
        if self._main:
            rows = read_rows(run_dir / "metrics.jsonl", last_bytes=1 << 20)
            self._last_row = rows[-1].get("wall_time") if rows else None
            self._writer = MetricsWriter(run_dir, state.step, state.tokens, total_tokens, self._hears, tolerate)
            if device.type == "cuda" and peak_flops(device) is None:
                self.say(f"MFU is not reported: the peak of {torch.cuda.get_device_name(device)} is not known")

    def say(self, text: str) -> None:
        """Print a line for people, and write it to the log."""
        self._log.write(text)
        if self._writer:
            self._writer.say(text)
        elif self._main:
            (self._hears or to_stderr)(text)

    def write(self, at: At, values: Mapping[str, float | None]) -> None:
        """Write a row of numbers, without those that are None."""
        if self._writer:
            known = {name: value for name, value in values.items() if value is not None}
            self._writer.write(at.step, at.tokens, known)
            self._callbacks.tell(Callback.on_row, Position(at.step, at.tokens), known)

    def samples(self, state: TrainState, texts: Sequence[tuple[str, str]]) -> None:
        """Write rows of samples.jsonl from pairs of a prompt and its continuation, and print the first line of each."""
        for number, (prompt, text) in enumerate(texts, 1):
            if self._writer:
                self._writer.sample(state.step, state.tokens, number, prompt, text)
                self._callbacks.tell(Callback.on_sample, Position(state.step, state.tokens), number, prompt, text)
            self.say(f"step {state.step}: sample {number}: {textwrap.shorten(prompt + text, 150, placeholder=' ...')}")

    def event(self, at: At, event: Event, say: bool = True) -> None:
        """Write a row of events.jsonl, and print a line unless it was printed before."""
        self._callbacks.tell(Callback.on_event, Position(at.step, at.tokens), event)
        if self._writer:
            self._writer.event(at.step, at.tokens, event)
            if say:
                self.say(f"step {at.step}: {event.text}")

    def started(self, state: TrainState, first: int, times: StartTimes) -> None:
        """Report the seconds of this start, whose first step has just ended. It began behind step `first`."""
        # A signal may leave the second step as if it had not begun.
        if "first step" in times.seconds:
            return
        times.ended("first step")
        self.keep("start: " + ", ".join(f"{part} {seconds:.2f} s" for part, seconds in times.seconds.items()))
        # Without a checkpoint, ranks that a keeper has begun again begin with the first step.
        if first or death():
            event = times.restart(state.step, first, self._last_row)
            self.write(state, {"perf/restart_seconds": event.fields["total"]})
            self.event(state, event)

    def step(self, state: TrainState, result: StepResult, size: int, lr: float) -> None:
        """Record all numbers of a step of `size` tokens that has brought the run to `state`, and the numbers of the
        clock.

        A row also has the numbers that only steps since the row before had, because some are measured only now and
        then. The last step has a row, whatever its number.
        """
        self._latest |= result.metrics
        self.clock.add(size, self._flops(result.span))
        self._held = partial(self._write_step, Position(state.step, state.tokens), result, size, lr)
        last = result.stop or state.tokens >= self._total
        if last or state.step % self._logging.every_steps == 0:
            self.row()

    def row(self) -> None:
        """Write the row of the last step, if it has none yet."""
        if self._writer and self._held:
            with self.clock.stopped():
                self._held()
        self._held = None

    def _write_step(self, at: Position, result: StepResult, size: int, lr: float) -> None:
        rate, flops = self.clock.take()
        peak = (peak_flops(self._device) or 0) * dist.get_world_size()
        derived = {
            "train/lr": lr,
            "train/tokens_per_step": size,
            "perf/tokens_per_second": rate,
            "perf/mfu": flops / peak if peak else None,
            "perf/mfu_full_attention": rate * self._full / peak if peak else None,
            "perf/memory_gib": memory_gib(self._device),
            "perf/memory_retries": self._take_retries(at.step),
        }
        self.write(at, {**self._latest, **derived})
        self._latest.clear()
        if self._writer:
            self._writer.progress(at.step, at.tokens, result.loss, lr, rate)

    def _take_retries(self, step: int) -> int | None:
        """Return memory_retries since the row before. Their first row past the first of all is said: steps that compile
        and choose kernels take more memory."""
        now = memory_retries(self._device)
        if now is None:
            return None
        new = now - (self._retries or 0)
        if new and self._retries is not None and not self._told_full:
            self._told_full = True
            self.say(f"step {step}: {FULL}")
        self._retries = now
        return new

    def saved(self, saver: Saver) -> None:
        """Report the checkpoints that have been published since the last call, and those that could not be written."""
        while saver.troubles:
            step, tokens, error = saver.troubles.popleft()
            text = (
                f"the checkpoint of step {step} could not be written; training goes on and it is tried again: {error}"
            )
            self.event(Position(step, tokens), Event("save_failed", text))
        while saver.saved:
            saved = saver.saved.popleft()
            self.write(
                Position(saved.step, saved.tokens),
                {
                    "perf/save_stall_seconds": saved.stall_seconds,
                    "perf/save_publish_seconds": saved.publish_seconds,
                },
            )
            self.say(
                f"saved {on_disk.folder_name(saved.step)}: training stood still for {saved.stall_seconds:.2f} s, "
                f"published {saved.publish_seconds:.1f} s later"
            )

    def close(self) -> None:
        """Write the last step's row and close all files. Lines can still be printed after that."""
        if self._writer:
            with suppress(OSError):
                self.row()
            self._writer.close()
            self._writer = None
