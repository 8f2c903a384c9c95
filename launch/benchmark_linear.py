"""Time linear layers in 8 bits beside F.linear in bf16, forward and backward, quantization included.

    python launch/benchmark_linear.py
    python launch/benchmark_linear.py --config configs/7b.yaml --tokens 8192 --json linear.json

One row for each layer of a block, at the sizes of a configuration: milliseconds of bf16, and of every recipe how many
times as fast it is. Weights are rounded before, as a run does once per step; x and the gradients as they come, by
themselves, where a block may fuse that with its norms. All is compiled. Ways take turns; a figure is the median over
rounds. Every result is compared with fp32 first: what is wrong is not timed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sagetrain.config.load import load_config
from sagetrain.model.linear_choice import LIMITS, errors_of, layer_of, layers_of
from sagetrain.parallel.lowbit import RECIPES

ROUNDS, CALLS = 15, 8


class Plain(nn.Module):
    """F.linear with each weight."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """[tokens, in] -> [tokens, out] for each weight."""
        return tuple(F.linear(x, weight) for weight in self.weights)


def ways_of(inputs: int, sizes: dict[str, int], device: torch.device) -> dict[str, nn.Module]:
    """The layer in bf16 and by every recipe, with the same weights."""
    draw, place = torch.Generator(device).manual_seed(0), {"device": device, "dtype": torch.bfloat16}
    weights = [0.02 * torch.randn(size, inputs, generator=draw, **place) for size in sizes.values()]
    ways: dict[str, nn.Module] = {"bf16": Plain(weights)}
    for name, matmul in RECIPES.items():
        ways[" ".join(name)] = layer_of(inputs, sizes, weights, matmul, kept=True)
    return ways


def call(layer: Callable[[Tensor], Sequence[Tensor]], x: Tensor, grads: Sequence[Tensor]) -> None:
    """Forward and backward: gradients are left in x and the weights."""
    torch.autograd.backward(layer(x), grads)


def check(name: str, layer: nn.Module, x: Tensor, grads: Sequence[Tensor]) -> None:
    """Compare output and gradients with fp32's.

    Raises:
        SystemExit: they are further away than the arithmetic explains.
    """
    for what, error in errors_of(layer, x, grads).items():
        if not error < LIMITS[name.split()[0]]:
            raise SystemExit(f"{name}: the {what} is wrong by {error:.3g} of itself; not timed")


def milliseconds(action: Callable[[], None]) -> float:
    """Of one call, between events around several."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(CALLS):
        action()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / CALLS


def measure(inputs: int, sizes: dict[str, int], tokens: int, recipes: Sequence[str]) -> dict[str, float]:
    """Milliseconds of forward and backward by way, at one layer's sizes."""
    device = torch.device("cuda")
    draw, place = torch.Generator(device).manual_seed(1), {"device": device, "dtype": torch.bfloat16}
    x = torch.randn(tokens, inputs, generator=draw, **place).requires_grad_()
    grads = [1e-3 * torch.randn(tokens, size, generator=draw, **place) for size in sizes.values()]
    ways = {name: way for name, way in ways_of(inputs, sizes, device).items() if name == "bf16" or name in recipes}
    actions = {}
    for name, layer in ways.items():
        layer.compile(fullgraph=True, dynamic=False)
        check(name, layer, x, grads)

        def action(layer: nn.Module = layer) -> None:
            x.grad = None
            layer.zero_grad()
            call(layer, x, grads)

        action()
        actions[name] = action
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 3):  # in turn, round by round: clocks drift
        for name, action in actions.items():
            spent = milliseconds(action)
            if number >= 3:
                times[name].append(spent)
    return {name: statistics.median(spent) for name, spent in times.items()}


def table(rows: dict[str, dict[str, float]]) -> str:
    """One line a layer, and one for all: bf16 in ms, recipes as multiples of its speed."""
    total = {name: sum(row[name] for row in rows.values()) for name in next(iter(rows.values()))}
    _, *names = total
    lines = [f"{'layer':28} {'bf16, ms':>9}" + "".join(f"{name:>25}" for name in names)]
    for layer, row in [*rows.items(), ("block", total)]:
        lines.append(f"{layer:28} {row['bf16']:9.3f}" + "".join(f"{row['bf16'] / row[name]:25.2f}" for name in names))
    return "\n".join(lines)


def main() -> None:
    """Print a table for each configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shipped = ["configs/1b.yaml", "configs/7b.yaml"]
    parser.add_argument("--config", nargs="+", default=shipped, help="models (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch (default: %(default)s)")
    every = [" ".join(name) for name in RECIPES]
    parser.add_argument("--recipes", nargs="+", default=every, choices=every, help="default: all of them")
    parser.add_argument("--json", type=Path, help="write the milliseconds there as well")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.config.recompile_limit = 1000  # one graph for each size and recipe, all of the same code
    found = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "tokens": args.tokens, "ms": {}}
    print(f"{found['gpu']}, torch {torch.__version__}, {args.tokens:,} tokens")
    for path in args.config:
        rows = {}
        for layer, (inputs, sizes) in layers_of(load_config(path).model).items():
            name = f"{layer} {inputs} x {sum(sizes.values())}"
            rows[name] = measure(inputs, sizes, args.tokens, args.recipes)
            print(f"{path} {name}: {rows[name]['bf16']:.3f} ms in bf16", flush=True)
        found["ms"][path] = rows
        print(f"\n{path}\n{table(rows)}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
