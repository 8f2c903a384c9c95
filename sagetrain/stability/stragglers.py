"""Find ranks that are slower than the others, or slower than they were.

The other ranks wait for a slow one in every step, so the time of a step does not say who is slow. Each rank therefore
measures its forward and backward passes alone, up to the reduction of the gradients, and the step's one reduction takes
the times of all ranks along. A time has two scores from 0 to 1: the relative score is the median of the ranks of the
same pipeline stage divided by the time, and the own score is the rank's own best time (the fastest tenth of its latest
steps) divided by it.
"""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from sagetrain.parallel.host import nvidia_smi
from sagetrain.parallel.metrics import Metrics
from sagetrain.stability.controller import Controller, Event, Taken

METRIC = "perf/slowest_rank"
"""The name of the smallest relative score of a step."""
SLOW = 0.85
STEPS = 50
"""A rank with a score below SLOW for so many steps in a row is named."""
_HISTORY = 500


class Stragglers(Controller):
    """The controller that names slow ranks. It remembers nothing: a run that continues may have other hosts.

    Args:
        names: the host and the device of each rank, in words.
        clock: returns seconds. It is asked on a CPU; a GPU has events of its own.
    """

    name = "stragglers"

    def __init__(
        self,
        rank: int,
        names: Sequence[str],
        stage_size: int,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._rank, self._names, self._stage_size, self._clock = rank, names, stage_size, clock
        self._on_gpu = device.type == "cuda"
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._times = np.zeros(len(names))
        self._begin_again(0)

    def _begin_again(self, tokens: int) -> None:
        """Forget all steps, because the next ones have another number of tokens."""
        self._tokens = tokens
        self._history: deque[np.ndarray[Any, Any]] = deque(maxlen=_HISTORY)
        self._slow = {kind: np.zeros(len(self._names), int) for kind in ("relative", "own")}

    @contextmanager
    def timed(self, metrics: Metrics) -> Iterator[None]:
        """Measure the passes inside, and add the time to the step's metrics. The time of a GPU is known one step later,
        because nothing waits for it."""
        if self._on_gpu:
            before, events = self._events, (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            events[0].record()
            yield
            events[1].record()
            self._events, seconds = events, before[0].elapsed_time(before[1]) / 1e3 if before else 0.0
        else:
            begin = self._clock()
            yield
            seconds = self._clock() - begin

        def caught(*times: float) -> float:
            self._times = np.array(times)
            return float(self._relative().min())

        metrics.derive(METRIC, caught, *(seconds * (rank == self._rank) for rank in range(len(self._names))))

    def _relative(self) -> np.ndarray[Any, Any]:
        times = np.maximum(self._times, 1e-9).reshape(-1, self._stage_size)
        # Of two ranks in the middle this takes the faster one, so that of two ranks the slower one is named.
        middle = np.quantile(times, 0.5, axis=1, keepdims=True, method="lower")
        return np.asarray(np.minimum(middle / times, 1.0)).ravel()

    def after_step(self, taken: Taken) -> list[Event]:
        """Score the ranks in a step. Return an event for each rank that has been slow for STEPS steps."""
        if METRIC not in taken.metrics or not self._times.all():
            return []
        if taken.tokens_per_step != self._tokens:
            self._begin_again(taken.tokens_per_step)
        self._history.append(self._times)
        best = np.quantile(np.stack(self._history), 0.1, axis=0)
        scores = {"relative": self._relative(), "own": np.minimum(best / self._times, 1.0)}
        # Where most ranks are slower than they were, longer documents or a slower network is the reason.
        slow = {"relative": scores["relative"] < SLOW, "own": scores["own"] < SLOW * min(1.0, np.median(scores["own"]))}
        named = list[Event]()
        for kind, ranks in slow.items():
            self._slow[kind] = np.where(ranks, self._slow[kind] + 1, 0)
            named += [self._event(int(rank), kind, scores) for rank in np.flatnonzero(self._slow[kind] == STEPS)]
        if any(event.fields["rank"] == self._rank for event in named) and (state := gpu_state(self._names[self._rank])):
            print(f"rank {self._rank} ({self._names[self._rank]}): {state}", file=sys.stderr, flush=True)
        return named

    def _event(self, rank: int, kind: str, scores: Mapping[str, np.ndarray[Any, Any]]) -> Event:
        relative, own, seconds = (float(each[rank]) for each in (scores["relative"], scores["own"], self._times))
        than = "the other ranks of its stage" if kind == "relative" else "it was"
        text = (
            f"rank {rank} ({self._names[rank]}) has been slower than {than} for {STEPS} steps: forward and backward "
            f"take {seconds:.3g} s, score {relative:.2f} beside the others and {own:.2f} beside its own best"
        )
        fields = {"rank": rank, "where": self._names[rank], "than": kind, "relative": relative, "own": own}
        return Event("straggler", text, {**fields, "seconds": seconds})


_ASKED = {
    "serial number": "serial",
    "SM clock in MHz": "clocks.sm",
    "at most": "clocks.max.sm",
    "degrees Celsius": "temperature.gpu",
    "throttle reasons": "clocks_throttle_reasons.active",
    "uncorrected ECC errors": "ecc.errors.uncorrected.volatile.total",
}
"""The values that nvidia-smi is asked for, by their names in words."""


def gpu_state(place: str) -> str:
    """Return what nvidia-smi says of a slow GPU, in words: clocks, temperature, throttling, and errors of memory and
    NVLink. `place` has its GPU-UUID. The text is empty if there is no GPU or no answer."""
    if not (found := re.search(r"GPU-[\w-]+", place)):
        return ""
    device, asked = ("-i", found[0]), f"--query-gpu={','.join(_ASKED.values())}"
    values = ",".join(nvidia_smi(asked, "--format=csv,noheader,nounits", *device))
    links = re.findall(r"Errors?: (\d+)", "\n".join(nvidia_smi("nvlink", "-e", *device)))
    said = [f"{name} {value.strip()}" for name, value in zip(_ASKED, values.split(","), strict=False) if value]
    return ", ".join([*said, *([f"NVLink errors {sum(map(int, links))}"] if links else [])])
