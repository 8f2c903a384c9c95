"""Train 43M parameters for the same time by SageTrain and by plain PyTorch, and measure bits per byte on the way.

    PYTHONPATH=.:kernels:benchmarks:tests/support:results/muon-loss python results/equal-time/runs.py TEXT OUT

TEXT is a folder with tokens of 16 bits, train.xz and valid.xz, of 8,192 words. Each arm has a process of its own, one
after the other. Learning rates follow the time that has passed. The clock begins behind the first step, which compiles,
and stands still while the held-out loss is measured. Plain PyTorch is benchmarks/peer.py under torch.compile, autocast
to bf16, and fused AdamW on fp32 weights. No test runs this script, and no page rests on it yet: it ran on a CPU alone
(SMALL=1).
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
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from search import LENGTH, MODEL, SEQUENCES, VOCAB, Knobs, batch, begin, config, read, text_of

import tiny
from peer import Peer
from sagetrain.cluster.join import end_distributed, init_distributed
from sagetrain.config.schema import ModelConfig
from sagetrain.parallel.topology import ParallelGroups

BYTES_PER_TOKEN = 3.767
"""Bytes of the held-out text beside its tokens."""
VALID, POINTS = 192, 8
ARMS = {
    "sagetrain": ("muon", Knobs(4e-3, 0.5, 1.6e-2, 0.1), 0.0),
    "sagetrain adamw": ("adamw", Knobs(2e-3, 0.75, 1.6e-2, 0.1), 0.0),
    "pytorch tuned": ("adamw", Knobs(2e-3, 0.75, 1.6e-2, 0.1), 0.0),
    "pytorch usual": ("adamw", Knobs(6e-4, 0.05, 6e-4, 0.1), 0.1),
}
"""The rule, its settings, and the learning rate at the end as a share of the peak. `usual` is what pages about models
of this size give; the others are the best of results/muon-loss."""


def share(passed: float, warmup: float, end: float) -> float:
    """Return the learning rate as a share of its peak, when this share of the time has passed."""
    if passed < warmup:
        return passed / warmup
    falling = min(1.0, (passed - warmup) / (1 - warmup))
    return end + (1 - end) * (1 + math.cos(math.pi * falling)) / 2


Step = Callable[[torch.Tensor, torch.Tensor, float], object]
Losses = Callable[[torch.Tensor, torch.Tensor], float]


def ours(rule: str, knobs: Knobs, seed: int, device: torch.device) -> tuple[Step, Losses]:
    cfg = config(rule, "bf16", 400, knobs)
    engine = tiny.alone(cfg, device, VOCAB)
    begin(engine, cfg, seed)
    return (
        lambda text, places, rate: engine.step([batch(text, places)], 1, rate * knobs.lr),
        lambda text, places: engine.evaluate([batch(text, places)])["valid/loss"],
    )


def plain(knobs: Knobs, seed: int, device: torch.device) -> tuple[Step, Losses]:
    sizes = ModelConfig(**MODEL, vocab_size=VOCAB, tie_embeddings=True)
    cfg = config("adamw", "bf16", 400, knobs)
    torch.set_float32_matmul_precision("high")
    peer = Peer(sizes, "sdpa", LENGTH, VOCAB)
    groups = ParallelGroups.single()
    peer.take_weights(tiny.transformer(cfg.model, cfg.attention, vocab_size=VOCAB, seed=seed, groups=groups))
    peer.to(device)
    gains = [weight for weight in peer.parameters() if weight.ndim == 1]
    matrices = [weight for weight in peer.blocks.parameters() if weight.ndim == 2]
    kinds = [
        {"params": [peer.embedding.weight], "peak": knobs.embedding, "weight_decay": knobs.decay},
        {"params": matrices, "peak": knobs.lr, "weight_decay": knobs.decay},
        {"params": gains, "peak": knobs.lr, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(kinds, lr=knobs.lr, betas=(0.9, 0.95), fused=device.type == "cuda")
    compiled = torch.compile(peer) if device.type == "cuda" else peer

    def loss(text: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        given = batch(text, places)
        tokens, labels = given.tokens.to(device, non_blocking=True), given.labels.to(device, non_blocking=True)
        with torch.autocast(device.type, torch.bfloat16):
            return compiled(tokens, labels)

    def step(text: torch.Tensor, places: torch.Tensor, rate: float) -> None:
        loss(text, places).backward()
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * rate
        torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def held(text: torch.Tensor, places: torch.Tensor) -> float:
        return float(loss(text, places))

    return step, held


def places_of(count: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield the places of each step's sequences: permutation after permutation of the text."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        yield from (torch.randperm(count, generator=draw) * LENGTH)[: count // SEQUENCES * SEQUENCES].split(SEQUENCES)


def worker(arm: str, seed: int, asked: argparse.Namespace) -> None:
    born, device = time.monotonic(), init_distributed(timeout_minutes=5)
    torch.set_num_threads(4)
    train, valid = (text_of(asked.text, name) for name in ("train", "valid"))
    rule, knobs, end = ARMS[arm]
    step, held = ours(rule, knobs, seed, device) if arm.startswith("sagetrain") else plain(knobs, seed, device)
    rows = (torch.arange(VALID) * LENGTH).split(SEQUENCES)
    places, found = places_of(len(train) // LENGTH - 1, seed), list[list[float]]()
    sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def measured() -> float:
        return sum(held(valid, part) for part in rows) / len(rows)

    for _ in range(3):  # Steps that compile, at a rate of zero.
        step(train, next(places), 0.0)
    measured()
    sync()
    start, passed = time.monotonic() - born, 0.0
    began, steps = time.monotonic(), 0
    for point in range(1, POINTS + 1):
        while passed < asked.seconds * point / POINTS:
            step(train, next(places), share(passed / asked.seconds, knobs.warmup, end))
            steps += 1
            if steps % 4 == 0:
                sync()
                passed = time.monotonic() - began
        stopped = time.monotonic()
        bits = measured() / math.log(2) / BYTES_PER_TOKEN
        sync()
        found.append([round(passed, 2), round(bits, 5)])
        began += time.monotonic() - stopped
    row = {"arm": arm, "seed": seed, "seconds": asked.seconds, "start": round(start, 1), "steps": steps,
           "tokens": steps * SEQUENCES * LENGTH, "bits": found}  # fmt: skip
    with (asked.out / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(
        f"{arm} seed {seed}: {found[-1][1]:.4f} bits per byte, {row['tokens']:,} tokens, start {start:.0f} s",
        flush=True,
    )
    end_distributed()


def table(rows: list[dict]) -> None:
    print("| arm | seed | steps | tokens/s |" + "".join(f" {n}/{POINTS} |" for n in range(1, POINTS + 1)))
    print("|---" * (4 + POINTS) + "|")
    for row in rows:
        bits = " | ".join(f"{found:.4f}" for _, found in row["bits"])
        print(f"| {row['arm']} | {row['seed']} | {row['steps']} | {row['tokens'] / row['seconds']:,.0f} | {bits} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--arms", nargs="*", default=["sagetrain", "pytorch usual", "pytorch tuned"], choices=ARMS)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only")
    asked = parser.parse_args()
    if asked.only:
        arm, seed = asked.only.split(":")
        worker(arm, int(seed), asked)
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "OMP_NUM_THREADS": "4"}
    for seed, arm in itertools.product(range(asked.seeds), asked.arms):
        subprocess.run([sys.executable, *sys.argv, "--only", f"{arm}:{seed}"], env=env, check=False)
    table(read([asked.out / "rows.jsonl"]))


if __name__ == "__main__":
    main()
