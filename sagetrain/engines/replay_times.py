"""Times of micro-steps, by the host's launches and by replays, from which training.cuda_graphs: auto chooses."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

ENOUGH = 3
"""The number of micro-steps, or of a pipeline's steps, that are timed each way."""
_SLOWER = 1.02
"""Replays stay unless they take this many times as long: two times of the same differ by as much, and a replay leaves
the host free."""


class ReplayTimes:
    """The times of one program's micro-steps, or of whole steps of a pipeline.

    A time is the GPU's from one event to another, so nothing waits for it. Where the host launches more slowly than the
    GPU computes, it is the host's time. What the loader takes is in neither time of a micro-step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_host: list[tuple[Any, Any, int]] = []
        self._replayed: list[tuple[Any, Any, int]] = []

    @property
    def host_known(self) -> bool:
        """Whether enough launches by the host were timed."""
        return len(self._by_host) >= ENOUGH

    @contextlib.contextmanager
    def timed(self, replayed: bool) -> Iterator[None]:
        """Time the micro-step inside."""
        begin = self.mark()
        yield
        self.note(replayed, begin)

    def note(self, replayed: bool, begin: Any, micro_batches: int = 1) -> None:
        """Note the time of these micro-batches since `begin`, which is a mark, unless enough of its kind are known."""
        times = self._replayed if replayed else self._by_host
        if len(times) < ENOUGH:
            times.append((begin, self.mark(), micro_batches))

    def medians(self) -> tuple[float, float] | None:
        """Return the seconds of a micro-batch by the host and replayed. The GPU has come past all of them. None: not
        enough were timed both ways."""
        if not self.host_known or len(self._replayed) < ENOUGH:
            return None
        both = ([self._seconds(*each) for each in times] for times in (self._by_host, self._replayed))
        by_host, replayed = map(statistics.median, both)
        return by_host, replayed

    def mark(self) -> Any:
        """Mark this place in what the GPU has to do."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, begin: Any, end: Any, micro_batches: int) -> float:
        seconds: float = begin.elapsed_time(end) / 1e3 if self._device.type == "cuda" else end - begin
        return seconds / micro_batches


def slowest_of_ranks(
    times: tuple[float, float] | None, timing: bool, device: torch.device
) -> tuple[float, float] | None:
    """Return the seconds of a micro-step by the host and of a replay on the slowest ranks, the same on all ranks, which
    all call it. None: a rank has not timed enough, but may have in a later step (`timing`). Seconds are 0 if no rank
    has times, and none will have."""
    by_host, replayed = times or (0.0, 0.0)
    waits = times is None and timing
    found = torch.tensor([by_host, replayed, waits], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    by_host, replayed, waits = found.tolist()
    return None if waits else (by_host, replayed)


def replays_stay(by_host: float, replayed: float) -> bool:
    """Return whether micro-steps are replayed from now on, by these seconds of a micro-step."""
    return replayed <= _SLOWER * by_host
