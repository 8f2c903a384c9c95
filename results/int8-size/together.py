"""Train models whose first half is common, in 16 bits and in INT8 in one process: for sizes whose state is large.

    PYTHONPATH=.:kernels:tests/support python results/int8-size/together.py TEXT OUT --size 1b --seeds 0 1 --seconds 120
    PYTHONPATH=.:kernels:tests/support python results/int8-size/together.py TEXT OUT --table OUT/*.jsonl

The runs are those of sizes.py, without the perturbed arm. Weights and moments of a common half go from one engine to
the other on the GPU. A process beside the first half fills the caches of INT8's kernels. Rows are written as runs end.
No test runs this script, and the page names its commit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import torch

BEGAN = time.time()
parser = argparse.ArgumentParser()
parser.add_argument("text", type=Path)
parser.add_argument("out", type=Path)
parser.add_argument("--size", default="1b")
parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
parser.add_argument("--steps", type=int, default=60, help="of a half")
parser.add_argument("--tokens", type=int, default=16384)
parser.add_argument("--seconds", type=float, default=120.0)
parser.add_argument("--table", type=Path, nargs="*", help="print what these files say")
parser.add_argument("--fill", action="store_true", help="compile INT8's kernels and end")
asked = parser.parse_args()
os.environ["SIZE"] = asked.size

import sizes  # noqa: E402

import tiny  # noqa: E402
from runs import LENGTH, MICRO, VOCAB, Text, evaluated_dense, put, train, write  # noqa: E402
from sagetrain.cluster.join import end_distributed, init_distributed  # noqa: E402
from sagetrain.engines.step import Engine  # noqa: E402
from sagetrain.parallel.topology import ParallelGroups  # noqa: E402

PEAK = sizes.runs.RATES[16384]


def said(what: str) -> None:
    print(f"[{time.time() - BEGAN:5.1f} s] {what}", flush=True)


def ready(arm: str, device: torch.device, text: Text, valid: Text) -> Engine:
    """Build an engine and compile the passes of a step and of an evaluation."""
    if asked.fill:
        sizes.SHAPE["num_layers"] = 2
    engine = tiny.alone(sizes.config(arm, asked.tokens), device, VOCAB)
    train(engine, text, 0, LENGTH * MICRO, 2, lambda step: 0.0)
    engine.evaluate(valid.batches([*range(MICRO)]))
    said(f"{arm}: compiled")
    return engine


def first(engine: Engine, seed: int, device: torch.device) -> None:
    """Give an engine the initial weights of a run, drawn on the device."""
    cfg = sizes.config("bf16", asked.tokens)
    groups = ParallelGroups.single()
    fresh = tiny.transformer(cfg.model, cfg.attention, vocab_size=VOCAB, seed=seed, groups=groups, device=device)
    put(engine, {name: {"weight": weight.detach()} for name, weight in fresh.named_parameters()}, 0)


@torch.no_grad()
def hand_over(source: Engine, target: Engine) -> None:
    """Give an engine the weights and moments of another behind its common half."""
    for old, new in zip(source.owned(), target.owned(), strict=True):
        assert old.name == new.name, f"{old.name} is not {new.name}"
        for kind in old.kinds:
            new.write(kind, old.read(kind))
    target.state_changed(asked.steps)


def second(arm: str, engine: Engine, seed: int, text: Text, valid: Text) -> None:
    """Train and evaluate the second half of a run."""
    begun, after, steps = time.time(), asked.steps * asked.tokens // LENGTH, asked.steps
    losses, _ = train(engine, text, seed, asked.tokens, steps, lambda step: PEAK * (1 - (step + 0.5) / steps), after)
    row = {"arm": arm, "seed": seed, "tokens": asked.tokens, "steps": steps, "losses": losses}
    row |= evaluated_dense(engine, sizes.config(arm, asked.tokens), valid, arm != "bf16")
    write(asked.out, row | {"took": time.time() - begun, "size": asked.size})
    said(f"{arm}, seed {seed}: {losses[-1]:.4f}, held out {row['valid']:.4f}")


def main() -> None:
    if asked.table:
        rows = [json.loads(line) for path in asked.table for line in path.read_text().splitlines()]
        sizes.table([row for row in rows if row["arm"] != "half"])
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    # It starts before this process has a port, which it would take over.
    filling = None if asked.fill else subprocess.Popen([sys.executable, *sys.argv, "--fill"], stdout=subprocess.DEVNULL)
    device = init_distributed(timeout_minutes=10)
    torch.set_num_threads(2)
    text, valid = Text(asked.text / "train.xz"), Text(asked.text / "valid.xz")
    if filling is None:
        ready("int8", device, text, valid)
        end_distributed()
        return
    sixteen, eight, took = ready("bf16", device, text, valid), None, 0.0
    for seed in asked.seeds:
        if took and time.time() - BEGAN + took > asked.seconds:
            said(f"seed {seed}: no time left")
            break
        begun = time.time()
        first(sixteen, seed, device)
        rise = lambda step: PEAK * min(1.0, (step + 0.5) / (0.5 * asked.steps))  # noqa: E731
        losses, _ = train(sixteen, text, seed, asked.tokens, asked.steps, rise)
        half = {"arm": "half", "seed": seed, "tokens": asked.tokens, "steps": asked.steps, "losses": losses}
        write(asked.out, half | {"size": asked.size})
        said(f"common half, seed {seed}: {losses[-1]:.4f}")
        if eight is None:
            with suppress(subprocess.TimeoutExpired):
                filling.wait(60)
            eight = ready("int8", device, text, valid)
        hand_over(sixteen, eight)
        second("bf16", sixteen, seed, text, valid)
        second("int8", eight, seed, text, valid)
        took = time.time() - begun
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    said(f"{memory:.1f} GiB")
    end_distributed()
    rows = [json.loads(line) for path in asked.out.glob("rows-*.jsonl") for line in path.read_text().splitlines()]
    sizes.table([row for row in rows if row["arm"] != "half"])


if __name__ == "__main__":
    main()
