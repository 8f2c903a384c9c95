"""A run folder has one writer, and all hosts of a run see the same folder."""

import errno
import fcntl
import os
import subprocess
import sys

import pytest

from distributed import run_distributed
from sagetrain.cluster import guard, preflight, run_folder
from sagetrain.cluster.run_folder import RunFolder
from sagetrain.config.errors import CheckpointError, ConfigError


def test_no_locks_is_a_warning_and_a_held_lock_an_error(tmp_path, monkeypatch) -> None:
    for number in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):

        def missing(file: object, how: int, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", missing)
        warning = RunFolder(tmp_path).claim("token")
        assert f"is on a file system without locks ({os.strerror(number)})" in warning
        monkeypatch.undo()
    folder = RunFolder(tmp_path)
    assert folder.claim("token") == ""
    with pytest.raises(CheckpointError, match="is in use by another run"):
        RunFolder(tmp_path).claim("other")
    assert folder.finds("token") == ""  # The refused run has changed nothing.


def test_another_folder_of_the_same_name_is_noticed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run_folder, "_LOOKS", 1)
    ours, theirs = RunFolder(tmp_path / "a/runs/x"), RunFolder(tmp_path / "b/runs/x")
    ours.claim("token")
    (tmp_path / "b").mkdir()
    assert theirs.finds("token") == "has no such folder"
    assert list((tmp_path / "b").iterdir()) == []
    theirs.claim("left by another start")
    assert theirs.finds("token") == "has another folder there"
    blocked = tmp_path / "c"
    blocked.write_text("a file")
    assert RunFolder(blocked / "x").finds("token") == "cannot use it (Not a directory)"
    ours.unclaim()
    assert not (tmp_path / "a/runs/x").exists()


def start_in_a_folder_that_is_taken(path) -> tuple[str, str]:
    rank = int(os.environ["RANK"])
    if rank == 0:
        other = RunFolder(path)
        other.claim("another run")
    try:
        preflight.share(RunFolder(path))
    except (ConfigError, CheckpointError) as error:
        return type(error).__name__, str(error)


def test_all_ranks_leave_when_rank_0_cannot_have_the_folder(tmp_path) -> None:
    (first, text), (second, told) = run_distributed(start_in_a_folder_that_is_taken, 2, tmp_path)
    assert (first, second) == ("CheckpointError", "ConfigError")
    assert "is in use by another run" in text
    assert told.startswith("rank 0 on ") and told.endswith(text)


TOLD = ["TORCHELASTIC_RUN_ID", "LOCAL_SIZE", guard.LAUNCHER]
ASKS = f"""
import os
from sagetrain.cluster import guard
for name in {TOLD}:
    os.environ[name] = "1"
    print(guard.launchers() == (os.getppid(),))
    del os.environ[name]
print(guard.launchers())
"""


def test_a_shell_with_the_word_deepspeed_is_no_launcher(tmp_path) -> None:
    """A shell may end while the program that it started goes on."""
    outer, script = tmp_path / "outer.py", tmp_path / "my_deepspeed_run.sh"
    outer.write_text(f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ASKS!r}])")
    script.write_text(f"{sys.executable} {outer}\ntrue\n")  # bash stays alive only if another command follows.
    env = {name: value for name, value in os.environ.items() if name not in TOLD}
    done = subprocess.run(["bash", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * len(TOLD) + ["()"], done.stderr
