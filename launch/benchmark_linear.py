"""Time linear layers in 8 bits beside F.linear in bf16, forward and backward, quantization included; a block's MLP with
its norm; and casts alone.

    python launch/benchmark_linear.py
    python launch/benchmark_linear.py --config configs/7b.yaml --tokens 8192 --json linear.json

One row for each layer of a block, at the sizes of a configuration: milliseconds of bf16, and of every recipe how many
times as fast it is. Weights are rounded before, as a run does once per step; x and the gradients as they come, by
themselves, where a block may fuse that with its norms. All is compiled. Ways take turns; a figure is the median over
rounds. Every result is compared with fp32 first: what is wrong is not timed.

The MLP with the addition and the norm before it: in bf16, and in FP8 with SwiGLU fused with its casts (as a run has it)
and apart, whose errors fused ones may not exceed.

Casts alone, to FP8 in both orientations: our kernels (sagekernels/casts.py) beside torch.compile's of their twin, which
they have to equal bit for bit. SwiGLU with its casts, and its gradients with theirs, fused and apart, likewise.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sagekernels.admission import median_seconds
from sagekernels.casts import Rounded, quantize_both, quantize_both_twin
from sagekernels.swiglu import quantize_swiglu, quantize_swiglu_gradient, swiglu, swiglu_gradient, swiglu_twin
from sagekernels.testing import random_swiglu
from sagetrain.config.load import load_config
from sagetrain.config.schema import ModelConfig
from sagetrain.model.linear_choice import LIMITS, errors_of, layer_of, layers_of
from sagetrain.model.mlp import MLP
from sagetrain.model.norm import RMSNorm, normalize
from sagetrain.parallel.layers import keep_weights
from sagetrain.parallel.lowbit import RECIPES
from sagetrain.parallel.matmul import Matmul
from sagetrain.parallel.topology import ParallelGroups

ROUNDS = 15


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
    return in_turn(actions)


class Half(nn.Module):
    """The second half of a block: y added to the residual stream x, normalized, and what the MLP makes of it."""

    def __init__(
        self, model: ModelConfig, matmul: Matmul | None, fused: bool, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        single, place = ParallelGroups.single(), {"dtype": dtype, "device": device}
        self.norm = RMSNorm(model.hidden_size, model.norm_eps, single, split_input=False, **place)
        self.mlp = MLP(model, single, matmul=matmul, sequence_parallel=False, **place)
        if fused and not self.mlp.fused:
            raise ValueError("SwiGLU is not fused with its casts in this recipe")
        self.mlp.fused = fused
        draw = torch.Generator(device).manual_seed(0)
        with torch.no_grad():
            self.norm.gain.fill_(1)
            for weight in self.mlp.parameters():
                weight.copy_(0.02 * torch.randn(weight.shape, generator=draw, device=device))
        keep_weights(self)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, hidden] each -> the same."""
        x, y = normalize(x, y, self.norm, None, self.norm.groups, False)
        return x, self.mlp.down(self.mlp(y))


def halves_of(model: ModelConfig, recipes: Sequence[str], device: torch.device) -> dict[str, Half]:
    """In bf16, and in those recipes that fuse, apart and fused, with the same weights."""
    matmuls = {" ".join(name): matmul for name, matmul in RECIPES.items() if matmul.gates}
    ways = {"bf16": Half(model, None, False, device, torch.bfloat16)}
    for name in [name for name in recipes if name in matmuls]:
        for fused in (False, True):
            kind = "fused" if fused else "apart"
            ways[f"{name} {kind}"] = Half(model, matmuls[name], fused, device, torch.bfloat16)
    return ways


def results_of(half: Half, x: Tensor, y: Tensor, grads: Sequence[Tensor]) -> dict[str, Tensor]:
    """What it makes, and gradients of x and of the parameters."""
    x, y = (given.detach().to(half.norm.gain.dtype).requires_grad_() for given in (x, y))
    results = half(x, y)
    torch.autograd.backward(results, [grad.to(x.dtype) for grad in grads])
    names = {name: parameter.grad for name, parameter in half.named_parameters()}
    half.zero_grad()
    return {"output": results[1].detach(), "gradient of x": x.grad, "gradient of y": y.grad, **names}


