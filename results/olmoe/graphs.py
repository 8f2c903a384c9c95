"""Compare CUDA graphs of mixtures with the host's launches on one GPU: bits without deterministic kernels, and times.

    PYTHONPATH=.:kernels:tests/support:benchmarks:results/olmoe:results/experts python results/olmoe/graphs.py bits int8
    ... python results/olmoe/graphs.py times int8 4

`bits` trains the small mixture of results/experts from the same weights, by graphs and by the host in one engine and in
another engine without graphs, with dQ of INT8 attention added up in any order and in order. `times` prints the seconds
of a micro-step by which training.cuda_graphs: auto chooses, for two of OLMoE's layers and so many sequences of 4,096.
No test runs this script, and the log names its commit.
"""

from __future__ import annotations

import os
import sys
from itertools import combinations, combinations_with_replacement, product
from typing import Any

import torch

import runs
import step as olmoe
import tiny
from sagekernels import hopper_backward, hopper_projection
from sagetrain.cluster.join import init_distributed
from sagetrain.config.load import load_config
from sagetrain.data.batch import Batch
from sagetrain.engines.step import Engine

RUNS, STEPS, SEVERAL = 3, 4, 4
SUMS, ORDER = hopper_backward.hopper_sums, list[bool | None]([None])


def hopper_sums(call, dk, dv, *, deterministic: bool | None = None) -> torch.Tensor:
    return SUMS(call, dk, dv, deterministic=ORDER[0] if deterministic is None else deterministic)


def batch(vocab: int, micro: int, length: int, seed: int) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    often = 1 / torch.arange(10, vocab + 10).float()
    words = torch.multinomial(often, micro * (length + 1), replacement=True, generator=draw).view(micro, -1)
    return Batch(words[:, :-1].contiguous(), words[:, 1:].contiguous(), None, None, None, [])


def small(arm: str, graphs: str, device: torch.device) -> Any:
    cfg = runs.config(arm, SEVERAL * runs.LENGTH)
    changes = {"training": {"cuda_graphs": graphs}, "optimizer": {"clip_grad": 0.0}, "data": {"micro_batch_size": 1}}
    sections = {name: getattr(cfg, name).model_copy(update=update) for name, update in changes.items()}
    return tiny.alone(cfg.model_copy(update=sections), device, runs.VOCAB)


def trained(engine: Any, by_host: bool, begin: dict[str, dict[str, torch.Tensor]]) -> tuple[list[float], list[int]]:
    """Return the losses of steps from the same weights, and a sum of the bits of each tensor behind them, where each
    place has another weight."""
    runs.put(engine, begin, 0)
    if by_host:
        engine._traversal.refusal = "this run is by the host"
    losses = []
    for step in range(STEPS):
        every = [batch(runs.VOCAB, 1, runs.LENGTH, 10 * step + number) for number in range(SEVERAL)]
        losses.append(engine.step(every, SEVERAL, 1e-3).loss)
    if by_host:
        engine._traversal.refusal = ""
    found = [kept.read("weight").float().flatten().contiguous() for kept in engine.owned()]
    bits = [(x.view(torch.int32).long() * torch.arange(1, len(x) + 1, device=x.device)).sum() for x in found]
    return losses, [int(x) for x in bits]


def bits(arm: str, device: torch.device) -> None:
    hopper_backward.hopper_sums = hopper_projection.hopper_sums = hopper_sums
    graphed, other = (small(arm, graphs, device) for graphs in ("on", "off"))
    ways = {"graph": (graphed, False), "host": (graphed, True), "other engine": (other, False)}
    begin = {kept.name: {"weight": kept.read("weight").clone()} for kept in graphed.owned()}
    for engine, by_host in reversed(ways.values()):
        trained(engine, by_host, begin)  # Everything is compiled.
    torch.utils.deterministic.fill_uninitialized_memory = False
    for order, deterministic in ((None, False), (True, False), (False, True)):
        ORDER[0] = order
        torch.use_deterministic_algorithms(deterministic)
        graphed._traversal._programs.clear()
        trained(graphed, False, begin)
        found = {name: [trained(*way, begin) for _ in range(RUNS)] for name, way in ways.items()}
        replays = sum(program.replays for program in graphed._traversal._programs)
        print(f"{arm}, dQ in order: {order}, deterministic: {deterministic}; {replays} replays")
        for a, b in combinations_with_replacement(found, 2):
            pairs = [*(combinations(found[a], 2) if a == b else product(found[a], found[b]))]
            apart = max(abs(m - n) for x, y in pairs for m, n in zip(x[0], y[0], strict=True))
            same = sum(x[1] == y[1] for x, y in pairs)
            print(f"{a}, {b}: losses {apart:.6f} apart, equal bits in {same} of {len(pairs)}")


def times(precision: str, micro: int, device: torch.device) -> None:
    more = ["training.cuda_graphs=auto", "parallel.engine=fsdp"]
    olmoe.load_config = lambda path, keys: load_config(path, [*keys, *more])
    engine: Engine = olmoe.Ours(olmoe.config(f"SageTrain {precision}", 2, micro, 0.003), device).engine
    every = [batch(olmoe.VOCAB, micro, olmoe.LENGTH, number) for number in range(8)]
    for _ in range(5):
        found = engine.step(every, 8, 0.0).metrics
        print({name: value for name, value in found.items() if "micro_step" in name} or "not chosen in this step")


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    here = init_distributed(timeout_minutes=5)
    bits(sys.argv[2], here) if sys.argv[1] == "bits" else times(sys.argv[2], int(sys.argv[3]), here)
