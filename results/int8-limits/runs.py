"""Find the learning rate at which a small model diverges, in 16-bit and INT8 attention, with and without QK-norm.

    PYTHONPATH=.:kernels:tests/support:results/muon-loss python results/int8-limits/runs.py TEXT OUT --seconds 225
    ... --found OUT/runs.jsonl --jobs none:paper:few:4:1 none:sdpa:few:4:1
    ... --model 325m --steps 120 --norms none --sizes few --rung 2

TEXT is a folder with tokens of 16 bits, train.xz and valid.xz, of 8,192 words. Each case (QK-norm, attention, few or
many tokens per step) has a process of its own, which keeps one engine and gives it the initial weights of a run before
each run. Rates are FIRST times powers of two. A case goes up four times at a time until a run diverges, then halves the
gap in between, until the highest rate that trained and the lowest that diverged are neighbours. Further seeds begin
there. No test runs this script, and the page names its commit.

A run has diverged if a loss is not finite, or if in the last twentieth before the learning rate falls its mean training
loss is

- more than BAND above its lowest twentieth before, or
- less than BAND below the entropy of single words, which a model reaches without attention.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from search import LARGE, LENGTH, VOCAB, batch, begin, read, text_of

import tiny
from sagetrain.cluster.join import end_distributed, init_distributed
from sagetrain.config import RunConfig
from sagetrain.engines.step import Engine
from sagetrain.training.lr_schedule import learning_rate

BAND, FIRST, LOWEST, HIGHEST, PARTS = 0.2, 2e-3, -2, 10, 20
SEQUENCES, VALID, STEPS = 16, 96, {"few": 400, "many": 80}
MICRO = {"few": 1, "many": 8}
MODEL: dict[str, Any] = {"num_layers": 8, "hidden_size": 256, "ffn_hidden_size": 768, "num_attention_heads": 4}
if os.environ.get("SMALL"):
    LARGE = {"num_layers": 3, "hidden_size": 64, "ffn_hidden_size": 192, "num_attention_heads": 2}
    SEQUENCES, VALID, STEPS, HIGHEST = 2, 4, {"few": 20, "many": 20}, 4
    MODEL |= {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 2}
TOKENS = {size: MICRO[size] * SEQUENCES * LENGTH for size in MICRO}


def config(norm: str, attention: str, size: str) -> RunConfig:
    total = STEPS[size] * TOKENS[size]
    return tiny.config(
        1,
        "bf16" if torch.cuda.is_available() else "fp32",
        model={**MODEL, "vocab_size": VOCAB},
        attention={
            "qk_norm": norm,
            **({"backend": "sdpa"} if attention == "sdpa" else {"backend": "sage", "recipe": attention}),
        },
        linear={"precision": "bf16"},
        data={"seq_length": LENGTH, "micro_batch_size": SEQUENCES},
        tokens_per_step={"tokens": TOKENS[size]},
        optimizer={"lr": FIRST},
        lr_schedule={"shape": "wsd", "warmup": 0.1, "decay_tokens": total // 5, "min_lr": 0.0},
        parallel={"engine": "fsdp"},
        training={"total_tokens": total},
    )  # fmt: skip


def has_diverged(parts: list[float], entropy: float) -> bool:
    """Whether a run diverged, by the mean losses of its twentieths. The last four are of the falling rate."""
    if len(parts) < PARTS or not all(map(math.isfinite, parts)):
        return True
    *before, last = parts[: PARTS * 4 // 5]
    return last > min(before) + BAND or last > entropy - BAND


def run(engine: Engine, cfg: RunConfig, seed: int, rung: int, size: str, texts: tuple[torch.Tensor, ...]) -> dict:
    """Train at FIRST times two to the power of `rung`. Return the losses."""
    train, valid, entropy = texts
    begin(engine, cfg, seed)
    started, losses, norms, total = time.monotonic(), list[float](), list[float](), cfg.training.total_tokens
    peak, steps, count = cfg.optimizer.model_copy(update={"lr": FIRST * 2.0**rung}), STEPS[size], len(train) // LENGTH
    order = torch.randperm(count - 1, generator=torch.Generator().manual_seed(seed)) * LENGTH
    for step in range(steps):
        rate = learning_rate(peak, cfg.lr_schedule, step * TOKENS[size], TOKENS[size], total)
        first = step * MICRO[size] * SEQUENCES
        places = order[first : first + MICRO[size] * SEQUENCES].split(SEQUENCES)
        result = engine.step([batch(train, part) for part in places], MICRO[size], rate)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        if not result.applied or not math.isfinite(result.loss):
            break
    held, part = math.inf, steps // PARTS
    if len(losses) == steps:
        rows = torch.arange(VALID) * LENGTH
        held = engine.evaluate([batch(valid, some) for some in rows.split(SEQUENCES)])["valid/loss"]
    parts = [sum(losses[at : at + part]) / len(losses[at : at + part]) for at in range(0, len(losses), part)]
    return {
        "diverged": has_diverged(parts, float(entropy)), "valid": held, "parts": [round(loss, 4) for loss in parts],
        "norms": [round(max(norms[at : at + part]), 3) for at in range(0, len(norms), part)], "steps": len(losses),
        "seconds": round(time.monotonic() - started, 2),
    }  # fmt: skip


def edge(runs: dict[int, bool]) -> tuple[int | None, int | None]:
    """Return the lowest rung that diverged, and the highest below it that did not, of runs by their rungs."""
    bad = min((rung for rung, diverged in runs.items() if diverged), default=None)
    good = [rung for rung, diverged in runs.items() if not diverged and (bad is None or rung < bad)]
    return bad, max(good, default=None)


def next_rung(runs: dict[int, bool], start: int, stride: int) -> int | None:
    """Return the rung to try next. None: the edge is found, or is outside of the ladder."""
    if not runs:
        return start
    bad, good = edge(runs)
    if bad is None:
        return good + stride if good + stride <= HIGHEST else None
    if good is None:
        return bad - stride if bad - stride >= LOWEST else None
    return (bad + good) // 2 if bad - good > 1 else None


def proposed(rows: list[dict], seeds: int, first: int) -> Iterator[tuple[int, int]]:
    """Yield seed and rung of each run, by what the runs so far found. `rows` grows in between. `first` is the first
    rung."""
    of = lambda seed: {row["rung"]: row["diverged"] for row in rows if row["seed"] == seed}  # noqa: E731
    for seed in range(seeds):
        bad, good = edge(of(0))
        start, stride = (first, 2) if seed == 0 else (good if good is not None else bad or 0, 1)
        while (rung := next_rung(of(seed), start, stride)) is not None:
            yield seed, rung


def named(norm: str, attention: str, size: str, asked: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Yield seed and rung of each job of a case."""
    for job in asked.jobs:
        *case, rung, seed = job.split(":")
        if case == [norm, attention, size]:
            yield int(seed), int(rung)


