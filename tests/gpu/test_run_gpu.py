"""A run on a GPU learns, saves, and goes on from its checkpoint, under each engine, compiled and not."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import yaml

import sagetrain
from on_gpu import needs_gpu, world_of_one  # noqa: F401
from sagetrain.corpus.token_writer import TokenFileWriter

pytestmark = [*needs_gpu(), pytest.mark.usefixtures("world_of_one")]
SEQ, VOCAB, STEP = 256, 512, 8 * 256


def write_config(folder: Path, engine: str, compiled: str, recipe: str) -> Path:
    tree = {
        "model": {
            "num_layers": 2,
            "hidden_size": 128,
            "ffn_hidden_size": 256,
            "num_attention_heads": 2,
            "vocab_size": VOCAB,
        },
        "attention": {"backend": "sage", "recipe": recipe},
        "linear": {"precision": "bf16"},  # `auto` would compile and time every layer first, as it does with recipes.
        "parallel": {"engine": engine},
        "data": {"train": [{"path": "none"}], "seq_length": SEQ, "micro_batch_size": 4},
        "tokens_per_step": {"schedule": "constant", "tokens": STEP},
        "optimizer": {"lr": 3e-3},
        "lr_schedule": {"shape": "constant"},
        "training": {"run_dir": str(folder / "run"), "total_tokens": 20 * STEP, "dtype": "bf16", "compile": compiled},
        "logging": {"every_steps": 1, "tensorboard": False},
    }
    path = folder / f"{engine}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def random_walk(index: int) -> list[int]:
    """Return a sequence that is easy to learn."""
    return (np.cumsum(np.random.default_rng(index).integers(0, 3, size=SEQ + 1)) % VOCAB).tolist()


class Losses(sagetrain.Callback):
    def __init__(self) -> None:
        self.of_steps: dict[int, float] = {}

    def on_row(self, position: sagetrain.Position, values: Mapping[str, float]) -> None:
        if "train/loss" in values:
            self.of_steps[position.step] = values["train/loss"]


@pytest.mark.parametrize(("engine", "compiled", "recipe"), [
    ("fsdp", "on", "scores"), ("deepspeed", "off", "scores"),
    pytest.param("deepspeed", "on", "auto", marks=pytest.mark.long),
])  # fmt: skip
def test_a_run_learns_saves_and_goes_on(engine: str, compiled: str, recipe: str, tmp_path: Path) -> None:
    config, losses, said = write_config(tmp_path, engine, compiled, recipe), Losses(), []
    assert sagetrain.train(config, tokens=random_walk, callbacks=[losses]).finished
    longer = {"training.total_tokens": 24 * STEP}
    assert sagetrain.train(config, longer, tokens=random_walk, callbacks=[losses], say=said.append).finished
    assert any("resumed from step-" in line for line in said)
    assert sorted(losses.of_steps) == list(range(1, 25))
    first, *_, before, _, _, _, after = losses.of_steps.values()
    assert before < first - 1 and after < before + 0.2


@pytest.mark.long
def test_a_part_with_longer_sequences_is_compiled_anew(tmp_path: Path) -> None:
    """The second part begins in this process, and once more in a run that is continued at the border."""
    config, writer = write_config(tmp_path, "fsdp", "on", "scores"), TokenFileWriter(tmp_path / "train").begin(VOCAB)
    writer.add(np.concatenate([random_walk(index) for index in range(128)]).astype(np.uint16), np.full(128, SEQ + 1))
    writer.finish()
    writer.publish({})
    (tmp_path / "train.json").unlink()  # Files from elsewhere need no tokenizer.
    short = {"from_tokens": 0, "tokens": STEP, "seq_length": SEQ, "micro_batch_size": 4}
    scaling = {"type": "yarn", "factor": 2.0, "original_seq_length": SEQ}
    longer = {
        "from_tokens": 6 * STEP,
        "tokens": STEP,
        "seq_length": 2 * SEQ,
        "micro_batch_size": 2,
        "rope_scaling": scaling,
    }
    changes = {
        "tokens_per_step": {"schedule": "stages", "stages": [short, longer]},
        "data.train.0.path": str(tmp_path / "train"),
        "training.total_tokens": 10 * STEP,
        "checkpoint.every_tokens": 2 * STEP,
        "checkpoint.keep_last": 9,
    }
    losses, again = Losses(), Losses()
    assert sagetrain.train(config, changes, callbacks=[losses]).finished
    assert list(losses.of_steps) == list(range(1, 11))
    assert (tmp_path / "run/log.txt").read_text().count("  micro-steps ") == 2
    for step in (8, 10):
        shutil.rmtree(tmp_path / f"run/checkpoints/step-{step:08d}")
    assert sagetrain.train(config, changes, callbacks=[again]).finished
    expected = [losses.of_steps[step] for step in range(7, 11)]
    assert [*again.of_steps.values()] == pytest.approx(expected, abs=0.02)
