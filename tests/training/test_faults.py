"""Faults, with real processes: whatever is killed, stopped, filled up or damaged, a run ends with a message about it,
or it continues to bitwise the same weights, with no sample skipped or seen twice."""

import contextlib
import json
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

import tiny
from distributed import run_distributed
from forked import PATIENCE, Command, until
from held import hold, release
from manifests import rewrite
from runs import (
    check_same,
    finish,
    free_port,
    kill_all,
    log_of,
    ranks_of,
    reached,
    rows_of,
    run_dir_of,
    start,
    training_rows,
    when,
    write_config,
)
from sagetrain.checkpoint import on_disk
from sagetrain.checkpoint.ledger import Ledger, check_consumed, fold
from sagetrain.checkpoint.manifest import KINDS
from sagetrain.checkpoint.reading import Reader
from sagetrain.cli import exits
from sagetrain.config.errors import CheckpointError, TrainingError
from sagetrain.data.batch import Batch
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.training.writers import RowFile

# -- the ledger ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("micro_batch", "dp_size", "sharers"), [(1, 1, 1), (2, 2, 1), (4, 3, 2), (4, 2, 4)])
def test_every_sample_once_on_the_ranks_it_was_dealt_to(micro_batch, dp_size, sharers) -> None:
    """`sharers` are tensor- and context-parallel ranks that work on the same samples."""
    first, count = 3 * 2**40, 5 * micro_batch * dp_size
    ranks: list[list[int]] = [[] for _ in range(dp_size)]
    for micro_step in range(0, count, micro_batch):
        ranks[micro_step // micro_batch % dp_size] += range(first + micro_step, first + micro_step + micro_batch)
    layout = (micro_batch, dp_size, dp_size * sharers)

    def folds() -> int:
        return sharers * sum(fold(ids, rank) for rank, ids in enumerate(ranks))

    check_consumed(folds(), first, count, *layout)
    for wrong_first, wrong_count in ((first + 1, count), (first, count + 1), (first - count, count)):
        with pytest.raises(TrainingError, match="each once"):
            check_consumed(folds(), wrong_first, wrong_count, *layout)
    once = ranks[0]
    # A sample is skipped, seen twice, or another rank's.
    for ranks[0] in (once[1:], [*once, once[0]], [once[-1] + 1, *once[1:]]):
        with pytest.raises(TrainingError, match=f"samples {first:,} to {first + count - 1:,}"):
            check_consumed(folds(), first, count, *layout)


def test_ranks_with_each_others_samples_are_noticed() -> None:
    """The set of samples is right, but a tensor-parallel rank that swaps data with its neighbour computes nonsense."""
    right = 2 * (fold([0, 1], 0) + fold([2, 3], 1))
    check_consumed(right, 0, 4, 2, 2, 4)
    with pytest.raises(TrainingError):
        check_consumed(right - fold([0, 1], 0) + fold([2, 3], 0) - fold([2, 3], 1) + fold([0, 1], 1), 0, 4, 2, 2, 4)


def one_rank_goes_wrong() -> list[str]:
    """Run two data-parallel ranks. Rank 1 trains on a neighbour's samples, then its loss is not a number."""
    engine = tiny.engine(tiny.config(1), tiny.join(1))
    rank, seen, forward, scale = engine.groups.dp_rank, [], engine.forward, 1.0
    engine.forward = lambda *how: forward(*how) * (scale if rank else 1.0)
    for step, (wrong_sample, factor) in enumerate([(0, 1.0), (1, 1.0), (0, float("nan"))]):
        scale = factor
        ids = [2 * step + rank * (1 + wrong_sample)]
        tokens = torch.full((1, tiny.SEQ), 5)
        batch = Batch(tokens, tokens, positions=None, cu_seqlens=None, max_seqlen=None, sample_ids=ids)
        result = engine.step([batch], 1, 1e-3)
        try:
            check_consumed(result.folds, 2 * step, 2, 1, 2, 2)
            seen.append("finite" if math.isfinite(result.loss) else "not finite")
        except TrainingError:
            seen.append("other samples")
    return seen


def test_every_rank_learns_what_went_wrong_on_one() -> None:
    assert run_distributed(one_rank_goes_wrong, 2) == [["finite", "other samples", "not finite"]] * 2


def ledger_of(sizes: list[int]) -> Ledger:
    ledger, cursor = Ledger("order"), 0
    for size in sizes:
        ledger.add(cursor, size)
        cursor += size
    return ledger


def test_ledger_is_found_again_from_its_segments() -> None:
    sizes = [8] * 5 + [16] * 3 + [8]
    stored = ledger_of(sizes)
    assert stored.segments == [[0, 8, 5], [40, 16, 3], [88, 8, 1]]
    again = Ledger.verified(stored, "order", Path("step-9"))
    assert (again.head, again.segments) == (stored.head, stored.segments)
    again.add(96, 8)
    assert again.head == ledger_of([*sizes, 8]).head != ledger_of([*sizes, 9]).head


@pytest.mark.parametrize(("segments", "words"), [
    ([[0, 8, 5], [48, 16, 3]], "skips samples 40 to 47"),
    ([[0, 8, 5], [32, 16, 3]], "has seen twice samples 32 to 39"),
    ([[0, 8, 5], [40, 16, 2]], "its steps give"),
    ([[0, 16, 3], [48, 8, 5]], "its steps give"),  # There are as many samples, in other steps.
    (None, "is missing"),
])  # fmt: skip
def test_a_ledger_that_does_not_fit_is_refused(segments, words) -> None:
    stored = segments and replace(ledger_of([8] * 5 + [16] * 3), segments=segments)
    with pytest.raises(CheckpointError, match=words):
        Ledger.verified(stored, "order", Path("step-00000008"))
    with pytest.raises(CheckpointError, match="order of samples"):
        Ledger.verified(ledger_of([8]), "another order", Path("step-00000001"))


# -- runs ------------------------------------------------------------------------------------------------------------


def check_ledger(run_dir: Path, reference: Path) -> None:
    """Check that no sample was skipped or seen twice, and that the chain is that of the undisturbed run."""
    states = []
    for folder in (run_dir, reference):
        newest = folder / "checkpoints" / (folder / "checkpoints/latest").read_text().strip()
        state = on_disk.read_state(newest)
        Ledger.verified(state.ledger, state.identity.order, newest)
        states.append((state.step, state.sequences, state.ledger))
    assert states[0] == states[1]
    assert states[0][2].segments == [[0, 8, 20], [160, 16, 20]]


def check_undisturbed(run_dir: Path, reference: Path) -> None:
    check_same(run_dir, reference)
    check_ledger(run_dir, reference)


def check_seconds(event: dict, step: int) -> None:
    """Check that the event says where the seconds went between the last row of the killed run and the next step."""
    assert (event["kind"], event["from_step"], event["step"]) == ("restart", step, step + 1)
    assert {"processes begun", "imports and settings", "ranks met", "engine built", "first step"} < {*event["seconds"]}
    assert sum(event["seconds"].values()) == pytest.approx(event["total"], abs=0.05)
    assert event["since"] + event["total"] == pytest.approx(event["wall_time"], abs=0.5)


def test_kill_9_of_one_rank_then_of_everything(tmp_path, corpus, pair) -> None:
    every_step = {"every_tokens": 256}  # With a save after every step, one is always in flight.
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run", tp_size=2, checkpoint=every_step)
    assert when("deepspeed", config, reached(config, 13), lambda launcher: ranks_of(launcher)[1].kill()) != 0
    assert when("torchrun", config, reached(config, 26), kill_all) == -signal.SIGKILL
    finish("ranks", config)
    found = re.findall(r"resumed from step-0*(\d+)", log_of(config))
    *_, event, seconds = rows_of(tmp_path / "run", "events")
    assert len(found) >= 2 and (event["kind"], event["step"], event["ranks"]) == ("resume", int(found[-1]), 2)
    check_seconds(seconds, int(found[-1]))
    check_undisturbed(tmp_path / "run", pair)


def test_ranks_whose_launcher_is_killed_save_and_leave(tmp_path, corpus, pair) -> None:
    patience = {"timeout_minutes": 0.5}  # The run looks for the launcher 20 times within this time.
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run", tp_size=2, training=patience)

    def only_the_launcher(launcher: Command) -> None:
        ranks, gone = ranks_of(launcher), "rank 1: the launcher is gone"
        before = log_of(config).count(gone)
        ranks[0].suspend()  # Rank 1 waits for it inside of a step, so the run does not finish meanwhile.
        launcher.kill()
        until(lambda: log_of(config).count(gone) > before, ranks[1].is_running, lambda: log_of(config)[-3000:])
        ranks[0].resume()
        release(config)
        assert psutil.wait_procs(ranks, timeout=PATIENCE)[1] == []

    for launcher, step in (("deepspeed", 7), ("torchrun", 24)):
        assert when(launcher, config, reached(config, step), only_the_launcher) == -signal.SIGKILL
    assert log_of(config).count("rank 1: the launcher is gone") == 2
    # Rank 0 looks for the launcher itself, or hears of it from rank 1 before.
    assert len(re.findall("stopped by (?:SIGTERM|another rank) at step", log_of(config))) == 2
    finish("ranks", config)
    check_undisturbed(tmp_path / "run", pair)


def test_sigterm_at_the_first_step(tmp_path, corpus, alone) -> None:
    """Signals beside a save are in the next test, beside an evaluation in test_resume.py."""
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run")
    hold(config, 2)
    assert when("sagetrain", config, reached(config, 1), lambda run: run.terminate()) == 0, log_of(config)[-3000:]
    assert "stopped by SIGTERM at step 1," in log_of(config)
    finish("sagetrain", config)
    check_undisturbed(tmp_path / "run", alone)


SLOW_DISK = """
import os, pathlib, runpy, sys, threading, time
fsync, main = os.fsync, threading.main_thread().ident
def waited_for():
    frame = sys._current_frames()[main]
    while frame and (frame.f_code.co_name, pathlib.Path(frame.f_code.co_filename).name) != ("wait", "saving.py"):
        frame = frame.f_back
    return frame
def slow(file):
    while "/.writing-" in os.readlink(f"/proc/self/fd/{file}") and not waited_for():
        time.sleep(0.01)
    fsync(file)
os.fsync = slow
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def slow_disk(tmp_path) -> list[str]:
    """A launcher of one process. A sync of a checkpoint to disk lasts until training waits for the checkpoint."""
    (tmp_path / "slow.py").write_text(SLOW_DISK)
    return ["python", str(tmp_path / "slow.py")]


def test_sigterm_and_kill_9_while_a_save_is_in_flight(tmp_path, corpus, alone, slow_disk) -> None:
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run")
    folder = tmp_path / "run/checkpoints"

    def training_beside_a_save(step: int) -> Callable[[], bool]:
        return lambda: reached(config, step + 2)() and any(folder.glob(f".writing-step-{step:08d}-*"))

    hold(config, 15)
    assert when(slow_disk, config, training_beside_a_save(10), lambda run: run.terminate()) == 0
    stopped = int(re.search(r"stopped by SIGTERM at step (\d+)", log_of(config))[1])
    assert sorted(path.name for path in folder.iterdir()) == [
        "latest", on_disk.folder_name(10), on_disk.folder_name(stopped)
    ]  # fmt: skip
    hold(config, 29)
    assert when(slow_disk, config, training_beside_a_save(25), lambda run: run.kill()) == -signal.SIGKILL
    assert max(folder.glob("step-*")).name == "step-00000020"
    finish("sagetrain", config)  # The disk is as fast as ever again.
    assert re.findall(r"resumed from step-0*(\d+)", log_of(config)) == [str(stopped), "20"]
    # The second start wrote this line, at step 25. A signal was the cause of the first one's wait.
    assert log_of(config).count("training waits for the checkpoint before this one (said once)") == 1
    saves = {row["step"]: row for row in rows_of(tmp_path / "run") if "perf/save_stall_seconds" in row}
    assert saves.keys() >= {10, 20, 40}
    assert saves[10]["perf/save_stall_seconds"] < saves[10]["perf/save_publish_seconds"]
    check_undisturbed(tmp_path / "run", alone)


HUNG = """
import os, sys, threading, time
from pathlib import Path
from types import SimpleNamespace
import forked
from sagetrain.cluster import guard
from sagetrain.cluster.guard import Watchdog

folder, enter, tell = Path(sys.argv[2]).parent, Watchdog.__enter__, guard._tell

def watched(self):
    self._tick = 0.1
    threading.Thread(target=hurry, args=(self,), daemon=True).start()
    return enter(self)

def hurry(watchdog):
    forked.until((folder / "stopped").exists)
    watchdog._timeout /= 100

def told(text):
    tell(text)
    (folder / f"told-{os.environ['RANK']}").touch()

def leave(code):
    forked.until(lambda: len(list(folder.glob("told-*"))) == 2)
    os._exit(code)

Watchdog.__enter__, guard._tell, guard.os = watched, told, SimpleNamespace(**{**vars(os), "_exit": leave})
sys.argv = ["ranks", "2", sys.argv[1], "train", *sys.argv[4:]]
forked.main()
"""


def test_a_hung_rank_ends_the_run_with_the_stacks_of_all(tmp_path, corpus) -> None:
    """The run's patience is a hundredth when the rank has stopped, and no rank ends before both have written."""
    (script := tmp_path / "hung.py").write_text(HUNG)
    patience = {"timeout_minutes": 15}
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run", tp_size=2, training=patience)
    stacks = tmp_path / "run/stacks"

    def stop_one_rank(launcher: Command) -> None:
        rank = ranks_of(launcher)[1]
        rank.suspend()
        release(config)
        (tmp_path / "stopped").touch()
        # By then the other rank's wait is on record in this file.
        until((stacks / "rank-0.collectives.json").exists, lambda: launcher.poll() is None)
        rank.resume()  # A stopped process cannot write anything.

    launcher = ["python", str(script), str(free_port()), str(config)]
    assert when(launcher, config, reached(config, 5), stop_one_rank) == 5, log_of(config)[-3000:]
    # The error is in a step or, on a busy machine, in the work after one.
    assert "rank 0: error: in " in log_of(config)
    assert "no progress for 0.15 minutes" in (stacks / "rank-0.txt").read_text()
    assert "another rank hangs" in (stacks / "rank-1.txt").read_text()
    assert "waits in gloo:" in (stacks / "rank-0.txt").read_text()
    for file in stacks.glob("*.txt"):
        assert "in _loop" in file.read_text()


# -- disks -----------------------------------------------------------------------------------------------------------


def train_and_save(root: Path, first: int, steps: int) -> None:
    """Save a checkpoint after every step. Every value in it is the number of the step. Training does not wait for the
    save."""
    torch.set_num_threads(1)
    shard = tiny.owned("w", {kind: torch.empty(20_000) for kind in KINDS})
    saver = tiny.saver(root, ParallelGroups.single(), keep_last=2)
    for step in range(first, first + steps):
        for tensor in map(shard.read, shard.kinds):
            tensor.fill_(step)
        state = tiny.run_state(step, step * tiny.SEQ)
        saver.start(state, f"step: {step}\n" * 1000, [shard], {"noise": torch.full((1000,), step)})
        for tensor in map(shard.read, shard.kinds):  # The values are half way to the next step.
            tensor.add_(0.5)
    saver.wait()


def test_kill_9_at_20_moments_while_saving(tmp_path) -> None:
    draw, context, newest, torn = random.Random(4), multiprocessing.get_context("fork"), 0, 0
    for number in range(20):
        writer = context.Process(target=train_and_save, args=(tmp_path, newest + 1, 1 << 30))
        writer.start()
        deadline = time.monotonic() + PATIENCE
        while max((int(folder.name[5:]) for folder in tmp_path.glob("step-*")), default=0) <= newest:
            assert writer.is_alive() and time.monotonic() < deadline
            time.sleep(0.001)
        while True:
            time.sleep(draw.uniform(0, 0.05))
            os.kill(writer.pid, signal.SIGSTOP)
            os.waitpid(writer.pid, os.WUNTRACED)
            if number % 2 or any(tmp_path.glob(".writing-*")):  # Every other kill comes in the middle of a save.
                break
            os.kill(writer.pid, signal.SIGCONT)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        half_written = list(tmp_path.glob(".writing-*"))
        assert len(half_written) <= 1  # There are never two.
        torn += len(half_written)
        said: list[str] = []
        folder, damaged = on_disk.newest_whole(tmp_path, said.append)
        assert (damaged, said) == ([], [])
        found = int(folder.name[5:])
        assert found > newest
        newest = found
        reader = Reader(folder)
        assert reader.state.step == newest
        assert reader.rng(0)["noise"].eq(newest).all()
        assert all(reader.local("w", kind, 0, 1).eq(newest).all() for kind in KINDS)
    assert torn >= 10
    train_and_save(tmp_path, newest + 1, 1)  # The next save removes what the kills have left behind.
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        "latest", *(on_disk.folder_name(n) for n in (newest, newest + 1))
    ]  # fmt: skip


