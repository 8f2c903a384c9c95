"""A layout of benchmarks/layouts.py: what its name stands for, and the run that measures it."""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from sagetrain.cluster.launcher import free_port
from sagetrain.config.schema import RunConfig
from sagetrain.config.tokens_per_step import tokens_per_step
from sagetrain.storage.local import read_rows

ROOT = Path(__file__).resolve().parent.parent
WHOLE_SEQUENCES = "data.document_attention=false", "data.document_positions=false"
WARM_UP = 2  # These steps compile and fill caches.
KEYS = {
    "tp": "tensor_parallel_size",
    "cp": "context_parallel_size",
    "pp": "pipeline_parallel_size",
    "v": "pipeline_chunks",
    "z": "zero_stage",
}
FLAGS = {
    "sp": "parallel.sequence_parallel=true",
    "selective": "training.activation_checkpointing=selective",
    "full": "training.activation_checkpointing=full",
    "attention": "training.activation_checkpointing=attention",
    "away": "training.activation_offload=true",
    "halves": "parallel.tensor_parallel_overlap=on",
    "whole": "parallel.tensor_parallel_overlap=off",
    "g16": "parallel.gradient_reduction=bf16",
    "fsdp": "parallel.engine=fsdp",
    "deepspeed": "parallel.engine=deepspeed",
    "moments16": "optimizer.moments=bf16",
    "offload": "parallel.engine=fsdp parallel.offload=optimizer",
    "alloffload": "parallel.engine=fsdp parallel.offload=all",
}
"""The settings of the parts of a layout's name that are on or off."""
ARITHMETIC = {
    "bf16": "linear.precision=bf16",
    "int8": "linear.precision=int8",
    "fp8": "linear.precision=fp8",
    "sdpa": "attention.backend=sdpa",
    "scores": "attention.backend=sage attention.recipe=scores",
    "noqk": "attention.qk_norm=none",
}
"""The settings of the parts that say what is computed. Layouts that share them are compared with each other."""
NEAR = -0.1, 1.5
"""Bounds of the first loss less the logarithm of the vocabulary's size. Random weights give logits of some variance,
and half of it is added to the loss."""


