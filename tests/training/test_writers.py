"""The reports of a run: rows, events and lines, at a terminal, in a log, and on a full disk."""

import errno
import fcntl
import itertools
import json
import os
import pty
import re
import shutil
import struct
import termios
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

import tiny
from distributed import run_distributed
from runs import rows_of
from sagetrain.checkpoint.ledger import TrainState
from sagetrain.cli import exits
from sagetrain.cluster.run_folder import RunFolder
from sagetrain.config.arithmetic import padded_vocab_size
from sagetrain.config.schema import DataSource, LoggingConfig
from sagetrain.corpus.token_writer import TokenFileWriter
from sagetrain.costs.accounting import flops_per_token
from sagetrain.engines.protocol import StepResult
from sagetrain.stability.controller import Event
from sagetrain.training import reporter, writers
from sagetrain.training.callbacks import Callback, Callbacks, Position, RunStart
from sagetrain.training.tensorboard import TensorBoard
from sagetrain.training.writers import MetricsWriter
from streams import stream_of
from trained import make_trainer


def events(folder: Path) -> list:
    return [event for path in sorted((folder / "tensorboard").iterdir()) for event in EventFileLoader(str(path)).Load()]


def opened(folder: Path, step: int = 0, tensorboard: bool = True) -> tuple[reporter.Reporter, Callbacks]:
    """Return a run's reporter, and the callbacks that listen to it."""
    own, listeners = reporter.Reporter(True), Callbacks([TensorBoard()] if tensorboard else [], [])
    state = TrainState(step=step, tokens=100 * step)
    own.open(folder, state, 1000, LoggingConfig(), lambda span: 1.0, 16, torch.device("cpu"), listeners)
    start = RunStart(tiny.config(1), folder, Position(step, 100 * step), None, True, print, lambda: None)
    listeners.tell(Callback.on_start, start)
    return own, listeners


def test_rows_and_events_hold_the_same_with_the_time(tmp_path: Path) -> None:
    begin = round(time.time(), 3)
    own, board = opened(tmp_path)
    own.write(TrainState(step=1, tokens=100), {"train/loss": 2.5, "perf/mfu": None})
    own.write(TrainState(step=2, tokens=200), {"train/loss": 2.25, "valid/loss": 2.0})
    own.close()
    board.end(Position(2, 200), True)
    now = round(time.time(), 3)
    assert [(row["step"], row["tokens"], row["train/loss"]) for row in rows_of(tmp_path)] == [
        (1, 100, 2.5),
        (2, 200, 2.25),
    ]
    assert "perf/mfu" not in rows_of(tmp_path)[0] and rows_of(tmp_path)[1]["valid/loss"] == 2.0
    assert begin <= rows_of(tmp_path)[0]["wall_time"] <= rows_of(tmp_path)[1]["wall_time"] <= now
    version, start, first, second = events(tmp_path)
    assert version.file_version == "brain.Event:2" and start.session_log.status == start.session_log.START
    assert [value.tag for value in second.summary.value] == ["train/loss", "valid/loss"]
    assert first.step == 1 and begin <= round(first.wall_time, 3) <= now
    (tmp_path / "metrics.jsonl").open("a").write('{"step": 2, "to')  # A kill leaves such a line.
    own, board = opened(tmp_path, 1)
    own.close()
    board.end(Position(1, 100), True)
    assert [row["step"] for row in rows_of(tmp_path)] == [1]
    # The event hides the events from there on.
    assert max(event.step for event in events(tmp_path) if event.HasField("session_log")) == 2


def test_events_of_steps_that_are_taken_again_are_dropped(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, 0, 0, 1000)
    for step in (1, 2):
        writer.event(step, 100 * step, Event("precision", f"layer {step} goes to 16 bits", {"layer": step}))
    writer.close()
    MetricsWriter(tmp_path, 1, 100, 1000).close()
    (row,) = rows_of(tmp_path, "events")
    row.pop("wall_time")
    text = "layer 1 goes to 16 bits"
    assert row == {"step": 1, "tokens": 100, "kind": "precision", "text": text, "layer": 1}


