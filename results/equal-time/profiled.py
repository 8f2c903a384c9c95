"""Say where a step of an arm of runs.py spends its time: by kernel, idle, and on the host.

    PYTHONPATH=.:kernels:benchmarks:tests/support:results/muon-loss python results/equal-time/profiled.py TEXT OUT \
        --arms sagetrain "speed run" "pytorch tuned"

Each arm has a process of its own; they compile at the same time, and are measured one after the other. Our arm has the
settings that `auto` had found for this page. No test runs this script.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import runs

FOUND = {"attention": {"backend": "sage", "recipe": "scores"}, "linear": {"precision": "bf16"}}
STEPS, WARM = 4, 12
KINDS = {
    "matmuls": r"gemm|nvjet|cutlass|_mm_|xmma|matmul",
    "attention": r"attention|fmha|flash|_fwd_|hopper|bwd_(?:dq|dk)|sage|quantize",
    "Muon": r"symmetric|newton|_gram|muon|_direction|_add_update|orthogonal",
    "optimizer": r"adam|multi_tensor|foreach|clip|norm_squares",
    "loss": r"softmax|cross_entropy|nll",
    "copies": r"memcpy|memset|copy",
}


def kind(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.I)), "other kernels")


def profiled(arm: runs.Arm, text: torch.Tensor) -> dict[str, Any]:
    places = runs.places_of(len(text) // runs.LENGTH - 1, 0)
    cuda = torch.cuda.is_available()
    sync = torch.cuda.synchronize if cuda else lambda: None
    for _ in range(WARM):
        arm.step(text, next(places), 0.1)
    sync()
    began, host = time.perf_counter(), 0.0
    for _ in range(2 * STEPS):
        at = time.perf_counter()
        arm.step(text, next(places), 0.1)
        host += time.perf_counter() - at
    sync()
    wall = (time.perf_counter() - began) / (2 * STEPS)
    at = time.perf_counter()
    for _ in range(STEPS):
        runs.batch(text, next(places))
    batches = (time.perf_counter() - at) / STEPS
    activities = [torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(STEPS):
            arm.step(text, next(places), 0.1)
        sync()
    spans, by_name, count = [], Counter[str](), 0
    for event in profile.events():
        on_gpu = event.device_type == torch.autograd.DeviceType.CUDA
        if on_gpu or not cuda:
            spans.append((event.time_range.start, event.time_range.end))
            by_name[event.name] += event.time_range.end - event.time_range.start
            count += 1
    busy, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        busy += max(0.0, end - max(start, last))
        last = max(last, end)
    kinds = Counter[str]()
    for name, spent in by_name.items():
        kinds[kind(name)] += spent
    milliseconds = lambda spent: round(spent / 1000 / STEPS, 3)  # noqa: E731
    return {
        "wall": round(1e3 * wall, 2), "host": round(1e3 * host / (2 * STEPS), 2), "batch": round(1e3 * batches, 2),
        "busy": milliseconds(busy), "kernels": count // STEPS,
        "kinds": {name: milliseconds(spent) for name, spent in kinds.most_common()},
        "names": {name[:110]: milliseconds(spent) for name, spent in by_name.most_common(40)},
    }  # fmt: skip


def worker(name: str, asked: argparse.Namespace, pipe: Connection) -> None:
    device = runs.init_distributed(timeout_minutes=10)
    torch.set_num_threads(2)
    text = runs.text_of(asked.text, "train")
    runs.settle = lambda cfg, *_, **__: SimpleNamespace(cfg=cfg.changed(FOUND))
    if name in runs.OURS:
        arm: runs.Arm = runs.Ours(name, asked.out, device)
    else:
        arm = runs.Raced(device) if name == "speed run" else runs.Plain(name, device)
    arm.begin(0)
    arm.step(text, torch.arange(runs.SEQUENCES) * runs.LENGTH, 0.0)
    pipe.send("ready")
    pipe.recv()
    pipe.send(profiled(arm, text))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--arms", nargs="*", default=["sagetrain", "speed run", "pytorch tuned"])
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    spawn, pipes = multiprocessing.get_context("spawn"), dict[str, Connection]()
    for name in asked.arms:
        pipes[name], end = spawn.Pipe()
        spawn.Process(target=worker, args=(name, asked, end), daemon=True).start()
        end.close()
    for name in asked.arms:
        runs._heard(pipes, name)
    for name in [name for name in asked.arms if name in pipes]:
        pipes[name].send("go")
        found = runs._heard(pipes, name)
        print(f"\n{name}: {json.dumps(found, indent=1)}", flush=True)
        with (asked.out / "profile.jsonl").open("a") as file:
            file.write(json.dumps({"arm": name, "found": found}) + "\n")


if __name__ == "__main__":
    main()
