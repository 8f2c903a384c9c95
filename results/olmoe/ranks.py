"""Time OLMoE's layers on two GPUs, with all experts on each of them and with half of them, in INT8 and in 16 bits.

    PYTHONPATH=.:kernels:tests/support:benchmarks:results/olmoe python results/olmoe/ranks.py OUT [--layers N]

Each side has two processes. All sides compile at once, take five steps on two layers, whose losses are compared, and
are then timed one after the other at their depth. A rate of 0 keeps the weights there, and a bias moves by 0.003 in
eight steps before. Words follow each other by a fixed table, so that there is something to learn. No test runs this
script, and the log names its commit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import step as olmoe
import tiny
from sagetrain.cluster.join import init_distributed
from sagetrain.config.load import load_config
from sagetrain.data.batch import Batch
from sagetrain.engines.build_engine import build_engine
from sagetrain.engines.protocol import StepResult
from sagetrain.engines.step import Engine
from sagetrain.model.compile import compile_blocks
from sagetrain.parallel.topology import ParallelGroups, Topology

SIDES = [f"{precision} EP {ranks}" for precision in ("int8", "bf16") for ranks in (1, 2)]
SEVERAL = 4
"""The micro-batches of a step."""


def batches(micro: int, rank: int) -> list[Batch]:
    """Return micro-batches of words, each of which is followed by one of 16, as often as words of a text are."""
    source = torch.Generator().manual_seed(1)
    often = 1 / torch.arange(10, olmoe.VOCAB + 10).float()
    follow = torch.multinomial(often, 16 * olmoe.VOCAB, replacement=True, generator=source).view(-1, 16)
    made = []
    for number in range(SEVERAL):
        draw = torch.Generator().manual_seed(2 * number + rank)
        words = [torch.multinomial(often, micro, replacement=True, generator=draw)]
        for way in torch.randint(0, 16, (olmoe.LENGTH, micro), generator=draw):
            words.append(follow[words[-1], way])
        every = torch.stack(words, 1)
        made.append(Batch(every[:, :-1].contiguous(), every[:, 1:].contiguous(), None, None, None, []))
    return made


def build(side: str, layers: int, micro: int, bias_rate: float, device: torch.device) -> Engine:
    precision, _, ranks = side.split()
    more = ["parallel.engine=fsdp", f"parallel.expert_parallel_size={ranks}"]
    more.append(f"tokens_per_step.tokens={2 * SEVERAL * micro * olmoe.LENGTH}")
    olmoe.load_config = lambda path, keys: load_config(path, [*keys, *more])
    cfg = olmoe.config(f"SageTrain {precision}", layers, micro, bias_rate)
    groups = ParallelGroups.create(Topology(2, 1, expert_parallel_size=int(ranks)))
    model = tiny.model(cfg, groups, device=device, vocab_size=olmoe.VOCAB)
    if olmoe.GPU:
        compile_blocks(model, hooks=True)
    return build_engine(cfg, model, groups, 1)


def step(engine: Engine, pairs: list[Batch], lr: float) -> StepResult:
    while (result := engine.step(pairs, len(pairs), lr)).room:
        print("a step is taken again, because rows had no room", flush=True)
    return result


def worker(side: str, asked: argparse.Namespace) -> None:
    torch.set_num_threads(2)
    rank, device = int(os.environ["RANK"]), init_distributed(timeout_minutes=5)
    made = batches(asked.micro, rank)
    engine = build(side, 2, asked.micro, 0.0, device)
    losses = [step(engine, [made[n % 2]], 1e-4).loss for n in range(5)]
    del engine
    olmoe.release()
    (asked.out / f"{side}.{rank}.checked").touch()
    while not (asked.out / f"{side}.turn").exists():
        time.sleep(0.05)
    engine = build(side, asked.layers, asked.micro, 0.003, device)
    for n in range(8):
        step(engine, [made[n % SEVERAL]], 0.0)
    times = []
    for _ in range(4):
        begun = time.perf_counter()
        result = step(engine, made, 0.0)  # It ends with its loss on the host.
        times.append(time.perf_counter() - begun)
    row = {"losses": losses, "times": times, "deep": result.loss, "load": result.metrics["moe/max_load"]}
    row["gib"] = torch.cuda.max_memory_allocated() / 2**30 if olmoe.GPU else 0.0
    row["rate"] = SEVERAL * asked.micro * olmoe.LENGTH / statistics.median(times[1:])
    if rank == 0:
        (asked.out / f"{side}.json").write_text(json.dumps(row) + "\n")
    sys.stdout.flush()
    os._exit(0)  # At once, so that the next side has the memory.


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--micro", type=int, default=4, help="sequences of a micro-batch")
    parser.add_argument("--side")
    asked = parser.parse_args()
    if asked.side:
        worker(asked.side, asked)
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    running = {}
    for number, side in enumerate(SIDES):
        for rank in map(str, range(2)):
            env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "2",
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29541 + number)}  # fmt: skip
            words = [sys.executable, *sys.argv, "--side", side]
            running[side, rank] = subprocess.Popen(words, env={**os.environ, **env})
    while any(not (asked.out / f"{s}.{r}.checked").exists() and p.poll() is None for (s, r), p in running.items()):
        time.sleep(0.1)
    print("| side | tokens/s a GPU | over EP 1 | GiB | losses apart on two layers, which fell | the fullest expert |")
    for side in SIDES:
        (asked.out / f"{side}.turn").touch()
        for rank in "01":
            running[side, rank].wait()
        row, one = (json.loads((asked.out / f"{name}.json").read_text()) for name in (side, f"{side[:-1]}1"))
        apart = max(abs(a - b) for a, b in zip(row["losses"], one["losses"], strict=True))
        print(f"| {side} | {row['rate']:,.0f} | {row['rate'] / one['rate']:.3f} | {row['gib']:.1f} | {apart:.5f}, "
              f"{row['losses'][0] - row['losses'][-1]:.3f} | {row['load']:.2f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
