"""A save runs beside training: it saves the state at the moment of the call, there is one save at a time, and every
rank hears of failures."""

import ctypes
import errno
import multiprocessing
import os
import resource
import threading
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

import tiny
from distributed import run_distributed
from forked import PATIENCE, until
from sagetrain.checkpoint import on_disk, saving
from sagetrain.checkpoint.ledger import Ledger
from sagetrain.checkpoint.reading import Reader
from sagetrain.checkpoint.saving import Saver
from sagetrain.checkpoint.state import RunState
from sagetrain.cluster.guard import HANG_EXIT_CODE, Watchdog
from sagetrain.config.errors import CheckpointError
from sagetrain.config.schema import CheckpointConfig
from sagetrain.costs.accounting import save_host_bytes
from sagetrain.parallel.rng import rng_state
from sagetrain.parallel.topology import ParallelGroups


class Gate:
    """A gate that holds the saver's thread before it writes its files, until the gate is opened."""

    def __init__(self, saver: Saver):
        self.open, self.reached, write = threading.Event(), threading.Event(), saver._write

        def held(*args: object) -> object:
            self.reached.set()
            return self.open.wait(PATIENCE) and write(*args)

        saver._write = held


def train_beside_a_save(root: str, tp_size: int, stage: int, dtype: str) -> list[str]:
    """Return the differences between this rank's state when the save began and the checkpoint."""
    cfg = tiny.config(stage, dtype, parallel={"tensor_parallel_size": tp_size})
    engine = tiny.engine(cfg, tiny.join(tp_size))
    saver = tiny.saver(Path(root), engine.groups)
    for step in range(2):
        tiny.global_step(engine, step)
    gate, wrong = Gate(saver), []
    random, state = torch.get_rng_state(), tiny.run_state(2, 256, ledger=Ledger("head", [[0, 8, 2]]))
    then = {
        (shard.name, kind): (shard.start, shard.stop, shard.read(kind).clone())
        for shard in engine.owned()
        for kind in shard.kinds
        if shard.stop > shard.start
    }
    saver.start(state, "{}", engine.owned(), rng_state())
    expected = RunState.from_json(state.to_json(), Path(root))
    state.ledger.add(128, 8)  # Training goes on.
    for step in range(2, 5):
        torch.rand(1)
        tiny.global_step(engine, step)
    if not 0.95 < saver._memory.nbytes / save_host_bytes(cfg, 2, tiny.VOCAB) < 1.02:
        wrong.append(f"{saver._memory.nbytes} bytes of host memory")
    if not saver.busy or list(Path(root).glob("step-*")):
        wrong.append("training did not go on beside the save")
    gate.open.set()
    saver.wait()
    if len(saver.saved) != 1 or not saver.saved[0].publish_seconds > 0:
        wrong.append(f"reported {saver.saved}")
    reader = Reader(Path(root) / on_disk.folder_name(2))
    if reader.state != expected or not reader.rng(torch.distributed.get_rank())["torch"].equal(random):
        wrong.append("state")
    now = {(shard.name, kind): shard.read(kind) for shard in engine.owned() for kind in shard.kinds}
    for (name, kind), (start, stop, tensor) in then.items():
        if not reader.local(name, kind, engine.groups.tp_rank, tp_size, start, stop).equal(tensor):
            wrong.append(f"{name}|{kind}")
        if now[name, kind].equal(tensor):
            wrong.append(f"{name}|{kind} was not trained meanwhile")
    return wrong


def test_what_is_saved_is_the_moment_of_the_call(tmp_path) -> None:
    for tp_size, stage, dtype in ((2, 0, "fp32"), (1, 1, "bf16"), (1, 3, "fp32")):
        root = str(tmp_path / f"{tp_size}{stage}{dtype}")
        assert run_distributed(train_beside_a_save, 2, root, tp_size, stage, dtype) == [[], []]


