"""Runs whose ranks have keepers: the processes, the deaths and the restarts."""

import json
from pathlib import Path

import psutil

from forked import Command
from runs import log_of, rank_of, run_dir_of
from sagetrain.checkpoint.slots import CopyFolder


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


def copied(memory: Path) -> int:
    """Return the newest step of which all hosts have whole copies in memory, each of its own rank and of another's; 0
    if there is none. Each host has a folder."""
    of_all = []
    for kind in ("copy", "held"):
        for host in memory.iterdir():
            headers = [CopyFolder(path).header() for path in host.glob(f"*/{kind}-*-of-rank-*")]
            of_all.append({int(header["step"]) for header in headers if header})
    return max(set.intersection(*of_all), default=0) if of_all else 0


def restarted(config: Path, times: int):
    """Return a function that says whether the run has begun again so many times and taken a step."""
    return lambda: log_of(config).count(" s after rank") >= times
