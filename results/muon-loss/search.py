"""Search rate, warm-up, the embedding's own rate and weight decay of AdamW and of Muon, then train seeds of the best.

    PYTHONPATH=.:kernels:tests/support python results/muon-loss/search.py TEXT OUT --seconds 250
    PYTHONPATH=.:kernels:tests/support python results/muon-loss/search.py TEXT OUT --found OUT/runs.jsonl --jobs \
        adamw:bf16:26214400:1 muon:bf16:26214400:1

TEXT is a folder with tokens of 16 bits, train.xz and valid.xz (or .bin, as `sagetrain prepare` writes them), of 8,192
words. Each side has a process of its own, which keeps one engine and gives it the initial weights of a run before each
run. Without --jobs both sides are searched alike: a Gaussian process over GRID proposes each run of 6.6M tokens from
the losses of the side's runs so far. A job SIDE:PRECISION:TOKENS:SEED[:RATE:WARMUP:EMBEDDING:DECAY] trains the
best of the runs so far and in --found, or what it names. No test runs this script, and the page names its commit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import tiny
from sagetrain.cluster.join import end_distributed, init_distributed
from sagetrain.config import RunConfig
from sagetrain.data.batch import Batch
from sagetrain.engines.step import Engine
from sagetrain.optim.build import groups as groups_of
from sagetrain.parallel.topology import ParallelGroups
from sagetrain.training.lr_schedule import learning_rate

VOCAB, LENGTH, SEQUENCES, SHORT, LONG, VALID = 8192, 1024, 64, 100, 400, 384
MODEL: dict[str, Any] = {"num_layers": 12, "hidden_size": 512, "ffn_hidden_size": 1536, "num_attention_heads": 8}
LARGE = {"num_layers": 20, "hidden_size": 1024, "ffn_hidden_size": 3072, "num_attention_heads": 16}  # 325M
if os.environ.get("LARGE"):
    SEQUENCES = 32
    MODEL |= LARGE
if os.environ.get("TEN"):  # Ten minutes of LARGE.
    VOCAB, LENGTH, SEQUENCES = 32000, 2048, 32
if os.environ.get("SMALL"):
    LENGTH, SEQUENCES, SHORT, LONG, VALID = 64, 2, 4, 8, 4
    MODEL |= {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 2}
TOKENS = SEQUENCES * LENGTH


class Knobs(NamedTuple):
    """The settings of the optimizer and the schedule that a search tunes."""

    lr: float
    warmup: float
    """The share of the run."""
    embedding: float
    """The embedding's peak learning rate."""
    decay: float
    """weight_decay of a run of 400 steps. A run of 100 steps has four times as much, so that both take the same part of
    the weights away."""


GRID = Knobs(
    [5e-4 * 2 ** (n / 2) for n in range(11)],  # 5e-4 to 1.6e-2
    [0.1, 0.25, 0.5, 0.75, 0.9],
    [1e-3 * 2**n for n in range(7)],  # 1e-3 to 6.4e-2
    [0.0, 0.1, 0.3, 1.0, 3.0],
)
# The best settings that an earlier search of three knobs found at 400 steps, and one knob of each moved.
START = {
    "adamw": [(2e-3, 0.75, 1.6e-2, 0.1), (2e-3, 0.5, 1.6e-2, 1.0), (4e-3, 0.9, 8e-3, 0.3), (1.4e-3, 0.75, 3.2e-2, 0.3)],
    "muon": [(4e-3, 0.5, 1.6e-2, 0.1), (4e-3, 0.75, 1.6e-2, 1.0), (8e-3, 0.5, 3.2e-2, 0.3), (5.7e-3, 0.25, 8e-3, 0.3)],
}
SPREAD, NOISE, REACH = 0.15, 0.01, 0.4


def place(knobs: tuple[float, ...]) -> list[float]:
    """Return the place of a setting, in units in which losses are expected to go together."""
    lr, warmup, embedding, decay = knobs
    return [math.log2(lr) / 1.5, warmup / 0.4, math.log2(embedding) / 2, math.log(max(decay, 0.03)) / 2.2]


