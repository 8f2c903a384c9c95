"""Time whole steps of the engine with passes launched by the host and replayed from CUDA graphs, on one or two GPUs.

    PYTHONPATH=.:kernels:tests/support torchrun --nproc-per-node GPUS results/graphs/steps.py [ROW...]

A row is SHAPE:TOKENS:LINEAR:ATTENTION:LAYOUT, and `,on` or `,off` behind it times one way alone. Each way has an engine
of its own. A step has 32 micro-batches of one sequence on one GPU, and 16 on each rank of two, and AdamW's update. No
test runs it.
"""

from __future__ import annotations

import functools
import gc
import sys
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist

import tiny
from sagekernels.graphs import forget
from sagetrain.cluster.join import end_distributed, init_distributed
from sagetrain.costs.memory import memory_per_rank
from sagetrain.data.batch import Batch
from sagetrain.engines.build_engine import build_engine
from sagetrain.model.compile import compile_blocks
from sagetrain.model.selection import matmuls_of
from sagetrain.parallel.topology import ParallelGroups, Topology

VOCAB = 32_000
SHAPES = {
    # The columns are: hidden size, layers, size of the MLP, heads, key and value heads, tied embeddings.
    "325m": (1024, 20, 3072, 16, 16, True),
    "1b": (2048, 20, 5632, 16, 4, False),
    "hybrid": (1024, 20, 3072, 16, 16, True),  # 325m with a gated delta net in three of four layers.
    "tiny": (64, 4, 128, 2, 2, True),
}
ATTENTION = {"sdpa": {"backend": "sdpa"}, "scores": {"backend": "sage", "recipe": "scores"}}
LAYOUTS = {  # The ZeRO stage, the stages of a pipeline, and the chunks of each.
    "zero1": (1, 1, 1), "zero2": (2, 1, 1), "zero3": (3, 1, 1), "1f1b": (1, 2, 1), "chunks": (1, 2, 2),
}  # fmt: skip
ROWS = [
    f"{shape}:{tokens}:{how}:zero1"
    for shape, tokens in (("325m", 1024), ("325m", 4096), ("1b", 4096))
    for how in ("bf16:sdpa", "fp8:scores", "int8:scores")
]


@functools.cache
def groups_of(stages: int) -> ParallelGroups:
    return ParallelGroups.create(Topology(dist.get_world_size(), 1, 1, stages))


def timed(row: str, graphs: str, device: torch.device) -> list[str]:
    """Take steps. Return the tokens/s of all ranks in the last one, the loss, the GiB before, at the most and by
    `plan` of the fullest rank, and why nothing is recorded."""
    shape, tokens, linear, attention, layout = row.split(":")
    hidden, layers, ffn, heads, kv_heads, tied = SHAPES[shape]
    (zero, stages, chunks), length, world = LAYOUTS[layout], int(tokens), dist.get_world_size()
    replicas, micros = world // stages, 32 if world == 1 else 16
    cfg = tiny.config(
        zero,
        "bf16",
        model={
            "num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": ffn, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "vocab_size": VOCAB, "tie_embeddings": tied,
            "delta_net": {"key_heads": 4, "value_heads": 8} if shape == "hybrid" else None,
        },
        linear={"precision": linear},
        attention=ATTENTION[attention],
        data={"seq_length": length},
        tokens_per_step={"tokens": replicas * micros * length},
        optimizer={"lr": 1e-4},
        training={"total_tokens": 10**9, "cuda_graphs": graphs},
        parallel={"zero_stage": zero, "pipeline_parallel_size": stages, "pipeline_chunks": chunks},
    )  # fmt: skip
    cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    groups = groups_of(stages)
    matmuls, _ = matmuls_of(cfg.linear, cfg.model, tensor_parallel_size=1, device=device, dtype=torch.bfloat16)
    model = tiny.model(cfg, groups, device=device, vocab_size=VOCAB, matmuls=matmuls)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
        compile_blocks(model, hooks=True)
    engine: Any = build_engine(cfg, model, groups, micros)
    # The first step compiles. The second one records, or the third one in a pipeline, whose slots come one by one.
    for step in range(2 if graphs == "off" else 4):
        draw = torch.Generator().manual_seed(100 * step + groups.dp_rank)
        texts = torch.randint(0, VOCAB, (micros, length + 1), generator=draw)
        batches = [Batch(text[None, :-1], text[None, 1:], None, None, None, []) for text in texts]
        torch.cuda.synchronize() if cuda else None
        dist.barrier()
        begin = time.perf_counter()
        loss = engine.step(batches, micros, 1e-4).loss
        torch.cuda.synchronize() if cuda else None
        dist.barrier()
        seconds = time.perf_counter() - begin
    kept = getattr(engine._traversal, "slots", engine._traversal)
    why = kept.recorder.refusal if hasattr(kept, "recorder") else engine.settings["micro_steps"]
    gib = [before, torch.cuda.max_memory_allocated() if cuda else 0]
    most = torch.tensor(gib, dtype=torch.float64, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    planned = sum(item.bytes for item in memory_per_rank(cfg, world, VOCAB))
    found = [f"{x / 2**30:.1f}" for x in (*most.tolist(), planned)]
    return [f"{replicas * micros * length / seconds:,.0f}", f"{loss:.5f}", *found, why]


def main() -> None:
    device, began = init_distributed(timeout_minutes=5), time.perf_counter()
    warnings.simplefilter("ignore")
    if dist.get_rank() == 0:
        names = "row", "graphs", "tokens/s", "loss", "GiB before", "GiB at most", "GiB by plan", "not recorded", "s"
        print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}", flush=True)
    for asked in sys.argv[1:] or ROWS:
        row, _, way = asked.partition(",")
        for graphs in [way] if way else ("off", "on"):
            found = [*timed(row, graphs, device), f"{time.perf_counter() - began:.0f}"]
            if dist.get_rank() == 0:
                print(f"| {row} | {graphs} | {' | '.join(found)} |", flush=True)
            gc.collect()
            if device.type == "cuda":
                forget()
                torch.cuda.empty_cache()
            torch._dynamo.reset()
    end_distributed()


if __name__ == "__main__":
    main()
