"""A pytest plugin (-p gpu_seen): a run of the GPU tests records the outcomes of their files; any other run prints the
record.

`make test-gpu` writes tests/gpu/seen.json and `make test` prints it. Most changes are made on machines without a GPU,
where nobody would notice that a GPU test has failed since some commit.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "gpu"
OUTCOMES = "passed", "failed", "skipped"
Files = Mapping[str, Mapping[str, int]]
"""The number of tests of each file that had each of OUTCOMES, keyed by file name."""


class Seen:
    """The record of one checkout."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder, self._path = folder, folder / "seen.json"

    def write(self, run: Mapping[str, Any], files: Files) -> None:
        """Record a run (commit, card, torch, date, pass) as the last one, and as the last green one of each file that
        was green."""
        green = self._read().get("green", {})
        green |= {name: run for name, counts in files.items() if counts["passed"] and not counts["failed"]}
        last = {**run, "files": {name: dict(files[name]) for name in sorted(files)}}
        self._path.write_text(json.dumps({"last": last, "green": dict(sorted(green.items()))}, indent=1) + "\n")

    def lines(self) -> Iterator[str]:
        """Yield lines that say at which commit each file was last green, how long ago that is, and what failed in the
        last run."""
        seen, together = self._read(), defaultdict(list)
        for path in sorted(self.folder.glob("test_*_gpu.py")):
            run = seen.get("green", {}).get(path.name)
            where = f"{self._ago(run['commit'])}, {run['card']}, {run['date']}" if run else "never"
            together[where].append(path.stem.removeprefix("test_").removesuffix("_gpu"))
        for where, names in together.items():
            yield f"{where}: {' '.join(names)}"
        if last := seen.get("last"):
            failed = [name for name, counts in last["files"].items() if counts["failed"]]
            yield f"last run, {self._ago(last['commit'])}, {last['pass']}: failed in {' '.join(failed) or 'no file'}"

    def commit(self) -> str:
        """The commit of this checkout. A file COMMIT names it for a copy without git."""
        head = os.environ.get("COMMIT") or self._git("rev-parse", "HEAD") or "unknown"
        changed = self._git("status", "--porcelain", "-uno", "--", ":/", f":!{self._path}")
        return f"{head} with changes" if changed else head

    def _ago(self, commit: str) -> str:
        revision, *changes = commit.split(maxsplit=1)
        count = self._git("rev-list", "--count", f"{revision}..HEAD")
        age = f"{count} commits ago" if count else "not in the history of this clone"
        return " ".join([revision[:7], *changes]) + f", {age}"

    def _git(self, *words: str) -> str | None:
        try:
            run = subprocess.run(["git", *words], cwd=self.folder, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return None if run.returncode else run.stdout.strip()

    def _read(self) -> dict[str, Any]:
        return json.loads(self._path.read_text()) if self._path.exists() else {}


class Recorder:
    """Count the outcomes of the GPU tests, in the process that hears of all of them."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self.files: dict[str, Counter[str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        path = Path(report.nodeid.split("::")[0])
        if path.parent.name == self._seen.folder.name and (report.when == "call" or not report.passed):
            counts = self.files.setdefault(path.name, Counter(dict.fromkeys(OUTCOMES, 0)))
            counts[report.outcome] += 1

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        ended = exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        # A run that was stopped has not run all files.
        if self.files and ended and not (session.shouldfail or session.shouldstop):
            first = session.config.pluginmanager.hasplugin("first_pass")
            count = torch.cuda.device_count()
            run = {
                "commit": self._seen.commit(),
                "card": f"{count} {torch.cuda.get_device_name(0)}" if count else "no GPU",
                "torch": torch.__version__,
                "date": date.today().isoformat(),
                "pass": "first pass" if first else "whole suite",
            }
            self._seen.write(run, self.files)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.files:
            terminalreporter.section("GPU tests last seen green (make test-gpu)")
            for line in self._seen.lines():
                terminalreporter.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # All workers report to the process that started them.
        config.pluginmanager.register(Recorder(Seen()))
