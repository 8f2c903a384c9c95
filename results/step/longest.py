"""Time forward and backward of five blocks as wide as 8B's on one sequence of 256K tokens, on one GPU.

    PYTHONPATH=.:kernels:benchmarks python results/step/longest.py OUT --seconds 110

Both arithmetics keep what attention returned, in the memory of the host, and recompute the rest of a block. There is no
optimizer. Each side takes one step, which compiles too, so that the seconds are those of its kernels. --tiny tries it
on the CPU. No test runs this script, and the page names its commit.
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
    "bf16": (AttentionConfig(backend="sdpa"), LinearConfig(precision="bf16")),
    "int8": (AttentionConfig(backend="sage", recipe="scores"), LinearConfig(precision="int8", recipe="rowwise")),
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
    """Return the loss of one sequence, and the seconds from the first launch to the end, compiling included."""
    text = torch.randint(0, VOCAB, (1, asked.tokens + 1), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    began = time.monotonic()
    loss = model(text[:, :-1], text[:, 1:])
    loss.backward()
    return loss.item(), time.monotonic() - began


def run(side: str) -> dict:
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    model, cuda = built(side, asked.blocks), DEVICE.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    activity = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    with sdpa_kernel(backends, set_priority=True), torch.profiler.profile(activities=[activity]) as profile:
        loss, wall = step(model)
    assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
    # Copies to the host and back are beside the kernels.
    events = [e for e in profile.key_averages() if not e.key.startswith(("Memcpy", "Memset"))] if cuda else []
    seconds = sum(e.self_device_time_total for e in events) / 1e6
    for event in sorted(events, key=lambda e: -e.self_device_time_total)[:8]:
        print(f"  {event.self_device_time_total / 1e6:7.3f} s {event.count:6d} x {event.key[:90]}")
    assert model.offload is not None
    host = sum(x.nbytes for each in model.offload._places.values() for x in each) / 1e9
    peak = torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0
    found = {"loss": loss, "kernels": seconds, "wall": wall, "peak_gb": peak, "host_gb": host}
    return {"side": side, "tokens": asked.tokens, "blocks": asked.blocks, **found}


rows = []
asked.out.mkdir(parents=True, exist_ok=True)
for side in SIDES:
    gc.collect()
    if time.monotonic() - BEGAN > asked.seconds - 40:
        print(f"{side}: no time left")
        break
    rows.append(run(side))
    (asked.out / "longest.json").write_text(json.dumps(rows, indent=1))
    row = rows[-1]
    print(
        f"{side}: {asked.blocks} blocks, {asked.tokens} tokens: {row['kernels']:.2f} s of kernels, {row['wall']:.2f} s "
        f"with compiling, {row['peak_gb']:.1f} GB of the GPU, {row['host_gb']:.1f} GB "
        f"of the host, loss {row['loss']:.5f}  [{time.monotonic() - BEGAN:.0f} s]", flush=True,
    )  # fmt: skip
