"""Train a few steps at each of several layouts on this host's GPUs and print tokens/s, scaling, MFU and memory.

    python3 benchmarks/layouts.py --config configs/1b.yaml --layouts tp1,dp4,dp4-z3,tp4,tp4-sp \\
        data.train.0.path=data/corpus/train data.micro_batch_size=8
    python3 benchmarks/layouts.py --config configs/8b.yaml --random-tokens --tokens-per-step 262144 --limit 120 \\
        --layouts tp2-dp2-sp-fp8-scores,dp4-z3-fp8-scores attention.qk_norm=none

A layout names its sizes: tp (tensor parallel), dp (data parallel), cp (context parallel), pp (pipeline stages), v
(chunks of a stage), z (ZeRO stage, 1 by default), m (data.micro_batch_size) and sp (sequence parallel). A size that is
left out is 1, or as configured. Under tensor parallelism a micro-batch goes in `halves` or `whole`, or else as
parallel.tensor_parallel_overlap: auto decides. Backward recomputes with `selective` or `full`. The engine is DeepSpeed
with deepspeed, torch's FSDP2 with fsdp, or else as configured. DeepSpeed's gradients travel in bf16 with g16
(docs/deepspeed.md): dp2-g16. moments16 keeps the moments in bf16: pp4-v2-moments16. With offload and alloffload FSDP2
keeps the optimizer's state, or everything, in the host's memory: dp2-offload,dp2-z3-alloffload.

It also names its arithmetic, if that is not as configured: linear layers in `bf16`, `int8` or `fp8`,
attention by `sdpa` or `scores`, and `noqk` for a model without QK-norm.

Each layout is a real run of launch/train.py through the deepspeed launcher. Its steps have `--accumulation` micro-steps
each, or `--tokens-per-step`; those of the warm-up have two micro-steps at most. Runs that leave GPUs free go side by
side. Nothing is saved: a run is killed when it has enough steps. It is not timed if a loss is not finite, if a step had
other tokens, or if the first loss is not near the logarithm of the vocabulary's size. Scaling is tokens/s per GPU
against the first layout of the same arithmetic. MFU is perf/mfu, which counts attention inside documents, and MFU of
whole sequences is perf/mfu_full_attention. results.json and results.md hold all rows, with predictions, from the start
on, and the loss and gradient norm of the last step: with the same data-parallel size and arithmetic they differ by
rounding alone. Exit code 1: a layout failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from layout_run import WARM_UP, WHOLE_SEQUENCES, Layout
from sagetrain.config.arithmetic import padded_vocab_size
from sagetrain.config.check import check
from sagetrain.config.errors import ConfigError
from sagetrain.config.layout import Layout as RunLayout
from sagetrain.config.load import load_config
from sagetrain.config.schema import RunConfig
from sagetrain.corpus.token_writer import TokenFileWriter
from sagetrain.costs.accounting import total_bytes
from sagetrain.costs.memory import memory_per_rank
from sagetrain.costs.which_gpu import of_device
from sagetrain.data.token_file import token_path
from sagetrain.data.tokenizer import Tokenizer
from sagetrain.planning.plan import document_span
from sagetrain.planning.priced import Target


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


def write_random_tokens(path: Path, vocab_size: int, tokens: int) -> None:
    """Write a token file of random tokens, one document."""
    writer = TokenFileWriter(path).begin(vocab_size)
    random = np.random.default_rng(0)
    writer.add(random.integers(vocab_size, size=tokens), np.array([tokens]))
    writer.finish()
    writer.publish({})
    # Without it the file is one from elsewhere, which needs no tokenizer.
    token_path(path, ".json").unlink()


def measure(
    layouts: list[Layout],
    settings: dict[str, list[str]],
    configs: dict[str, RunConfig],
    vocab_size: int,
    arguments: argparse.Namespace,
    write: Callable[[], None],
) -> None:
    """Run all layouts in the order given, as many at a time as there are GPUs for. `write` is called after each."""
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
            for layout in list(running):
                if not layout.finished(configs[layout.name], vocab_size, arguments.steps, arguments.limit):
                    continue
                running.remove(layout)
                free += layout.gpus
                print(f"{layout.name}: {layout.error or f'{layout.rate:,.0f} tokens/s'}", flush=True)
                write()
            time.sleep(0.5)
    finally:
        for layout in running:
            layout.kill()


def predicted(cfg: RunConfig, world_size: int, vocab_size: int, device: str) -> tuple[float | None, float]:
    """Return the tokens/s and the GiB of a rank that `plan` predicts. The speed is None for a device that `plan` does
    not know. `vocab_size` is padded."""
    rate, hardware = None, of_device(device)
    if hardware:
        span = document_span(cfg.data)
        target = Target(world_size, vocab_size, hardware, span)
        cfg = cfg.model_copy(update={"linear": target.fastest_linear(cfg)})
        rate = target.predict(cfg).tokens_per_second
    return rate, total_bytes(memory_per_rank(cfg, world_size, vocab_size)) / 2**30


COLUMNS = (
    *("layout", "GPUs", "tokens/s", "predicted", "per GPU", "scaling"),
    *("MFU", "of whole sequences", "memory", "predicted"),
)


def cells(layout: Layout, layouts: list[Layout]) -> list[str]:
    """Return a layout's row of the table."""
    alike = [other for other in layouts if other.rate and other.arithmetic == layout.arithmetic]
    rate, gib = layout.predicted
    planned, room = (f"{rate:,.0f}" if rate else "-"), (f"{gib:.1f} GiB" if gib else "-")
    if not layout.rate:
        return [layout.name, str(layout.world_size), layout.error, planned, *[""] * 5, room]
    per_gpu, first = layout.rate / layout.world_size, alike[0]
    return [
        layout.name,
        str(layout.world_size),
        f"{layout.rate:,.0f}",
        planned,
        f"{per_gpu:,.0f}",
        f"{per_gpu / (first.rate / first.world_size):.3f}",
        *(f"{share:.3f}" for share in layout.mfu),
        f"{layout.memory:.1f} GiB",
        room,
    ]


