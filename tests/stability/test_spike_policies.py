"""Runs over data with spoiled parts, with real processes: skipped steps and rewinds stay on record."""

from pathlib import Path

import pytest

from forked import PATIENCE
from runs import at_step, finish, kill_all, log_of, rows_of, start, training_rows, write_config
from sagetrain.checkpoint import on_disk
from sagetrain.checkpoint.ledger import Ledger
from sagetrain.checkpoint.state import RunState
from spoiled import spoiled


def samples_of(step: int) -> range:
    """Return the samples of one of the first 20 steps."""
    return range(8 * (step - 1), 8 * step)


@pytest.fixture(scope="module")
def bad(tmp_path_factory, corpus) -> Path:
    """The corpus with steps 15 and 18 spoiled."""
    return spoiled(corpus, tmp_path_factory.mktemp("bad") / "bad", [*samples_of(15), *samples_of(18)])


EXPERTS = {"number": 8, "per_token": 2, "ffn_size": 32, "balance": {"bias_rate": 0.01, "aux_weight": 0.1}}
MIXTURE = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 64, "num_attention_heads": 2, "experts": EXPERTS}


def config(folder: Path, corpus: Path, policy: str, name: str = "run", **keys: object) -> Path:
    """Write a run of 30 steps with a checkpoint about every 5 steps. `keys` belong to training or to
    stability.spikes, and `model` is the section."""
    keys = {"total_tokens": 20 * 256 + 10 * 512, **keys}
    spikes = {"window": 16, "grace_steps": 6, "policy": policy}
    spikes |= {key: keys.pop(key) for key in ("max_events",) if key in keys}
    sections = {"stability": {"spikes": spikes}, "checkpoint": {"every_tokens": 1280, "keep_last": 4}}
    sections |= {"attention": {"backend": "sdpa"}, "evaluation": {"every_tokens": 10**9}, "training": keys}
    sections |= {"model": model} if (model := keys.pop("model", None)) else {}
    return write_config(folder / f"{name}.yaml", corpus, folder / name, **sections)


def state_of(run_dir: Path) -> RunState:
    """Return the state of the newest checkpoint. Check that its ledger holds every sample once."""
    folder = on_disk.newest(run_dir / "checkpoints")
    state = on_disk.read_state(folder)
    Ledger.verified(state.ledger, state.identity.order, folder)
    assert state.sequences == 20 * 8 + 10 * 16
    return state


def events_of(run_dir: Path) -> list[dict]:
    return [row for row in rows_of(run_dir, "events") if row["kind"] == "spike"]


def losses_of(run_dir: Path) -> dict[int, float]:
    return {row["step"]: row["train/loss"] for row in training_rows(run_dir)}


def weights_of(run_dir: Path) -> dict[str, bytes]:
    """Return the files of tensors of the newest checkpoint. Loads and biases of routers are among them."""
    folder = on_disk.newest(run_dir / "checkpoints")
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def test_a_spike_is_reported_and_what_policy_stop_trains_on(tmp_path, bad) -> None:
    finish("sagetrain", config(tmp_path, bad, "stop"))
    assert [event["step"] for event in events_of(tmp_path / "run")] == [15, 18]
    assert "step 15: gradient norm" in log_of(tmp_path / "run.yaml")
    assert state_of(tmp_path / "run").ledger.dropped == []
    assert sorted(losses_of(tmp_path / "run")) == list(range(1, 31))


def test_a_skipped_step_stays_dropped_after_a_kill(tmp_path, bad) -> None:
    finish("sagetrain", config(tmp_path, bad, "skip", "undisturbed"))
    finish("sagetrain", config(tmp_path, bad, "stop", "dropped", drop_steps=[15, 18]))
    undisturbed, dropped = tmp_path / "undisturbed", tmp_path / "dropped"
    state = state_of(undisturbed)
    assert (state.ledger.dropped, state.optimizer_steps) == ([15, 18], 28)
    assert state_of(dropped).ledger == state.ledger
    assert losses_of(undisturbed) == losses_of(dropped)
    events = events_of(undisturbed)
    assert [(event["step"], event["action"]) for event in events] == [(15, "skip"), (18, "skip")]
    assert all(event["grad_norm"] > event["grad_norm_limit"] for event in events)

    run = config(tmp_path, bad, "skip")
    run.write_text(run.read_text().replace("every_tokens: 1280", "every_tokens: 2560"))
    assert at_step("ranks", run, 15, kill_all) != 0  # The run is killed at the skip; the next save is at step 20.
    newest = on_disk.newest(tmp_path / "run/checkpoints")
    finish("sagetrain", run)
    assert f"resumed from {newest.name}" in log_of(run) and "2 wrote that checkpoint, 1 go on" in log_of(run)
    assert state_of(tmp_path / "run").ledger == state.ledger
    assert [event["step"] for event in events_of(tmp_path / "run")] == [15, 18]
    ours, theirs = losses_of(tmp_path / "run"), losses_of(undisturbed)
    assert ours.keys() == theirs.keys() and ours == pytest.approx(theirs, abs=1e-3)


