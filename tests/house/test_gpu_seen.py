"""The record of GPU tests, and its lines on a machine without a GPU."""

import json
import multiprocessing
import re
import signal
import subprocess
from pathlib import Path

import pytest

from gpu_seen import OUTCOMES, Recorder, Seen
from runs import ROOT

RUN = {"card": "1 NVIDIA H100 80GB HBM3", "torch": "2.11.0", "date": "2026-11-26", "pass": "first pass"}
GREEN, RED, SKIPPED, STOPPED = (
    dict(zip(OUTCOMES, counts, strict=True)) for counts in ((2, 0, 1, 0), (1, 1, 0, 0), (0, 0, 4, 0), (3, 0, 0, 1))
)


def git(folder: Path, *words: str) -> str:
    who = "-c", "user.name=Test", "-c", "user.email=test@example.com"
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of one commit with three files of GPU tests. Two of them pass, and `b` fails."""
    folder = tmp_path / "repository/tests/gpu"
    folder.mkdir(parents=True)
    for name, value in (("a", 1), ("b", 2), ("c", 3)):
        (folder / f"test_{name}_gpu.py").write_text(f"def test_it():\n    assert {value} != 2\n")
    git(tmp_path / "repository", "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def test_a_file_is_green_at_its_last_commit_without_a_failure(checkout: Path) -> None:
    seen, head = Seen(checkout), git(checkout, "rev-parse", "HEAD")
    assert seen.commit() == head
    assert list(seen.lines()) == ["never: a b c"]
    files = {f"test_{name}_gpu.py": counts for name, counts in (("a", GREEN), ("b", GREEN), ("c", SKIPPED))}
    seen.write({"commit": head, **RUN}, files, {"test_a_gpu.py::test_it": 3.0})
    for message in ("second", "third"):
        git(checkout, "commit", "-q", "--allow-empty", "-m", message)
    now = {"commit": git(checkout, "rev-parse", "HEAD"), **RUN, "failures": ["test_b_gpu.py::test_it"]}
    seen.write(now, files | {"test_b_gpu.py": RED}, {"test_b_gpu.py::test_it": 0.5})
    assert seen.seconds() == {"test_a_gpu.py::test_it": 3.0, "test_b_gpu.py::test_it": 0.5}
    git(checkout, "commit", "-q", "--allow-empty", "-m", "fourth")
    last, card = git(checkout, "rev-parse", "--short=7", "HEAD~1"), "1 NVIDIA H100 80GB HBM3, 2026-11-26"
    expected = [
        f"{last}, 1 commits ago, {card}: a",
        f"{head[:7]}, 3 commits ago, {card}: b",
        "never: c",
        f"last run, {last}, 1 commits ago, first pass: failed in test_b_gpu.py",
    ]
    assert list(seen.lines()) == expected
    assert seen.commit() == git(checkout, "rev-parse", "HEAD")  # The record itself is no change.
    seen.write(now, files | {"test_a_gpu.py": STOPPED, "test_b_gpu.py": RED}, {})
    assert list(seen.lines()) == [*expected[:3], f"{expected[3]}, stopped before the end of test_a_gpu.py"]
    seen.write(now, files | {"test_b_gpu.py": GREEN}, {}, whole=False)
    assert list(seen.lines())[1] == expected[1]  # Some tests of a file do not make it green.
    seen.write(now, files | {"test_b_gpu.py": RED}, {})
    (checkout / "test_a_gpu.py").write_text("")
    assert seen.commit() == git(checkout, "rev-parse", "HEAD") + " with changes"

    shallow = checkout.parents[2] / "shallow"
    git(checkout, "clone", "-q", "--depth", "1", f"file://{checkout.parents[1]}", str(shallow))
    (shallow / "tests/gpu/seen.json").write_bytes((checkout / "seen.json").read_bytes())
    unknown = [re.sub(r"\d commits ago", "not in the history of this clone", line) for line in expected]
    assert list(Seen(shallow / "tests/gpu").lines()) == unknown


def test_a_gpu_run_is_recorded_and_another_run_prints_it(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, seen = checkout.parents[1], Seen(checkout)
    cpu = root / "tests/test_cpu.py"
    cpu.write_text("def test_it():\n    pass\n")

    def run(*words: object) -> int:
        options = "-q", "-p", "no:cacheprovider", "-c", "/dev/null", f"--rootdir={root}"
        return pytest.main([*options, *map(str, words)], plugins=[Recorder(seen)])

    assert run(checkout) == 1
    assert json.loads((checkout / "seen.json").read_text())["last"]["failures"] == ["test_b_gpu.py::test_it"]
    last = json.loads((checkout / "seen.json").read_text())["last"]
    assert last["commit"] == git(checkout, "rev-parse", "HEAD") and last["pass"] == "whole suite"
    assert {name: counts["failed"] for name, counts in last["files"].items()} == {
        "test_a_gpu.py": 0, "test_b_gpu.py": 1, "test_c_gpu.py": 0,
    }  # fmt: skip
    assert run("-k", "test_it", checkout) == 1
    assert json.loads((checkout / "seen.json").read_text())["last"]["pass"] == "some tests"
    assert run("-p", "first_pass", checkout) == 1
    assert json.loads((checkout / "seen.json").read_text())["last"]["pass"] == "first pass"
    capsys.readouterr()
    before = (checkout / "seen.json").read_bytes()
    assert run(cpu) == 0
    printed = capsys.readouterr().out
    assert "GPU tests last seen green" in printed and "\nnever: b\nlast run, " in printed
    assert (checkout / "seen.json").read_bytes() == before


def test_a_run_that_is_killed_is_recorded_as_far_as_it_came(checkout: Path) -> None:
    (checkout / "test_b_gpu.py").write_text(
        "import os, signal\ndef test_it():\n    pass\ndef test_last():\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    git(checkout, "commit", "-q", "-a", "-m", "second")
    words = ["-q", "--import-mode=importlib", "-p", "no:cacheprovider"]
    words += ["-c", "/dev/null", f"--rootdir={checkout.parents[1]}"]
    run = multiprocessing.get_context("fork").Process(
        target=pytest.main, args=([*words, str(checkout)], [Recorder(Seen(checkout))])
    )
    run.start()
    run.join()
    assert run.exitcode == -signal.SIGKILL
    seen = json.loads((checkout / "seen.json").read_text())
    assert seen["last"]["files"] == {
        "test_a_gpu.py": {"passed": 1, "failed": 0, "skipped": 0, "not run": 0},
        "test_b_gpu.py": {"passed": 1, "failed": 0, "skipped": 0, "not run": 1},
        "test_c_gpu.py": {"passed": 0, "failed": 0, "skipped": 0, "not run": 1},
    }
    assert list(seen["green"]) == ["test_a_gpu.py"]


def test_the_record_of_this_checkout_names_files_that_are_there() -> None:
    record = json.loads((ROOT / "tests/gpu/seen.json").read_text())
    files = {path.name for path in (ROOT / "tests/gpu").glob("test_*.py")}
    assert set(record["green"]) <= files and set(record["last"]["files"]) <= files
