"""The precision ladder in whole runs: the cost of a move, and a resume between moves at other layouts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tiny
from distributed import run_distributed
from sagetrain.checkpoint.on_disk import newest, read_state
from sagetrain.config import RunConfig
from sagetrain.config.schema import PrecisionConfig
from sagetrain.engines.build_engine import build_engine
from sagetrain.model.backends import Sage, Sdpa
from sagetrain.model.compile import compile_blocks
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.stability.controller import Taken
from sagetrain.stability.precision import Ladder
from sagetrain.stability.spikes import METRIC as SPIKE
from sagetrain.training.build_run import build
from sagetrain.training.trainer import Trainer

STEP = 4 * tiny.SEQ
FUNCTIONS = {"paper": Sage("paper"), "fine": Sage("fine"), "gradients": Sage("gradients"), "sdpa": Sdpa()}


Moved = tuple[list[tuple[float, float]], list[int]]


def moving_runs(tp_size: int, stage: int, again: str, backends: list[str | None]) -> list[Moved]:
    """Take the steps of a ladder once for each backend."""
    groups = tiny.join(tp_size)
    return [moving_losses(groups, stage, again, backend) for backend in backends]


def moving_losses(groups: ParallelGroups, stage: int, again: str, backend: str | None) -> Moved:
    """Return the (loss, gradient norm) pair of each step of a ladder, and the number of graphs after it."""
    tp_size = groups.tp_size
    cfg = tiny.config(
        stage, optimizer={"eps": 1e-6}, training={"activation_checkpointing": again}, model={"num_layers": 4}
    )
    functions = [FUNCTIONS["paper"]] * 4
    # test_model_parallel.py compiles halves, which take twice as long.
    model = tiny.model(cfg, groups, sequence_parallel=tp_size > 1, overlap=backend is None, functions=functions)
    if backend:
        tiny.compile_first_rank(model, backend, whole=stage == 3, later=FUNCTIONS.values())
    engine = build_engine(cfg, model, groups, 1)
    precision = PrecisionConfig(
        rungs=["fine", "gradients", "sdpa"], threshold={"metric": "quant/*/dS/rel_l2", "above": 0.5}
    )
    ladder = Ladder(precision, FUNCTIONS, [block.attention for block in model.blocks], 1000, 0)
    losses, graphs = [], []
    for step, moved in enumerate(([], [3], [3], [0, 2], [3], range(4), [])):
        result = tiny.global_step(engine, step, sequences=4 // tp_size)
        losses.append((result.loss, result.grad_norm))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        ladder.after_step(Taken(step, step * STEP, STEP, {f"quant/{layer}/dS/rel_l2": 0.9 for layer in moved}))
    return losses, graphs


@pytest.mark.parametrize(("tp_size", "stage", "again"), [(2, 1, "none"), (1, 3, "full")])
def test_a_rung_costs_one_graph_with_its_first_layer(tp_size, stage, again) -> None:
    backend = "aot_eager" if stage == 3 else "eager"  # Both make the same graphs.
    ranks = run_distributed(moving_runs, 2, tp_size, stage, again, [None, backend])
    plain, _ = ranks[0][0]
    for _, (compiled, _) in ranks:
        assert torch.allclose(torch.tensor(compiled[:2]), torch.tensor(plain[:2]), rtol=1e-3)
        found = [loss for loss, _ in compiled]
        assert found == pytest.approx([loss for loss, _ in plain], rel=0.02)  # INT8 magnifies rounding from there on.
    # The moves are: layer 3 to fine, then to gradients; layers 0 and 2 to fine, which has its graph; layer 3 to sdpa;
    # all layers up by one, to rungs with graphs.
    graphs = ranks[0][1][1]
    assert [after - graphs[0] for after in graphs] == [0, 0, 1, 2, 2, 3, 3]


def test_evaluation_between_steps_fits_four_rungs() -> None:
    """torch compiles at most 8 graphs for one function: four rungs, each with gradients and without."""
    cfg = tiny.config(1)
    place = {"vocab_size": tiny.VOCAB, "groups": ParallelGroups.single()}
    model = tiny.transformer(cfg.model, cfg.attention, functions=[FUNCTIONS["paper"]] * 2, **place)
    torch._dynamo.reset()
    compile_blocks(model, "eager", later=FUNCTIONS.values())  # It makes the same graphs as aot_eager.
    tokens = torch.arange(2 * tiny.SEQ).view(2, tiny.SEQ) % tiny.VOCAB
    for function in FUNCTIONS.values():
        for block in model.blocks:
            block.attention.function = function
        with torch.no_grad():
            unrecorded = model(tokens, tokens)
        loss = model(tokens, tokens)
        loss.backward()
        assert unrecorded.item() == pytest.approx(loss.item(), rel=1e-5)


def train(corpus: str, run_dir: str, tp_size: int, stop_after: int | None) -> tuple[list[str], str]:
    """Train 12 steps of a ladder that moves for every possible reason, or fewer steps. Return the rungs and the start
    line."""
    cfg = tiny.config(1, attention={"backend": "sage", "recipe": "paper"}).model_dump()
    cfg["data"].update(train=[{"path": f"{corpus}/train"}], micro_batch_size=2)
    cfg["parallel"].update(tensor_parallel_size=tp_size)
    cfg["training"].update(run_dir=run_dir, total_tokens=12 * STEP)
    cfg["stability"]["precision"] = {
        "rungs": ["fine", "gradients", "sdpa"],
        "floors": [{"rung": "fine", "first_layers": 1}, {"rung": "sdpa", "last_fraction": 0.2}],
        "threshold": {"metric": "quant/*/dS/rel_l2", "above": 0.5, "below": 0.2, "cooldown_tokens": 3 * STEP},
        "spike_tokens": 3 * STEP,
    }
    trainer = Trainer(build(RunConfig.model_validate(cfg)))
    step = trainer.engine.step

    def measured(*arguments, **options):
        result = step(*arguments, **options)
        number = trainer.state.step + 1
        found = {
            "quant/1/dS/rel_l2": 0.9 if number in (2, 6) else 0.1 if number > 6 else 0.3,
            SPIKE: float(number == 5),
        }
        stop = result.stop or number == stop_after
        return dataclasses.replace(result, metrics={**result.metrics, **found}, stop=stop)

    trainer.engine.step = measured
    assert trainer.train() == (stop_after is None)
    functions = [type(block.attention.function).__name__ for block in trainer.engine.model.blocks]
    (ladder,) = (controller for controller in trainer.run.controllers.controllers if isinstance(controller, Ladder))
    return functions, ladder.summary()


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_resumes_in_the_middle_of_a_ladder_at_any_layout(corpus, tmp_path, capfd) -> None:
    def go(name: str, world: int, tp_size: int, stop_after: int | None) -> tuple[list[str], str]:
        first, *others = run_distributed(train, world, str(corpus), str(tmp_path / name), tp_size, stop_after)
        assert all(other == first for other in others)
        return first

    assert go("whole", 1, 1, None) == (["Sdpa", "Sdpa"], "sdpa in layers 0, 1")
    for name in ("same", "split"):
        assert go(name, 1, 1, 6) == (["Sage", "Sdpa"], "gradients in layer 0; sdpa in layer 1")
    capfd.readouterr()
    go("same", 1, 1, None)
    said = capfd.readouterr().out
    assert "stability.precision: gradients in layer 0; sdpa in layer 1" in said
    assert "attention of layer 0 from gradients to fine: no spike" in said
    go("split", 2, 2, None)
    whole, same, split = (tmp_path / name for name in ("whole", "same", "split"))
    events = [
        [
            {key: value for key, value in row.items() if key != "wall_time"}
            for row in rows_of(folder / "events.jsonl")
            if row["kind"] == "precision"
        ]
        for folder in (whole, same, split)
    ]
    assert events[0] == events[1] == events[2] and len(events[0]) >= 6
    assert {"schedule", "a spike"} < {row["cause"] for row in events[0]}
    states = [read_state(newest(folder / "checkpoints")).controllers for folder in (whole, same, split)]
    assert states[0] == states[1] and states[0]["precision"] == states[2]["precision"]
    tensors = [
        {k: v for f in newest(folder / "checkpoints").glob("*.safetensors") for k, v in load_file(f).items()}
        for folder in (whole, same)
    ]
    assert tensors[0].keys() == tensors[1].keys()
    assert all(tensors[0][key].equal(tensors[1][key]) for key in tensors[0])
    losses = [
        [row["train/loss"] for row in rows_of(folder / "metrics.jsonl") if "train/loss" in row]
        for folder in (whole, same, split)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 12
    assert losses[0] == pytest.approx(losses[2], abs=0.02)  # INT8 codes differ between layouts now and then.


def train_measured(corpus: str, run_dir: str) -> list[dict]:
    """Train six steps whose monitor moves the layers, and return the events."""
    cfg = tiny.config(1, attention={"backend": "sage", "recipe": "paper"}).model_dump()
    cfg["data"].update(train=[{"path": f"{corpus}/train"}], micro_batch_size=2)
    cfg["training"].update(run_dir=run_dir, total_tokens=6 * STEP)
    cfg["stability"]["monitor"] = {"every_steps": 1}
    cfg["stability"]["precision"] = {
        "rungs": ["fine", "gradients", "sdpa"],
        "floors": [{"rung": "gradients", "last_layers": 1}],
        "threshold": {"metric": "quant/*/dQ/rel_l2", "above": 1e-4},
    }
    trainer = Trainer(build(RunConfig.model_validate(cfg)))
    assert trainer.train()
    return rows_of(Path(run_dir) / "events.jsonl")


def test_measurements_of_the_monitor_move_layers(corpus, tmp_path) -> None:
    """Layers on different rungs are measured side by side, until no layer quantizes anything."""
    (events,) = run_distributed(train_measured, 1, str(corpus), str(tmp_path))
    moves = [(row["step"], row["layers"], row["to"]) for row in events if row["kind"] == "precision"]
    assert moves == [(1, [0], "fine"), (1, [1], "sdpa"), (2, [0], "gradients"), (3, [0], "sdpa")]
    measured = {row["step"]: {key.split("/")[1] for key in row if key.startswith("quant/")}
                for row in rows_of(tmp_path / "metrics.jsonl") if "train/loss" in row}  # fmt: skip
    assert measured == {1: {"0", "1"}, 2: {"0"}, 3: {"0"}, 4: set(), 5: set(), 6: set()}


def train_on(corpus: str, run_dir: str, steps: int, precision: dict | None) -> list[str]:
    """Train to so many steps, and return the attention of the layers in the first of them."""
    cfg = tiny.config(1, attention={"backend": "sage", "recipe": "paper"}).model_dump()
    cfg["data"].update(train=[{"path": f"{corpus}/train"}], micro_batch_size=2)
    cfg["training"].update(run_dir=run_dir, total_tokens=steps * STEP)
    cfg["stability"].update(monitor={"every_steps": None}, precision=precision)
    trainer = Trainer(build(RunConfig.model_validate(cfg)))
    functions = [type(function).__name__ for function in trainer.engine.model.functions]
    assert trainer.train()
    return functions


def test_a_ladder_added_at_a_resume_is_on_schedule_at_once(corpus, tmp_path) -> None:
    precision = {"rungs": ["sdpa"], "floors": [{"rung": "sdpa", "last_fraction": 0.5}]}
    for steps, ladder, functions in ((4, None, ["Sage"] * 2), (6, precision, ["Sdpa"] * 2)):
        assert run_distributed(train_on, 1, str(corpus), str(tmp_path), steps, ladder) == [functions]