def check_halves(ways: dict[str, Half], model: ModelConfig, x: Tensor, y: Tensor, grads: Sequence[Tensor]) -> None:
    """Compare all with fp32, and fused ones with those apart.

    Raises:
        SystemExit: one is further away than the arithmetic of its two layers explains, or fused than apart.
    """
    truth, apart = results_of(Half(model, None, False, x.device, torch.float32), x, y, grads), {}
    for name, way in ways.items():
        found = results_of(way, x, y, grads)
        errors = {what: ((found[what].float() - truth[what]).norm() / truth[what].norm()).item() for what in truth}
        for what, error in errors.items():
            if not error < 2 * LIMITS[name.split()[0]]:
                raise SystemExit(f"MLP, {name}: {what} is wrong by {error:.3g} of itself; not timed")
            if name.endswith("fused") and not error < 1.02 * apart[what]:
                raise SystemExit(f"MLP, {name}: {what} is wrong by {error:.3g} of itself, apart by {apart[what]:.3g}")
        apart = errors


def measure_halves(model: ModelConfig, tokens: int, recipes: Sequence[str]) -> dict[str, float]:
    """Milliseconds of forward and backward of a block's MLP with its norm, by way."""
    device = torch.device("cuda")
    draw, place = torch.Generator(device).manual_seed(1), {"device": device, "dtype": torch.bfloat16}
    x, y, *grads = (torch.randn(tokens, model.hidden_size, generator=draw, **place) for _ in range(4))
    ways = halves_of(model, recipes, device)
    for way in ways.values():
        way.compile(fullgraph=True, dynamic=False)
    check_halves(ways, model, x, y, grads)
    x, y = x.requires_grad_(), y.requires_grad_()

    def action(way: Half) -> None:
        x.grad = y.grad = None
        way.zero_grad()
        torch.autograd.backward(way(x, y), grads)

    return in_turn({name: partial(action, way) for name, way in ways.items()})


def half_lines(spent: dict[str, float]) -> list[str]:
    """Milliseconds of each way, and of fused ones how many times as fast they are as apart and as bf16."""
    lines = [f"MLP with its norm, bf16: {spent['bf16']:.3f} ms"]
    for name in [name for name in spent if name.endswith("fused")]:
        recipe, apart, fused = name.removesuffix(" fused"), spent[name.replace("fused", "apart")], spent[name]
        faster = f"{apart / fused:.3f} x apart, {spent['bf16'] / fused:.2f} x bf16"
        lines.append(f"MLP with its norm, {recipe}: {apart:.3f} ms apart, {fused:.3f} fused ({faster})")
    return lines


def check_casts(name: str, found: tuple[Rounded, Rounded], truth: tuple[Rounded, Rounded]) -> None:
    """Compare codes and scales of both orientations with the twin's.

    Raises:
        SystemExit: they are not the same bits.
    """
    for which, ours, twin in zip(("as it lies", "turned"), found, truth, strict=True):
        same = torch.equal(ours.codes.view(torch.uint8), twin.codes.view(torch.uint8))
        if not (same and torch.equal(ours.scale, twin.scale)):
            raise SystemExit(f"{name}: the matrix {which} is not the twin's; not timed")


def measure_casts(columns: int, tokens: int, recipe: tuple[str, str]) -> dict[str, float]:
    """Milliseconds of casting a gradient [tokens, columns] in both orientations, by torch.compile and by kernels."""
    draw, matmul = torch.Generator("cuda").manual_seed(1), RECIPES[recipe]
    x = torch.randn(tokens, columns, generator=draw, device="cuda", dtype=torch.bfloat16)
    how = matmul.gradient, matmul.per_row
    compiled = torch.compile(quantize_both_twin, fullgraph=True, dynamic=False)
    ways = {"compiled": lambda: compiled(x, *how), "kernels": lambda: quantize_both(x, *how)}
    for name, way in ways.items():
        check_casts(f"{name}, {recipe[1]}, {columns} columns", way(), quantize_both_twin(x, *how))
    return in_turn(ways)


