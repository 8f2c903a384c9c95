"""Train the tiny model in this process, which is one of the run's ranks."""

from collections.abc import Callable
from typing import Any

import tiny
from sagetrain.training.build_run import build
from sagetrain.training.trainer import Trainer


def make_trainer(
    corpus: str, run_dir: str, steps: float, stage: int = 1, hears: Callable[[str], None] | None = None, **sections: Any
) -> Trainer:
    """Build a trainer of so many steps of four sequences; `sections` are those of tiny.config."""
    data = {"train": [{"path": f"{corpus}/train"}], **sections.pop("data", {})}
    training = {"run_dir": run_dir, "total_tokens": int(steps * 4 * tiny.SEQ), **sections.pop("training", {})}
    return Trainer(build(tiny.config(stage, data=data, training=training, **sections), hears=hears))