@dataclass
class Layout:
    """One row of the table, and the run that measures it."""

    name: str
    sizes: dict[str, int] = field(default_factory=lambda: {"tp": 1, "dp": 1, "cp": 1, "pp": 1, "v": 1, "z": 1})
    flags: list[str] = field(default_factory=list)
    gpus: list[str] = field(default_factory=list)
    process: subprocess.Popen | None = None
    started: float = 0.0
    error: str = "not measured"
    predicted: tuple[float | None, float | None] = (None, None)
    """Tokens/s and GiB that `plan` predicts; None where it predicts nothing."""
    rate: float = 0.0
    mfu: tuple[float, float] = (0.0, 0.0)
    """MFU of documents, and MFU of whole sequences."""
    memory: float = 0.0
    losses: list[float] = field(default_factory=list)
    """The losses of all steps. Their gradient norms are in `norms`, and their tokens/s in `rates`. Those of the warm-up
    come first."""
    norms: list[float | None] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    seconds: float = 0.0
    """Time that the run took, start included."""

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Parse the name of a layout: `tp2-dp2-z3-sp`."""
        layout = cls(text)
        for part in text.split("-"):
            match = re.fullmatch(r"(tp|dp|cp|pp|v|z|m)(\d+)", part)
            if match:
                layout.sizes[match[1]] = int(match[2])
            elif part in FLAGS or part in ARITHMETIC:
                layout.flags.append(part)
            else:
                names = f"tpN, dpN, cpN, ppN, vN, zN, mN, {', '.join((*FLAGS, *ARITHMETIC))}"
                raise argparse.ArgumentTypeError(f"{text!r}: {part!r} is not one of {names}")
        return layout

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes[name] for name in ("tp", "dp", "cp", "pp"))

    @property
    def arithmetic(self) -> frozenset[str]:
        return frozenset(self.flags) & ARITHMETIC.keys()

    def settings(self, cfg: RunConfig, folder: Path, accumulation: int, tokens: int | None = None) -> list[str]:
        """Return the overrides of the layout's run. `tokens` are those of a step, in place of an accumulation."""
        micro_batch = self.sizes.get("m", cfg.data.micro_batch_size)
        once = micro_batch * cfg.data.seq_length * self.sizes["dp"]
        size = tokens or once * accumulation
        warm_up = min(2 * once, size)
        return [
            *(f"parallel.{key}={self.sizes[name]}" for name, key in KEYS.items()),
            *([] if "sp" in self.flags else ["parallel.sequence_parallel=false"]),
            *(setting for name in self.flags for setting in {**FLAGS, **ARITHMETIC}[name].split()),
            f"data.micro_batch_size={micro_batch}",
            f"tokens_per_step={{schedule: stages, stages: [{{from_tokens: 0, tokens: {warm_up}}}, "
            f"{{from_tokens: {WARM_UP * warm_up}, tokens: {size}}}]}}",
            f"training.run_dir={folder}",
            "data.valid=[]",
            f"parallel.world_size={self.world_size}",
            "logging.every_steps=1",
        ]

    def start(self, gpus: list[str], config: str, settings: list[str], folder: Path) -> None:
        """Start the layout's run on these GPUs."""
        self.gpus, self.started = gpus, time.monotonic()
        folder.mkdir(parents=True)
        # The option --include is not used, because it counts all GPUs of the host, also those that CUDA_VISIBLE_DEVICES
        # leaves to others. A hostfile of the cluster (/job/hostfile is read unless another one is named) does not apply
        # here.
        where, environment = ["--hostfile", os.devnull], {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        if not torch.cuda.is_available():
            where, environment = ["--num_accelerators", str(len(gpus))], None
        program = [str(ROOT / "launch/train.py"), "--config", config]
        command = [deepspeed(), *where, "--master_port", str(free_port()), *program]
        with (folder / "log.txt").open("w") as log:
            self.process = subprocess.Popen(
                [*command, *settings], env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def finished(self, cfg: RunConfig, vocab_size: int, steps: int, limit: float) -> bool:
        """Whether the layout's run has its steps, or ended without them, or ran past the limit. The figures are taken
        then, and the run is ended."""
        folder = Path(cfg.training.run_dir)
        found, self.seconds = rows(folder), time.monotonic() - self.started
        late = self.seconds > limit
        if len(found) < WARM_UP + steps and self.process.poll() is None and not late:
            return False
        self.kill()
        self.losses = [row["train/loss"] for row in found]
        self.norms = [row.get("train/grad_norm") for row in found]
        self.rates = [row["perf/tokens_per_second"] for row in found]
        self.error = self._wrong(found, cfg, vocab_size)
        if self.error:
            return True
        if len(found) < WARM_UP + steps:
            seen = f"{len(found)} of {WARM_UP + steps} steps in {limit:.0f} s"
            self.error = seen if late else _last_words(folder / "log.txt")
            return True
        timed = found[WARM_UP : WARM_UP + steps]
        self.rate = statistics.median(row["perf/tokens_per_second"] for row in timed)
        names = "perf/mfu", "perf/mfu_full_attention"
        self.mfu = tuple(statistics.median(row.get(name) or 0.0 for row in timed) for name in names)
        self.memory = timed[-1]["perf/memory_gib"]
        return True

    def _wrong(self, found: list[dict], cfg: RunConfig, vocab_size: int) -> str:
        """Return the reason why these steps are not timed, or an empty string."""
        for row in found:
            size = tokens_per_step(cfg.tokens_per_step, row["tokens"] - row["train/tokens_per_step"])
            if row["train/tokens_per_step"] != size:
                return f"wrong: step {row['step']} had {row['train/tokens_per_step']:,} tokens, not {size:,}"
            if not math.isfinite(row["train/loss"]):
                return f"wrong: the loss of step {row['step']} is {row['train/loss']}"
        above = found[0]["train/loss"] - math.log(vocab_size) if found else 0.0
        if cfg.training.init_from is None and not NEAR[0] <= above <= NEAR[1]:
            return f"wrong: the first loss is {found[0]['train/loss']:.3f}, not near {math.log(vocab_size):.3f}"
        return ""

    def kill(self) -> None:
        """End the layout's run at once, because it would save a checkpoint that nobody wants."""
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def _last_words(log: Path) -> str:
    """Return the line of a log that says why its run ended."""
    lines = log.read_text().splitlines()
    for words in ("OutOfMemory", "out of memory"), ("Error", "error"), ("",):
        if said := [line for line in lines if any(word in line for word in words)]:
            return said[-1].strip()[:150]
    return "ended without a word"


def deepspeed() -> str:
    """Return the launcher on the PATH, or else the one that is installed beside this Python."""
    return shutil.which("deepspeed") or str(Path(sys.executable).with_name("deepspeed"))


def rows(folder: Path) -> list[dict]:
    """Return the steps that a run has reported."""
    return [row for row in read_rows(folder / "metrics.jsonl") if "train/loss" in row]
