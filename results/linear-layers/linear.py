"""Time linear layers in 8 bits beside F.linear in bf16, forward and backward, quantization included.

    python results/linear-layers/linear.py
    python results/linear-layers/linear.py --config configs/7b.yaml --tokens 8192 --json linear.json

There is one row for each layer of a block, at the sizes of a configuration: the milliseconds of bf16, and for every
recipe how many times as fast it is. Weights are rounded beforehand, as a run does once per step. x and the gradients
are rounded by themselves, where a block may fuse that with its norms. Everything is compiled. Ways take turns; a figure
is the median over rounds. Every result is compared with fp32 first, and a way that is wrong is not timed.

Products alone are timed with operands that are rounded beforehand: bf16, FP8 and INT8, the three products of every
layer together.

This script is frozen. It runs with the library as it was at commit 97813d0a. A run
prints the same table of its own layers where linear.precision is auto.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sagekernels.admission import median_seconds
from sagekernels.casts import E4M3, INT8, quantize
from sagekernels.lowbit import RECIPES, product
from sagetrain.auto.linear_choice import LIMITS, errors_of, layer_of
from sagetrain.config.errors import ConfigError
from sagetrain.config.layer_specs import linear_layers
from sagetrain.config.load import load_config

ROUNDS = 15
PRODUCT_LIMITS = {"bf16": 0.005, "fp8": 0.06, "int8": 0.02}
"""Largest error for random normal matrices, row-wise: the rounding of both operands to codes, and of the result to
bf16."""


class Plain(nn.Module):
    """The linear layer in bf16: F.linear with each weight."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Map [tokens, in] to [tokens, out] for each weight."""
        return tuple(F.linear(x, weight) for weight in self.weights)


def ways_of(inputs: int, sizes: dict[str, int], device: torch.device) -> dict[str, nn.Module]:
    """Return the layer in bf16 and by every recipe, with the same weights."""
    draw, place = torch.Generator(device).manual_seed(0), {"device": device, "dtype": torch.bfloat16}
    weights = [0.02 * torch.randn(size, inputs, generator=draw, **place) for size in sizes.values()]
    ways: dict[str, nn.Module] = {"bf16": Plain(weights)}
    for name, matmul in RECIPES.items():
        ways[" ".join(name)] = layer_of(inputs, sizes, weights, matmul, kept=True)
    return ways


def call(layer: Callable[[Tensor], Sequence[Tensor]], x: Tensor, grads: Sequence[Tensor]) -> None:
    """Run forward and backward. The gradients are left in x and the weights."""
    torch.autograd.backward(layer(x), grads)


def check(name: str, layer: nn.Module, x: Tensor, grads: Sequence[Tensor]) -> None:
    """Compare output and gradients with those of fp32.

    Raises:
        SystemExit: they are further away than the precision explains.
    """
    exact = Plain([weight.detach().float() for weight in layer.parameters()])
    for what, error in errors_of(layer, exact, x, grads).items():
        if not error < LIMITS[name.split()[0]]:
            raise SystemExit(f"{name}: the {what} is wrong by {error:.3g} of itself; not timed")


def measure(inputs: int, sizes: dict[str, int], tokens: int, recipes: Sequence[str]) -> dict[str, float]:
    """Return the milliseconds of forward and backward by way, at one layer's sizes."""
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
    return in_turn(actions)


def product_ways(rows: int, columns: int, inner: int, device: torch.device) -> dict[str, Callable[[], Tensor]]:
    """Return [rows, inner] times [columns, inner] transposed, in bf16 and with row-wise codes in FP8 and INT8.

    Raises:
        SystemExit: one is further from float64 than its precision explains.
    """
    draw, place = torch.Generator(device).manual_seed(3), {"device": device, "dtype": torch.bfloat16}
    a, b = (torch.randn(size, inner, generator=draw, **place) for size in (rows, columns))
    ways: dict[str, Callable[[], Tensor]] = {"bf16": lambda: a @ b.t()}
    for name, number in (("fp8", E4M3), ("int8", INT8)):
        operands = quantize(a, number, True), quantize(b, number, True)
        ways[name] = partial(product, *operands, torch.bfloat16, fast_accumulation=True)
    some = min(rows, 128)
    truth = a[:some].double() @ b.double().t()
    for name, way in ways.items():
        error = ((way()[:some].double() - truth).norm() / truth.norm()).item()
        if not error < PRODUCT_LIMITS[name]:
            raise SystemExit(f"{name}: the product is wrong by {error:.3g} of itself; not timed")
    return ways


def measure_products(inputs: int, outputs: int, tokens: int) -> dict[str, float]:
    """Return the milliseconds of a layer's three products, by way."""
    device, total = torch.device("cuda"), dict.fromkeys(PRODUCT_LIMITS, 0.0)
    for sizes in ((tokens, outputs, inputs), (tokens, inputs, outputs), (outputs, inputs, tokens)):
        for name, spent in in_turn(product_ways(*sizes, device)).items():
            total[name] += spent
    return total


def in_turn(actions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the milliseconds of each action, the median over rounds. The actions take turns, because clocks drift."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(ROUNDS):
        for name, action in actions.items():
            times[name].append(1e3 * median_seconds(action, "cuda"))
    return {name: statistics.median(spent) for name, spent in times.items()}


def table(rows: dict[str, dict[str, float]]) -> str:
    """Return one line per layer, and one for all: bf16 in ms, recipes as multiples of its speed."""
    total = {name: sum(row[name] for row in rows.values()) for name in next(iter(rows.values()))}
    _, *names = total
    lines = [f"{'layer':28} {'bf16, ms':>9}" + "".join(f"{name:>25}" for name in names)]
    for layer, row in [*rows.items(), ("block", total)]:
        lines.append(f"{layer:28} {row['bf16']:9.3f}" + "".join(f"{row['bf16'] / row[name]:25.2f}" for name in names))
    return "\n".join(lines)


def main() -> None:
    """Measure, and print a table for each configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shipped = ["configs/1b.yaml", "configs/7b.yaml"]
    parser.add_argument("--config", nargs="+", default=shipped, help="models (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch (default: %(default)s)")
    every = [" ".join(name) for name in RECIPES]
    parser.add_argument("--recipes", nargs="+", default=every, choices=every, help="default: all of them")
    parser.add_argument("--json", type=Path, help="write the milliseconds there as well")
    args = parser.parse_args()
    try:
        models = {path: load_config(path).model for path in args.config}
    except ConfigError as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        parser.error("it times a GPU, and there is none here")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.config.recompile_limit = 1000  # There is one graph for each size and recipe, all of the same code.
    found = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "tokens": args.tokens}
    found |= {"ms": {}, "products": {}}
    print(f"{found['gpu']}, torch {torch.__version__}, {args.tokens:,} tokens")
    for path, model in models.items():
        rows = {}
        for layer, (inputs, sizes) in linear_layers(model, 1).items():
            name = f"{layer} {inputs} x {sum(sizes.values())}"
            rows[name] = measure(inputs, sizes, args.tokens, args.recipes)
            print(f"{path} {name}: {rows[name]['bf16']:.3f} ms in bf16", flush=True)
        found["ms"][path] = rows
        print(f"\n{path}\n{table(rows)}\n", flush=True)
    for path, model in models.items():
        rows = {
            f"{layer} {inputs} x {sum(sizes.values())}": measure_products(inputs, sum(sizes.values()), args.tokens)
            for layer, (inputs, sizes) in linear_layers(model, 1).items()
        }
        found["products"][path] = rows
        print(f"products alone, {path}\n{table(rows)}\n", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
