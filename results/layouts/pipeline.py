"""Time a pipeline beside one GPU that trains its share of the blocks, and beside other layouts.

    torchrun --nproc-per-node 2 results/layouts/pipeline.py          (or 4)

It says how much of a step the stages idle, beside the bound (stages - 1) / (chunks x micro-batches + stages - 1). The
model is 3B with sequences of 8,192 random tokens. Before anything is timed, losses and gradient norms of a small model
are compared with those of ZeRO 1. Rows that do not fit into --seconds are left out, the last ones first.

This script is frozen. It runs with the library as it was at commit 6c48af22.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from sagetrain.cluster.join import init_distributed
from sagetrain.config import RunConfig
from sagetrain.config.arithmetic import idle_share
from sagetrain.costs.accounting import overlaps
from sagetrain.costs.stages import chunks_of_stage
from sagetrain.data.loader import Batch
from sagetrain.engines.build_engine import build_engine, partitioner
from sagetrain.engines.protocol import Engine, StepResult
from sagetrain.model.compile import compile_blocks
from sagetrain.model.selection import attention_functions, matmuls_of
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.topology import ParallelGroups, Topology

SMALL = {"num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 4}
LARGE = {
    "num_layers": 28,
    "hidden_size": 3072,
    "ffn_hidden_size": 8192,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
}


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to train the model."""

    name: str
    tensor: int = 1
    stages: int = 1
    chunks: int = 1
    zero: int = 1
    alone: bool = False
    """Whether every rank trains a model of its own, which has the blocks of one stage."""


