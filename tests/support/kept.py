"""Runs whose ranks have keepers: the processes, the deaths and the restarts."""

from __future__ import annotations

import json
from pathlib import Path

import psutil

from forked import Command
from runs import log_of, rank_of, run_dir_of


def ranks_of(launcher: Command) -> list[psutil.Process]:
    """Return the processes that train, in the order of their ranks. Their parents are keepers of the same names."""
    every = psutil.Process(launcher.pid).children(recursive=True)
    named = {process.pid: process.name() for process in [psutil.Process(launcher.pid), *every]}
    training = [each for each in every if named[each.pid] == named.get(each.ppid()) and rank_of(each) is not None]
    return sorted(training, key=rank_of)


def kill(*numbers: int):
    """Return a function that kills these ranks at once with SIGKILL."""

    def act(launcher: Command) -> None:
        for process in [ranks_of(launcher)[number] for number in numbers]:
            process.kill()

    return act


def events_of(config: Path) -> list[dict]:
    path = run_dir_of(config) / "events.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if row["kind"] == "restart"]


def restarted(config: Path, times: int):
    """Return a function that says whether the run has begun again so many times and taken a step."""
    return lambda: log_of(config).count(" s after rank") >= times
