"""The profiler traces the steps of its window only, also where a run ends or begins within it, and prints a table."""

import json
from pathlib import Path

import torch

from sagetrain.config.schema import ProfileConfig
from sagetrain.engines.protocol import StepResult
from sagetrain.training.callbacks import Position
from sagetrain.training.profile import ProfileWindow


def steps_of(path: Path) -> set[str]:
    names = {event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]}
    return {name for name in names if name.startswith("step ")} | names & {"aten::mm"}


def step(window: ProfileWindow, number: int) -> None:
    window.on_step_begin(number)
    torch.ones(8, 8) @ torch.ones(8, 8)
    window.on_step(Position(number, 64 * number), StepResult({}, True, False, 0, 1.0))


def profiled(folder: Path, taken: range, settings: ProfileConfig, rank: int = 0) -> list[str]:
    said: list[str] = []
    window = ProfileWindow(settings, folder, rank, said.append)
    for number in taken:
        step(window, number)
    window.on_end(Position(0, 0), True)
    return said


def test_the_trace_has_the_windows_steps_and_the_log_a_table(tmp_path: Path) -> None:
    (said,) = profiled(tmp_path, range(1, 9), ProfileConfig(from_step=3, steps=2))
    assert steps_of(tmp_path / "rank-0.json") == {"step 3", "step 4", "aten::mm"}
    assert str(tmp_path / "rank-0.json") in said and "aten::mm" in said and "Self CPU" in said


def test_a_run_within_the_window_leaves_its_own_trace(tmp_path: Path) -> None:
    assert len(profiled(tmp_path, range(4, 6), ProfileConfig(from_step=3, steps=9))) == 1
    assert steps_of(tmp_path / "rank-0.json") == {"step 4", "step 5", "aten::mm"}


def test_the_window_ends_also_where_its_last_step_is_dropped(tmp_path: Path) -> None:
    """Otherwise all later steps would be traced to the end of the run, and their events kept in memory."""
    said: list[str] = []
    window = ProfileWindow(ProfileConfig(from_step=3, steps=2), tmp_path, 0, said.append)
    for number in (3, 5):  # training.drop_steps: [4]
        step(window, number)
    assert len(said) == 1 and steps_of(tmp_path / "rank-0.json") == {"step 3", "aten::mm"}


def test_other_ranks_write_where_they_were_asked_to(tmp_path: Path) -> None:
    assert profiled(tmp_path, range(1, 3), ProfileConfig(from_step=1), rank=1) == []
    assert profiled(tmp_path, range(5, 7), ProfileConfig(from_step=1, steps=3, all_ranks=True), rank=1) == []
    assert not list(tmp_path.iterdir())
    profiled(tmp_path, range(1, 3), ProfileConfig(from_step=1, all_ranks=True), rank=1)
    assert [path.name for path in tmp_path.iterdir()] == ["rank-1.json"]
