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
"""The number of micro-steps that are timed each way."""
_SLOWER = 1.02
"""Replays stay unless they take this many times as long: two times of the same differ by as much, and a replay leaves
the host free."""


class ReplayTimes:
    """The times of one program's micro-steps.

    A time is the GPU's from one event to another, so nothing waits for it. Where the host launches more slowly than the
    GPU computes, it is the host's time. What the loader takes is in neither.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_host: list[tuple[Any, Any]] = []
        self._replayed: list[tuple[Any, Any]] = []

    @property
    def host_known(self) -> bool:
        """Whether enough launches by the host were timed."""
        return len(self._by_host) >= ENOUGH

    @property
    def known(self) -> bool:
        """Whether enough micro-steps were timed both ways."""
        return self.host_known and len(self._replayed) >= ENOUGH

    @contextlib.contextmanager
    def timed(self, replayed: bool) -> Iterator[None]:
        """Time the micro-step inside, unless enough of its kind are timed."""
        times, begin = self._replayed if replayed else self._by_host, self._mark()
        yield
        if len(times) < ENOUGH:
            times.append((begin, self._mark()))

    def medians(self) -> tuple[float, float]:
        """Return the seconds of a micro-step by the host and of a replay. The GPU has come past all of them."""
        both = ([self._seconds(*pair) for pair in times] for times in (self._by_host, self._replayed))
        by_host, replayed = map(statistics.median, both)
        return by_host, replayed

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, begin: Any, end: Any) -> float:
        seconds: float = begin.elapsed_time(end) / 1e3 if self._device.type == "cuda" else end - begin
        return seconds


def slowest_of_ranks(times: ReplayTimes | None, timing: bool, device: torch.device) -> tuple[float, float] | None:
    """Return the seconds of a micro-step by the host and of a replay on the slowest ranks. All ranks call it.

    Args:
        times: the times of this rank; None: it has not enough of them.
        timing: whether this rank may still have enough of them in a later step.

    Returns:
        the seconds, the same on all ranks. None: a rank needs another step. Seconds are 0 if no rank has times, and
        none will have.
    """
    by_host, replayed = times.medians() if times else (0.0, 0.0)
    waits = times is None and timing
    found = torch.tensor([by_host, replayed, waits], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    by_host, replayed, waits = found.tolist()
    return None if waits else (by_host, replayed)


def replays_stay(by_host: float, replayed: float) -> bool:
    """Return whether micro-steps are replayed from now on, by these seconds of a micro-step."""
    return replayed <= _SLOWER * by_host