def worker(norm: str, attention: str, size: str, asked: argparse.Namespace) -> None:
    device = init_distributed(timeout_minutes=5)
    torch.set_num_threads(1)
    train, valid = (text_of(asked.text, name) for name in ("train", "valid"))
    shares = torch.bincount(train, minlength=VOCAB).double() / len(train)
    texts = (train, valid, torch.special.entr(shares).sum())
    cfg = config(norm, attention, size)
    engine = tiny.alone(cfg, device, VOCAB)
    case = {
        "model": asked.model,
        "qk_norm": norm,
        "attention": attention,
        "tokens_per_step": TOKENS[size],
        "entropy": float(texts[2]),
    }
    found = [{"model": "9m", **row} for row in read([*asked.found])]
    rows = [row for row in found if all(row[key] == value for key, value in case.items())]
    took = 0.0
    for seed, rung in named(norm, attention, size, asked) if asked.jobs else proposed(rows, asked.seeds, asked.rung):
        if time.time() + took > asked.until:
            break
        row = {**case, "seed": seed, "rung": rung, "lr": FIRST * 2.0**rung}
        row |= run(engine, cfg, seed, rung, size, texts)
        took = row["seconds"] + 1
        rows.append(row)
        with (asked.out / f"{norm}-{attention}-{size}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        said = f"{row['valid']:.4f} {'DIVERGED' if row['diverged'] else 'trained'} in {row['seconds']} s"
        print(f"{norm} {attention} {TOKENS[size]} seed {seed} lr {row['lr']:g}: {said}", flush=True)
    end_distributed()


def table(rows: list[dict]) -> None:
    """Print the mean held-out losses by case and rate, with the number of seeds that diverged and that ran."""
    rates, of = sorted({row["lr"] for row in rows}), {"sdpa": "16 bits"}

    def case(row: dict) -> tuple[bool, int, bool, str]:
        large = row.get("model", "9m") != "9m"
        return large, row["tokens_per_step"], row["qk_norm"] == "none", row["attention"]

    print("| tokens per step | QK-norm | attention |" + "".join(f" {rate:g} |" for rate in rates))
    print("|---" * (3 + len(rates)) + "|")
    for large, tokens, none, attention in sorted({*map(case, rows)}):
        size = f"{tokens // 1000}K" + ", 325M" * large
        cells = [size, "no" if none else "yes", of.get(attention, f"`{attention}`")]
        for rate in rates:
            same = [row for row in rows if case(row) == (large, tokens, none, attention) and row["lr"] == rate]
            bad, mean = sum(r["diverged"] for r in same), sum(r["valid"] for r in same) / max(len(same), 1)
            cells.append(f"{mean:.2f} ({bad}/{len(same)})" if same else "")
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=225.0)
    parser.add_argument("--until", type=float)
    parser.add_argument("--found", type=Path, nargs="*", default=[])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--attention", nargs="*", default=["paper", "sdpa"])
    parser.add_argument("--norms", nargs="*", default=["none", "before_rope"])
    parser.add_argument("--sizes", nargs="*", default=["many", "few"])
    parser.add_argument("--model", choices=["9m", "325m"], default="9m")
    parser.add_argument("--steps", type=int, help="of a run with few tokens a step, a multiple of 20")
    parser.add_argument("--rung", type=int, default=0, help="the first of a search")
    parser.add_argument("--jobs", nargs="*", help="QK-NORM:ATTENTION:few or many:RUNG:SEED, in place of the search")
    parser.add_argument("--only")
    asked = parser.parse_args()
    if asked.model == "325m":
        MODEL.update(LARGE)
    STEPS["few"] = asked.steps or STEPS["few"]
    if asked.only:
        worker(*asked.only.split(":"), asked)
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    until, running = time.time() + asked.seconds, []
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    chosen = [tuple(job.split(":")[:3]) for job in asked.jobs or []]
    for case in dict.fromkeys(chosen) or itertools.product(asked.norms, asked.attention, asked.sizes):
        words = [sys.executable, *sys.argv, "--only", ":".join(case), "--until", str(until)]
        running.append(subprocess.Popen(words, env=env))
    for process in running:
        process.wait()
    made = read(sorted(asked.out.glob("*-*-*.jsonl")))
    (asked.out / "runs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    table([*read(asked.found), *made])


if __name__ == "__main__":
    main()
