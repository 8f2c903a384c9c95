"""Train a few steps at each of several layouts on this host's GPUs and print tokens/s, scaling, MFU and memory.

    python3 benchmarks/layouts.py --config configs/1b.yaml --layouts tp1,dp4,dp4-z3,tp4,tp4-sp \\
        data.train.0.path=data/corpus/train data.micro_batch_size=8

A layout names its sizes: tp (tensor parallel), dp (data parallel), cp (context parallel), z (ZeRO stage, 1 by default)
and sp (sequence parallel). A size that is left out is 1. Under tensor parallelism a micro-batch goes in `halves` or
`whole`, or else as parallel.tensor_parallel_overlap: auto decides. Gradients travel in bf16 with g16, beside backward
with overlap (ZeRO 2), not beside it with sync (ZeRO 1 and 3), and at ZeRO 2 by reduces to their owners with owners
(docs/gradients.md): dp2,dp2-sync,dp2-g16,dp2-z2,dp2-z2-overlap,dp2-z2-owners,dp2-z3,dp2-z3-sync. With fsdp torch's
FSDP2 is the engine: dp2-fsdp,dp2-z3-fsdp.

Each layout is a real run of launch/train.py through the deepspeed launcher with `--accumulation` micro-steps per step.
Runs that leave GPUs free go side by side. Nothing is saved: a run is killed when it has enough steps. Scaling is
tokens/s per GPU against the first layout. MFU is perf/mfu, which counts attention inside documents, and MFU of whole
sequences is perf/mfu_full_attention. Exit code 1: a layout failed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from sagetrain.cluster.rendezvous import free_port
from sagetrain.config.arithmetic import padded_vocab_size
from sagetrain.config.check import check
from sagetrain.config.errors import ConfigError
from sagetrain.config.load import load_config
from sagetrain.config.schema import RunConfig
from sagetrain.data.tokenizer import Tokenizer, find_tokenizer
from sagetrain.hardware import of_device
from sagetrain.model.accounting import memory_per_rank, total_bytes
from sagetrain.planning.layouts import fastest_linear
from sagetrain.planning.performance import predict
from sagetrain.planning.plan import document_span
from sagetrain.report.read import read_rows

ROOT = Path(__file__).resolve().parent.parent
WARM_UP = 2  # These steps compile and fill caches.
KEYS = {"tp": "tensor_parallel_size", "cp": "context_parallel_size", "z": "zero_stage"}
FLAGS = {
    "sp": "parallel.sequence_parallel=true",
    "halves": "parallel.tensor_parallel_overlap=on",
    "whole": "parallel.tensor_parallel_overlap=off",
    "g16": "parallel.gradient_reduction=bf16",
    "overlap": "deepspeed.zero_optimization.overlap_comm=true",
    "sync": "deepspeed.zero_optimization.overlap_comm=false",
    "fsdp": "parallel.engine=fsdp",
    "owners": "deepspeed.zero_optimization.use_multi_rank_bucket_allreduce=false",
}
"""The settings of the parts of a layout's name that are on or off."""