def test_a_log_gets_one_line_a_step_and_no_carriage_return(tmp_path: Path, capsys) -> None:
    writer = MetricsWriter(tmp_path, 0, 0, 36_100_000)
    writer.progress(12, 100_000, 5.12345, 1.2e-3, 10_000.0)
    writer.say("saved step-00000012")
    writer.progress(13, 36_200_000, 5.0, 0, 123.4)
    writer.progress(14, 0, 5.0, 0, 1e-9)  # The time is longer than a timedelta can hold.
    writer.close()
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "step 12 | 100,000 tokens | loss 5.1235 | lr 1.20e-03 | 10,000 tokens/s | 1:00:00 left\n"
        "saved step-00000012\n"
        "step 13 | 36,200,000 tokens | loss 5.0000 | lr 0.00e+00 | 123 tokens/s | 0:00:00 left\n"
        "step 14 | 0 tokens | loss 5.0000 | lr 0.00e+00 | 0 tokens/s | 999999999 days, 0:00:00 left\n"
    )


@pytest.mark.parametrize(("columns", "tokens", "total", "rate"), [
    (120, 500, 1000, 100.0), (80, 500, 1000, 100.0), (80, 499_999_999_999, 999_999_999_999, 12_345_678.9),
])  # fmt: skip
def test_a_terminal_gets_a_bar_with_whole_lines_and_numbers(
    tmp_path: Path, monkeypatch, columns: int, tokens: int, total: int, rate: float
) -> None:
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("4H", 40, columns, 0, 0))
    with os.fdopen(follower, "w") as terminal, monkeypatch.context() as patched:
        patched.setattr("sys.stderr", terminal)
        writer = MetricsWriter(tmp_path, 0, 0, total)
        writer._bar._time = lambda: writer._bar.start_t + 3600 * 99  # The run has been going on for days.
        writer.progress(1, tokens, 12.3456, 1e-3, rate)
        writer.say("saved step-00000001")
        writer.close()
        terminal.write("error: what comes next\n")
        terminal.flush()
        shown = ""
        while "comes next" not in shown:
            shown += os.read(leader, 100_000).decode()
    os.close(leader)
    assert f"{100 * tokens / total:.0f}%" in shown
    assert re.search(r"\[99:00:00<\d\d:\d\d:\d\d, loss 12.3456, lr 1.00e-03, [\d.]+M? tok/s\]", shown)
    assert all(len(line) <= columns for line in re.split(r"[\r\n]", shown))
    # Find what stands on each line in the end: a carriage return goes back to the beginning of its line.
    lines = [re.split("\r", line.rstrip("\r"))[-1].replace("\x1b[A", "") for line in shown.split("\n")]
    assert {"saved step-00000001", "error: what comes next"} <= set(lines)


def fill(disk: Path, leave: int = 0) -> None:
    (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - leave))


def write_for_ever(own: reporter.Reporter) -> None:
    for step in itertools.count(1):
        own.write(TrainState(step=step, tokens=step), {"train/loss": 1.0, "x" * 90: 2.0})


def test_a_full_disk_names_the_file_and_leaves_whole_rows(small_disk: Path) -> None:
    for tensorboard in (False, True):
        folder = small_disk / str(tensorboard)
        folder.mkdir()
        own, board = opened(folder, tensorboard=tensorboard)
        fill(small_disk)
        with pytest.raises(OSError, match="No space left") as raised:
            write_for_ever(own)
        own.close()
        board.end(Position(1, 1), False)
        assert raised.value.errno == errno.ENOSPC and str(raised.value.filename).startswith(str(folder))
        assert [row["step"] for row in rows_of(folder)] == list(range(1, len(rows_of(folder)) + 1))
        if tensorboard:
            assert len(events(folder)) >= len(rows_of(folder))  # Two events begin the file, and none is cut short.
        (small_disk / "filler").unlink()


