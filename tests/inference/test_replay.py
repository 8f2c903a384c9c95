"""Failed steps are replayed: spoiled data, a fault of the quantization, and a step that does not fail again."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import tiny
from distributed import run_distributed
from forked import PATIENCE
from runs import finish, log_of, sagetrain, start, write_config
from sagekernels.lowbit import LowBit
from sagetrain.checkpoint import on_disk
from sagetrain.checkpoint.ledger import Ledger, TrainState
from sagetrain.config.errors import CheckpointError, ConfigError, TrainingError
from sagetrain.config.load import load_config
from sagetrain.config.rules import fit
from sagetrain.config.schema import DataSource
from sagetrain.data.batch import Batch
from sagetrain.data.loader import SampleStream
from sagetrain.engines.protocol import StepResult
from sagetrain.engines.step import BaseEngine
from sagetrain.inference import replay as module
from sagetrain.inference.replay import _go_there, _start, replay
from sagetrain.model import selection
from sagetrain.model.backends import Sage, TokenLayout
from sagetrain.stability.spikes import Verdict
from sagetrain.training import failed_step
from sagetrain.training.build_run import build
from sagetrain.training.trainer import Trainer
from spoiled import MIDDLE, spoiled

STEP = 15
SAMPLES = range(8 * (STEP - 1), 8 * STEP)
SPIKES = {"window": 16, "grace_steps": 6}


def config(folder: Path, corpus: Path, **sections: dict) -> Path:
    """Write the configuration of a run with a checkpoint about every 10 steps, and at the end."""
    sections = {"evaluation": {"every_tokens": 10**9}, "stability": {"spikes": SPIKES}, **sections}
    return write_config(folder / "run.yaml", corpus, folder / "run", **sections)


@pytest.fixture(scope="module")
def bad(tmp_path_factory, corpus) -> Path:
    """The folder of a finished run of two ranks, by INT8 attention, whose step 15 has spoiled samples."""
    folder = tmp_path_factory.mktemp("bad")
    finish("ranks", config(folder, spoiled(corpus, folder / "corpus", SAMPLES), linear={"precision": "auto"}))
    return folder


def test_a_step_with_a_programs_loss_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bundle.json").write_text(json.dumps({"format": failed_step.FORMAT, "loss": "mine.focal"}))
    with pytest.raises(ConfigError, match=r"the loss mine\.focal of a program"):
        replay(tmp_path, "sdpa")


def test_a_bundle_has_all_that_it_takes_and_little_more(bad) -> None:
    (folder,) = (bad / "run/spikes").iterdir()
    assert folder.name == "step-00000015" and f"{folder} has what" in log_of(bad / "run.yaml")
    assert sorted(path.name for path in folder.iterdir()) == [
        "bundle.json", "config.yaml", "rng-00000.pt", "rng-00001.pt"
    ]  # fmt: skip
    assert sum(path.stat().st_size for path in folder.iterdir()) < 100_000
    content = failed_step.read(folder)
    stream = SampleStream([DataSource(path=str(bad / "corpus/train"))], 32, 0)
    assert content["samples"] == [list(stream.locate(sample)) for sample in SAMPLES]
    assert (content["step"], content["checkpoint"], content["first_sample"]) == (15, 10, SAMPLES[0])
    assert [row["step"] for row in content["steps_between"]] == [11, 12, 13, 14]
    assert content["attention"] == ["sage fine"] * 2 and content["layout"]["data_parallel_size"] == 2
    norms = content["layer_grad_norms"]
    assert sorted(norms) == ["0", "1", "embedding", "head"]
    assert math.hypot(*norms.values()) == pytest.approx(content["event"]["grad_norm"], rel=1e-4)
    settled = load_config(folder / "config.yaml")  # The run's own configuration says auto.
    assert (settled.attention.recipe, settled.linear.precision) == ("fine", "bf16")
    kept = sorted(path.name for path in (bad / "run/checkpoints").glob("step-*"))
    # The bundle's checkpoint and the newest two stay.
    assert kept == ["step-00000010", "step-00000035", "step-00000040"]


def test_spoiled_data_are_blamed_and_replayed_in_one_process(bad) -> None:
    folder = bad / "run/spikes/step-00000015"
    shown = sagetrain("replay", folder)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("step 15: gradient norm 5.") and lines[1].split() == [
        "limit", "recorded", "again", "sdpa"
    ]  # fmt: skip
    assert lines[-1].startswith("data: it comes back in the recorded precision and stays with sdpa")
    assert any(line.startswith("  layer 1 ") for line in lines)
    found = json.loads(sagetrain("replay", folder, "--attention", "reference", "--json").stdout)
    assert found["cause"] == "data" and found["drift"] < 0.01
    recorded, again = found["numbers"]["recorded"], found["numbers"]["again"]
    # One rank takes the step instead of two, in INT8.
    assert again["loss"] == pytest.approx(recorded["loss"], rel=1e-2)
    assert again["layers"] == pytest.approx(recorded["layers"], rel=0.05)
    assert not (folder / "replay").exists()
    same = sagetrain("replay", folder, "--attention", "sage")
    assert "open: it comes back, and sage fine is what it was recorded with" in same.stdout


def test_what_cannot_be_replayed_says_why(bad, tmp_path) -> None:
    with pytest.raises(ConfigError, match="is no replay bundle"):
        replay(tmp_path, "sdpa")
    with pytest.raises(ConfigError, match="recipe 'none': it is one of"):
        replay(bad / "run/spikes/step-00000015", "sage", "none")
    with pytest.raises(ConfigError, match="--recipe fine is of --attention sage, and this is sdpa"):
        replay(bad / "run/spikes/step-00000015", "sdpa", "fine")
    alone = tmp_path / "spikes/step-00000015"
    alone.mkdir(parents=True)
    (alone / "bundle.json").write_bytes((bad / "run/spikes/step-00000015/bundle.json").read_bytes())
    with pytest.raises(CheckpointError, match="no checkpoint of step 10 or before is left to replay step 15"):
        replay(alone, "sdpa")
    refused = sagetrain("replay", bad / "run/spikes/step-00000015", "--attention", "flash")
    assert refused.returncode == 2 and "attention.backend flash needs a GPU" in refused.stderr
    assert sagetrain("replay", tmp_path).returncode == 2 and sagetrain("replay", alone).returncode == 3


def test_a_step_before_the_first_checkpoint_is_replayed(tmp_path, corpus) -> None:
    path = config(tmp_path, corpus, optimizer={"lr": 1e30, "weight_decay": 0}, attention={"backend": "sdpa"})
    assert start("ranks", path).wait(PATIENCE) == 4
    (folder,) = (tmp_path / "run/spikes").iterdir()
    content = failed_step.read(folder)
    assert content["checkpoint"] is None and not content["event"]["finite"]
    assert sorted(content["layer_grad_norms"]) == ["0", "1", "embedding", "head"]
    found = json.loads(sagetrain("replay", folder, "--attention", "reference", "--json").stdout)
    assert found["cause"] == "data" and found["step"] == content["step"] > 1
    assert not math.isfinite(float(found["numbers"]["again"]["grad_norm"]))
    assert sorted(found["numbers"]["again"]["layers"]) == ["0", "1", "embedding", "head"]


def left_by(path: str, factors: dict[int, float]) -> list[str]:
    """Return the names of the bundles of a run whose losses in these steps are multiplied by these factors."""
    trainer = Trainer(build(load_config(path)))
    forward = trainer.engine.forward
    trainer.engine.forward = lambda *how: forward(*how) * factors.get(trainer.state.step + 1, 1.0)
    with contextlib.suppress(TrainingError):
        trainer.train()
    return sorted(folder.name for folder in trainer.run.files.folder.spikes.iterdir())


def test_a_run_that_began_with_another_is_replayed_from_it(tmp_path, corpus) -> None:
    saves = {"checkpoint": {"every_tokens": 1024}, "training": {"total_tokens": 2048}}
    finish("sagetrain", write_config(tmp_path / "source.yaml", corpus, tmp_path / "source", **saves))
    first, newest = sorted((tmp_path / "source/checkpoints").glob("step-*"))
    newest.rename(tmp_path / newest.name)
    training = {"init_from": str(tmp_path / "source")}
    path = config(tmp_path, corpus, optimizer={"lr": 1e30, "weight_decay": 0}, training=training)
    assert start("sagetrain", path).wait(PATIENCE) == 4
    (tmp_path / newest.name).rename(newest)  # The other run has gone on since.
    (folder,) = (tmp_path / "run/spikes").iterdir()
    shown = sagetrain("replay", folder, "--attention", "reference", "--json")
    assert failed_step.read(folder)["checkpoint"] is None and shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout, parse_constant=lambda name: pytest.fail(name))["drift"] < 1e-6
    (first / "manifest.json").unlink()
    gone = sagetrain("replay", folder)
    assert gone.returncode == 3 and "init_from.json: the weights that the run began with, " in gone.stderr


def test_a_damaged_checkpoint_is_passed_over(bad, tmp_path) -> None:
    content, whole = failed_step.read(bad / "run/spikes/step-00000015"), bad / "run/checkpoints/step-00000010"
    for step in (7, 8, 9, 10):
        shutil.copytree(whole, tmp_path / on_disk.folder_name(step))
    (tmp_path / "step-00000010/manifest.json").write_text("{")
    torn = next((tmp_path / "step-00000009").glob("*.safetensors"))
    torn.write_bytes(bytes(torn.stat().st_size))
    assert _start(tmp_path, content) == tmp_path / "step-00000008"


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_one_process_keeps_no_setting_of_many_ranks(tmp_path, corpus, monkeypatch, dtype: str) -> None:
    sharded = {"engine": "fsdp", "zero_stage": 2, "shard_size": 3, "offload": "optimizer"}
    parallel = {"tensor_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2, **sharded}
    config(tmp_path, corpus, training={"dtype": dtype}, parallel=parallel).rename(tmp_path / "config.yaml")
    monkeypatch.setattr(module, "build", lambda cfg, layers_of_tp: cfg)
    cfg = module._built(tmp_path, tmp_path / "scratch", True, 2)
    assert [finding for finding in fit(cfg, 1, 512) if finding.level == "error"] == []


def test_one_process_has_the_same_layers_in_8_bits_as_ranks(tmp_path, corpus) -> None:
    """Only gate_up has 2,000 weights on a rank of two, but three layers do in one process. The run comes to 8 bits
    after the checkpoint."""
    linear = {"precision": "fp8", "keep_layers_below": 2000, "keep_first_fraction": 0.8}
    sections = {"attention": {"backend": "sdpa"}, "linear": linear}
    spoiled_corpus = spoiled(corpus, tmp_path / "corpus", SAMPLES)
    parallel, training = {"tensor_parallel_size": 2}, {"total_tokens": 15 * 256}
    finish("ranks", config(tmp_path, spoiled_corpus, parallel=parallel, training=training, **sections))
    (folder,) = (tmp_path / "run/spikes").iterdir()
    shown = sagetrain("replay", folder, "--attention", "reference", "--json")
    said = "linear layers fp8 rowwise in all blocks, layers of 2,000 weights and more (gate_up)"
    assert f"{said}, by the sizes at tensor_parallel_size 2 in training and 1 here (" in shown.stderr
    assert "a rank's sizes decide" not in shown.stderr  # The layers are the same, so nothing is said.
    numbers = json.loads(shown.stdout)["numbers"]
    assert numbers["again"]["grad_norm"] == pytest.approx(numbers["recorded"]["grad_norm"], rel=1e-5)


@pytest.mark.parametrize(
    ("policy", "factors", "steps"),
    [
        ("stop", {11: 1e4, 12: math.nan}, (11, 12)),  # The step that ends the run leaves a bundle too.
        ("skip", {11: 1e4, 12: 1e4}, (11, 12)),
        ("stop", {11: 1e4, 12: 2e4, 14: 1e4}, (11, 14)),  # The first two steps are one spike.
    ],
)
def test_every_step_left_out_leaves_a_bundle(tmp_path, corpus, policy, factors, steps) -> None:
    stability = {"spikes": {**SPIKES, "policy": policy}}
    short = {"attention": {"backend": "sdpa"}, "training": {"total_tokens": 15 * 256}}
    path = config(tmp_path, corpus, **short, stability=stability)
    (names,) = run_distributed(left_by, 1, str(path), factors)
    assert names == [on_disk.folder_name(step) for step in steps]


def test_the_replay_passes_a_step_in_which_no_token_counts(monkeypatch) -> None:
    """The loss of such a step is 0."""
    ledger = Ledger("order")
    ledger.add(0, 4), ledger.add(4, 4)
    # Earlier versions kept the attention of steps, too.
    rows = [{"step": 1, "loss": 0.0, "attention": ["sage fine"]}, {"step": 2, "loss": 2.0}]
    content = {"steps_between": rows, "ledger": asdict(ledger)}
    losses = iter((0.0, 2.1))
    step = lambda *how: StepResult({"train/loss": next(losses)}, True, False, 0, 1.0)  # noqa: E731
    monkeypatch.setattr("sagetrain.inference.replay._step", step)
    spikes = SimpleNamespace(judge=lambda metrics, tokens: Verdict())
    controllers = SimpleNamespace(spikes=spikes, ask=lambda *what: [])
    resumed = SimpleNamespace(state=TrainState(ledger=Ledger("order")))
    run = SimpleNamespace(resumed=resumed, cfg=tiny.config(1), controllers=controllers)
    assert _go_there(run, content) == pytest.approx(0.05)


# -- a fault of the quantization --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Faulty(Sage):
    """INT8 attention with a fault: its backward pass takes a wrong scale where a document begins at one certain
    place."""

    normalizes = False  # The fault is in the call that gets normalized q and k.

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layout: TokenLayout) -> Tensor:
        o = super().__call__(q, k, v, layout)
        return o + 300 * (o - o.detach()) if 2 * 32 + MIDDLE in layout.cu_seqlens.tolist() else o


def make_faulty() -> None:
    real = selection.attention_function
    selection.attention_function = lambda backend, attention, device: (
        Faulty("fine") if backend == "sage" else real(backend, attention, device)
    )


def train(path: str) -> bool:
    make_faulty()
    return Trainer(build(load_config(path))).train()


def replayed(folder: str, faulty: bool) -> dict:
    if faulty:
        make_faulty()
    return asdict(replay(Path(folder), "sdpa"))


def test_a_fault_of_the_quantization_is_blamed_on_precision(tmp_path, corpus) -> None:
    short = {"attention": {"backend": "sage", "recipe": "fine"}, "training": {"total_tokens": 16 * 256}}
    where = spoiled(corpus, tmp_path / "corpus", (), begins=SAMPLES[2])  # The sample is the third of a micro-batch.
    path = config(tmp_path, where, **short)
    assert run_distributed(train, 1, str(path)) == [True]
    (folder,) = (tmp_path / "run/spikes").iterdir()
    (found,) = run_distributed(replayed, 1, str(folder), True)
    assert found["cause"] == "precision" and found["step"] == STEP
    again, recorded, asked = (found["numbers"][way] for way in ("again", "recorded", "asked"))
    assert again["loss"] == pytest.approx(recorded["loss"], rel=1e-5)
    assert again["layers"] == pytest.approx(recorded["layers"], rel=1e-3)
    assert asked["grad_norm"] < found["limits"]["grad_norm"] < again["grad_norm"]
    assert found["drift"] < 1e-5
    pair = run_distributed(replayed, 2, str(folder), True)
    assert [each["cause"] for each in pair] == ["precision"] * 2
    assert pair[0]["numbers"]["again"]["loss"] == pytest.approx(recorded["loss"], rel=1e-2)
    (healthy,) = run_distributed(replayed, 1, str(folder), False)
    assert healthy["cause"] == "hardware"
    assert torch.tensor(healthy["numbers"]["again"]["loss"]) < found["limits"]["loss"]


def make_linear_faulty() -> None:
    """Make gradients of weights in 8 bits 300 times too large in the step of these samples."""
    where, step, gradient = SimpleNamespace(fault=False), BaseEngine.step, LowBit._weight_gradient

    def watched(self: BaseEngine, batches: Iterable[Batch], *rest: object, **how: object) -> StepResult:
        def each() -> Iterator[Batch]:
            for batch in batches:
                where.fault = batch.sample_ids[0] in SAMPLES
                yield batch

        return step(self, each(), *rest, **how)

    BaseEngine.step = watched
    LowBit._weight_gradient = lambda self, *what: gradient(self, *what) * (300 if where.fault else 1)


def train_with_faulty_linear_layers(path: str) -> bool:
    make_linear_faulty()
    return Trainer(build(load_config(path))).train()


def replayed_with_faulty_linear_layers(folder: str) -> list[dict]:
    make_linear_faulty()
    ways = ("sdpa", False), ("reference", False), ("sdpa", True)
    return [asdict(replay(Path(folder), backend, linear_in_16_bits=also)) for backend, also in ways]


def test_linear_layers_in_8_bits_are_told_from_the_data(tmp_path, corpus) -> None:
    short = {"attention": {"backend": "sdpa"}, "linear": {"precision": "fp8"}, "training": {"total_tokens": 15 * 256}}
    path = config(tmp_path, corpus, **short)
    assert run_distributed(train_with_faulty_linear_layers, 1, str(path)) == [True]
    (folder,) = (tmp_path / "run/spikes").iterdir()
    ((first, other, second),) = run_distributed(replayed_with_faulty_linear_layers, 1, str(folder))
    assert first["cause"] == "open" and first["attention"]["asked"] == "sdpa"  # sdpa is the run's own attention.
    assert other["cause"] == "data or linear layers"
    assert second["cause"] == "precision" and second["attention"]["asked"] == "sdpa and linear layers in 16 bits"
    again, asked = second["numbers"]["again"], second["numbers"]["asked"]
    assert asked["grad_norm"] < second["limits"]["grad_norm"] < again["grad_norm"]
    assert again["loss"] == pytest.approx(second["numbers"]["recorded"]["loss"], rel=1e-6) and second["drift"] < 1e-6
    shown = sagetrain("replay", folder, "--attention", "reference")  # Without the fault, 8 bits do nothing wrong.
    assert "hardware: it does not come back" in shown.stdout
    shown = sagetrain("replay", folder, "--linear", "fp8")
    assert shown.returncode == 2 and "'recorded', 'bf16'" in shown.stderr
