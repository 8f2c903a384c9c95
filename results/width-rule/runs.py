"""Train models of several widths at several learning rates, with and without optimizer.lr_base_width, on one GPU.

    PYTHONPATH=.:kernels:tests/support python results/width-rule/runs.py TEXT OUT [--seconds N] [--done FILE]

TEXT is a folder with token files train and valid of 8,192 words. Each width and rule has a process of its own, which
keeps one engine and gives it the initial weights of a run before each run. A run that is in FILE, or in OUT/runs.jsonl,
is not repeated. Runs of seed 0 come first. The table is printed at the end. No test runs this script, and the page
names its commit.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

import tiny
from sagetrain.cluster.join import end_distributed, init_distributed
from sagetrain.config import RunConfig
from sagetrain.data.batch import Batch
from sagetrain.data.token_file import TokenFile
from sagetrain.engines.step import Engine
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.training.lr_schedule import learning_rate

VOCAB, LENGTH, BASE, LAYERS = 8192, 512, 256, 4
SEQUENCES, STEPS, VALID = 64, 160, 768
if os.environ.get("SMALL"):
    SEQUENCES, STEPS, VALID = 2, 6, 4
TOKENS = SEQUENCES * LENGTH
RATES = {
    "none": {64: (2, 64), 128: (2, 64), 256: (1, 32), 512: (1, 16), 1024: (0.5, 8)},
    "width": {64: (1, 32), 128: (1, 32), 512: (1, 32), 1024: (1, 32)},
    "init": {64: (2, 16), 1024: (2, 32)},
}
"""The smallest and the largest rate by rule and width, in thousandths; each is twice the one before. The rule `init` is
`width` with initial weights whose standard deviation goes with the inverse root of the width as well."""
FIRST = {"none": {64: 16, 128: 8, 256: 8, 512: 4, 1024: 2}, "width": dict.fromkeys((64, 128, 512, 1024), 8)}


def jobs(rule: str, width: int, seeds: int) -> list[tuple[int, float]]:
    """Return seeds and rates in the order of the runs."""
    low, high = RATES[rule][width]
    rates = [low * 2**n for n in range(round(math.log2(high / low)) + 1)]
    centre = FIRST.get(rule, {}).get(width, 8)
    rates.sort(key=lambda rate: abs(math.log2(rate / centre)))
    return [(seed, rate / 1000) for seed in range(seeds) for rate in rates]


def config(rule: str, width: int) -> RunConfig:
    std = 0.02 * (math.sqrt(BASE / width) if rule == "init" else 1.0)
    return tiny.config(
        1,
        "bf16" if torch.cuda.is_available() else "fp32",
        model={
            "num_layers": LAYERS, "hidden_size": width, "ffn_hidden_size": 3 * width,
            "num_attention_heads": width // 64, "vocab_size": VOCAB, "init_std": std,
        },
        linear={"precision": "bf16"},
        data={"seq_length": LENGTH, "micro_batch_size": SEQUENCES},
        tokens_per_step={"tokens": TOKENS},
        optimizer={"lr": 1e-3, "lr_base_width": None if rule == "none" else BASE},
        lr_schedule={"shape": "cosine", "warmup": 0.25, "min_lr": 0.0},
        parallel={"engine": "fsdp"},
        training={"total_tokens": STEPS * TOKENS},
    )  # fmt: skip


@torch.no_grad()
def begin(engine: Engine, cfg: RunConfig, seed: int) -> None:
    """Give an engine the weights that a run of this seed begins with, and no moments."""
    named = dict(
        tiny.transformer(
            cfg.model, cfg.attention, vocab_size=VOCAB, seed=seed, groups=ParallelGroups.single()
        ).named_parameters()
    )
    for kept in engine.owned():
        for kind in kept.kinds:
            values = named[kept.name].detach().float().flatten()[kept.start : kept.stop]
            kept.write(kind, (values if kind == "weight" else torch.zeros_like(values)).to(kept.weight.device))
    engine.state_changed(0)


def batch(text: torch.Tensor, places: torch.Tensor) -> Batch:
    rows = torch.stack([text[place : place + LENGTH + 1] for place in places.tolist()])
    return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), None, None, None, [])


def run(engine: Engine, cfg: RunConfig, seed: int, lr: float, train: torch.Tensor, valid: torch.Tensor) -> dict:
    """Train. Return the losses."""
    begin(engine, cfg, seed)
    started, losses, total = time.monotonic(), list[float](), STEPS * TOKENS
    order = torch.randperm(len(train) // LENGTH - 1, generator=torch.Generator().manual_seed(seed)) * LENGTH
    peak = cfg.optimizer.model_copy(update={"lr": lr})
    for step in range(STEPS):
        rate = learning_rate(peak, cfg.lr_schedule, step * TOKENS, TOKENS, total)
        places = order[step * SEQUENCES : (step + 1) * SEQUENCES]
        result = engine.step([batch(train, places)], 1, rate)
        losses.append(result.loss)
        if not result.applied or not math.isfinite(result.loss):
            break
    finished = len(losses) == STEPS and math.isfinite(losses[-1])
    held = float("nan")
    if finished:
        rows = torch.arange(VALID) * LENGTH
        held = engine.evaluate([batch(valid, part) for part in rows.split(SEQUENCES)])["valid/loss"]
    return {
        "valid": held, "train": sum(losses[-8:]) / 8, "losses": [round(x, 4) for x in losses[::8]],
        "steps": len(losses), "seconds": round(time.monotonic() - started, 2),
    }  # fmt: skip


def worker(rule: str, width: int, text: Path, out: Path, until: float, done: set, todo: list) -> None:
    device = init_distributed(timeout_minutes=5)
    torch.set_num_threads(2)
    train, valid = (
        torch.from_numpy(f.tokens(0, f.num_tokens)) for f in (TokenFile(text / n) for n in ("train", "valid"))
    )
    cfg = config(rule, width)
    engine = tiny.alone(cfg, device, VOCAB)
    took = 0.0
    for seed, lr in todo:
        if (rule, width, seed, lr) in done:
            continue
        if time.time() + took > until:
            break
        row = {"rule": rule, "width": width, "seed": seed, "lr": lr, **run(engine, cfg, seed, lr, train, valid)}
        took = row["seconds"] + 1
        with (out / f"{rule}-{width}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{rule} {width} seed {seed} lr {lr:g}: {row['valid']:.4f} in {row['seconds']} s", flush=True)
    end_distributed()


def read(paths: list[Path]) -> list[dict]:
    return [json.loads(line) for path in paths if path.is_file() for line in path.read_text().splitlines()]


def table(rows: list[dict]) -> None:
    """Print the mean held-out loss of each rule, width and rate, and its number of seeds."""
    rates = sorted({row["lr"] for row in rows})
    print("| rule | width |" + "".join(f" {rate:g} |" for rate in rates) + "\n|" + "---|" * (2 + len(rates)))
    for rule, width in sorted({(row["rule"], row["width"]) for row in rows}):
        cells = []
        for rate in rates:
            found = [r["valid"] for r in rows if (r["rule"], r["width"], r["lr"]) == (rule, width, rate)]
            cells.append(f"{sum(found) / len(found):.3f} ({len(found)})" if found else "")
        print(f"| {rule} | {width} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=270.0)
    parser.add_argument("--until", type=float)
    parser.add_argument("--done", type=Path, nargs="*", default=[])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rules", nargs="*", default=["none", "width"])
    parser.add_argument("--widths", type=int, nargs="*", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--jobs", nargs="*", help="RULE:WIDTH:SEED:RATE, in place of the grid")
    parser.add_argument("--only")
    asked = parser.parse_args()
    before = read([*asked.done, asked.out / "runs.jsonl"])
    if asked.only:
        rule, width = asked.only.split(":")
        done = {(row["rule"], row["width"], row["seed"], row["lr"]) for row in before}
        chosen = [job.split(":") for job in asked.jobs or []]
        own = [(int(seed), float(lr)) for name, size, seed, lr in chosen if (name, size) == (rule, width)]
        worker(rule, int(width), asked.text, asked.out, asked.until, done, own or jobs(rule, int(width), asked.seeds))
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    until, running = time.time() + asked.seconds, []
    env = {**os.environ, "OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    # The widest models take longest, so they begin first.
    every = {(width, name) for name in asked.rules for width in RATES[name] if width in asked.widths}
    chosen = {(int(job.split(":")[1]), job.split(":")[0]) for job in asked.jobs or []}
    for width, rule in sorted(chosen or every, reverse=True):
        words = [sys.executable, *sys.argv, "--only", f"{rule}:{width}", "--until", str(until)]
        running.append(subprocess.Popen(words, env=env))
    for process in running:
        process.wait()
    found = [*before, *read(sorted(asked.out.glob("*-*.jsonl")))]
    (asked.out / "runs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    table(found)


if __name__ == "__main__":
    main()