def test_a_rewind_gives_up_steps_and_a_second_one_more(tmp_path, bad) -> None:
    """A mixture has the loads and biases of then. Ranks that go back together are in model/test_linear_precision.py,
    and stages in engines/test_pipeline.py."""
    finish("sagetrain", config(tmp_path, bad, "rewind", "undisturbed", model=MIXTURE))
    finish("sagetrain", config(tmp_path, bad, "stop", "dropped", drop_steps=list(range(6, 19)), model=MIXTURE))
    undisturbed = tmp_path / "undisturbed"
    events = events_of(undisturbed)
    assert [(event["step"], event["action"], event["weights_of"]) for event in events] == [
        (15, "rewind", 10),
        (18, "rewind", 5),
    ]
    # The save comes at once, though none was due.
    assert "saved step-00000018" in log_of(tmp_path / "undisturbed.yaml")
    state = state_of(undisturbed)
    assert (state.ledger.dropped, state.optimizer_steps) == (list(range(6, 19)), 17)
    assert state_of(tmp_path / "dropped").ledger == state.ledger
    ours, theirs = losses_of(undisturbed), losses_of(tmp_path / "dropped")
    assert {step: ours[step] for step in theirs} == theirs  # The losses are as if the steps had never been taken.
    ends = [weights_of(run) for run in (undisturbed, tmp_path / "dropped")]
    assert ends[0] and ends[0] == ends[1]

    run = config(tmp_path, bad, "rewind", model=MIXTURE)
    # The kill may come while the checkpoint of the rewind is being written.
    assert at_step("sagetrain", run, 16, kill_all) != 0
    finish("sagetrain", run)
    assert "resumed from step-" in log_of(run)
    assert state_of(tmp_path / "run").ledger == state.ledger
    given_up = {step: loss for step, loss in ours.items() if step not in state.ledger.dropped}
    assert {step: losses_of(tmp_path / "run")[step] for step in given_up} == given_up


def test_a_run_that_goes_back_has_the_controllers_of_then(tmp_path, bad) -> None:
    """The numbers of the steps that are given up are in no window and no average. The spike itself is remembered."""
    finish("sagetrain", config(tmp_path, bad, "rewind", total_tokens=15 * 256))
    then, now = (
        on_disk.read_state(tmp_path / "run/checkpoints" / on_disk.folder_name(step)).controllers for step in (10, 15)
    )
    assert (then["spikes"].pop("acted"), now["spikes"].pop("acted")) == ([], [[15, 10]])
    assert len(then["spikes"]["window"]) == 10 and now == then


@pytest.mark.parametrize(("policy", "keys", "words", "newest"), [
    ("skip", {"max_events": 1}, "after 1 in 16 steps (stability.spikes.max_events)", 15),
    ("rewind", {"max_events": 1}, "training.drop_steps=[18]", 15),
])  # fmt: skip
def test_once_too_often_ends_the_run_with_all_that_was_saved(tmp_path, bad, policy, keys, words, newest) -> None:
    run = config(tmp_path, bad, policy, **keys)
    assert start("sagetrain", run).wait(PATIENCE) == 4
    assert "error: step 18 (sequences 136 to 143): gradient norm" in log_of(run) and words in log_of(run)
    assert on_disk.newest(tmp_path / "run/checkpoints").name == on_disk.folder_name(newest)
    events = events_of(tmp_path / "run")
    assert [(event["step"], event["action"]) for event in events] == [(15, policy), (18, "stop")]
    assert events[-1]["text"].endswith(": the run ends") and events[-1]["grad_norm"] > events[-1]["grad_norm_limit"]


def test_a_rewind_without_a_checkpoint_to_go_back_to_says_so(tmp_path, corpus) -> None:
    run = config(tmp_path, spoiled(corpus, tmp_path / "bad", samples_of(8)), "rewind")
    text = run.read_text().replace("every_tokens: 1280", "every_tokens: 2560")
    run.write_text(text)
    assert start("sagetrain", run).wait(PATIENCE) == 4
    assert "finds no checkpoint to go back to" in log_of(run) and "begins anew" in log_of(run)
