"""Train a Llama 3 of 338M weights by torchtitan's own trainer on one GPU, on the text and in the order of runs.py, and
measure bits per byte of held-out text on the way.

    TEN=1 LARGE=1 PYTHONPATH=.:kernels:benchmarks:tests/support:results/muon-loss torchrun --nproc-per-node 1 \\
        results/equal-time/titan.py TEXT OUT --seconds 480

torchtitan 0.2.2 trains: its model, loop, loss, optimizer and schedule. torch 2.11 lacks what version 0.3.0 imports.
Through torchtitan's registry come the shape, a loader of our tokens and a validator, which keeps the time as well.
Settings are those of its debug_model.toml (its registry has no Llama 3 between that one and 8B), which are the defaults
of its JobConfig: AdamW 8e-4, warm-up over a fifth of the steps, a linear fall to 0 over the rest. Others than there:
torch.compile, no recomputation, 65,536 tokens a step, as llama3_8b.toml has on eight GPUs. `--float8` is torchtitan's
own conversion by torchao, of the layers that torchao's filter takes.

torchtitan's rates follow the steps, so a first run of 30 steps measures how many of them --seconds take. The clock
begins behind two steps, which compile, and stands still while the held-out loss is measured. No test runs this script,
and the page names its commit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from search import LENGTH, MODEL, TOKENS, VOCAB, batch, text_of
from torch import Tensor, nn
from torchtitan.components.validate import BaseValidator
from torchtitan.config import JobConfig
from torchtitan.models.llama3 import TransformerModelArgs
from torchtitan.models.llama3 import get_train_spec as llama3
from torchtitan.protocols.train_spec import register_train_spec
from torchtitan.tools import utils
from torchtitan.tools.logging import init_logger
from torchtitan.train import Trainer

from runs import BYTES_PER_TOKEN, MICRO, POINTS, VALID, places_of

NAME, COMPILES, FIRST = "sagetrain", 2, 30
"""The name under which torchtitan finds the model, the steps before the clock begins, and those of the first run."""


class Loader:
    """Micro-batches of the text, in the order of runs.py."""

    def __init__(self, text: Tensor, seed: int) -> None:
        self.text, self.seed = text, seed

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for places in places_of(len(self.text) // LENGTH - 1, self.seed):
            for part in places.split(MICRO):
                given = batch(self.text, part)
                yield {"input": given.tokens}, given.labels

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("a run is not resumed")


class Held(BaseValidator):
    """torchtitan asks it behind each step whether to validate, so it keeps the time as well."""

    def __init__(self, asked: argparse.Namespace, job_config: JobConfig, validation_context: Any, maybe_enable_amp: Any,
                 loss_fn: Any, **_: Any) -> None:  # fmt: skip
        self.asked, self.steps, self.rate = asked, job_config.training.steps, 0.0
        self.context, self.amp, self.loss_fn = validation_context, maybe_enable_amp, loss_fn
        self.text = text_of(asked.text, "valid")
        self.began, self.done = math.inf, 0
        self.sync = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None

    def should_validate(self, step: int) -> bool:
        if step == COMPILES:
            self.sync()
            self.began = time.monotonic()
        return step == self.steps or time.monotonic() - self.began >= self.asked.seconds * (self.done + 1) / POINTS

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        self.sync()
        stopped = time.monotonic()
        passed, (model,), total = stopped - self.began, model_parts, 0.0
        self.rate = (step - COMPILES) * TOKENS / passed
        for places in (torch.arange(VALID) * LENGTH).split(MICRO):
            given = batch(self.text, places)
            tokens, labels = (t.to(utils.device_type) for t in (given.tokens, given.labels))
            with self.context(), self.amp:
                total += float(self.loss_fn(model(tokens), labels).detach())  # As in runs.py.
        bits = [round(passed, 2), round(total / VALID / LENGTH / math.log(2) / BYTES_PER_TOKEN, 5)]
        row = {"steps": step, "of": self.steps, "tokens": step * TOKENS, "rate": round(self.rate), "bits": bits}
        with (self.asked.out / f"{self.asked.name}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)
        self.done += 1
        self.sync()
        self.began += time.monotonic() - stopped


def job(asked: argparse.Namespace, steps: int) -> JobConfig:
    settings: dict[str, Any] = {
        "job.dump_folder": str(asked.out / "titan"),
        "model.name": NAME,
        "model.flavor": NAME,
        "metrics.log_freq": 10,
        "metrics.disable_color_printing": True,
        "lr_scheduler.warmup_steps": steps // 5,
        "lr_scheduler.decay_ratio": 0.8,
        "training.local_batch_size": MICRO,
        "training.global_batch_size": TOKENS // LENGTH,
        "training.seq_len": LENGTH,
        "training.steps": steps,
        "activation_checkpoint.mode": "none",
        "compile.enable": torch.cuda.is_available(),
        "validation.enable": True,
        "debug.seed": asked.seed,
    }
    if asked.float8:
        settings |= {
            "model.converters": ["quantize.linear.float8"],
            "quantize.linear.float8.filter_fqns": ["output", "auto_filter_small_kn"],
            "quantize.linear.float8.recipe_name": "tensorwise",
        }
    made = JobConfig()
    for name, value in settings.items():
        *sections, key = name.split(".")
        section: Any = made
        for part in sections:
            section = getattr(section, part)
        getattr(section, key)  # This raises an error for a setting that this torchtitan lacks.
        setattr(section, key, value)
    return made


def trained(asked: argparse.Namespace, steps: int) -> float:
    """Train from the beginning. Return the tokens per second."""
    trainer = Trainer(job(asked, steps))
    try:
        trainer.train()
        return trainer.validator.rate
    finally:
        trainer.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--name", default="titan", help="of the file of rows")
    parser.add_argument("--seconds", type=float, default=480.0, help="of the run")
    parser.add_argument("--total", type=float, help="seconds of all: the run is made shorter to fit")
    parser.add_argument("--steps", type=int, help="of the run, where its rate is known")
    parser.add_argument("--float8", action="store_true", help="in the linear layers that torchao's filter takes")
    parser.add_argument("--seed", type=int, default=0)
    asked, born = parser.parse_args(), time.monotonic()
    asked.out.mkdir(parents=True, exist_ok=True)
    inner, width = MODEL["ffn_hidden_size"], MODEL["hidden_size"]
    shape = TransformerModelArgs(
        dim=width, n_layers=MODEL["num_layers"], n_heads=MODEL["num_attention_heads"], vocab_size=VOCAB,
        # torchtitan rounds a multiple of the width up to one of multiple_of: half of the inner width, to all of it.
        multiple_of=inner, ffn_dim_multiplier=inner / (2 * 8 * width / 3), rope_theta=10000,
    )  # fmt: skip
    spec = dataclasses.replace(
        llama3(),
        model_args={NAME: shape},
        build_tokenizer_fn=None,
        build_dataloader_fn=lambda **_: Loader(text_of(asked.text, "train"), asked.seed),
        build_validator_fn=lambda **given: Held(asked, **given),
        state_dict_adapter=None,
    )
    register_train_spec(NAME, spec)
    init_logger()
    if asked.steps is None:
        rate = trained(asked, FIRST)
        if asked.total:
            asked.seconds = min(asked.seconds, asked.total - (time.monotonic() - born) - 15)
        asked.steps = COMPILES + round(asked.seconds * rate / TOKENS)
    trained(asked, asked.steps)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
