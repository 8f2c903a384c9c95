"""A pytest plugin (-p gpu_seen): a run of the GPU tests records the outcomes of their files; any other run prints the
record.

`make test-gpu` writes tests/gpu/seen.json and `make test` prints it. Most changes are made on machines without a GPU,
where nobody would notice that a GPU test has failed since some commit.
"""

import json
import os
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "gpu"
RECORD = re.compile(r"\{\n {3,}[^{}]*\}")
"""A file's counts, or the run in which it was green. Each has one line."""
OUTCOMES = "passed", "failed", "skipped", "not run"
Files = Mapping[str, Mapping[str, int]]
"""The number of tests of each file that had each of OUTCOMES, keyed by file name."""


def test_of(nodeid: str) -> str:
    """Name the test that a case belongs to: its file's name and its own."""
    return Path(nodeid.split("[")[0]).name


class Seen:
    """The record of one checkout."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self.folder, self._path = folder, folder / "seen.json"

    def write(self, run: Mapping[str, Any], files: Files, seconds: Mapping[str, float], whole: bool = True) -> None:
        """Record a run (commit, card, torch, date, pass, failures) as the last one.

        Args:
            seconds: the seconds of the longest case of each test that was run. They replace what earlier runs needed.
            whole: Whether the run has all tests of the files. Then it is the last green one of each file that was
                green. A file is not green while tests of it wait to be run.
        """
        before = self._read()
        green = {
            name: {key: value for key, value in run.items() if key != "failures"}
            for name, counts in files.items()
            if whole and counts["passed"] and not (counts["failed"] or counts["not run"])
        }
        found = {
            "last": {**run, "files": {name: dict(files[name]) for name in sorted(files)}},
            "green": dict(sorted((before.get("green", {}) | green).items())),
            "seconds": dict(sorted((before.get("seconds", {}) | dict(seconds)).items())),
        }
        partial = self._path.with_suffix(".partial")
        lines = RECORD.sub(lambda record: " ".join(record[0].split()), json.dumps(found, indent=1))
        partial.write_text(lines + "\n")
        os.replace(partial, self._path)  # A run that is killed while it writes leaves the record before.

    def seconds(self) -> dict[str, float]:
        """Return the seconds of the longest case of each test that was ever timed, keyed by test_of."""
        return self._read().get("seconds", {})

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
            failed, waiting = (
                " ".join(name for name, counts in last["files"].items() if counts[outcome]) or "no file"
                for outcome in ("failed", "not run")
            )
            stopped = f", stopped before the end of {waiting}" if waiting != "no file" else ""
            yield f"last run, {self._ago(last['commit'])}, {last['pass']}: failed in {failed}{stopped}"

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


def card() -> str:
    """Return the number and the name of the GPUs. This process does not begin to use one for that."""
    words = "nvidia-smi", "--query-gpu=name", "--format=csv,noheader"
    try:
        names = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return "no GPU"
    return f"{torch.cuda.device_count()} {names[0]}"


class Recorder:
    """Count the outcomes of the GPU tests, in the process that hears of all of them.

    The record is written after each test, so a run that is interrupted or killed leaves one too.
    """

    def __init__(self, seen: Seen) -> None:
        self._seen, self._run = seen, {}
        self._config: pytest.Config
        self._waiting: set[str] = set()
        self._failures: set[str] = set()
        self._seconds: Counter[str] = Counter()
        self.files: dict[str, Counter[str]] = {}

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._config = session.config

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.expect(item.nodeid for item in session.items)

    def expect(self, ids: Iterable[str]) -> None:
        """Hear which tests are to be run."""
        for nodeid in ids:
            if self._is_ours(nodeid):
                self._waiting.add(nodeid)
                self._counts(nodeid)["not run"] += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not self._is_ours(report.nodeid):
            return
        self._seconds[report.nodeid] += report.duration
        if report.when == "call" or not report.passed:
            counts = self._counts(report.nodeid)
            counts[report.outcome] += 1
            counts["not run"] -= report.nodeid in self._waiting
            self._waiting.discard(report.nodeid)
            if report.failed:
                self._failures.add(report.nodeid.removeprefix(f"tests/{self._seen.folder.name}/"))
        if report.when == "teardown" or report.failed:  # A process that has died reports no teardown.
            self._write()

    def _write(self) -> None:
        options, args = self._config.option, self._config.args
        some = bool(options.keyword or options.markexpr or any("::" in each for each in args))
        first = self._config.pluginmanager.hasplugin("first_pass")
        if not self._run:
            self._run = {
                "commit": self._seen.commit(),
                "card": card(),
                "torch": torch.__version__,
                "date": date.today().isoformat(),
                "pass": "some tests" if some else "first pass" if first else "whole suite",
            }
        seconds: dict[str, float] = {}
        for nodeid, duration in self._seconds.items():
            if nodeid not in self._waiting:
                seconds[test_of(nodeid)] = max(round(duration, 1), seconds.get(test_of(nodeid), 0.0))
        self._seen.write({**self._run, "failures": sorted(self._failures)}, self.files, seconds, whole=not some)

    def _is_ours(self, nodeid: str) -> bool:
        return Path(nodeid.split("::")[0]).parent.name == self._seen.folder.name

    def _counts(self, nodeid: str) -> Counter[str]:
        return self.files.setdefault(Path(nodeid.split("::")[0]).name, Counter(dict.fromkeys(OUTCOMES, 0)))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.files:
            terminalreporter.section("GPU tests last seen green (make test-gpu)")
            for line in self._seen.lines():
                terminalreporter.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Recorder(Seen()))
