"""Time whole steps of the engine with micro-steps launched by the host and replayed from CUDA graphs, on one GPU.

    PYTHONPATH=.:kernels:tests/support torchrun --nproc-per-node 1 results/graphs/steps.py [ROW...]

A row is SHAPE:TOKENS:LINEAR:ATTENTION. A step has 32 micro-batches of one sequence, and AdamW's update. Frozen at
commit 3c3b3a2a: no test runs it.
"""

from __future__ import annotations

import sys
import time

import torch

import tiny
from sagetrain.cluster.join import end_distributed, init_distributed
from sagetrain.data.loader import Batch
from sagetrain.engines.build_engine import build_engine
from sagetrain.engines.protocol import Engine
from sagetrain.model.compile import compile_blocks
from sagetrain.model.selection import matmuls_of
from sagetrain.parallel.topology import ParallelGroups, Topology

VOCAB, MICRO_BATCHES = 32_000, 32
SHAPES = {
    # The columns are: hidden size, layers, size of the MLP, heads, key and value heads, tied embeddings.
    "325m": (1024, 20, 3072, 16, 16, True),
    "1b": (2048, 20, 5632, 16, 4, False),
    "tiny": (64, 2, 128, 2, 2, True),
}
ATTENTION = {"sdpa": {"backend": "sdpa"}, "scores": {"backend": "sage", "recipe": "scores"}}
ROWS = [
    f"{shape}:{tokens}:{how}"
    for shape, tokens in (("325m", 1024), ("325m", 4096), ("1b", 4096))
    for how in ("bf16:sdpa", "fp8:scores", "int8:scores")
]


def engine_of(shape: str, tokens: int, linear: str, attention: str, graphs: str, device: torch.device) -> Engine:
    hidden, layers, ffn, heads, kv_heads, tied = SHAPES[shape]
    cfg = tiny.config(
        1,
        "bf16",
        model={
            "num_layers": layers, "hidden_size": hidden, "ffn_hidden_size": ffn, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "vocab_size": VOCAB, "tie_embeddings": tied,
        },
        linear={"precision": linear},
        attention=ATTENTION[attention],
        data={"seq_length": tokens},
        tokens_per_step={"tokens": MICRO_BATCHES * tokens},
        optimizer={"lr": 1e-4},
        training={"total_tokens": 10**9, "cuda_graphs": graphs},
    )  # fmt: skip
    groups = ParallelGroups.create(Topology(1, 1))
    matmuls, _ = matmuls_of(cfg.linear, cfg.model, tensor_parallel_size=1, device=device, dtype=torch.bfloat16)
    model = tiny.model(cfg, groups, device=device, vocab_size=VOCAB, matmuls=matmuls)
    if device.type == "cuda":
        compile_blocks(model, hooks=True)
    return build_engine(cfg, model, groups, MICRO_BATCHES)


def rate(engine: Engine, tokens: int) -> float:
    """Return the tokens/s of the third step. The first one compiles, and the second one records."""
    for step in range(3):
        texts = torch.randint(0, VOCAB, (MICRO_BATCHES, tokens + 1), generator=torch.Generator().manual_seed(step))
        batches = [Batch(text[None, :-1], text[None, 1:], None, None, None, []) for text in texts]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.step(batches, MICRO_BATCHES, 1e-4)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    return MICRO_BATCHES * tokens / seconds


def main() -> None:
    device = init_distributed(timeout_minutes=5)
    print("| micro-step | linear layers, attention | by the host, tokens/s | replayed, tokens/s |\n|---|---|---|---|")
    for row in sys.argv[1:] or ROWS:
        shape, tokens, linear, attention = row.split(":")
        found = []
        for graphs in ("off", "on") if device.type == "cuda" else ("off",):
            engine = engine_of(shape, int(tokens), linear, attention, graphs, device)
            found.append(f"{rate(engine, int(tokens)):,.0f}")
            del engine
            torch._dynamo.reset()
            torch.cuda.empty_cache()
        print(f"| {shape}, 1 x {tokens} | {linear}, {attention} | {' | '.join(found)} |", flush=True)
    end_distributed()


if __name__ == "__main__":
    main()
