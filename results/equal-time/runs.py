"""Train for the same time on one GPU by SageTrain, by plain PyTorch and by a public speed run's recipe, and measure
bits per byte of held-out text on the way.

    PYTHONPATH=.:kernels:benchmarks:tests/support:results/muon-loss python results/equal-time/runs.py TEXT OUT

TEXT is a folder with tokens of 16 bits, train.xz and valid.xz, of 8,192 words. Each arm has a process of its own, which
compiles once and gives its model the initial weights of a run before each run. Runs take turns, so that one alone uses
the GPU. Learning rates follow the time that has passed. The clock begins behind steps that compile, and stands still
while the held-out loss is measured. All arms see the same sequences in the same order, 65,536 tokens a step. With LARGE
in the environment models have 325M weights. With TEN too they have untied embeddings and read sequences of 2,048 tokens
of 32,000 words, arm `int8` is 325M's row of docs/recipes.md, and titan.py trains beside.

`sagetrain` is 43M's row of docs/recipes.md, with attention and linear layers as `auto` settles them here. Plain PyTorch
is benchmarks/peer.py, the same model, under torch.compile, autocast to bf16, and fused AdamW on fp32 weights. `speed
run` is speedrun.py. No test runs this script, and the page names its commit.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Protocol

import torch
from search import LENGTH, MODEL, SEQUENCES, TOKENS, VOCAB, Knobs, batch, begin, config, read, text_of
from speedrun import Optimizers, Speedrun

import tiny
from peer import Peer
from sagetrain.auto.settled import settle
from sagetrain.auto.timed_choice import StartOfRun
from sagetrain.cluster.join import init_distributed
from sagetrain.cluster.run_folder import RunFolder
from sagetrain.config.schema import RunConfig
from sagetrain.parallel.topology import ParallelGroups, Topology

TEN = bool(os.environ.get("TEN"))
BYTES_PER_TOKEN = float(os.environ.get("BYTES_PER_TOKEN", 1860099 / 430537 if TEN else 3.812))
"""Bytes of the held-out text beside its tokens."""
VALID, POINTS, WARM = 192, 9 if TEN else 8, 4 if TEN else 12
MICRO = min(16, SEQUENCES) if TEN else SEQUENCES
"""Sequences of a micro-batch."""
WITHIN = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
TUNED, MUON = Knobs(2e-3, 0.75, 1.6e-2, 0.1), Knobs(4e-3, 0.5, 1.6e-2, 0.1)
LINE, QUICK = MUON._replace(warmup=0.2), {"optimizer.betas": [0.8, 0.95], "optimizer.muon.momentum": 0.9}
UNTIED = {"model.tie_embeddings": False, "optimizer.lr_of.head": 4e-3}
EVEN = {"optimizer.weight_decay_lr": 4e-3}
INT8 = {
    "attention.backend": "sage", "attention.recipe": "scores", "linear.precision": "int8",
    "data.document_attention": False, "data.document_positions": False, "data.micro_batch_size": MICRO,
}  # fmt: skip
# The settings, the learning rate at the end as a share of the peak, and the share of the run over which it falls in a
# line; None: a cosine. `usual` is what pages about models of this size give, and `titan` has torchtitan's defaults. The
# others are the best of results/muon-loss, and rates beside them.
PLAIN: dict[str, tuple[Knobs, float, float | None]] = {
    "pytorch usual": (Knobs(6e-4, 0.05, 6e-4, 0.1), 0.1, None),
    "pytorch titan": (Knobs(8e-4, 0.2, 8e-4, 0.1), 0.0, 0.8),
    "pytorch tuned": (TUNED, 0.0, None),
    **{f"pytorch {lr:g}": (TUNED._replace(lr=lr, warmup=0.5), 0.0, None) for lr in (5e-4, 1e-3, 2e-3)},
    **{
        f"pytorch {lr:g} {embedding:g}": (Knobs(lr, 0.2, embedding, 0.1), 0.0, None)
        for lr in (5e-4, 1e-3, 2e-3, 4e-3) for embedding in (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
    },
}  # fmt: skip
OURS: dict[str, tuple[str, Knobs, dict[str, Any], float | None]] = {
    "sagetrain": ("muon", MUON, {}, None),
    "sagetrain adamw": ("adamw", TUNED, {}, None),
    "line": ("muon", LINE, {}, 0.65),
    "line, 8e-3": ("muon", LINE._replace(lr=8e-3), {}, 0.65),
    "line, quick": ("muon", LINE, QUICK, 0.65),
    "untied": ("muon", LINE._replace(embedding=6.4e-2), UNTIED, 0.65),
    "untied, quick": ("muon", LINE._replace(embedding=6.4e-2), UNTIED | QUICK, 0.65),
    "int8": ("muon", LINE._replace(embedding=6.4e-2, warmup=0.1), UNTIED | QUICK | INT8, 0.65),
    "int8 even": ("muon", LINE._replace(embedding=6.4e-2, warmup=0.1), UNTIED | QUICK | INT8 | EVEN, 0.65),
    "untied, quick, 2e-3": ("muon", LINE._replace(lr=2e-3, embedding=6.4e-2), UNTIED | QUICK, 0.65),
    "untied, quick, 8e-3": ("muon", LINE._replace(lr=8e-3, embedding=6.4e-2), UNTIED | QUICK, 0.65),
}
"""The rule, its settings, other keys, and the share of the run over which the rate falls in a line; None: a cosine.
Those behind the first two take settings of the speed run that our keys have (parts.py)."""
ARMS = [*OURS, *PLAIN, "speed run"]


def share(passed: float, warmup: float, end: float, line: float | None = None) -> float:
    """Return the learning rate as a share of its peak, when this share of the time has passed. `line` is the share of
    the run over which it falls in a line; None: by a cosine, from the warm-up on."""
    if line:
        return min(1.0, passed / warmup, end + (1 - end) * (1 - passed) / line)
    if passed < warmup:
        return passed / warmup
    falling = min(1.0, (passed - warmup) / (1 - warmup))
    return end + (1 - end) * (1 + math.cos(math.pi * falling)) / 2


def is_ours(name: str) -> bool:
    return name.split(" +")[0] in OURS


class Arm(Protocol):
    settings: str

    def begin(self, seed: int) -> None: ...
    def step(self, text: torch.Tensor, places: torch.Tensor, passed: float) -> None: ...
    def held(self, text: torch.Tensor, places: torch.Tensor) -> float: ...


def recipe(name: str) -> tuple[RunConfig, Knobs, float | None]:
    """Return the configuration of one of OURS, its knobs, and its line. Keys may follow: "int8 +optimizer.lr=2e-3"."""
    first, *others = name.split(" +")
    rule, knobs, changes, line = OURS[first]
    changes = changes | {key: json.loads(value) for key, value in (each.split("=") for each in others)}
    knobs = knobs._replace(lr=float(changes.pop("optimizer.lr", knobs.lr)))
    tree = config(rule, "bf16", 400, knobs).model_dump(mode="json")
    for key, value in changes.items():
        *sections, last = key.split(".")
        functools.reduce(dict.__getitem__, sections, tree)[last] = value
    return RunConfig.model_validate(tree), knobs, line


class Ours:
    def __init__(self, name: str, out: Path, device: torch.device, fixed: bool = False) -> None:
        cfg, self.knobs, self.line = recipe(name)
        if device.type == "cuda" and not fixed and cfg.linear.precision != "int8":
            open_to = {"attention": {"backend": "auto"}, "linear": {"precision": "auto"}}
            cfg = cfg.changed({**open_to, "data": {"document_attention": False, "document_positions": False}})
            start = StartOfRun(
                cfg, ParallelGroups.create(Topology(1, 1)), VOCAB, device, torch.bfloat16, compiled=True,
                folder=RunFolder(out / name.replace(" ", "-"), None), say=print,
            )  # fmt: skip
            cfg = settle(start, None, None).cfg
        self.cfg, self.engine = cfg, tiny.alone(cfg, device, VOCAB)
        self.settings = f"attention {cfg.attention.backend} {cfg.attention.recipe}, linear {cfg.linear.precision}"

    def begin(self, seed: int) -> None:
        begin(self.engine, self.cfg, seed)

    def step(self, text: torch.Tensor, places: torch.Tensor, passed: float) -> None:
        parts = [batch(text, part) for part in places.split(MICRO)]
        self.engine.step(parts, len(parts), share(passed, self.knobs.warmup, 0.0, self.line) * self.knobs.lr)

    def held(self, text: torch.Tensor, places: torch.Tensor) -> float:
        return self.engine.evaluate([batch(text, places)])["valid/loss"]


class Written:
    """A model in plain PyTorch."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        torch.set_float32_matmul_precision("high")
        if TEN:  # Attention is cuDNN's, as in torchtitan.
            torch.backends.cuda.enable_flash_sdp(False)
            torch.backends.cuda.enable_mem_efficient_sdp(False)
        self.model, self.device = model.to(device), device
        self.compiled = torch.compile(model, dynamic=False) if device.type == "cuda" else model

    def loss(self, text: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        given = batch(text, places)
        tokens, labels = (t.to(self.device, non_blocking=True) for t in (given.tokens, given.labels))
        with torch.autocast(self.device.type, torch.bfloat16):
            return self.compiled(tokens, labels)

    def backward(self, text: torch.Tensor, places: torch.Tensor) -> None:
        for part in places.split(MICRO):
            (self.loss(text, part) * (MICRO / SEQUENCES)).backward()

    def held(self, text: torch.Tensor, places: torch.Tensor) -> float:
        return float(self.loss(text, places).detach())  # Without gradients it would be compiled once more.


class Plain(Written):
    def __init__(self, name: str, device: torch.device) -> None:
        self.knobs, self.end, self.line = PLAIN[name]
        self.cfg = config("adamw", "bf16", 400, self.knobs).changed({"model": {"tie_embeddings": not TEN}})
        peer = Peer(self.cfg.model, "sdpa", LENGTH, VOCAB)
        super().__init__(peer, device)
        knobs, embedding = self.knobs, peer.embedding.weight
        of = {n: [w for w in peer.parameters() if w.ndim == n and w is not embedding] for n in (1, 2)}
        groups = [
            {"params": [embedding], "peak": knobs.embedding, "weight_decay": knobs.decay},
            {"params": of[2], "peak": knobs.lr, "weight_decay": knobs.decay},
            {"params": of[1], "peak": knobs.lr, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=device.type == "cuda")
        self.settings = f"bf16, {knobs}"

    def begin(self, seed: int) -> None:
        cfg, groups = self.cfg, ParallelGroups.single()
        self.model.take_weights(tiny.transformer(cfg.model, cfg.attention, vocab_size=VOCAB, seed=seed, groups=groups))
        gains = [weight for weight in self.model.parameters() if weight.ndim == 1]
        torch._foreach_copy_([gain.data for gain in gains], [torch.ones_like(gain) for gain in gains])
        self.optimizer.state.clear()

    def step(self, text: torch.Tensor, places: torch.Tensor, passed: float) -> None:
        self.backward(text, places)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * share(passed, self.knobs.warmup, self.end, self.line)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Raced(Written):
    def __init__(self, device: torch.device) -> None:
        layers = MODEL["num_layers"] + 2 * TEN  # 22 of its layers have as many weights as 20 of the others.
        super().__init__(Speedrun(layers, MODEL["hidden_size"], VOCAB, LENGTH), device)
        self.optimizers, self.settings = Optimizers(self.model, TOKENS, device), "bf16, speedrun.py"

    def begin(self, seed: int) -> None:
        self.model.begin(seed)
        self.optimizers.begin()

    def step(self, text: torch.Tensor, places: torch.Tensor, passed: float) -> None:
        self.backward(text, places)
        self.optimizers.step(passed)


def places_of(count: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield the places of each step's sequences: permutation after permutation of the text."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        yield from (torch.randperm(count, generator=draw) * LENGTH)[: count // SEQUENCES * SEQUENCES].split(SEQUENCES)


def timed(
    arm: Arm, seed: int, seconds: float, train: torch.Tensor, valid: torch.Tensor, whole: int | None, curve: Path
) -> dict[str, Any]:
    """Train for so many seconds. Return the steps, and the bits per byte after each part of the time, which go into
    `curve` too. With `whole`, a run takes so many steps in place of its seconds, whatever its time."""
    rows, places = (torch.arange(VALID) * LENGTH).split(MICRO), places_of(len(train) // LENGTH - 1, seed)
    sync = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    found, steps, passed = list[list[float]](), 0, 0.0
    arm.begin(seed)
    sync()
    began = time.monotonic()
    for point in range(1, POINTS + 1):
        while passed < seconds * point / POINTS:
            arm.step(train, next(places), passed / seconds)
            steps += 1
            if whole:
                passed = seconds * steps / whole
            elif steps % 2 == 0:
                sync()
                passed = time.monotonic() - began
        stopped = time.monotonic()
        held = [arm.held(valid, part) for part in rows]
        found.append([round(passed, 2), round(fmean(held) / math.log(2) / BYTES_PER_TOKEN, 5)])
        row = {"steps": steps, "tokens": steps * TOKENS, "bits": found[-1], "held": [round(x, 4) for x in held]}
        with curve.open("a") as file:
            file.write(json.dumps(row) + "\n")
        began += time.monotonic() - stopped
    return {"steps": steps, "tokens": steps * TOKENS, "bits": found}


def worker(name: str, asked: argparse.Namespace, pipe: Connection) -> None:
    device = init_distributed(timeout_minutes=10)
    torch.set_num_threads(2)
    train, valid = (text_of(asked.text, kind) for kind in ("train", "valid"))
    if asked.beside:
        more, half = (text_of(asked.beside, kind) for kind in ("train", "valid")), VALID // 2 * LENGTH
        train, valid = torch.cat([train, next(more)]), torch.cat([valid[:half], next(more)[: half + 1]])
    pipe.recv()
    born = time.monotonic()
    if is_ours(name):
        arm: Arm = Ours(name, asked.out, device, asked.steps is not None)
    else:
        arm = Raced(device) if name == "speed run" else Plain(name, device)
    pipe.send("settled")
    arm.begin(0)
    for part in (torch.arange(WARM * SEQUENCES) * LENGTH).split(SEQUENCES):  # These compile.
        arm.step(train, part, 0.0)
    arm.held(valid, torch.arange(MICRO) * LENGTH)
    pipe.send(f"{name}: ready after {time.monotonic() - born:.0f} s, {arm.settings}")
    while (run := pipe.recv()) is not None:
        curve = asked.out / f"{name.replace(' ', '-')}-{run[0]}.jsonl"
        found = timed(arm, *run, train, valid, asked.steps, curve)
        pipe.send({"arm": name, "seed": run[0], "seconds": round(run[1], 2), **found})


def table(rows: list[dict]) -> None:
    """Print each arm's mean bits per byte after each part of the time, and the difference to the first arm's end."""
    first, seconds = rows[0]["arm"], rows[0]["seconds"]
    print("| arm | tokens/s |" + "".join(f" {seconds * n / POINTS:.1f} s |" for n in range(1, POINTS + 1)) + " less |")
    print("|---" * (3 + POINTS) + "|")
    ends = {(row["arm"], row["seed"]): row["bits"][-1][1] for row in rows}
    for arm in dict.fromkeys(row["arm"] for row in rows):
        of = [row for row in rows if row["arm"] == arm]
        means = [fmean(row["bits"][n][1] for row in of) for n in range(POINTS)]
        pairs = [ends[arm, r["seed"]] - ends[first, r["seed"]] for r in of if (first, r["seed"]) in ends]
        less = f"{fmean(pairs):.4f} ± {WITHIN[len(pairs)] * stdev(pairs) / len(pairs) ** 0.5:.4f}" if pairs[1:] else ""
        cells = [arm, f"{fmean(r['tokens'] / r['bits'][-1][0] for r in of):,.0f}", *(f"{m:.4f}" for m in means), less]
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--beside", type=Path, help="a second text, with half of the held-out sequences")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a run")
    parser.add_argument("--total", type=float, help="seconds of all: runs are made shorter to fit")
    parser.add_argument("--arms", nargs="*", default=["sagetrain", "pytorch tuned", "pytorch usual", "speed run"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--steps", type=int, help="of a run, in place of seconds: runs may share the GPU")
    asked, born = parser.parse_args(), time.monotonic()
    asked.out.mkdir(parents=True, exist_ok=True)
    spawn, pipes, processes = multiprocessing.get_context("spawn"), dict[str, Connection](), []
    for name in asked.arms:
        pipes[name], end = spawn.Pipe()
        processes.append(spawn.Process(target=worker, args=(name, asked, end), daemon=True))
        processes[-1].start()
        end.close()
    for name in sorted(asked.arms, key=lambda name: not is_ours(name)):
        pipes[name].send("begin")
        if is_ours(name) and not asked.steps:  # `auto` finds by times what it stands for, so nothing else may run.
            _heard(pipes, name)
    for name in asked.arms:
        for _ in range(1 if is_ours(name) and not asked.steps else 2):
            print(_heard(pipes, name), flush=True)
    print(f"{time.monotonic() - born:.0f} s until all were ready", flush=True)
    seconds, runs = asked.seconds, asked.seeds * max(len(pipes), 1)
    if asked.total:
        seconds = min(seconds, (asked.total - (time.monotonic() - born)) / runs - (10 if TEN else 1.5))
    for seed in range(asked.seed, asked.seed + asked.seeds):
        for name in [name for name in asked.arms if name in pipes]:
            pipes[name].send((seed, seconds))
            row = _heard(pipes, name)
            if isinstance(row, dict):
                with (asked.out / "rows.jsonl").open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(f"{time.monotonic() - born:6.1f} s {row}", flush=True)
    for pipe in pipes.values():
        pipe.send(None)
    table(read([asked.out / "rows.jsonl"]))


def _heard(pipes: dict[str, Connection], name: str) -> Any:
    """Return what a worker says next. A worker that died is left out from then on."""
    try:
        return pipes[name].recv() if name in pipes else None
    except EOFError:
        del pipes[name]
        return f"{name}: died"


if __name__ == "__main__":
    main()