def test_a_run_whose_folder_is_removed_stops_writing(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    writer = MetricsWriter(tmp_path / "run", 0, 0, 1000)
    writer.write(1, 1, {"train/loss": 1.0})
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match="removed") as raised:
        writer.write(2, 2, {"train/loss": 1.0})
    writer.close()
    assert raised.value.filename == str(tmp_path / "run/metrics.jsonl")


def test_files_beside_the_metrics_stay_on_a_full_disk(small_disk: Path) -> None:
    folder, cfg = RunFolder(small_disk), tiny.config(1)
    folder.describe(cfg, "fsdp", {"first": 1}, [])
    fill(small_disk)
    with pytest.raises(OSError, match="No space left") as raised:
        folder.describe(cfg, "fsdp", {"second": 2}, [])
    assert raised.value.filename == str(small_disk / "config.yaml")
    (small_disk / "filler").unlink()
    assert json.loads((small_disk / "fsdp.json").read_text()) == {"first": 1}
    assert sorted(path.name for path in small_disk.iterdir()) == ["config.yaml", "findings.json", "fsdp.json"]
    folder.describe(cfg, "deepspeed", {"third": 3}, [])
    assert sorted(path.name for path in small_disk.iterdir()) == ["config.yaml", "deepspeed.json", "findings.json"]


@pytest.mark.parametrize(("number", "path", "code", "said"), [
    (errno.ENOSPC, "run/metrics.jsonl", 3, "No space left on device; free some space and run the same command again"),
    (errno.ENOSPC, None, 3, "No space left on device; free some space and run the same command again"),
    (errno.EACCES, "/data/train.bin", 2, "Permission denied; let this user have it (chmod), or name another path"),
])  # fmt: skip
def test_the_command_says_which_file_and_what_to_do(number: int, path: str | None, code: int, said: str, capsys):
    with pytest.raises(SystemExit) as ended, exits.Errors(run_dir=Path("run")):
        raise OSError(number, os.strerror(number), path)
    assert ended.value.code == code
    assert capsys.readouterr().err == f"error: {path or 'run or standard output'}: {said}\n"


def train_two_ranks(data: str, tokenizer: str, run_dir: str) -> None:
    reporter.peak_flops = lambda device: 1e12
    make_trainer(
        "", run_dir, 4, data={"train": [{"path": data}], "tokenizer": tokenizer, "micro_batch_size": 2},
        parallel={"tensor_parallel_size": 2}, logging={"every_steps": 2, "layer_norms_every_steps": 3},
        checkpoint={"every_tokens": 10**9},  # A save would have a row, too.
        profile={"from_step": 2, "steps": 1, "all_ranks": True},
    ).train()  # fmt: skip


