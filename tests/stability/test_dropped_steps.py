"""A step that a run cannot get past: the message, the way to drop the step, and its record in the ledger."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

import tiny
from distributed import run_distributed
from runs import rows_of
from sagetrain.checkpoint.ledger import Ledger
from sagetrain.checkpoint.on_disk import newest, read_state
from sagetrain.config.errors import CheckpointError, TrainingError
from trained import make_trainer

STEP = 4 * tiny.SEQ


def test_a_dropped_step_is_found_again_and_cannot_be_forged() -> None:
    ledger = Ledger("order")
    for step in range(5):
        ledger.add(4 * step, 4, dropped=step == 2)
    assert (ledger.segments, ledger.dropped) == ([[0, 4, 5]], [3])
    again = Ledger.verified(ledger, "order", Path("step-5"))
    assert again == ledger and again.steps == 5
    for dropped in ([], [2], [3, 4]):
        with pytest.raises(CheckpointError, match="it was changed"):
            Ledger.verified(replace(ledger, dropped=dropped), "order", Path("step-5"))


def train(
    corpus: str, run_dir: str, steps: float, drop: list[int], bad_sample: int = -1, every: int = 1, policy: str = "stop"
) -> str:
    """Train to `steps` with a checkpoint at every second step. The loss on one sample is not a number. Return what
    ended the run."""
    trainer = make_trainer(
        corpus, run_dir, steps,
        data={"micro_batch_size": 2, "valid": [{"path": f"{corpus}/{name}"} for name in ("valid", "train")]},
        training={"drop_steps": drop}, logging={"every_steps": every}, stability={"spikes": {"policy": policy}},
        lr_schedule={"shape": "constant"}, checkpoint={"every_tokens": 2 * STEP},
        evaluation={"every_tokens": 2 * STEP, "num_sequences": 10**6 if drop == [2] else 5},
    )  # fmt: skip
    forward = trainer.engine.forward
    trainer.engine.forward = lambda batch: forward(batch) * (math.nan if bad_sample in batch.sample_ids else 1.0)
    if drop == [2]:
        for source, windows in zip(trainer.run.valid.stream._sources, (2, 1), strict=True):
            source.num_windows = windows  # All windows count, so an epoch takes no time.
    try:
        return f"finished: {trainer.train()}"
    except TrainingError as error:
        return str(error)


def by_step(run_dir: Path, key: str) -> dict[int, float]:
    return {row["step"]: row[key] for row in rows_of(run_dir) if key in row}


def test_a_step_that_is_not_finite_is_dropped_once(corpus, tmp_path, capfd) -> None:
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"

    def go(run_dir: Path, world: int, *what) -> str:
        first, *others = run_distributed(train, world, str(corpus), str(run_dir), *what)
        assert all(other == first for other in others)
        return first

    said = go(tmp_path / "new", 1, 4, [], 2)
    assert "step 1 (sequences 0 to 3): loss nan" in said
    assert said.endswith("Started again, the run begins anew: no checkpoint was written yet")
    said = go(run, 2, 4, [], 9)
    assert "step 3 (sequences 8 to 11): loss nan" in said and "training.drop_steps=[3]" in said
    assert said.endswith("Started again, the run continues from step-00000002")
    assert "sdpa" not in said  # The run uses sdpa already.
    capfd.readouterr()
    assert go(run, 2, 4, [3], 9) == "finished: True"
    assert "step 3: dropped (training.drop_steps): sequences 8 to 11 are passed over" in capfd.readouterr().out
    assert go(run, 2, 6, [2], 9) == "finished: True"  # The record stands, whatever the setting says now.
    out = capfd.readouterr().out
    assert "resumed from step-00000004" in out and "training.drop_steps: 2 came before this checkpoint" in out
    # The log says it once, in one evaluation or several.
    assert (run / "log.txt").read_text().count("data.valid holds 3; evaluations take all of them") == 1
    state = read_state(newest(run / "checkpoints"))
    assert (state.step, state.optimizer_steps, state.ledger.dropped) == (6, 5, [3])
    assert go(undisturbed, 2, 5.9, [3], 9) == "finished: True"
    asked = f"training.total_tokens {int(5.9 * STEP):,}"
    assert f"finished at step 6, {6 * STEP:,} tokens: whole steps for {asked}\n" in capfd.readouterr().out
    assert f"{asked}: whole steps end at {6 * STEP:,} tokens" in (undisturbed / "log.txt").read_text()
    assert by_step(run, "train/loss") == by_step(undisturbed, "train/loss")
    assert sorted(by_step(run, "train/loss")) == [1, 2, 4, 5, 6]
    assert by_step(run, "train/dropped_tokens") == {3: STEP}
    assert read_state(newest(undisturbed / "checkpoints")).ledger == state.ledger
    # Five sequences are evaluated, three of one source, whatever the layout.
    assert go(tmp_path / "alone", 1, 2, []) == "finished: True"
    names = "valid/loss", "valid/valid/loss", "valid/train/loss"
    alone, pair = ([by_step(folder, name)[2] for name in names] for folder in (tmp_path / "alone", undisturbed))
    assert alone == pytest.approx(pair, abs=1e-5)
    assert alone[0] == pytest.approx((3 * alone[1] + 2 * alone[2]) / 5, abs=1e-12) and alone[1] != alone[2]
    said = "validation loss {:.4f} (valid {:.4f}, train {:.4f})".format(*alone)
    assert said in capfd.readouterr().out


@pytest.mark.parametrize(("drop", "bad_sample", "policy"), [([4], -1, "stop"), ([], 12, "skip"), ([], 12, "stop")])
def test_the_step_before_one_that_is_left_out_has_its_row(corpus, tmp_path, drop, bad_sample, policy) -> None:
    """logging.every_steps does not matter. The row is that of the last step taken, which led to the next one."""
    (said,) = run_distributed(train, 1, str(corpus), str(tmp_path), 4, drop, bad_sample, 2, policy)
    assert ("loss nan" in said) == (policy == "stop" and bad_sample == 12)
    assert sorted(by_step(tmp_path, "train/loss")) == [2, 3]


def test_a_checkpoint_has_a_row_of_its_step(corpus, tmp_path) -> None:
    """logging.every_steps does not matter. Without the row, measurements since the last row would be lost with the
    run."""
    run_distributed(train, 1, str(corpus), str(tmp_path), 5, [], -1, 100)
    assert sorted(by_step(tmp_path, "train/loss")) == [2, 4, 5]


def functions_of_steps(corpus: str, run_dir: str) -> dict[int, str]:
    """Return the precision of each step's linear layers in a run whose second half is in 16 bits and whose second step
    is dropped."""
    low = {"precision": "int8", "keep_last_fraction": 0.5}
    trainer = make_trainer(corpus, run_dir, 4, linear=low, training={"drop_steps": [2]})
    step, found = trainer.engine.step, {}

    def watched(*arguments, **options):
        found[trainer.state.step + 1] = type(trainer.engine.model.blocks[0].attention.qkv.matmul).__name__
        return step(*arguments, **options)

    trainer.engine.step = watched
    trainer.train()
    return found


def test_controllers_hear_of_a_dropped_step(corpus, tmp_path) -> None:
    """Otherwise a schedule by tokens would come a step late."""
    found = run_distributed(functions_of_steps, 1, str(corpus), str(tmp_path / "run"))[0]
    assert found == {1: "LowBit", 3: "Matmul", 4: "Matmul"}
