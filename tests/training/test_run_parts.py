"""A run whose later stages have longer sequences, stopped in its parts and between them."""

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from distributed import run_distributed
from runs import at_step, check_same, final_tensors, finish, kill_all, log_of, rows_of, training_rows, write_config
from sagetrain import api
from sagetrain.costs.hardware import H200
from sagetrain.planning.plan import make_plan

STEPS, BORDER = 12, 8
YARN = {"type": "yarn", "factor": 2.0, "original_seq_length": 32}
STAGES = [
    {"from_tokens": 0, "tokens": 256, "seq_length": 32, "micro_batch_size": 4},
    {"from_tokens": 256 * BORDER, "tokens": 256, "seq_length": 64, "micro_batch_size": 2, "rope_scaling": YARN},
]
AWAY = {"training.activation_checkpointing": "attention", "training.activation_offload": True}


def config(folder: Path, corpus: Path, name: str, stages: list[dict] | None = None) -> Path:
    schedule = {"schedule": "stages", "stages": stages or STAGES}
    training = {"total_tokens": 256 * STEPS}
    checkpoint = {"every_tokens": 512, "keep_last": 9}
    return write_config(
        folder / f"{name}.yaml", corpus, folder / name, tokens_per_step=schedule, training=training,
        checkpoint=checkpoint,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """The run folder of a run that was not stopped."""
    path = config(tmp_path_factory.mktemp("parts"), corpus, "whole")
    assert api.train(path).finished
    return path.with_suffix("")


def cut(whole: Path, folder: Path, step: int) -> Path:
    """Return a copy of the run that has no checkpoint behind a step, as after a kill."""
    copy = shutil.copytree(whole, folder)
    for each in (copy / "checkpoints").glob("step-*"):
        if int(each.name.removeprefix("step-")) > step:
            shutil.rmtree(each)
    (copy / "checkpoints/latest").write_text(f"step-{step:08d}")
    return copy


def test_the_first_part_is_a_plain_run_and_says_so(tmp_path, corpus, whole) -> None:
    """The second one continues in the data where it stood, counted in its own sequences."""
    plain = config(tmp_path, corpus, "plain", [{"from_tokens": 0, "tokens": 256}])
    assert api.train(plain).finished
    theirs, ours = training_rows(tmp_path / "plain"), training_rows(whole)
    assert ours[:BORDER] == theirs[:BORDER] and ours[BORDER] != theirs[BORDER]
    assert [row["train/lr"] for row in ours] == [row["train/lr"] for row in theirs]
    border, step = (
        load_file(next((run / f"checkpoints/step-{BORDER:08d}").glob("*.safetensors")))
        for run in (tmp_path / "plain", whole)
    )
    assert border.keys() == step.keys() and all(border[name].equal(step[name]) for name in border)
    lengths = [row["train/seq_length"] for row in rows_of(whole) if "train/loss" in row]
    assert lengths == [32] * BORDER + [64] * (STEPS - BORDER)
    events = rows_of(whole, "events")
    said = [event["text"] for event in events if event["kind"] == "sequences"]
    assert said == [
        f"sequences of {length} tokens up to {256 * end:,} tokens, in training and in data.valid"
        for length, end in ((32, BORDER), (64, STEPS))
    ]
    resumed = [event["text"] for event in events if event["kind"] == "resume"]
    assert resumed == ["resumed at 2,048 tokens with 1 rank"], "what a stage has is no change of the user's"
    state = json.loads((whole / f"checkpoints/step-{STEPS:08d}/manifest.json").read_text())["state"]
    window = state["controllers"]["spikes"]["window"]
    assert len(window) == STEPS - BORDER, "losses of other sequences are no measure of a spike"
    assert state["sequences"] == 256 * STEPS // 64 and state["identity"]["data.seq_length"] == 64
    assert state["ledger"]["segments"] == [[0, 8, BORDER], [256 * BORDER // 64, 4, STEPS - BORDER]]
    loaded = api.load_run(whole).run.cfg
    assert loaded.data.seq_length == 64 and loaded.model.rope_scaling is not None


@pytest.mark.parametrize("step", [BORDER - 2, BORDER, BORDER + 2])
def test_a_run_goes_on_before_at_and_behind_the_border(tmp_path, corpus, whole, step) -> None:
    path = config(tmp_path, corpus, "again")
    cut(whole, tmp_path / "again", step)
    plan = make_plan(path, [], 1, H200)
    assert [f"{finding}" for finding in plan.findings if finding.level == "error"] == []
    assert any(f"at {256 * step:,} of 3,072 tokens" in finding.message for finding in plan.findings)
    assert api.train(path).finished
    check_same(tmp_path / "again", whole, STEPS)


class StopsAtTheBorder(api.Callback):
    def on_start(self, start: api.RunStart) -> None:
        self.stop = start.stop

    def on_step(self, position: api.Position, result: object) -> None:
        if position.step == BORDER:
            self.stop()


def evaluations(run: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["valid/loss"]) for row in rows_of(run) if "valid/loss" in row]


def test_the_first_part_makes_the_evaluation_of_its_border(tmp_path, corpus, whole) -> None:
    path = config(tmp_path, corpus, "stopped")
    assert not api.train(path, callbacks=[StopsAtTheBorder()]).finished
    expected = evaluations(whole)
    assert evaluations(tmp_path / "stopped") == [row for row in expected if row[0] < BORDER]
    assert BORDER in dict(expected), "an evaluation is due there"
    assert api.train(path).finished
    assert evaluations(tmp_path / "stopped") == expected
    check_same(tmp_path / "stopped", whole, STEPS)


def test_a_run_that_ends_at_the_border_begins_no_part(tmp_path, corpus, whole) -> None:
    path = config(tmp_path, corpus, "ended")
    said = len((cut(whole, tmp_path / "ended", BORDER) / "events.jsonl").read_text())
    assert api.train(path, {"training.total_tokens": 256 * BORDER}).finished
    assert "sequences of 64" not in (tmp_path / "ended/events.jsonl").read_text()[said:]


def test_a_run_killed_in_its_second_part_goes_on(tmp_path, corpus, whole) -> None:
    path = config(tmp_path, corpus, "killed")
    assert at_step("sagetrain", path, BORDER + 2, kill_all) != 0
    plan = make_plan(path, [], 1, H200)
    assert plan.errors == 0 and "goes_on" in [finding.rule for finding in plan.findings]
    finish("sagetrain", path)
    check_same(tmp_path / "killed", whole, STEPS)
    assert log_of(path).count("sequences of 64 tokens up to") == 2


def at_layouts(folder: Path, paths: dict[str, Path]) -> None:
    """Continue each run at the layout that its name says, on the ranks of this world."""
    os.environ["MASTER_PORT"] = "29500"  # The ranks have met. This is only read.
    for name, path in paths.items():
        keys = {"tp": "tensor_parallel_size", "cp": "context_parallel_size", "pp": "pipeline_parallel_size"}
        layout = {f"parallel.{keys[name]}": 2} if name in keys else {"parallel.zero_stage": 3, **AWAY}
        assert api.train(path, layout).finished


def test_layouts_go_on_alike(tmp_path, corpus, whole) -> None:
    """A run of one rank is continued over the border by two, at every axis, and at ZeRO 3 with activations away."""
    paths = {name: config(tmp_path, corpus, name) for name in ("tp", "cp", "pp", "dp")}
    for name in paths:
        cut(whole, tmp_path / name, BORDER - 2)
    run_distributed(at_layouts, 2, tmp_path, paths)
    expected = [row["train/loss"] for row in training_rows(whole)]
    for name in paths:
        assert [row["train/loss"] for row in training_rows(tmp_path / name)] == pytest.approx(expected, abs=1e-5)
        assert len(final_tensors(tmp_path / name, STEPS)) > 0


def test_another_length_of_an_ended_stage_is_another_run(tmp_path, corpus, whole) -> None:
    stages = [{**STAGES[0], "seq_length": 16}, STAGES[1]]
    path = config(tmp_path, corpus, "other", stages)
    changed = yaml.safe_load(path.read_text())
    changed["data"].update(seq_length=16)
    path.write_text(yaml.safe_dump(changed))
    cut(whole, tmp_path / "other", BORDER)
    with pytest.raises(api.ConfigError, match=r"data\.seq_length: checkpoint 32, this run 16"):
        api.train(path)