def test_a_notebook_has_a_bar_beside_the_lines_that_are_heard(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(writers, "in_notebook", lambda: True)
    heard: list[str] = []
    own = writers.MetricsWriter(tmp_path, 0, 0, 64, heard.append)
    own.progress(1, 64, 2.5, 1e-3, 10.0)
    own.say("a line")
    own.close()
    assert heard == ["a line"] and "100%" in capsys.readouterr().err


def test_a_card_without_a_known_peak_is_said(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H1000")
    own = reporter.Reporter(True)
    how = (LoggingConfig(), lambda span: 1.0, 16, torch.device("cuda"), Callbacks([], []))
    own.open(tmp_path, TrainState(), 64, *how)
    own.close()
    assert "MFU is not reported: the peak of NVIDIA H1000 is not known" in "".join(capsys.readouterr())


def test_the_last_step_of_a_run_has_a_row_whatever_its_number(tmp_path: Path, monkeypatch) -> None:
    """The row has the measurements since the row before."""
    monkeypatch.setattr(reporter.dist, "get_world_size", lambda: 1)
    own, state, logging = reporter.Reporter(True), TrainState(), LoggingConfig(every_steps=2)
    own.open(tmp_path, state, 3 * 64 - 1, logging, lambda span: 1.0, 16, torch.device("cpu"), Callbacks([], []))
    for number in range(1, 4):
        state.advance(64, 16)
        metrics = {"train/loss": float(number), "train/grad_norm": 1.0}
        own.step(state, StepResult(metrics, True, False, 0, 1.0), 64, 1e-3)
    own.close()
    assert [(row["step"], row["train/loss"]) for row in rows_of(tmp_path)] == [(2, 2.0), (3, 3.0)]


def test_a_full_gpu_is_said_once_and_not_of_the_first_row(tmp_path: Path, monkeypatch, capsys) -> None:
    """The counts are made up here. tests/gpu/test_reporting_gpu.py takes a GPU's own."""
    counts = iter([2, 2, 5, 6])
    monkeypatch.setattr(reporter, "memory_retries", lambda device: next(counts))
    monkeypatch.setattr(reporter.dist, "get_world_size", lambda: 1)
    own, state = opened(tmp_path, tensorboard=False)[0], TrainState()
    for _ in range(4):
        state.advance(64, 16)
        own.step(state, StepResult({"train/loss": 1.0}, True, False, 0, 1.0), 64, 1e-3)
    own.close()
    assert [row["perf/memory_retries"] for row in rows_of(tmp_path)] == [2, 0, 3, 1]
    said = "".join(capsys.readouterr())
    assert said.count("the GPU is full") == 1 and "step 3: the GPU is full: PyTorch gave back the memory" in said


def test_mfu_counts_attention_inside_documents(corpus: Path, tmp_path: Path) -> None:
    data, lengths = str(tmp_path / "short"), np.arange(1, 50) % 9 + 3
    writer = TokenFileWriter(data).begin(512)
    writer.add(np.arange(lengths.sum()), lengths)
    writer.finish()
    writer.publish({})
    run_distributed(train_two_ranks, 2, data, str(corpus / "tokenizer.model"), str(tmp_path / "run"))
    steps = [row for row in rows_of(tmp_path / "run") if "train/loss" in row]
    assert [row["step"] for row in steps] == [2, 4]
    assert all(("norms/1/activation" in row) == ("norms/head/gradient" in row) == (row["step"] == 4) for row in steps)
    assert sorted(path.name for path in (tmp_path / "run/profile").iterdir()) == ["rank-0.json", "rank-1.json"]
    model, vocab = tiny.config(1).model, padded_vocab_size(512)
    inside = stream_of([DataSource(path=data)], tiny.SEQ, 0).document_lengths(16)
    # There are two steps of four sequences each.
    for row, sequences in zip(steps, (inside[:8], inside[8:]), strict=True):
        span = sum(n * n for documents in sequences for n in documents) / (8 * tiny.SEQ)
        assert span < tiny.SEQ
        full = row["perf/tokens_per_second"] * flops_per_token(model, vocab, tiny.SEQ) / 2e12
        assert row["perf/mfu_full_attention"] == pytest.approx(full)
        done = row["perf/tokens_per_second"] * flops_per_token(model, vocab, span) / 2e12
        assert row["perf/mfu"] == pytest.approx(done, rel=1e-5)


def test_rows_behind_the_checkpoint_and_broken_rows_go(tmp_path: Path) -> None:
    """A killed run may leave half a line, and a power failure any bytes."""
    path, row = tmp_path / "metrics.jsonl", b'{"step": 1, "tokens": 8}\n'
    path.write_bytes(row + b'17\n[1]\n{"tokens": 9}\n{"step": 2, "tokens": 16}\n\xff\xfe\x00{"step"')
    writers._drop_rows_after(path, 1)
    assert path.read_bytes() == row


def test_a_clock_that_is_stopped_twice_counts_no_second_twice(monkeypatch) -> None:
    now = [0.0]
    monkeypatch.setattr(writers.time, "perf_counter", lambda: now[0])
    clock = writers.Throughput()
    clock.add(100, 1.0)
    now[0] = 2.0
    with clock.stopped():
        now[0] = 5.0
        with clock.stopped():
            now[0] = 6.0
        now[0] = 9.0
    now[0] = 12.0
    with clock.stopped():
        assert clock.take() == (20.0, 20.0)  # The sum is 5 seconds: up to 2, and from 9 on.
