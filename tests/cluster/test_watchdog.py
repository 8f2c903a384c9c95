"""A run that hangs says which rank waits for which, and in which collective. Whatever the report meets, the run
ends."""

import ctypes
import faulthandler
import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import tiny
from distributed import run_distributed
from forked import PATIENCE, until
from sagetrain.cluster import guard
from sagetrain.cluster.guard import HANG_EXIT_CODE, StopSignal, Watchdog, collectives_under_way


def waits_on_record(folder: Path) -> bool:
    return (path := folder / "rank-0.txt").exists() and "waits in" in path.read_text()


def one_rank_stays_away(folder: str) -> None:
    """The rank that stays away ends when the other one has written its stacks, because the first end is that of all."""
    groups, end = tiny.join(2), os._exit
    dist.all_reduce(torch.ones(1))

    def last(code: int) -> None:
        until(lambda: waits_on_record(Path(folder)))
        end(code)

    guard.os = SimpleNamespace(**{**vars(os), "_exit": last})
    if groups.rank == 0:
        begun = dist.all_reduce(torch.ones(3, 5), group=groups.tp_group, async_op=True)
    with Watchdog(Path(folder), groups.rank, timeout=1.0) as watchdog:
        watchdog.begin("step 7")
        if groups.rank == 0:
            begun.wait()
        time.sleep(PATIENCE)


def test_the_stacks_name_the_collective(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=f"died with exit code {HANG_EXIT_CODE}"):
        run_distributed(one_rank_stays_away, 2, str(tmp_path))
    waits = tmp_path / "rank-0.txt"
    assert "in one_rank_stays_away" in waits.read_text()
    assert "waits in gloo:all_reduce number 1 of group " in waits.read_text()
    assert "(tensor parallel) over Float [3, 5]" in waits.read_text()
    record = json.loads((tmp_path / "rank-0.collectives.json").read_text())
    assert [entry["profiling_name"] for entry in record["entries"]].count("gloo:all_reduce") >= 2


def test_nothing_under_way() -> None:
    assert collectives_under_way(b'{"version": "2.10"}') == "no collective is under way"


def hang(folder: Path, recorder) -> None:
    """Hang. Only what a case is about has a limit of time: a recorder that blocks, and a process that it blocks too."""
    guard.flight_record, guard._RECORD_SECONDS = recorder, 0.5 if recorder in (blocks, blocks_everything) else PATIENCE
    if recorder is not blocks_everything:
        faulthandler.dump_traceback_later = lambda *_, **how: None
    with Watchdog(folder, 0, timeout=0.2):
        threading.Event().wait(PATIENCE)


def blocks() -> bytes:
    time.sleep(PATIENCE)
    return b""


def blocks_everything() -> bytes:
    """Sleep without releasing the interpreter, as a call into C++ may."""
    ctypes.PyDLL(None).sleep(int(PATIENCE))
    return b""


def fails() -> bytes:
    raise RuntimeError("no recorder here")


@pytest.mark.parametrize(("recorder", "code", "words"), [
    (blocks, HANG_EXIT_CODE, "the flight recorder gave nothing in 0.5 seconds"),
    (blocks_everything, 1, "Timeout (0:00:01.5"),  # faulthandler writes this text and needs no interpreter.
    (fails, HANG_EXIT_CODE, "the flight recorder failed: no recorder here"),
    (lambda: b"{", HANG_EXIT_CODE, "the flight recorder failed: Expecting"),
])  # fmt: skip
def test_a_recorder_that_does_not_answer_keeps_no_process_alive(tmp_path: Path, recorder, code, words) -> None:
    process = multiprocessing.get_context("fork").Process(target=hang, args=(tmp_path / "stacks", recorder))
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == code
    text = (tmp_path / "stacks/rank-0.txt").read_text()
    assert "in start: no progress" in text and "in hang" in text and words in text


@pytest.mark.parametrize(("wrote", "named"), [([2], "0, 1, 3"), ([3], ""), ([0, 1, 3], "")])
def test_ranks_that_write_no_stacks_are_named_once(tmp_path: Path, monkeypatch, wrote, named) -> None:
    """A stopped process says nothing, so the first rank that hangs because of it names it."""
    monkeypatch.setattr(guard, "os", SimpleNamespace(**{**vars(os), "_exit": lambda code: None}))
    for rank in wrote:
        (tmp_path / f"rank-{rank}.txt").touch()
    watchdog = Watchdog(tmp_path, 2, timeout=0.2, ranks=4)
    watchdog._tick, watchdog._record_collectives, text = 0.0, lambda: "waits", tmp_path / "rank-2.txt"
    if wrote == [3]:
        (tmp_path / "rank-1.txt").touch()
    watchdog._end("no progress")
    faulthandler.cancel_dump_traceback_later()
    last = text.read_text().splitlines()[-1]
    assert last == "waits" if not named else last.startswith(f"error: no stacks of rank {named}: a process")


def test_a_run_whose_comparison_was_killed_is_asked_to_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run stops also if the comparison was gone before the run began to watch it. Its runs have sessions of their
    own, so no signal of the shell reaches them."""
    told: list[tuple[int, int]] = []
    asked = threading.Event()
    monkeypatch.setattr(guard.os, "kill", lambda *what: (told.append(what), asked.set()))
    for parent, wanted in ((os.getppid(), False), (2**22 + 1, True)):
        monkeypatch.setenv("SAGETRAIN_LAUNCHER", str(parent))
        watchdog = Watchdog(tmp_path / "stacks", 0, 60.0)
        watchdog._tick = 0.01
        with watchdog:
            assert asked.wait(PATIENCE if wanted else 0.2) == wanted
    assert told == [(os.getpid(), signal.SIGTERM)]


def test_stacks_of_an_earlier_run_end_nothing(tmp_path: Path) -> None:
    """A network file system may show them for a while after rank 0 of another host has removed them."""
    (folder := tmp_path / "stacks").mkdir()
    watchdog, ended = Watchdog(folder, 0, 3600.0), threading.Event()
    watchdog._tick, watchdog._end = 0.01, lambda why: ended.set()
    with watchdog:
        assert not ended.wait(0.2)
        folder.rmdir()
        while watchdog._old:
            time.sleep(0.01)
        folder.mkdir()
        assert ended.wait(PATIENCE)


@pytest.mark.parametrize(("rank", "launcher", "said"), [
    ("0", False, "SIGINT: the run saves a checkpoint and stops; a second Ctrl-C ends it at once\n"),
    ("0", True, "SIGINT: the run saves a checkpoint and stops; a second Ctrl-C ends it at once "
                "(a traceback that follows is the launcher's)\n"),
    ("1", True, ""),
])  # fmt: skip
def test_ctrl_c_is_answered_before_the_launchers_traceback(monkeypatch, capfd, rank, launcher, said) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(guard, "launchers", lambda: (os.getppid(),) * launcher)
    stop = StopSignal()
    stop._ask(signal.SIGINT, None)
    stop._ask(signal.SIGTERM, None)  # The launcher sends this signal to all ranks.
    assert capfd.readouterr().err == said and stop.name == "SIGINT"
    with pytest.raises(KeyboardInterrupt):
        stop._ask(signal.SIGINT, None)
