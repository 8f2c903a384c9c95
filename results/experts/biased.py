"""Time GPT-OSS-20B's experts forward and backward on a GPU, with biases and the clamped SwiGLU and without.

    PYTHONPATH=.:kernels python results/experts/biased.py

16,384 tokens go to 4 of 32 experts of 2880 x 2880 by chance. Routing is not timed. Weights in 8 bits are kept, as a run
keeps them for a step. A figure is the median of 20 calls.

This script is frozen. It runs with the library as it was at the commit that added it.
"""

from __future__ import annotations

import statistics
import time

import torch

from sagekernels.grouped import plan_rows
from sagekernels.grouped_matmul import GROUPED_LOW_BIT, GroupedMatmul
from sagetrain.model.moe import Experts
from sagetrain.parallel.layers import keep_weights

NUMBER, HIDDEN, INNER, TOP, TOKENS = 32, 2880, 2880, 4, 16384
WAYS = {"bf16": GroupedMatmul(), "int8": GROUPED_LOW_BIT["int8"]}


def milliseconds(way: str, biased: bool) -> float:
    """Return the time of one call, forward and backward."""
    draw, device = torch.Generator("cuda").manual_seed(0), torch.device("cuda")
    layer = Experts(NUMBER, HIDDEN, INNER, biased=biased, matmul=WAYS[way], dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            p.copy_((0.5 if "bias" in name else 0.02) * torch.randn(p.shape, generator=draw, device=device))
    x, grad = (torch.randn(TOKENS, HIDDEN, generator=draw, device=device).bfloat16() for _ in range(2))
    weights, choices = torch.rand(TOKENS, NUMBER, generator=draw, device=device).topk(TOP)
    weights, rows = (weights / weights.sum(1, keepdim=True)).requires_grad_(), plan_rows(choices, NUMBER)
    x.requires_grad_()
    keep_weights(layer)
    torch._dynamo.reset()
    layer.compile(fullgraph=True, dynamic=False)
    times = []
    for _ in range(25):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        layer(x, weights, rows).backward(grad)
        for leaf in (*layer.parameters(), x, weights):
            leaf.grad = None
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times[5:])


for way in WAYS:
    plain, biased = (milliseconds(way, each) for each in (False, True))
    print(f"{way}: {plain:.2f} ms without biases, {biased:.2f} with ({biased / plain:.3f})")
