"""Train 160 steps by each of our recipes, and by the speed run's with and without parts of its model: which part of it
brings the lead?

    PYTHONPATH=.:kernels:benchmarks:tests/support:results/muon-loss python results/equal-time/parts.py TEXT OUT

Steps are counted and not seconds, so that all recipes train at the same time on one GPU. No test runs this script.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import speedrun
import torch
import torch.nn.functional as F
from profiled import FOUND
from torch import Tensor

import runs
import tiny
from sagetrain.config.schema import RunConfig

STEPS = 160
WITHOUT = "speed run without values, first residual and cap"
TIED = ["sagetrain", "line", "line, quick", "line, 8e-3"]
UNTIED = ["untied, quick", "untied", "untied, quick, 2e-3", "untied, quick, 8e-3"]
KINDS = {"tied": TIED, "untied": UNTIED, "speed run": ["speed run"], WITHOUT: [WITHOUT]}


class Less(speedrun.Speedrun):
    """The speed run's model without embeddings added to values, shares of the first residual, and a cap of logits."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = speedrun.norm(self.embedding(tokens).bfloat16())
        square, ups, downs = self.square.unbind(), self.up.unbind(), self.down.unbind()
        for layer, (up, down) in enumerate(zip(ups, downs, strict=True)):
            h, (*qkv, out) = speedrun.norm(x), square[4 * layer : 4 * layer + 4]
            q, k, v = (F.linear(h, weight).unflatten(-1, (self.heads, -1)) for weight in qkv)
            q, k = speedrun.norm(self._rotate(q)), speedrun.norm(self._rotate(k))
            o = F.scaled_dot_product_attention(*(t.transpose(1, 2).to(v.dtype) for t in (q, k, v)), is_causal=True)
            x = x + F.linear(o.transpose(1, 2).flatten(2), out)
            x = x + F.linear(F.relu(F.linear(speedrun.norm(x), up)).square(), down)
        logits = F.linear(speedrun.norm(x), self.head).float()
        # The optimizers want a gradient of each tensor.
        unused = sum(weight.sum() for weight in (self.gates, self.values.weight, self.first, self.keep))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) + 0 * unused


def changed(arm: runs.Ours, name: str) -> runs.Ours:
    """Give an arm the settings of another recipe for the same model."""
    arm.cfg, arm.knobs, arm.line = runs.recipe(name)
    arm.cfg = arm.cfg.changed(FOUND) if torch.cuda.is_available() else arm.cfg
    for _, optimizer in arm.engine._shards._optimizers:
        optimizer._cfg = arm.cfg.optimizer.muon if type(optimizer).__name__ == "Muon" else arm.cfg.optimizer
    return arm


def made(kind: str, device: torch.device) -> Any:
    if kind not in ("tied", "untied"):
        runs.Speedrun = Less if kind == WITHOUT else speedrun.Speedrun
        return runs.Raced(device)
    arm = object.__new__(runs.Ours)
    cfg: RunConfig = runs.recipe(KINDS[kind][0])[0]
    arm.engine = tiny.alone(cfg.changed(FOUND) if device.type == "cuda" else cfg, device, runs.VOCAB)
    return arm


def worker(kind: str, asked: argparse.Namespace, until: float) -> None:
    device = runs.init_distributed(timeout_minutes=10)
    torch.set_num_threads(2)
    runs.POINTS = 2
    train, valid = (runs.text_of(asked.text, name) for name in ("train", "valid"))
    arm = made(kind, device)
    for name in KINDS[kind]:
        if time.time() > until:
            break
        arm = changed(arm, name) if kind in ("tied", "untied") else arm
        found = runs.timed(arm, asked.seed, 10.0, train, valid, asked.steps, asked.out / f"{kind}.jsonl")
        with (asked.out / "parts.jsonl").open("a") as file:
            file.write(json.dumps({"arm": name, "seed": asked.seed, **found}) + "\n")
        print(f"{time.time() - until:.0f} s to the end: {name} {found}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=120.0, help="no run begins later than 20 s before")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    asked, born = parser.parse_args(), time.time()
    asked.out.mkdir(parents=True, exist_ok=True)
    spawn = multiprocessing.get_context("spawn")
    words = [(kind, asked, born + asked.seconds - 20) for kind in KINDS]
    running = [spawn.Process(target=worker, args=each) for each in words]
    for process in running:
        process.start()
    for process in running:
        process.join(max(1.0, born + asked.seconds + 10 - time.time()))
        process.terminate()
    print("| recipe | half way | end |\n|---|---|---|")
    for row in sorted(runs.read([asked.out / "parts.jsonl"]), key=lambda row: row["bits"][-1][1]):
        print(f"| {row['arm']} | {row['bits'][0][1]:.4f} | {row['bits'][-1][1]:.4f} |")


if __name__ == "__main__":
    main()
