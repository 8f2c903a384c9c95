"""Time AdamW's update of many values on one GPU: our kernel, torch's operators as we called them before, and others.

    PYTHONPATH=.:kernels:tests/support python results/experts/update.py OUT [--values 1e9 6.9e9] [--tiles]

The kernel must first have the bits of its twin. Each row is the mean of several updates of tensors of 134M values (the
last one shorter), as of the experts of OLMoE's layers, with fp32 gradients and fp32 masters. No test runs this script,
and the page names its commit.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from sagekernels import adamw as kernel
from sagetrain.config.schema import OptimizerConfig
from sagetrain.model.tensors import TensorSpec
from sagetrain.optim.adamw import AdamW
from sagetrain.optim.pieces import TensorPiece
from updates import KINDS, assert_levels_are_the_nearest, assert_same_bits

LARGEST, REPEATS = 2**27, 4
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
rows: list[dict[str, object]] = []


def sizes(values: int) -> list[int]:
    return [LARGEST] * (values // LARGEST) + [values % LARGEST] * (values % LARGEST > 0)


def timed(update: Callable[[int], None]) -> float:
    """Return the seconds of an update, after two others."""
    for number in (1, 2):
        update(number)
    if GPU:
        torch.cuda.synchronize()
    begun = time.perf_counter()
    for number in range(REPEATS):
        update(3 + number)
    if GPU:
        torch.cuda.synchronize()
    return (time.perf_counter() - begun) / REPEATS


def ours(values: int, moments: str, master: str, in_one_pass: bool, of_gradient: torch.dtype) -> Callable[[int], None]:
    dtype = torch.float32 if master == "fp32" else torch.bfloat16
    weights = [torch.randn(size, dtype=dtype, device=DEVICE) for size in sizes(values)]
    gradients = [torch.randn(size, dtype=of_gradient, device=DEVICE).mul_(1e-3) for size in sizes(values)]
    pieces = [
        TensorPiece(TensorSpec(f"w{n}", tuple(w.shape), None, None, "matrix", 0), 0, 1, 0, len(w), w)
        for n, w in enumerate(weights)
    ]
    optimizer = AdamW(pieces, OptimizerConfig(lr=1e-4, moments=moments, master=master), 0, 0.1)
    optimizer._in_one_pass = in_one_pass
    return lambda number: optimizer.step(gradients, 1e-4, number, 0.999)


def theirs(values: int, make: Callable[..., torch.optim.Optimizer]) -> Callable[[int], None]:
    weights = [torch.nn.Parameter(torch.randn(size, device=DEVICE)) for size in sizes(values)]
    for weight in weights:
        weight.grad = torch.randn_like(weight).mul_(1e-3)
    optimizer = make(weights, lr=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    return lambda number: optimizer.step()


def torchao(*arguments: object, **options: object) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(*arguments, **options)


def torch_fused(*arguments: object, **options: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(*arguments, **options, fused=GPU)


def sides(values: int) -> Iterator[tuple[str, Callable[[], Callable[[int], None]], float]]:
    """Yield each side with the bytes of memory traffic that a value needs."""
    fp32, bf16 = torch.float32, torch.bfloat16
    yield "int8 moments, one pass", lambda: ours(values, "int8", "fp32", True, fp32), 16
    yield "int8 moments, bf16 gradients", lambda: ours(values, "int8", "fp32", True, bf16), 14
    yield "bf16 moments, one pass", lambda: ours(values, "bf16", "fp32", True, fp32), 20
    yield "int8 moments, bf16 by chance", lambda: ours(values, "int8", "bf16_chance", True, fp32), 12
    yield "int8 moments, bf16 Kahan", lambda: ours(values, "int8", "bf16_kahan", True, fp32), 16
    yield "torch's fused AdamW in fp32", lambda: theirs(values, torch_fused), 28
    yield "int8 moments by torch's operators", lambda: ours(values, "int8", "fp32", False, fp32), 16
    yield "torchao's AdamW8bit", lambda: theirs(values, torchao), 16


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--values", type=float, nargs="*", default=[1e9, 6.9e9])
    parser.add_argument("--tiles", action="store_true", help="try other sizes of a program, at the first number")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    if GPU:
        for moments, master in KINDS:
            assert_same_bits(100_003, moments, master, device=DEVICE)
        assert_levels_are_the_nearest(DEVICE)
        print("the kernel has the bits of its twin", flush=True)

    def run(name: str, values: int, make: Callable[[], Callable[[int], None]], moved: float) -> None:
        try:
            seconds = timed(make())
        except Exception:  # noqa: BLE001 - the other sides are still timed
            traceback.print_exc(limit=3, file=sys.stdout)
            print(f"| {name} | {values / 1e9:.1f}B | FAILED |", flush=True)
            return
        finally:
            gc.collect()
            if GPU:
                torch.cuda.empty_cache()
        row = {"side": name, "values": values, "seconds": seconds, "terabytes": moved * values / seconds / 1e12}
        rows.append(row)
        print(f"| {name} | {values / 1e9:.1f}B | {1e3 * seconds:.2f} ms | {row['terabytes']:.2f} TB/s |", flush=True)
        (asked.out / "update.json").write_text(json.dumps(rows, indent=1) + "\n")

    if asked.tiles:
        chosen = kernel.TILES[True]
        for kernel.TILES[True] in ((1, 1), (1, 2), (2, 2), (2, 4), (4, 4), (4, 8), (8, 4), (8, 8), (16, 8)):
            name, make, moved = next(iter(sides(int(asked.values[0]))))
            run(f"{name}, {kernel.TILES[True]} blocks and warps", int(asked.values[0]), make, moved)
        kernel.TILES[True] = chosen
    for values in asked.values:
        for name, make, moved in sides(int(values)):
            run(name, int(values), make, moved)


if __name__ == "__main__":
    main()
