"""Time forward and backward of some blocks as wide as 8B's on one sequence of 256K tokens, on one GPU.

    PYTHONPATH=.:kernels:benchmarks python results/step/longest.py OUT --blocks 3 --seconds 130

Both arithmetics keep what attention returned, in the memory of the host, and recompute the rest of a block. There is no
optimizer. Each side takes one step, which compiles too, so that the seconds are those of its kernels. OUT/SIDE.json is
written as soon as a number is there. A process beside the first side fills the caches of INT8's kernels. --tiny tries
it on the CPU. No test runs this script, and the page names its commit.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
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
    "int8": (AttentionConfig(backend="sage", recipe="scores"), LinearConfig(precision="int8")),
}
parser = argparse.ArgumentParser()
parser.add_argument("out", type=Path)
parser.add_argument("--sides", nargs="*", default=[*SIDES], choices=SIDES)
parser.add_argument("--seconds", type=float, default=130.0)
parser.add_argument("--tokens", type=int, default=2**18)
parser.add_argument("--blocks", type=int, default=3)
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


def said(side: str, found: dict, **more: object) -> None:
    """Add to what was found of a side, write all of it, and print the new part."""
    found |= more
    (asked.out / f"{side}.json").write_text(json.dumps(found, indent=1))
    print(f"{side}: {more}  [{time.monotonic() - BEGAN:.0f} s]", flush=True)


def run(side: str) -> dict:
    """Take the step of a side. Return its loss, seconds, memory and kernels."""
    found = {"side": side, "tokens": asked.tokens, "blocks": asked.blocks}
    backends = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    model, cuda = built(side, asked.blocks), DEVICE.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        said(side, found, gpu=torch.cuda.get_device_name())
    activity = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU
    with sdpa_kernel(backends, set_priority=True), torch.profiler.profile(activities=[activity]) as profile:
        loss, wall = step(model)
        said(side, found, loss=loss, wall=wall, peak_gb=torch.cuda.max_memory_allocated() / 1e9 if cuda else 0.0)
    events = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    # Copies to the host and back are beside the kernels.
    events = [e for e in events if cuda and not e.key.startswith(("Memcpy", "Memset"))]
    said(side, found, kernels=sum(e.self_device_time_total for e in events) / 1e6)
    longest = [[round(e.self_device_time_total / 1e6, 3), e.count, e.key[:90]] for e in events[:16]]
    print(*(f"  {seconds:7.3f} s {count:6d} x {name}" for seconds, count, name in longest), sep="\n", flush=True)
    assert model.offload is not None
    host = sum(x.nbytes for each in model.offload._places.values() for x in each) / 1e9
    finite = all(bool(p.grad.isfinite().all()) for p in model.parameters())
    said(side, found, host_gb=host, gradients_are_finite=finite, longest=longest)
    return found


asked.out.mkdir(parents=True, exist_ok=True)
filling = None
if asked.sides == [*SIDES]:
    words = [
        sys.executable,
        __file__,
        str(asked.out / "filling"),
        "--sides",
        "int8",
        "--tokens",
        "4096",
        "--blocks",
        "2",
    ]
    filling = subprocess.Popen(
        [*words, *(["--tiny"] if asked.tiny else [])], stdout=subprocess.DEVNULL, env={**os.environ}
    )
rows = dict[str, dict]()
for side in asked.sides:
    gc.collect()
    left = asked.seconds - (time.monotonic() - BEGAN)
    if rows and left < 10 * asked.blocks:
        print(f"{side}: {left:.0f} s are left, which is too little")
        break
    rows[side] = run(side)
if filling is not None:
    filling.kill()
if len(rows) == 2:
    both = [rows[side] for side in SIDES]
    kernels, gb = (" and ".join(f"{row[key]:.2f}" for row in both) for key in ("kernels", "peak_gb"))
    ratio = both[0]["kernels"] / (both[1]["kernels"] or 1)
    print(f"16 bits and INT8: {kernels} s of kernels, {gb} GB of the GPU, {ratio:.3f} times")