def measure_swiglu(columns: int, tokens: int, recipe: tuple[str, str], backward: bool) -> dict[str, float]:
    """Milliseconds of silu(gate) * up [tokens, columns], or of its gradients, cast in both orientations: written by
    torch.compile and then cast, and fused."""
    grad, gate, up = random_swiglu(tokens, columns, 1.0, torch.bfloat16, "cuda")
    matmul = RECIPES[recipe]
    compute = torch.compile(swiglu_gradient if backward else swiglu, fullgraph=True, dynamic=False)
    cast = quantize_swiglu_gradient if backward else quantize_swiglu
    given = (grad, gate, up) if backward else (gate, up)
    how = matmul.gradient if backward else matmul.number, matmul.per_row
    ways = {"apart": lambda: quantize_both(compute(*given), *how), "fused": lambda: cast(*given, *how)}
    twin = swiglu_twin(grad if backward else None, gate, up, *how)
    for name, way in ways.items():
        check_casts(f"SwiGLU {name}, {recipe[1]}, {columns} columns", way(), twin)
    return in_turn(ways)


def swiglu_line(spent: dict[str, float], elements: int, backward: bool) -> str:
    """Milliseconds, and bytes that fusing moves (twice 4 read and 2 written; backward twice 6 and 4) over its own."""
    rate = (16 if backward else 10) * elements / spent["fused"] / 1e9
    faster = spent["apart"] / spent["fused"]
    return f"{spent['apart']:.3f} ms apart, {spent['fused']:.3f} fused ({faster:.2f} x, {rate:.2f} TB/s)"


def in_turn(actions: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of each, the median over rounds: round by round, since clocks drift."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(ROUNDS + 3):
        for name, action in actions.items():
            spent = 1e3 * median_seconds(action, "cuda")
            if number >= 3:
                times[name].append(spent)
    return {name: statistics.median(spent) for name, spent in times.items()}


def widths_of(model: ModelConfig) -> set[int]:
    """Columns of what a block's linear layers read and write."""
    return {width for inputs, sizes in layers_of(model).values() for width in (inputs, sum(sizes.values()))}


def cast_line(spent: dict[str, float], elements: int) -> str:
    """Milliseconds, and bytes that have to be moved (2 + 2 read, 1 + 1 written) over that of the kernels."""
    rate = 6 * elements / spent["kernels"] / 1e9
    faster = spent["compiled"] / spent["kernels"]
    return f"{spent['compiled']:.3f} ms compiled, {spent['kernels']:.3f} by kernels ({faster:.2f} x, {rate:.2f} TB/s)"


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
    found = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "tokens": args.tokens}
    found |= {"ms": {}, "mlp": {}, "casts": {}, "swiglu": {}}
    print(f"{found['gpu']}, torch {torch.__version__}, {args.tokens:,} tokens")
    for path in args.config:
        rows = {}
        for layer, (inputs, sizes) in layers_of(load_config(path).model).items():
            name = f"{layer} {inputs} x {sum(sizes.values())}"
            rows[name] = measure(inputs, sizes, args.tokens, args.recipes)
            print(f"{path} {name}: {rows[name]['bf16']:.3f} ms in bf16", flush=True)
        found["ms"][path] = rows
        print(f"\n{path}\n{table(rows)}\n", flush=True)
        found["mlp"][path] = measure_halves(load_config(path).model, args.tokens, args.recipes)
        print("\n".join([*half_lines(found["mlp"][path]), ""]), flush=True)
    inner = {load_config(path).model.ffn_hidden_size for path in args.config}
    widths = {width for path in args.config for width in widths_of(load_config(path).model)}
    for recipe in RECIPES:
        if recipe[0] == "fp8" and not RECIPES[recipe].wide_weight_gradient and " ".join(recipe) in args.recipes:
            for columns in sorted(widths):
                spent = measure_casts(columns, args.tokens, recipe)
                found["casts"][f"{recipe[1]} {columns}"] = spent
                print(f"casts, {recipe[1]}, {columns} columns: {cast_line(spent, columns * args.tokens)}", flush=True)
            for columns, backward in itertools.product(sorted(inner), (False, True)):
                what, spent = (
                    "gradients" if backward else "SwiGLU",
                    measure_swiglu(columns, args.tokens, recipe, backward),
                )
                found["swiglu"][f"{what} {recipe[1]} {columns}"] = spent
                line = swiglu_line(spent, columns * args.tokens, backward)
                print(f"{what} and casts, {recipe[1]}, {columns} columns: {line}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