def test_memory_for_a_gpus_state_is_pinned_after_its_pages(monkeypatch, tmp_path) -> None:
    """The GPU is simulated. Pinning happens once and reads the memory, which reserve's thread has set to zero by
    then."""
    pinned: list[tuple[int, int]] = []

    class Cuda:
        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            assert not ctypes.string_at(address, size).strip(b"\0")
            pinned.append((address, size))
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            return 0

    monkeypatch.setattr(saving, "_on_gpu", bool)
    monkeypatch.setattr(torch.cuda, "cudart", Cuda)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    saver = tiny.saver(tmp_path, ParallelGroups.single())
    saver.reserve([tiny.owned("w", {"weight": torch.ones(1_000_000), "exp_avg": torch.ones(1_000_000)})])
    assert not pinned
    for _ in range(2):
        saver.pin()
        assert pinned == [(saver._memory.data_ptr(), 8_000_000)]


def save_plain(saver: Saver, step: int) -> None:
    saver.start(tiny.run_state(step, step * tiny.SEQ), "{}", (), {"noise": torch.full((20_000,), step)})


def test_a_save_waits_for_the_one_before(tmp_path, monkeypatch) -> None:
    """The clock stands still but for a hundred seconds in which the second save waits for the first."""
    saver, now = tiny.saver(tmp_path, ParallelGroups.single()), [0.0]
    monkeypatch.setattr(saving, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    gate, wait = Gate(saver), saver.wait

    def late() -> None:
        now[0] += 100
        gate.open.set()
        wait()

    save_plain(saver, 1)
    assert saver.busy and gate.reached.wait(PATIENCE)
    monkeypatch.setattr(saver, "wait", late)
    save_plain(saver, 2)
    monkeypatch.undo()
    assert (tmp_path / "step-00000001/manifest.json").exists()
    assert len(list(tmp_path.glob(".writing-*"))) <= 1
    saver.wait()
    first, second = saver.saved
    assert (first.step, second.step) == (1, 2)
    assert (first.stall_seconds, first.publish_seconds) == (0, 100)
    assert second.stall_seconds == 100  # Training stood still for the first save as well.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001", "step-00000002"]


def one_rank_cannot_write_for_a_while(root: str) -> tuple[list, bool, str]:
    """Let rank 1 fail twice, and then for ever. Return what this rank has noticed, whether the first checkpoint is
    there, and the error in the end."""
    saving._PAUSES, failures, noticed = (0.01, 0.01), [2, 10**9], []
    saver = tiny.saver(Path(root), tiny.join(1))
    write = saver._write

    def full(*args: object) -> object:
        if saver._groups.rank == 1 and failures[0]:
            failures[0] -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(*args)

    saver._write, saver._tolerate = full, 600.0
    save_plain(saver, 1)
    saver.wait_for_an_attempt()
    saver.wait()
    noticed.append(saver.troubles.popleft()[:2])
    saver._tolerate = 0.5
    del failures[0]
    save_plain(saver, 2)
    try:
        saver.wait()
    except CheckpointError as error:
        noticed.append(saver.troubles.popleft()[:2])
        return noticed, Path(root, "step-00000001/manifest.json").exists(), str(error)
    return noticed, False, ""


def test_a_save_that_fails_is_tried_again_for_a_while(tmp_path) -> None:
    for noticed, saved, error in run_distributed(one_rank_cannot_write_for_a_while, 2, str(tmp_path)):
        assert noticed == [(1, tiny.SEQ), (2, 2 * tiny.SEQ)] and saved
        assert "cannot write" in error and "rank 1: [Errno 28] No space left on device" in error


def one_rank_cannot_write(root: str) -> list[str]:
    """Let rank 1 write no files above 40 kB. All ranks know without waiting. Return the errors of the next two
    calls."""
    groups = tiny.join(1)
    saver, raised = tiny.saver(Path(root), groups), []
    save_plain(saver, 1)
    saver.wait()
    if groups.dp_rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))
    save_plain(saver, 2)
    until(lambda: saver.failed)
    for call in (lambda: save_plain(saver, 3), saver.wait):
        try:
            call()
        except CheckpointError as error:
            raised.append(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return raised


def test_what_one_rank_cannot_write_stops_every_rank(tmp_path) -> None:
    raised, second = run_distributed(one_rank_cannot_write, 2, str(tmp_path))
    assert raised == second
    said = (
        f"cannot write {tmp_path / 'step-00000002'}: rank 1: [Errno 27] File too large; allow larger files (ulimit -f"
    )
    assert len(raised) == 2 and all(text.startswith(said) for text in raised)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


def rank_0_stumbles(root: str) -> str:
    """Let rank 0 stumble over an error that has nothing to do with the disk."""
    saver = tiny.saver(Path(root), tiny.join(1), seconds=60)
    saver._publish = lambda *_: {}["tensors"]
    save_plain(saver, 1)
    try:
        saver.wait()
    except CheckpointError as error:
        return f"{error}, after {type(error.__cause__).__name__}"
    return ""


def test_what_stops_rank_0_is_told_to_every_rank(tmp_path) -> None:
    message = f"cannot write {tmp_path / 'step-00000001'}: 'tensors', after "
    assert run_distributed(rank_0_stumbles, 2, str(tmp_path)) == [f"{message}KeyError", f"{message}NoneType"]


def one_rank_does_not_write(root: str) -> str:
    """Let rank 1 never get to the save."""
    groups = tiny.join(1)
    saver = tiny.saver(Path(root), groups, seconds=2)
    if groups.dp_rank == 0:
        save_plain(saver, 1)
        try:
            saver.wait()
        except CheckpointError as error:
            return str(error)
    return ""


def test_nobody_waits_for_ever_for_a_silent_rank(tmp_path) -> None:
    message = run_distributed(one_rank_does_not_write, 2, str(tmp_path))[0]
    assert f"cannot write {tmp_path / 'step-00000001'}: another rank is gone, or still writes 0:00:02 after" in message
    assert "rank 1 has said nothing" in message
    assert list(tmp_path.iterdir()) == []


def save_on_a_slow_disk(root: Path, stuck: bool) -> None:
    """Save with syncs each of which takes three quarters of the watchdog's patience, by the watchdog's own count of the
    seconds; or with a third one that has no end."""
    patience = 2.0 if stuck else 20 * PATIENCE
    watchdog = Watchdog(root / "stacks", 0, patience)
    place, alive = (tiny.folder_of(root), ParallelGroups.single()), partial(watchdog.begin, "saving")
    saver = Saver(*place, CheckpointConfig(), timedelta(60), alive)
    sync, calls = saver._publisher._sync, []

    def slow(path: Path) -> None:
        calls.append(path)
        if not stuck:
            until(lambda: watchdog._idle <= patience / 2)
            watchdog._idle += 0.75 * patience
        elif len(calls) == 3:
            time.sleep(PATIENCE)
        sync(path)

    saver._publisher._sync = slow
    with watchdog:
        save_plain(saver, 1)
        saver.wait()
    assert watchdog._idle < patience and len(calls) > 3


def test_the_watchdog_waits_for_a_slow_disk_not_for_a_dead_one(tmp_path) -> None:
    context, ends = multiprocessing.get_context("fork"), []
    for stuck in (False, True):
        process = context.Process(target=save_on_a_slow_disk, args=(tmp_path / str(stuck), stuck))
        process.start()
        process.join(PATIENCE)
        ends.append(process.exitcode)
    assert ends == [0, HANG_EXIT_CODE]
    assert (tmp_path / "False/step-00000001/manifest.json").exists()
    stacks = (tmp_path / "True/stacks/rank-0.txt").read_text()
    assert "in saving: no progress" in stacks
    assert "in _publish" in stacks
    assert not list((tmp_path / "True").glob("step-*"))
