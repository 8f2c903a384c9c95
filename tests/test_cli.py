"""The command line itself: how it is started, what its options refuse, and errors in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from test_resume import BIN, ROOT, write_config


def command(*words: object) -> subprocess.CompletedProcess:
    words = [word if isinstance(word, bytes) else str(word) for word in words]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200", "PYTHONUTF8": "1"}
    return subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=ROOT, env=env, check=False)


@pytest.mark.parametrize("module", ["sagetrain", "sagetrain.cli"])
def test_the_package_and_the_module_can_be_run(module: str) -> None:
    done = command(sys.executable, "-m", module, "train", "--config", "none.yaml")
    assert done.returncode == 2
    assert "error: none.yaml: cannot be read" in done.stderr


def test_help_of_the_quickstart_starts_nothing() -> None:
    done = command(sys.executable, "launch/quickstart.py", "--help")
    assert done.returncode == 0
    assert "the whole life of a run" in done.stdout and "$ " not in done.stdout


@pytest.mark.parametrize(("words", "said"), [
    (["eval", "none", "--num-sequences", 0], "--num-sequences"),
    (["eval", "none", "--num-sequences", -3], "--num-sequences"),
    (["generate", "none", "--seed", 2**64], "--seed"),
    (["generate", "none", "--temperature", 1e-40], "error: --temperature 1e-40: neither 0 nor at least 1e-6"),
    (["generate", "none", "--temperature", "nan"], "--temperature"),
    (["generate", "none", b"caf\xe9"], "error: the prompt 'caf\\udce9' is not UTF-8"),
])  # fmt: skip
def test_arguments_that_are_refused(words: list[object], said: str) -> None:
    done = command(BIN / "sagetrain", *words)
    assert done.returncode == 2
    assert said in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(("run_dir", "said"), [
    ("file", "file: File exists"), ("file/run", "file/run: Not a directory"), ("/proc/none/run", "/proc/none"),
])  # fmt: skip
def test_a_run_dir_that_cannot_be_used_is_one_line(corpus: Path, tmp_path: Path, run_dir: str, said: str) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / run_dir
    config = write_config(tmp_path / "run.yaml", corpus, folder)
    done = command(BIN / "sagetrain", "train", "--config", config)
    assert done.returncode == 2
    assert f"error: training.run_dir {folder} cannot be used: " in done.stderr and said in done.stderr
    assert "Traceback" not in done.stderr