def propose(side: str, rows: list[dict]) -> Knobs:
    """Return the setting that a side tries next: its start, then the lowest lower bound of a Gaussian process."""
    tried = {tuple(row["knobs"]) for row in rows}
    for knobs in START[side]:
        if knobs not in tried:
            return Knobs(*knobs)
    found = [row["valid"] if math.isfinite(row["valid"]) else math.inf for row in rows]
    best = min(found)
    y = torch.tensor([min(loss - best, REACH) for loss in found], dtype=torch.float64)
    x = torch.tensor([place(row["knobs"]) for row in rows], dtype=torch.float64)
    left = [knobs for knobs in itertools.product(*GRID) if knobs not in tried]
    at = torch.tensor([place(knobs) for knobs in left], dtype=torch.float64)

    def kernel(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return SPREAD**2 * torch.exp(-0.5 * torch.cdist(a, b) ** 2)

    mean, cross = y.mean(), kernel(at, x)
    inverse = torch.linalg.inv(kernel(x, x) + NOISE**2 * torch.eye(len(x), dtype=torch.float64))
    expected = mean + cross @ inverse @ (y - mean)
    variance = (SPREAD**2 - (cross @ inverse * cross).sum(1)).clamp(min=0)
    return Knobs(*left[int((expected - 0.7 * variance.sqrt()).argmin())])


def config(side: str, precision: str, steps: int, knobs: Knobs) -> RunConfig:
    cuda, int8 = torch.cuda.is_available(), precision == "int8"
    return tiny.config(
        1,
        "bf16" if cuda else "fp32",
        model={**MODEL, "vocab_size": VOCAB, "tie_embeddings": True},
        attention={"backend": "sage", "recipe": "scores"} if int8 else {"backend": "sdpa"},
        linear={"precision": "int8" if int8 else "bf16"},
        data={"seq_length": LENGTH, "micro_batch_size": SEQUENCES},
        tokens_per_step={"tokens": TOKENS},
        optimizer={
            "name": side, "lr": knobs.lr, "lr_of": {"embedding": knobs.embedding},
            "weight_decay": knobs.decay * LONG / steps,
        },
        lr_schedule={"shape": "cosine", "warmup": knobs.warmup, "min_lr": 0.0},
        parallel={"engine": "fsdp"},
        training={"total_tokens": steps * TOKENS},
    )  # fmt: skip


_WEIGHTS: dict[int, dict[str, torch.Tensor]] = {}


@torch.no_grad()
def begin(engine: Engine, cfg: RunConfig, seed: int) -> None:
    """Give an engine the weights that a run of this seed begins with, no moments, and the rates and decays of `cfg`."""
    if seed not in _WEIGHTS:
        made = tiny.transformer(
            cfg.model, cfg.attention, vocab_size=VOCAB, seed=seed, groups=ParallelGroups.single()
        ).named_parameters()
        _WEIGHTS.clear()
        _WEIGHTS[seed] = {name: values.detach().float().flatten() for name, values in made}
    for kept in engine.owned():
        for kind in kept.kinds:
            values = _WEIGHTS[seed][kept.name][kept.start : kept.stop]
            kept.write(kind, (values if kind == "weight" else torch.zeros_like(values)).to(kept.weight.device))
    rules = {name: rule for rule in groups_of(engine.model.every_spec.values(), cfg) for name in rule.names}
    for pieces, optimizer in engine._shards._optimizers:
        every = {(rules[p.spec.name].weight_decay, rules[p.spec.name].lr_factor) for p in pieces}
        ((optimizer._weight_decay, optimizer._lr_factor),) = every
    engine.state_changed(0)


def batch(text: torch.Tensor, places: torch.Tensor) -> Batch:
    rows = torch.stack([text[place : place + LENGTH + 1] for place in places.tolist()]).long()
    return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), None, None, None, [])


def run(engine: Engine, cfg: RunConfig, seed: int, train: torch.Tensor, valid: torch.Tensor) -> dict:
    """Train. Return the losses."""
    begin(engine, cfg, seed)
    started, losses, total = time.monotonic(), list[float](), cfg.training.total_tokens
    steps, draw, count = total // TOKENS, torch.Generator().manual_seed(seed), len(train) // LENGTH - 1
    passes = math.ceil(steps * SEQUENCES / count)
    order = torch.cat([torch.randperm(count, generator=draw) for _ in range(passes)]) * LENGTH
    for step in range(steps):
        rate = learning_rate(cfg.optimizer, cfg.lr_schedule, step * TOKENS, TOKENS, total)
        result = engine.step([batch(train, order[step * SEQUENCES : (step + 1) * SEQUENCES])], 1, rate)
        losses.append(result.loss)
        if not result.applied or not math.isfinite(result.loss):
            break
    held = float("inf")
    if len(losses) == steps:
        rows = torch.arange(VALID) * LENGTH
        held = engine.evaluate([batch(valid, part) for part in rows.split(SEQUENCES)])["valid/loss"]
    every, last = max(1, steps // 50), max(1, steps // 20)
    return {
        "valid": held, "train": sum(losses[-last:]) / last, "steps": len(losses), "of": steps,
        "losses": [round(sum(losses[n : n + every]) / every, 4) for n in range(0, len(losses), every)],
        "seconds": round(time.monotonic() - started, 2),
    }  # fmt: skip


def text_of(folder: Path, name: str) -> torch.Tensor:
    packed = folder / f"{name}.xz"
    data = lzma.decompress(packed.read_bytes()) if packed.is_file() else (folder / f"{name}.bin").read_bytes()
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint16).astype(np.int32))