@dataclass
class Layout:
    """One row of the table, and the run that measures it."""

    name: str
    sizes: dict[str, int] = field(default_factory=lambda: {"tp": 1, "dp": 1, "cp": 1, "z": 1})
    flags: list[str] = field(default_factory=list)
    gpus: list[str] = field(default_factory=list)
    process: subprocess.Popen | None = None
    error: str = ""
    rate: float = 0.0
    mfu: tuple[float, float] = (0.0, 0.0)
    """MFU of documents, and MFU of whole sequences."""
    memory: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Parse the name of a layout: `tp2-dp2-z3-sp`."""
        layout = cls(text)
        for part in text.split("-"):
            match = re.fullmatch(r"(tp|dp|cp|z)(\d+)", part)
            if match:
                layout.sizes[match[1]] = int(match[2])
            elif part in FLAGS:
                layout.flags.append(part)
            else:
                names = f"tpN, dpN, cpN, zN, {', '.join(FLAGS)}"
                raise argparse.ArgumentTypeError(f"{text!r}: {part!r} is not one of {names}")
        return layout

    @property
    def world_size(self) -> int:
        return self.sizes["tp"] * self.sizes["dp"] * self.sizes["cp"]

    def settings(self, cfg: RunConfig, folder: Path, accumulation: int) -> list[str]:
        """Return the overrides of the layout's run."""
        size = cfg.data.micro_batch_size * cfg.data.seq_length * self.sizes["dp"] * accumulation
        return [
            *(f"parallel.{key}={self.sizes[name]}" for name, key in KEYS.items()),
            *([] if "sp" in self.flags else ["parallel.sequence_parallel=false"]),
            *(FLAGS[name] for name in self.flags),
            f"tokens_per_step={{schedule: constant, tokens: {size}}}",
            f"training.run_dir={folder}",
            "data.valid=[]",
            f"parallel.world_size={self.world_size}",
            "logging.every_steps=1",
        ]

    def start(self, gpus: list[str], config: str, settings: list[str], folder: Path) -> None:
        """Start the layout's run on these GPUs."""
        self.gpus = gpus
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

    def finished(self, folder: Path, steps: int) -> bool:
        """Whether the layout's run has its steps, or ended without them. The figures are taken then, and the run is
        ended."""
        found = rows(folder)
        if len(found) < WARM_UP + steps and self.process.poll() is None:
            return False
        self.kill()
        if len(found) < WARM_UP + steps:
            text = (folder / "log.txt").read_text()
            said = [line for line in text.splitlines() if "Error" in line or "error" in line] or text.splitlines()
            self.error = said[-1].strip()[:150] if said else "ended without a word"
            return True
        timed = found[WARM_UP : WARM_UP + steps]
        self.rate = statistics.median(row["perf/tokens_per_second"] for row in timed)
        names = "perf/mfu", "perf/mfu_full_attention"
        self.mfu = tuple(statistics.median(row.get(name, 0.0) for row in timed) for name in names)
        self.memory = timed[-1]["perf/memory_gib"]
        return True

    def kill(self) -> None:
        """End the layout's run at once, because it would save a checkpoint that nobody wants."""
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def deepspeed() -> str:
    """Return the launcher on the PATH, or else the one that is installed beside this Python."""
    return shutil.which("deepspeed") or str(Path(sys.executable).with_name("deepspeed"))


def parse_layouts(text: str) -> list[Layout]:
    """Parse a list of layouts: `tp1,dp4-z3`."""
    names = text.split(",")
    if len({*names}) < len(names):
        raise argparse.ArgumentTypeError(f"{text!r} names a layout twice; name each once")
    return [Layout.parse(name) for name in names]


