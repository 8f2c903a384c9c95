"""Time forward and backward of five blocks as wide as 8B's on one sequence of 256K tokens, on one GPU.

    PYTHONPATH=.:kernels:benchmarks python results/step/longest.py OUT --seconds 110

Both arithmetics keep what attention returned, in the memory of the host, and recompute the rest of a block. There is no
optimizer. A model of one block compiles what the five blocks run. --tiny tries it on the CPU. No test runs this script,
and the page names its commit.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sagetrain.config.schema import AttentionConfig, LinearConfig, ModelConfig
from sagetrain.model.activation_offload import ActivationOffload
from sagetrain.model.compile import compile_blocks
from sagetrain.model.selection import attention_functions, matmuls_of
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.topology import ParallelGroups

BEGAN = time.monotonic()
SIDES = {
    "int8": (AttentionConfig(backend="sage", recipe="scores"), LinearConfig(precision="int8", recipe="rowwise")),
    "bf16": (AttentionConfig(backend="sdpa"), LinearConfig(precision="bf16")),
}
parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--seconds", type=float, default=110.0)
parser.add_argument("--tokens", type=int, default=2**18)
parser.add_argument("--blocks", type=int, default=5)
parser.add_argument("--tiny", action="store_true")
asked = parser.parse_args()
DEVICE, VOCAB = torch.device("cpu" if asked.tiny else "cuda"), 512 if asked.tiny else 128_256
WIDTHS = {"hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
if asked.tiny:
    WIDTHS = {"hidden_size": 64, "ffn_hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def built(side: str, blocks: int) -> Transformer:
    """Build a model with random weights."""
    attention, linear = SIDES[side]
    shape = ModelConfig(num_layers=blocks, rope_theta=5e5, vocab_size=VOCAB, **WIDTHS)
    place = {"device": DEVICE, "dtype": torch.bfloat16}
    matmuls, _ = matmuls_of(linear, shape, tensor_parallel_size=1, **place)
    functions = attention_functions(attention, shape, **place)
    model = Transformer(
        shape, attention, vocab_size=VOCAB, groups=ParallelGroups.single(), functions=functions, matmuls=matmuls,
        activation_checkpointing="attention", seed=None, **place,
    )  # fmt: skip
    model.to_empty(device=DEVICE)
    draw = torch.Generator(DEVICE).manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1) if parameter.ndim == 1 else parameter.normal_(0, 0.02, generator=draw)
    model.keep_weights()
    model.offload = ActivationOffload.on(DEVICE)
    compile_blocks(model, "aot_eager_decomp_partition" if asked.tiny else "inductor")
    return model


def step(model: Transformer) -> tuple[float, float]:
    """Return the loss of one sequence, and the seconds of both passes."""
    text = torch.randint(0, VOCAB, (1, asked.tokens + 1), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    model.zero_grad(set_to_none=True)
    torch.accelerator.synchronize() if DEVICE.type == "cuda" else None
    began = time.monotonic()
    loss = model(text[:, :-1], text[:, 1:])
    loss.backward()
    return loss.item(), time.monotonic() - began


def run(side: str) -> dict:
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
        step(built(side, 1))
        model = built(side, asked.blocks)
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        loss, seconds = step(model)
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
    assert model.offload is not None
    host = sum(x.nbytes for each in model.offload._places.values() for x in each) / 1e9
    peak = torch.cuda.max_memory_allocated() / 1e9 if DEVICE.type == "cuda" else 0.0
    return {"side": side, "loss": loss, "seconds": seconds, "peak_gb": peak, "host_gb": host}


rows = []
for side in SIDES:
    gc.collect()
    if time.monotonic() - BEGAN > asked.seconds - 50:
        print(f"{side}: no time left")
        break
    rows.append(run(side))
    (asked.out / "longest.json").write_text(json.dumps(rows, indent=1))
    row = rows[-1]
    print(
        f"{side}: {asked.blocks} blocks, {asked.tokens} tokens: {row['seconds']:.2f} s, "
        f"{asked.tokens / row['seconds']:,.0f} tokens/s, {row['peak_gb']:.1f} GB of the GPU, {row['host_gb']:.1f} GB "
        f"of the host, loss {row['loss']:.5f}  [{time.monotonic() - BEGAN:.0f} s]", flush=True,
    )  # fmt: skip
