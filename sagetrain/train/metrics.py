"""What a run reports: metrics.jsonl, TensorBoard, the progress bar, and the figures derived from the clock."""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

import torch
from tqdm import tqdm

from sagetrain.hardware import PEAK_FLOPS


def peak_flops(device: torch.device) -> float | None:
    """16-bit peak of a device, or None where the figure is not known (MFU is then not reported)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for key, flops in PEAK_FLOPS.items() if key in name), None)


def memory_gib(device: torch.device) -> float:
    """Peak memory in GiB: allocated on the GPU, or resident in the process without one."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class Throughput:
    """Tokens per second of training alone: evaluation and saving stop the clock."""

    def __init__(self) -> None:
        self._tokens, self._seconds, self._since = 0, 0.0, time.perf_counter()

    def pause(self) -> None:
        """Stop the clock, at the end of a step."""
        self._seconds += time.perf_counter() - self._since

    def resume(self) -> None:
        """Start the clock again, after whatever was not training."""
        self._since = time.perf_counter()

    def add(self, tokens: int) -> None:
        """Count the tokens of a step."""
        self._tokens += tokens

    def take(self) -> float:
        """Tokens per second since the last call."""
        rate = self._tokens / max(self._seconds, 1e-9)
        self._tokens, self._seconds = 0, 0.0
        return rate


class MetricsWriter:
    """Writes one row of numbers per call to every sink. Only rank 0 makes one.

    Opening it drops the rows past `step` that a killed run left behind, so that a resumed run has each step once.
    """

    def __init__(self, run_dir: Path, step: int, tokens: int, total_tokens: int, tensorboard: bool):
        self._path = run_dir / "metrics.jsonl"
        self._drop_rows_after(step)
        self._file = self._path.open("a")
        self._board = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=step + 1)
        self._bar = tqdm(
            total=total_tokens,
            initial=min(tokens, total_tokens),
            unit="tok",
            unit_scale=True,
            dynamic_ncols=True,
            mininterval=0.1 if sys.stderr.isatty() else 30,  # a log file gets a line now and then
        )

    def _drop_rows_after(self, step: int) -> None:
        if not self._path.exists():
            return
        kept = []
        for line in self._path.read_text().splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line + "\n")
            except (ValueError, KeyError):  # the last line of a killed run may be cut short
                continue
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text("".join(kept))
        os.replace(temporary, self._path)

    def write(self, step: int, tokens: int, values: dict[str, float | None]) -> None:
        """One row: {"step", "tokens", **values}; None values are left out."""
        row = {"step": step, "tokens": tokens, **{k: v for k, v in values.items() if v is not None}}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._board:
            for key, value in values.items():
                if value is not None:
                    self._board.add_scalar(key, value, step)

    def progress(self, tokens: int, shown: dict[str, str]) -> None:
        """Move the progress bar to `tokens`, with `shown` behind it."""
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update(min(tokens, self._bar.total) - self._bar.n)

    def say(self, text: str) -> None:
        """Print a line without breaking the progress bar."""
        self._bar.write(text)

    def close(self) -> None:
        """Flush and close every sink."""
        self._bar.close()
        self._file.close()
        if self._board:
            self._board.close()