def devices() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them, or cores if there are none (to try
    the benchmark out)."""
    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[:count] if count else []
    return named if named and named[0] else [str(i) for i in range(count or os.cpu_count() or 1)]


def rows(folder: Path) -> list[dict]:
    """Return the steps that a run has reported."""
    return [row for row in read_rows(folder / "metrics.jsonl") if "train/loss" in row]


def measure(layouts: list[Layout], settings: dict[str, list[str]], arguments: argparse.Namespace) -> None:
    """Run all layouts in the order given, as many at a time as there are GPUs for."""
    free, waiting, running = devices(), list(layouts), []
    folder = Path(arguments.output)
    # This list has the signals to stop. An exception of the handler could come between a start and its note in
    # `running`.
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    try:
        while waiting or running:
            if asked:
                sys.exit("stopped by SIGTERM")
            while waiting and waiting[0].world_size <= len(free):
                layout = waiting.pop(0)
                gpus, free = free[: layout.world_size], free[layout.world_size :]
                layout.start(gpus, arguments.config, settings[layout.name], folder / layout.name)
                running.append(layout)
            for layout in [x for x in running if x.finished(folder / x.name, arguments.steps)]:
                running.remove(layout)
                free += layout.gpus
                print(f"{layout.name}: {layout.error or f'{layout.rate:,.0f} tokens/s'}", flush=True)
            time.sleep(0.5)
    finally:
        for layout in running:
            layout.kill()


def table(layouts: list[Layout], configs: dict[str, RunConfig], vocab_size: int, title: str) -> Table:
    """Build the table of results."""
    first = next((x for x in layouts if x.rate), None)
    hardware = of_device(title.rpartition(", ")[2])
    shown = Table(title=title, title_justify="left")
    rates = "tokens/s", "predicted", "per GPU", "scaling", "MFU", "of whole sequences"
    for column in ("layout", "GPUs", *rates, "memory", "predicted"):
        shown.add_column(column, justify="left" if column == "layout" else "right")
    for layout in layouts:
        if not layout.rate:
            shown.add_row(layout.name, str(layout.world_size), layout.error or "not measured")
            continue
        cfg, step = configs[layout.name], None
        if hardware:
            span = document_span(cfg.data)
            cfg = cfg.model_copy(update={"linear": fastest_linear(cfg, vocab_size, hardware, span)})
            step = predict(cfg, layout.world_size, vocab_size, hardware, span)
        predicted = total_bytes(memory_per_rank(cfg, layout.world_size, vocab_size)) / 2**30
        per_gpu = layout.rate / layout.world_size
        shown.add_row(
            layout.name,
            str(layout.world_size),
            f"{layout.rate:,.0f}",
            f"{step.tokens_per_second:,.0f}" if step else "-",
            f"{per_gpu:,.0f}",
            f"{per_gpu / (first.rate / first.world_size):.3f}",
            *(f"{share:.3f}" for share in layout.mfu),
            f"{layout.memory:.1f} GiB",
            f"{predicted:.1f} GiB",
        )
    return shown


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="YAML of the run")
    parser.add_argument("--layouts", type=parse_layouts, required=True, help="such as tp1,dp4-z3,tp2-dp2-sp")
    parser.add_argument("--steps", type=int, default=6, help=f"steps to time, after {WARM_UP} that are not")
    parser.add_argument("--accumulation", type=int, default=4, help="micro-steps of a step")
    parser.add_argument(
        "--output",
        default=f"runs/layouts/{datetime.now():%Y%m%d-%H%M%S}",
        help="folder for the runs' logs and metrics, one that holds none yet (default: runs/layouts/DATE-TIME)",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of every run")
    arguments = parser.parse_intermixed_args()
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: at least 1 is timed")
    for folder in (Path(arguments.output) / layout.name for layout in arguments.layouts):
        if folder.exists():
            parser.error(f"{folder} holds an earlier measurement; name another --output or remove it")
    largest = max(layout.world_size for layout in arguments.layouts)
    if len(devices()) < largest:
        parser.error(f"the largest layout needs {largest} GPUs, here are {len(devices())}")
    settings, configs, findings = {}, {}, []
    try:
        cfg = load_config(arguments.config, arguments.overrides)
        vocab_size = cfg.model.vocab_size or Tokenizer.load(find_tokenizer(cfg.data)).vocab_size
        for layout in arguments.layouts:
            own = layout.settings(cfg, Path(arguments.output).absolute() / layout.name, arguments.accumulation)
            settings[layout.name] = [*arguments.overrides, *own]
            configs[layout.name] = load_config(arguments.config, settings[layout.name])
            found = check(configs[layout.name], layout.world_size, vocab_size=vocab_size)
            findings += [f"{layout.name}: {finding}" for finding in found if finding.level == "error"]
    except ConfigError as error:
        sys.exit(str(error))
    if findings:
        sys.exit("\n".join(findings))
    title = f"{arguments.config}, {torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU'}"
    try:
        measure(arguments.layouts, settings, arguments)
    finally:  # This also prints what was measured before a SIGTERM.
        Console(width=120).print(table(arguments.layouts, configs, padded_vocab_size(vocab_size), title))
    if any(layout.error for layout in arguments.layouts):
        sys.exit(1)


if __name__ == "__main__":
    main()
