"""Run jobs side by side on the GPUs of this machine. Each is an ordinary `sagetrain train`, and is stopped and
continued like one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sagetrain.cluster.guard import LAUNCHER
from sagetrain.cluster.launcher import ASKING
from sagetrain.comparing.question import Job

_TICK = 0.2
_LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


Process = subprocess.Popen[bytes]
Start = Callable[[Sequence[str], Mapping[str, str], Path], Process]
"""A function that starts the process of a run, given the words after `sagetrain train`, the environment and the log."""


def start_process(words: Sequence[str], env: Mapping[str, str], log: Path) -> Process:
    """Start `sagetrain train WORDS`, with its output appended to `log`. Signals of a terminal do not reach the process,
    and it stops if this process is gone."""
    command = [sys.executable, "-m", "sagetrain", "train", *words]
    with log.open("ab") as output:
        return subprocess.Popen(
            command, env={**env, LAUNCHER: str(os.getpid())}, stdout=output, stderr=output, start_new_session=True
        )


def slots(gpus: Sequence[str], per_gpu: int, cores: int) -> list[dict[str, str]]:
    """Return the environments of runs that go side by side: `per_gpu` on each GPU, or `per_gpu` in all where there is
    no GPU. Those share the cores of this host."""
    if gpus:
        return [{"CUDA_VISIBLE_DEVICES": gpu} for _ in range(per_gpu) for gpu in gpus]
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // per_gpu))
    return [{"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": threads} for _ in range(per_gpu)]


class Stop:
    """A flag that says whether to stop, because a signal came (SIGTERM, SIGUSR1, Ctrl-C) or the time is up. The second
    signal ends everything at once. As a context manager it handles the signals."""

    def __init__(self, seconds: float | None = None):
        self.why, self.at_once, self._asked = "", False, False
        self._deadline = None if seconds is None else time.monotonic() + seconds

    def __enter__(self) -> Stop:
        self._before = {number: signal.signal(number, self._ask) for number in ASKING}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _frame: object) -> None:
        # The time limit does not count as a first signal.
        self.at_once, self._asked = self._asked, True
        self.why = self.why or signal.Signals(number).name

    def __bool__(self) -> bool:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self.why = self.why or "--time-limit"
        return bool(self.why)


@dataclass(frozen=True)
class Runner:
    """Start jobs in slots, and report how they ended."""

    slots: Sequence[Mapping[str, str]]
    """The environments of the slots."""
    command: Callable[[Job], Sequence[str]]
    """Return the arguments of a job: CONFIG [KEY=VALUE]..."""
    log: Callable[[Job], Path]
    """Return the file for a job's output."""
    ended: Callable[[Job, int | None], None]
    """Called with the exit code of each run that is over. It is None if the run was asked to stop and did."""
    tick: Callable[[Sequence[Job]], None]
    """Called every now and then with the jobs that run."""
    start: Start = start_process
    ready: Callable[[Job], bool] = lambda job: True
    """Return whether a job can start by now."""
    crowded: Callable[[Job, int], bool] = lambda job, others: False
    """Return whether a job failed because of the other jobs on its GPU, whose number is given. Such a job is started
    again after those that wait, and its GPU takes one run fewer from then on."""

    def run(self, jobs: Sequence[Job], stop: Stop) -> None:
        """Run all jobs, until `stop` is set. Then the running jobs are asked to save, and are waited for. A job that is
        not ready when no other job runs is left out. An exception in this process also asks the running jobs to save,
        and waits for none."""
        running: dict[int, tuple[Job, Process]] = {}
        try:
            self._run(deque(jobs), running, stop)
        except BaseException:
            _tell(running, signal.SIGTERM)
            raise

    def _run(self, waiting: deque[Job], running: dict[int, tuple[Job, Process]], stop: Stop) -> None:
        asked, closed = False, set[int]()
        while waiting or running:
            if stop and not asked:
                asked = True
                waiting.clear()
                _tell(running, signal.SIGTERM)
            if stop.at_once:
                _tell(running, signal.SIGKILL)
            for place, (job, process) in list(running.items()):
                if (code := process.poll()) is not None:
                    del running[place]
                    others = self._beside(place, running)
                    if code and others and not asked and self.crowded(job, others):
                        closed.add(place)
                        waiting.append(job)
                        continue
                    did = stop.at_once or code in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
                    self.ended(job, None if asked and did else code)
            ready = deque(job for job in waiting if self.ready(job))
            for place in range(len(self.slots)):
                if ready and place not in running and place not in closed:
                    job = ready.popleft()
                    waiting.remove(job)
                    running[place] = job, self._launch(job, self.slots[place])
            self.tick([job for job, _ in running.values()])
            if not running:
                return
            time.sleep(_TICK)

    def _beside(self, place: int, running: Mapping[int, tuple[Job, Process]]) -> int:
        """Return the number of runs on the GPU of a slot."""
        gpu = self.slots[place].get("CUDA_VISIBLE_DEVICES")
        return sum(self.slots[other].get("CUDA_VISIBLE_DEVICES") == gpu for other in running) if gpu else 0

    def _launch(self, job: Job, slot: Mapping[str, str]) -> Process:
        log = self.log(job)
        log.parent.mkdir(parents=True, exist_ok=True)
        env = {key: value for key, value in os.environ.items() if key not in _LAUNCHED}
        return self.start(self.command(job), {**env, **slot}, log)


def _tell(running: Mapping[int, tuple[Job, Process]], number: int) -> None:
    for _, process in running.values():
        process.send_signal(number)


def end_of_log(path: Path, lines: int = 8) -> str:
    """Return the last lines of a run's log. The log's folder is enough to find the rest."""
    text = path.read_text(errors="replace") if path.exists() else ""
    return "\n".join(text.splitlines()[-lines:])