def test_a_limit_on_files_is_named_with_the_way_to_raise_it(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """The kernel refuses to let a file grow past `ulimit -f`, in a checkpoint and in a file that grows by rows."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    way = "allow larger files (ulimit -f unlimited; a file on FAT32 ends at 4 GiB) and"
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        with pytest.raises(CheckpointError) as of_checkpoint:
            train_and_save(tmp_path, 1, 1)
        for _ in range(49):
            RowFile(tmp_path / "rows").write(b"x" * 101)
        with pytest.raises(SystemExit) as ended, exits.Errors():
            RowFile(tmp_path / "rows").write(b"x" * 101)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said, again = str(of_checkpoint.value), f"{way} run the same command again"
    assert "cannot write" in said and said.endswith(f"; {way} start the run again")
    assert (ended.value.code, capfd.readouterr().err) == (3, f"error: {tmp_path}/rows: File too large; {again}\n")
    assert (tmp_path / "rows").stat().st_size == 4949


def saved_step_10(config: Path) -> Callable[[], bool]:
    """Return a function that says whether the run has reported step 12 and its checkpoint of step 10 is whole."""
    return lambda: reached(config, 12)() and (run_dir_of(config) / "checkpoints/latest").exists()


def test_a_full_disk_ends_the_run_which_continues_with_space(tmp_path, corpus, alone, small_disk) -> None:
    config = write_config(tmp_path / "run.yaml", corpus, small_disk / "run")

    def fill(run: Command) -> None:
        run.send_signal(signal.SIGSTOP)
        (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - 200_000))
        run.send_signal(signal.SIGCONT)

    hold(config, 18)
    assert when("sagetrain", config, saved_step_10(config), fill) == 3, log_of(config)[-3000:]
    assert "cannot write" in log_of(config) and "No space left on device" in log_of(config)
    assert "; free some space and start the run again\n" in log_of(config)
    names = [folder.name for folder in (small_disk / "run/checkpoints").iterdir()]
    assert sorted(names) == ["latest", "step-00000010"]
    (small_disk / "filler").unlink()
    finish("sagetrain", config)
    assert "resumed from step-00000010" in log_of(config)
    check_undisturbed(small_disk / "run", alone)


def test_a_run_trains_on_while_the_disk_is_full(tmp_path, corpus, pair, small_disk) -> None:
    """It saves when there is space again, and no row of numbers is lost."""
    tolerant = {"every_tokens": 2560, "tolerate_minutes": 30}
    sections = {"checkpoint": tolerant, "stability": {"stragglers": True}}
    config = write_config(tmp_path / "run.yaml", corpus, small_disk / "run", tp_size=2, **sections)

    def fill(launcher: Command) -> None:
        # The run writes as well.
        with (small_disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(1 << 12))
        hold(config)
        # Step 25 is the next one with a checkpoint.
        said = ("could not be written; training goes on", "step 28 |")
        until(
            lambda: all(each in log_of(config) for each in said),
            lambda: launcher.poll() is None,
            lambda: log_of(config)[-3000:],
        )
        (small_disk / "filler").unlink()

    hold(config, 18)
    assert when("ranks", config, saved_step_10(config), fill) == 0, log_of(config)[-3000:]
    failed = [row["step"] for row in rows_of(small_disk / "run", "events") if row["kind"] == "save_failed"]
    assert failed[:1] == [20]
    assert "saved step-00000020" in log_of(config)
    steps = [row for row in rows_of(small_disk / "run") if "train/loss" in row]
    assert [0 < row["perf/slowest_rank"] <= 1 for row in steps] == [True] * 40
    check_undisturbed(small_disk / "run", pair)


def test_a_disk_that_fills_up_while_logging_is_one_line(tmp_path, corpus, small_disk) -> None:
    config = write_config(
        tmp_path / "run.yaml", corpus, small_disk / "run", checkpoint={"every_tokens": 10**6}, data={"valid": []}
    )

    def fill(run: subprocess.Popen) -> None:
        run.send_signal(signal.SIGSTOP)
        (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free))
        run.send_signal(signal.SIGCONT)

    assert when("sagetrain", config, reached(config, 2), fill) == 3, log_of(config)[-3000:]
    said = [line for line in log_of(config).splitlines() if "No space" in line]
    assert len(said) == 1 and "Traceback" not in log_of(config)
    assert said[0].startswith(f"error: {small_disk}/run/")
    assert said[0].endswith(": No space left on device; free some space and run the same command again")
    text = (small_disk / "run/metrics.jsonl").read_text()
    assert text.endswith("}\n") and [json.loads(line)["step"] for line in text.splitlines()][:2] == [1, 2]
    assert not list((small_disk / "run").rglob("*.partial"))


def flip_a_bit(path: Path, position: int | None = None) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if position is None else position] ^= 4
    path.write_bytes(content)


def test_damaged_shards_are_walked_past_and_set_aside(tmp_path, corpus, alone) -> None:
    shutil.copytree(alone, tmp_path / "run")
    folders = sorted((tmp_path / "run/checkpoints").glob("step-*"))
    os.truncate(folders[2] / "shard-tp000-dp000.safetensors", 100_000)
    flip_a_bit(folders[1] / "shard-tp000-dp000.safetensors")
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run")
    finish("sagetrain", config)
    for damaged, words in ((folders[2], "has 100000 bytes instead of"), (folders[1], "does not match its SHA-256")):
        assert f"checkpoint {damaged.name} is damaged and passed over" in log_of(config)
        assert words in log_of(config)
        assert damaged.with_name(f"damaged-{damaged.name}").is_dir()
    assert f"resumed from {folders[0].name}" in log_of(config)
    check_undisturbed(tmp_path / "run", alone)


def test_a_forged_ledger_is_refused(tmp_path, corpus, alone) -> None:
    shutil.copytree(alone, tmp_path / "run")
    for folder in (tmp_path / "run/checkpoints").glob("step-*"):
        # The next step would be left out.
        rewrite(folder, lambda tree: tree["state"].update(sequences=496, tokens=496 * 32))
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run")
    assert start("sagetrain", config).wait(PATIENCE) == 3
    assert "has 40 steps over 480 samples, the training state says 40 steps over 496" in log_of(config)
    assert len(training_rows(tmp_path / "run")) == 40


def test_damaged_token_files_are_named_before_training(tmp_path, corpus) -> None:
    runs = {}
    for suffix, words in ((".bin", "the .bin does not have the checksum"), (".idx", "does not end where the next one")):
        folder = tmp_path / suffix[1:]
        shutil.copytree(corpus, folder)
        # In the .idx file the flipped bit lies in the lengths.
        flip_a_bit(folder / f"train{suffix}", None if suffix == ".bin" else 34)
        config = write_config(tmp_path / f"run-{suffix[1:]}.yaml", folder, tmp_path / f"run-{suffix[1:]}")
        runs[config] = start("sagetrain", config), f"token file {folder / 'train'}: ", words
    for config, (run, name, words) in runs.items():
        assert run.wait(PATIENCE) == 2
        assert name in log_of(config)
        assert words in log_of(config)
        assert not run_dir_of(config).exists()
