"""Weights & Biases, offline: it has the rows of metrics.jsonl, in one run for each run folder."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

import tiny
from runs import rows_of
from sagetrain.checkpoint.ledger import TrainState
from sagetrain.config.check import check
from sagetrain.config.errors import ConfigError
from sagetrain.config.rules import logging
from sagetrain.config.schema import WandbConfig
from sagetrain.training.build_run import build
from sagetrain.training.callbacks import Callback, Callbacks, Position, RunStart
from sagetrain.training.reporter import Reporter
from sagetrain.training.weights_and_biases import WeightsAndBiases, check_login

if TYPE_CHECKING:  # Collecting the tests would wait half a second for it.
    from wandb.proto.wandb_internal_pb2 import Record

OFFLINE = WandbConfig(project="small models", mode="offline")


def records(path: Path) -> list[Record]:
    """Return the records of a .wandb file: 7 bytes, then LevelDB's log format, blocks of 32 KiB with records in one or
    several parts."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, found, whole = path.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        if (left := -at % 2**15) and left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # The part is a whole record, or its last part.
            found.append(Record.FromString(whole))
            whole = b""
    return found


def rows(record: list[Record]) -> list[dict[str, float]]:
    """Return the logged rows, without the keys that wandb adds itself."""
    items = [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in one.history.item}
             for one in record if one.HasField("history")]  # fmt: skip
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in items]


def write(folder: Path, begin: int, end: int) -> list[Record]:
    """Write steps [begin, end) of a run, as one start of it does."""
    before = set(folder.glob("wandb/offline-*"))
    said: list[str] = []
    own, listeners, at = Reporter(True), Callbacks([WeightsAndBiases(OFFLINE)], []), begin - 1
    state, cfg = TrainState(step=at, tokens=16 * at), tiny.config(1, optimizer={"lr": 1e-2})
    own.open(folder, state, 1000, cfg.logging, lambda span: 1.0, 16, torch.device("cpu"), listeners)
    start = RunStart(cfg, folder, Position(at, 16 * at), None, True, said.append, lambda: None)
    listeners.tell(Callback.on_start, start)
    for step in range(begin, end):
        own.write(TrainState(step=step, tokens=16 * step), {"train/loss": 1 / step, "perf/mfu": None})
    earlier = TrainState(step=begin, tokens=16 * begin)
    own.write(earlier, {"perf/save_publish_seconds": 2.5})  # The row belongs to the checkpoint.
    listeners.end(Position(end - 1, 16 * (end - 1)), True)
    own.close()
    (new,) = set(folder.glob("wandb/offline-*")) - before
    assert str(new) in said[0]
    return records(next(new.glob("*.wandb")))


def test_a_resume_continues_the_run_with_the_same_rows(tmp_path: Path) -> None:
    folder = tmp_path / "325m"
    folder.mkdir()
    # The run was killed after step 4, and its checkpoint is of step 2.
    first, second = write(folder, 1, 5), write(folder, 3, 7)
    (begun,), (resumed,) = ([one.run for one in record if one.HasField("run")] for record in (first, second))
    assert (begun.project, begun.display_name) == ("small models", "325m")
    assert begun.run_id == resumed.run_id == json.loads((folder / "wandb.json").read_text())["id"]
    assert any(item.key == "optimizer" and json.loads(item.value_json)["lr"] == 1e-2 for item in begun.config.update)
    assert rows(first)[-1] == {"step": 1, "tokens": 16, "perf/save_publish_seconds": 2.5}
    ours = rows_of(folder)
    theirs = [row for row in rows(first) if row["step"] < 3] + rows(second)
    assert theirs == [{key: value for key, value in row.items() if key != "wall_time"} for row in ours]
    assert any(one.metric.glob_name == "*" and one.metric.step_metric == "step" for one in first)


def test_what_wandb_refuses_is_said_with_what_to_do(tmp_path: Path, monkeypatch) -> None:
    import wandb

    def refuse(**_: object) -> None:
        raise wandb.errors.UsageError("No API key configured.")

    monkeypatch.setattr(wandb, "init", refuse)
    start = RunStart(tiny.config(1), tmp_path, Position(0, 0), None, True, print, lambda: None)
    with pytest.raises(ConfigError, match=r"No API key configured; log in .* logging.wandb.mode=offline"):
        WeightsAndBiases(OFFLINE).on_start(start)


def test_a_login_is_looked_for_before_ranks_meet(corpus: Path, tmp_path: Path, monkeypatch) -> None:
    """A run without a login ends before its engine is built, and so does one with a key that wandb refuses."""
    import wandb

    for name in ("HOME", "NETRC", "WANDB_DIR", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    data = {"train": [{"path": f"{corpus}/train"}]}
    cfg = tiny.config(1, data=data, training={"run_dir": str(tmp_path / "run")}, logging={"wandb": {"project": "own"}})
    with pytest.raises(ConfigError, match=r"logging\.wandb: there is no login here; log in with `wandb login`"):
        build(cfg)
    monkeypatch.setenv("WANDB_API_KEY", "short")
    with pytest.raises(ConfigError, match=r"logging\.wandb: WANDB_API_KEY invalid: .*mode=offline"):
        check_login(cfg.logging.wandb, tmp_path)
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("WANDB_MODE", "sideways")
    wandb.teardown()  # Variables are read once.
    with pytest.raises(ConfigError, match=r"logging\.wandb: WANDB_MODE = 'sideways': .*; unset that variable"):
        check_login(cfg.logging.wandb, tmp_path)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"id": 7}'])
def test_a_damaged_id_is_an_error_before_ranks_meet(tmp_path: Path, text: str) -> None:
    (tmp_path / "wandb.json").write_text(text)
    with pytest.raises(ConfigError, match=r"wandb\.json: has no id of a run at Weights & Biases .*; restore the file"):
        check_login(OFFLINE, tmp_path)


def test_a_missing_package_is_an_error_before_anything_starts(monkeypatch) -> None:
    cfg = tiny.config(1, logging={"wandb": {"project": "small models"}})
    assert not list(logging.findings(cfg, required=True))
    monkeypatch.setattr(logging, "find_spec", lambda name: None)
    (found,) = [finding for finding in check(cfg, 1) if finding.rule == "wandb_installed"]
    assert found.level == "error" and "pip install 'sagetrain[wandb]'" in str(found)
    assert not [finding for finding in check(cfg, 1, files=False) if finding.rule == "wandb_installed"]
    assert not list(logging.findings(tiny.config(1), required=True))
    for project in ("team/models", 129 * "a"):  # wandb refuses them when a run begins.
        (found,) = logging.findings(tiny.config(1, logging={"wandb": {"project": project}}), required=False)
        assert (found.rule, found.level) == ("wandb_project", "error") and "up to 128 characters, none of /" in str(
            found
        )