def best_of(side: str, steps: int, rows: list[dict]) -> Knobs:
    """Return the best setting of a side's runs of so many steps, or of shorter ones where there are none."""
    rows = [row for row in rows if row["side"] == side and row["steps"] == row["of"]]
    return Knobs(*min(rows, key=lambda row: (row["of"] != steps, row["valid"]))["knobs"])


def worker(side: str, precision: str, jobs: list[list[str]] | None, asked: argparse.Namespace) -> None:
    born = time.time()
    device = init_distributed(timeout_minutes=5)
    torch.set_num_threads(2)
    train, valid = (text_of(asked.text, name) for name in ("train", "valid"))
    before = read([*asked.found])
    # Each kind of tensor has rates of its own here, so that none shares an optimizer with another.
    cfg = config(side, precision, LONG, Knobs(1e-3, 0.5, 8e-3, 0.1))
    engine = tiny.alone(cfg, device, VOCAB)
    path, rows, rate = asked.out / f"{side}-{precision}-{'jobs' if jobs else 'search'}.jsonl", list[dict](), None
    for number in itertools.count():
        if jobs is None:
            steps, seed, phase = SHORT, 0, "search"
            knobs = propose(side, [row for row in [*before, *rows] if row["side"] == side and row["phase"] == "search"])
        elif number < len(jobs):
            steps, seed, phase = int(jobs[number][0]) // TOKENS, int(jobs[number][1]), "job"
            given = [float(word) for word in jobs[number][2:]]
            knobs = Knobs(*given) if given else best_of(side, steps, [*before, *rows])
        else:
            break
        # The first run compiles, so it says little about the next.
        if time.time() + (rate or 0.0) * steps > asked.until:
            break
        found = run(engine, config(side, precision, steps, knobs), seed, train, valid)
        row = {"phase": phase, "side": side, "precision": precision, "seed": seed, "tokens": steps * TOKENS,
               "knobs": [*knobs], **found, "passed": round(time.time() - born, 1)}  # fmt: skip
        rate = (found["seconds"] + 1) / max(found["steps"], 1) if number else rate
        rows.append(row)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        said = f"lr {knobs.lr:.3g} warmup {knobs.warmup:g} embedding {knobs.embedding:.3g} decay {knobs.decay:g}"
        print(f"{row['passed']:6.1f} s {side} {precision} {steps} steps, seed {seed}, {said}: {row['valid']:.4f} in "
              f"{row['seconds']} s", flush=True)  # fmt: skip
    end_distributed()


def read(paths: list[Path]) -> list[dict]:
    return [json.loads(line) for path in paths if path.is_file() for line in path.read_text().splitlines()]


def table(rows: list[dict]) -> None:
    """Print every run, by side, precision and length, the best one first."""
    names = ["side", "precision", "tokens", "seed", "lr", "warmup", "embedding", "decay", "held out", "train", "s"]
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for row in sorted(rows, key=lambda row: (row["tokens"], row["precision"], row["side"], row["valid"])):
        knobs = " | ".join(f"{knob:.3g}" for knob in row["knobs"])
        print(f"| {row['side']} | {row['precision']} | {row['tokens']:,} | {row['seed']} | {knobs} | "
              f"{row['valid']:.4f} | {row['train']:.4f} | {row['seconds']} |")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--until", type=float)
    parser.add_argument("--found", type=Path, nargs="*", default=[])
    parser.add_argument("--jobs", nargs="*", help="SIDE:PRECISION:TOKENS:SEED[:RATE:WARMUP:EMBEDDING:DECAY]")
    parser.add_argument("--only")
    asked = parser.parse_args()
    named = [job.split(":") for job in asked.jobs or []]
    if asked.only:
        side, precision = asked.only.split(":")
        worker(side, precision, [job[2:] for job in named if job[:2] == [side, precision]] or None, asked)
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    until, running = time.time() + asked.seconds, []
    env = {**os.environ, "OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    for side, precision in dict.fromkeys((job[0], job[1]) for job in named) or [("muon", "bf16"), ("adamw", "bf16")]:
        words = [sys.executable, *sys.argv, "--only", f"{side}:{precision}", "--until", str(until)]
        running.append(subprocess.Popen(words, env=env))
    for process in running:
        process.wait()
    made = read(sorted(asked.out.glob("*-*.jsonl")))
    (asked.out / "runs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    table(made)


if __name__ == "__main__":
    main()
