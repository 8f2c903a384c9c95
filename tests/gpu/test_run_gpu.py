"""A run on a GPU learns, saves, and goes on from its checkpoint, under each engine, compiled and not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import yaml

import sagetrain
from on_gpu import needs_gpu, world_of_one  # noqa: F401

pytestmark = [*needs_gpu(), pytest.mark.usefixtures("world_of_one")]
SEQ, VOCAB, STEP = 256, 512, 8 * 256


def write_config(folder: Path, engine: str, compiled: str) -> Path:
    tree = {
        "model": {
            "num_layers": 2,
            "hidden_size": 128,
            "ffn_hidden_size": 256,
            "num_attention_heads": 2,
            "vocab_size": VOCAB,
        },
        "attention": {"backend": "sage"},
        "linear": {"precision": "bf16"},  # `auto` would compile and time every layer first.
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


@pytest.mark.parametrize(("engine", "compiled"), [
    ("fsdp", "on"), ("deepspeed", "off"), pytest.param("deepspeed", "on", marks=pytest.mark.long)
])  # fmt: skip
def test_a_run_learns_saves_and_goes_on(engine: str, compiled: str, tmp_path: Path) -> None:
    config, losses, said = write_config(tmp_path, engine, compiled), Losses(), []
    assert sagetrain.train(config, tokens=random_walk, callbacks=[losses]).finished
    longer = {"training.total_tokens": 24 * STEP}
    assert sagetrain.train(config, longer, tokens=random_walk, callbacks=[losses], say=said.append).finished
    assert any("resumed from step-" in line for line in said)
    assert sorted(losses.of_steps) == list(range(1, 25))
    first, *_, before, _, _, _, after = losses.of_steps.values()
    assert before < first - 1 and after < before + 0.2