def last_step(layout: Layout) -> list[str]:
    """Return the loss and the gradient norm of a layout's last step, as text."""
    every = [*layout.losses[-1:], *layout.norms[-1:]]
    return [f"{number:.5g}" if number is not None else "" for number in every]


def table(layouts: list[Layout], title: str) -> Table:
    """Build the table of results."""
    shown = Table(title=title, title_justify="left")
    for column in COLUMNS:
        shown.add_column(column, justify="left" if column == "layout" else "right")
    for layout in layouts:
        shown.add_row(*map(escape, cells(layout, layouts)))
    return shown


def write_results(folder: Path, layouts: list[Layout], settings: dict[str, list[str]], title: str) -> None:
    """Write results.json, and results.md for a page of results."""
    folder.mkdir(parents=True, exist_ok=True)
    hidden = "process", "gpus", "started"
    made: list[dict[str, Any]] = []
    for layout in layouts:
        shown = {
            each.name: getattr(layout, each.name) for each in dataclasses.fields(layout) if each.name not in hidden
        }
        made.append({**shown, "gpus": layout.world_size, "settings": settings[layout.name]})
    run = {"title": title, "command": sys.argv, "date": f"{datetime.now():%Y-%m-%d %H:%M}", "torch": torch.__version__}
    (folder / "results.json").write_text(json.dumps({**run, "layouts": made}, indent=1) + "\n")
    head = [*COLUMNS, "loss", "gradient norm"]
    lines = [head, ["---"] * len(head), *([*cells(layout, layouts), *last_step(layout)] for layout in layouts)]
    (folder / "results.md").write_text(title + "\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="YAML of the run")
    parser.add_argument("--layouts", type=parse_layouts, required=True, help="such as tp1,dp4-z3,tp2-dp2-sp")
    parser.add_argument("--steps", type=int, default=6, help=f"steps to time, after {WARM_UP} that are not")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--accumulation", type=int, default=4, help="micro-steps of a step")
    size.add_argument("--tokens-per-step", type=int, help="tokens of a step, the same for all layouts")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which a layout has failed")
    parser.add_argument(
        "--random-tokens", action="store_true", help="train on random tokens without documents instead of data.train"
    )
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
    output = Path(arguments.output).absolute()
    settings, configs, findings = {}, {}, []
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    try:
        overrides = list(arguments.overrides)
        if arguments.random_tokens:
            overrides += [f"data.train=[{{path: {output / 'random'}}}]", "data.tokenizer=null", *WHOLE_SEQUENCES]
        cfg = load_config(arguments.config, overrides)
        if arguments.random_tokens and not cfg.model.vocab_size:
            sys.exit("--random-tokens: model.vocab_size = null: there is no tokenizer; give a number")
        vocab_size = cfg.model.vocab_size or Tokenizer.load(cfg.data.tokenizer_path).vocab_size
        for layout in arguments.layouts:
            own = layout.settings(cfg, output / layout.name, arguments.accumulation, arguments.tokens_per_step)
            settings[layout.name] = [*overrides, *own]
            configs[layout.name] = load_config(arguments.config, settings[layout.name])
            found = check(
                configs[layout.name], layout.world_size, vocab_size=vocab_size, files=not arguments.random_tokens
            )
            findings += [f"{layout.name}: {finding}" for finding in found if finding.level == "error"]
            padded = padded_vocab_size(vocab_size)
            layout.predicted = predicted(configs[layout.name], layout.world_size, padded, device)
    except ConfigError as error:
        sys.exit(str(error))
    if findings:
        sys.exit("\n".join(findings))
    title = f"{arguments.config}, {device}"
    write = partial(write_results, output, arguments.layouts, settings, title)
    if arguments.random_tokens:
        output.mkdir(parents=True, exist_ok=True)
        most = max(RunLayout.of(configs[layout.name], layout.world_size).micro_step for layout in arguments.layouts)
        steps = WARM_UP + arguments.steps + 2  # A run reads ahead, and is ended a moment after its last step.
        write_random_tokens(
            output / "random", vocab_size, steps * (arguments.tokens_per_step or most * arguments.accumulation)
        )
    write()
    try:
        measure(arguments.layouts, settings, configs, vocab_size, arguments, write)
    finally:  # This also prints what was measured before a SIGTERM.
        Console(width=150).print(table(arguments.layouts, title))
        write()
    if any(layout.error for layout in arguments.layouts):
        sys.exit(1)


if __name__ == "__main__":
    main()