def ways(world: int) -> list[Way]:
    """Return what is timed on so many GPUs, the most important ways first."""
    found = [Way("one GPU with the blocks of a stage", alone=True)]
    found += [Way(f"pipeline {world}", stages=world), Way(f"pipeline {world}, two chunks", stages=world, chunks=2)]
    if world > 2:
        found += [Way(f"pipeline 2 x data parallel {world // 2}", stages=2)]
        found += [Way(f"pipeline 2 x tensor parallel {world // 2}", stages=2, tensor=world // 2)]
    return [*found, Way("ZeRO 1"), Way("ZeRO 3", zero=3), Way(f"tensor parallel {world}", tensor=world)]


class Bench:
    """The ranks of the benchmark, and the models that they train one after the other."""

    def __init__(self, seconds: float, tiny: bool) -> None:
        self.begin, self.seconds, self.tiny = time.time(), seconds, tiny
        self.device, self.world, self.main = init_distributed(10), dist.get_world_size(), dist.get_rank() == 0
        self.vocab, self.length = (512, 16) if tiny else (32_768, 8192)
        self._groups: dict[tuple[int, int, bool], ParallelGroups] = {}

    def say(self, text: str) -> None:
        """Print a line on rank 0."""
        if self.main:
            print(text, flush=True)

    def groups(self, way: Way) -> ParallelGroups:
        """Return the process groups of a way, which are made once."""
        key = way.tensor, way.stages, way.alone
        if key not in self._groups and way.alone:
            own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
            self._groups[key] = ParallelGroups(Topology(1, 1), 0, tp_group=own, replica_group=own)
        elif key not in self._groups:
            self._groups[key] = ParallelGroups.create(Topology(self.world, way.tensor, 1, way.stages))
        return self._groups[key]

    def engine(self, way: Way, shape: Mapping[str, int], dtype: str, compiled: bool) -> Engine:
        """Build a model and its engine."""
        groups = self.groups(way)
        cfg = RunConfig.model_validate({
            "model": shape,
            "attention": {"backend": "sdpa", "qk_norm": "none"},
            "data": {"train": [{"path": "none"}], "seq_length": self.length, "micro_batch_size": 1},
            "tokens_per_step": {"schedule": "constant", "tokens": self.length * groups.dp_size},
            "optimizer": {"lr": 1e-4, "eps": 1e-6},
            "linear": {"precision": "bf16"},
            "training": {"run_dir": "none", "total_tokens": 10**9, "dtype": dtype},
            "parallel": {
                "engine": "fsdp",
                "zero_stage": way.zero,
                "tensor_parallel_size": way.tensor,
                "sequence_parallel": way.tensor > 1,
                "pipeline_parallel_size": way.stages,
                "pipeline_chunks": way.chunks,
            },
        })  # fmt: skip
        place: dict[str, Any] = {
            "device": self.device,
            "dtype": torch.bfloat16 if dtype == "bf16" else torch.float32,
        }
        model = Transformer(
            cfg.model,
            cfg.attention,
            vocab_size=self.vocab,
            groups=groups,
            matmuls=matmuls_of(cfg.linear, cfg.model, tensor_parallel_size=way.tensor, **place)[0],
            functions=attention_functions(cfg.attention, cfg.model, **place),
            sequence_parallel=way.tensor > 1,
            overlap=overlaps(cfg),
            partition=partitioner(cfg, groups),
            chunks=chunks_of_stage(cfg, self.vocab, groups.pp_rank),
            **place,
        )
        if compiled and self.device.type == "cuda":
            # Otherwise sizes that an earlier model had differently would be unknown to the compiler.
            torch._dynamo.reset()
            compile_blocks(model, hooks=True)
        return build_engine(cfg, model, groups, 1)

    def step(self, engine: Engine, number: int, micros: int) -> StepResult:
        """Take a step of so many micro-batches on each data-parallel rank."""
        groups, draw = engine.groups, torch.Generator().manual_seed(number)
        tokens = torch.randint(0, self.vocab, (micros * groups.dp_size, self.length + 1), generator=draw)
        own = tokens[groups.dp_rank :: groups.dp_size]
        return engine.step([Batch(row[None, :-1], row[None, 1:], None, None, None, []) for row in own], micros, 1e-4)

    def check(self, some: Sequence[Way]) -> None:
        """Compare the losses and norms of three steps with those of ZeRO 1.

        Raises:
            SystemExit: they differ.
        """
        expected = torch.empty(0)
        for way in [Way("ZeRO 1"), *(way for way in some if way.stages > 1 and way.stages * way.chunks <= 4)]:
            engine = self.engine(way, SMALL, "fp32", compiled=False)
            results = [self.step(engine, number, 4 // engine.groups.dp_size) for number in range(3)]
            found = torch.tensor([(result.loss, result.grad_norm) for result in results])
            expected = expected if len(expected) else found
            if ((found - expected).abs() > 1e-3 * expected).any():
                raise SystemExit(f"{way.name}: {found.tolist()} is not {expected.tolist()}: nothing is timed")

    def timed(self, way: Way, totals: Sequence[int]) -> dict[int, float]:
        """Return the median seconds of a step by its number of micro-batches on all data-parallel ranks together."""
        shape = SMALL if self.tiny else LARGE
        if way.alone:
            shape = {**shape, "num_layers": shape["num_layers"] // self.world}
        engine = self.engine(way, shape, "bf16", compiled=True)
        self.step(engine, 9, max(2, way.stages))  # This step compiles.
        found = {}
        for total in totals:
            seconds = []
            for number in range(3):
                self._synchronize()
                begin = time.perf_counter()
                self.step(engine, number, total // engine.groups.dp_size)
                self._synchronize()
                seconds.append(time.perf_counter() - begin)
            found[total] = statistics.median(seconds)
            rate = f"{total * self.length / found[total]:,.0f} tokens/s"
            self.say(f"{way.name:36} {total:3} micro-batches {found[total] * 1e3:8.0f} ms {rate:>18}")
        del engine
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return found

    def left(self) -> float:
        """Return the seconds that are left, the same on all ranks."""
        left = torch.tensor(self.seconds - (time.time() - self.begin), device=self.device)
        dist.broadcast(left, 0)
        return left.item()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark on this rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--first", type=int, default=99, help="time this many ways, the first ones")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a machine without GPUs")
    args = parser.parse_args(arguments)
    bench = Bench(args.seconds, args.tiny)
    some = [
        way for way in ways(bench.world) if way.stages * way.chunks <= (SMALL if args.tiny else LARGE)["num_layers"]
    ]
    bench.check(some)
    bench.say("losses and norms are those of ZeRO 1")
    totals, alone = [bench.world] if args.tiny else [4 * bench.world, 8 * bench.world], dict[int, float]()
    for way in some:
        if bench.left() < 40:
            bench.say(f"{way.name}: no time left")
            continue
        found = bench.timed(way, totals)
        alone = found if way.alone else alone
        for total, seconds in found.items() if way.stages == bench.world else ():
            bound = idle_share(way.stages, way.chunks, total)
            bench.say(f"    idle {1 - alone[total] / seconds:.1%} of a step, the bound is {bound:.1%}")


if __name__ == "__main__":
    main()
