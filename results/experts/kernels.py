"""Time mixtures of experts forward and backward: the whole MLP with its routing, and grouped products alone.

    PYTHONPATH=.:kernels:benchmarks:results/linear-layers python results/experts/kernels.py
    ... --shapes olmoe --tokens 16384 --json e.json
    ... --ways bf16 "int8 rowwise" --profile

The whole MLP is timed in these ways, with weights in 8 bits kept as a run keeps them for a step:

- `dense`: one MLP in bf16 with the same active FLOPs, by cuBLAS. No mixture in bf16 can be faster.
- `torch`: the mixture composed of torch's operators, as trainers do it: a stable sort, indexing, torch._grouped_mm for
  gate, up and down, weights behind the last product, index_add. The router is the same for all ways.
- `bf16` and the recipes: by this package (grouped_matmul.py).

Products alone are timed with operands that are rounded beforehand: the three products of both layers together, in bf16
by torch._grouped_mm, in FP8 by torch._scaled_grouped_mm and by our kernel, and in INT8.

The whole MLP is compiled. Ways take turns; a figure is the median over rounds. Every result is compared with
a loop over experts in fp32 first, and a way that is wrong is not timed. `--profile` prints the kernels of each way's
whole MLP by their time.

This script is frozen. It runs with the library as it was at commit 97813d0a.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from linear import in_turn
from torch import Tensor

from sagekernels.casts import E4M3, INT8
from sagekernels.grouped import Rows, gather, plan_rows
from sagekernels.grouped_casts import grouped_casts, weight_casts
from sagekernels.grouped_matmul import GROUPED_RECIPES, GroupedMatmul, grouped_gated, grouped_matmul
from sagekernels.grouped_products import (
    GROUPED_CODES_PRODUCT,
    GROUPED_CODES_WEIGHT_PRODUCT,
    GROUPED_PRODUCT,
    GROUPED_WEIGHT_PRODUCT,
)
from sagekernels.router import router_logits
from step import print_profile


class Shape(NamedTuple):
    """The sizes of a mixture."""

    hidden: int
    ffn: int
    experts: int
    top: int


SHAPES = {
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
    "olmoe": Shape(2048, 1024, 64, 8),
    "small": Shape(1024, 512, 64, 8),
}
SPREAD = 1.0
"""The standard deviation of a bias of the logits, by which some experts are chosen more often, as early in training."""
PROFILED = 24
"""The kernels of a profile that are printed."""
LIMITS = {"torch": 0.02, "bf16": 0.01, "int8": 0.05, "fp8": 0.12}
"""Largest relative errors of the output and of all gradients, by the first word of a way."""
PRODUCT_LIMITS = {"bf16": 0.005, "int8": 0.02, "fp8": 0.06}
WAYS = ["torch", "bf16", *map(" ".join, GROUPED_RECIPES)]
Way = Callable[..., Tensor]


class Mixture(NamedTuple):
    """A mixture's weights, and its inputs."""

    x: Tensor
    router: Tensor
    gate_up: Tensor
    down: Tensor
    bias: Tensor
    top: int

    def leaves(self) -> list[Tensor]:
        """Return x and the weights as leaves of a graph."""
        return [tensor.detach().requires_grad_() for tensor in self[:4]]


def random_mixture(shape: Shape, tokens: int, device: torch.device) -> tuple[Mixture, Tensor]:
    """Return a mixture in bf16 with a router in fp32, and the gradient of its output."""
    draw = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=draw, device=device)

    hidden, ffn, experts, top = shape
    gate_up = (normal(experts, 2 * ffn, hidden) / hidden**0.5).bfloat16()
    down = (normal(experts, hidden, ffn) / ffn**0.5).bfloat16()
    x, grad = normal(tokens, hidden).bfloat16(), normal(tokens, hidden).bfloat16()
    return Mixture(x, normal(experts, hidden) / hidden**0.5, gate_up, down, SPREAD * normal(experts), top), grad


def route(x: Tensor, router: Tensor, bias: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return the choices [T, k] and their weights, which sum to 1, of logits in fp32."""
    scores = router_logits(x, router).add(bias).softmax(-1)
    weights, choices = scores.topk(top, -1)
    return choices, weights / weights.sum(-1, keepdim=True)


def by_loop(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, bias: Tensor, top: int) -> Tensor:
    """Compute the mixture one expert after the other: the judge, in the dtype of the weights."""
    choices, weights = route(x, router, bias, top)
    y = torch.zeros_like(x)
    for expert in range(len(gate_up)):
        token, place = torch.where(choices == expert)
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, -1)
        out = F.linear(F.silu(gate) * up, down[expert])
        y = y.index_add(0, token, out * weights[token, place, None].to(out.dtype))
    return y


def by_torch(x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, bias: Tensor, top: int) -> Tensor:
    """Compute the mixture by torch's operators."""
    choices, weights = route(x, router, bias, top)
    order = choices.flatten().argsort(stable=True)
    experts = torch.arange(len(gate_up), device=x.device)
    ends = torch.searchsorted(choices.flatten()[order], experts, right=True).int()
    token = order // top
    gate, up = torch._grouped_mm(x[token], gate_up.mT, offs=ends).chunk(2, -1)
    out = torch._grouped_mm(F.silu(gate) * up, down.mT, offs=ends)
    out = out.float() * weights.flatten()[order, None]
    return torch.zeros_like(x, dtype=torch.float32).index_add(0, token, out).to(x.dtype)


def by_kernels(
    matmul: GroupedMatmul, kept: Sequence[Sequence[Tensor]],
    x: Tensor, router: Tensor, gate_up: Tensor, down: Tensor, bias: Tensor, top: int,
) -> Tensor:  # fmt: skip
    """Compute the mixture by this package."""
    choices, weights = route(x, router, bias, top)
    rows = plan_rows(choices, len(gate_up))
    inner = grouped_gated(x, gate_up, weights, rows, matmul, kept[0], gathers=True)
    return grouped_matmul(inner, down, rows, matmul, kept[1], combines=True)


def ways_of(mixture: Mixture) -> dict[str, Way]:
    """Return the mixture's MLP by way."""
    ways: dict[str, Way] = {"torch": by_torch, "bf16": partial(by_kernels, GroupedMatmul(), ((), ()))}
    for name, matmul in GROUPED_RECIPES.items():
        kept = tuple(matmul.keep(weight) for weight in (mixture.gate_up, mixture.down))
        ways[" ".join(name)] = partial(by_kernels, matmul, kept)
    return ways


def results(way: Way, mixture: Mixture, grad: Tensor) -> list[Tensor]:
    """Return the output, and the gradients of x, the router, gate_up and down."""
    leaves = mixture.leaves()
    y = way(*leaves, mixture.bias, mixture.top)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad)]


def judge(mixture: Mixture, grad: Tensor) -> list[Tensor]:
    """Return the results of the loop in fp32."""
    wide = mixture._replace(**{name: getattr(mixture, name).float() for name in ("x", "gate_up", "down")})
    return results(by_loop, wide, grad.float())


def check(name: str, found: Sequence[Tensor], truth: Sequence[Tensor]) -> None:
    """Compare results with the judge's.

    Raises:
        SystemExit: they are further away than the precision explains.
    """
    for what, ours, exact in zip(("output", "gradient of x", "router", "gate_up", "down"), found, truth, strict=False):
        error = ((ours.double() - exact.double()).norm() / exact.double().norm()).item()
        if not error < LIMITS[name.split()[0]]:
            raise SystemExit(f"{name}: {what} is wrong by {error:.3g} of itself; not timed")


def dense_action(shape: Shape, x: Tensor, grad: Tensor) -> Callable[[], object]:
    """Return forward and backward of a dense MLP whose FLOPs are those of the chosen experts."""
    draw = torch.Generator(x.device).manual_seed(1)
    sizes = (2 * shape.top * shape.ffn, shape.hidden), (shape.hidden, shape.top * shape.ffn)
    weights = [
        (torch.randn(size, generator=draw, device=x.device) / size[1] ** 0.5).bfloat16().requires_grad_()
        for size in sizes
    ]
    leaf = x.detach().requires_grad_()

    @torch.compile(fullgraph=True, dynamic=False)
    def mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        gate, up = F.linear(x, gate_up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, down)

    return lambda: torch.autograd.grad(mlp(leaf, *weights), (leaf, *weights), grad)


def measure(shape: Shape, tokens: int, names: Sequence[str], profiles: bool) -> dict[str, float]:
    """Return the milliseconds of forward and backward of the whole MLP, by way."""
    mixture, grad = random_mixture(shape, tokens, torch.device("cuda"))
    truth = judge(mixture, grad)
    actions = {"dense": dense_action(shape, mixture.x, grad)}
    for name, way in ways_of(mixture).items():
        if name in names:
            actions[name] = partial(results, torch.compile(way, fullgraph=True, dynamic=False), mixture, grad)
            check(name, actions[name](), truth)
    del truth
    if profiles:
        for name, action in actions.items():
            print_profile(name, action, PROFILED)
    return in_turn(actions)


def product_ways(shape: Shape, tokens: int, device: torch.device) -> dict[str, list[Callable[[], Tensor]]]:
    """Return the three products of gate_up and of down by way, of operands rounded beforehand.

    Raises:
        SystemExit: one is further from fp32 than its precision explains.
    """
    mixture, _ = random_mixture(shape, tokens, device)
    choices, _ = route(mixture.x, mixture.router, mixture.bias, shape.top)
    rows = plan_rows(choices, shape.experts)
    draw = torch.Generator(device).manual_seed(2)
    ways: dict[str, list[Callable[[], Tensor]]] = {}
    for weight in (mixture.gate_up, mixture.down):
        _, outputs, inputs = weight.shape
        x = gather(mixture.x, rows) if weight is mixture.gate_up else _random(rows, inputs, draw)
        grad = _random(rows, outputs, draw)
        truth = [product().double() for product in _bf16(x.float(), grad.float(), weight.float(), rows)]
        made = {"bf16": _bf16(x, grad, weight, rows)}
        for name, number in (("int8", INT8), ("fp8", E4M3)):
            made[name] = _codes(x, grad, weight, rows, number)
        if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9:
            made["fp8 torch"] = _torch_codes(x, grad, weight, rows)
        for name, products in made.items():
            for what, product, exact in zip(("output", "dX", "dW"), products, truth, strict=True):
                error = ((product().double() - exact).norm() / exact.norm()).item()
                if not error < PRODUCT_LIMITS[name.split()[0]]:
                    raise SystemExit(f"{name}: {what} is wrong by {error:.3g} of itself; not timed")
            ways.setdefault(name, []).extend(products)
    return ways


def _random(rows: Rows, columns: int, draw: torch.Generator) -> Tensor:
    return torch.randn(len(rows.choice), columns, generator=draw, device=draw.device).bfloat16()


def _bf16(x: Tensor, grad: Tensor, weight: Tensor, rows: Rows) -> list[Callable[[], Tensor]]:
    return [
        partial(GROUPED_PRODUCT, x, weight.mT, rows.ends, rows.tiles),
        partial(GROUPED_PRODUCT, grad, weight, rows.ends, rows.tiles),
        partial(GROUPED_WEIGHT_PRODUCT, grad, x, rows.ends),
    ]


def _codes(x: Tensor, grad: Tensor, weight: Tensor, rows: Rows, number: torch.dtype) -> list[Callable[[], Tensor]]:
    ours, theirs = (grouped_casts(one, rows, number, False) for one in (x, grad))
    kept = weight_casts(weight, number)
    return [
        partial(GROUPED_CODES_PRODUCT, *ours[:2], *kept[:2], rows.ends, rows.tiles, torch.bfloat16),
        partial(GROUPED_CODES_PRODUCT, *theirs[:2], *kept[2:], rows.ends, rows.tiles, torch.bfloat16),
        partial(GROUPED_CODES_WEIGHT_PRODUCT, *theirs[2:], *ours[2:], rows.first, torch.bfloat16),
    ]


def _torch_codes(x: Tensor, grad: Tensor, weight: Tensor, rows: Rows) -> list[Callable[[], Tensor]]:
    """Return the products by torch._scaled_grouped_mm. Our layout of transposed codes, whole tiles and one at least an
    expert, is one that it takes."""
    (a, a_scale, turned, turned_scale), (b, b_scale, of_b, of_b_scale) = (
        grouped_casts(one, rows, E4M3, False) for one in (x, grad)
    )
    codes, scale, back, back_scale = weight_casts(weight, E4M3)
    how = {"out_dtype": torch.bfloat16, "use_fast_accum": True}
    ends = 128 * rows.first[1:]
    multiply = torch._scaled_grouped_mm
    return [
        partial(multiply, a, codes.mT, a_scale.view(-1), scale, offs=rows.ends, **how),
        partial(multiply, b, back.mT, b_scale.view(-1), back_scale, offs=rows.ends, **how),
        partial(multiply, of_b, turned.t(), of_b_scale.view(-1), turned_scale.view(-1), offs=ends, **how),
    ]


def measure_products(shape: Shape, tokens: int) -> dict[str, float]:
    """Return the milliseconds of all six products, by way."""
    ways = product_ways(shape, tokens, torch.device("cuda"))
    return in_turn({name: partial(_all, products) for name, products in ways.items()})


def _all(products: Sequence[Callable[[], Tensor]]) -> None:
    for product in products:
        product()


def line(spent: dict[str, float], base: str) -> str:
    """Return the milliseconds of all ways, and how many times as fast as one of them they are."""
    return ", ".join(f"{name} {ms:.3f} ms ({spent[base] / ms:.2f} x)" for name, ms in spent.items())


def main() -> None:
    """Measure, and print a line for each shape and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES), help="default: all of them")
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[16384], help="of a micro-batch (default: %(default)s)"
    )
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS, help="beside dense (default: all of them)")
    parser.add_argument("--profile", action="store_true", help="print the kernels of the whole MLP by their time")
    parser.add_argument("--json", type=Path, help="write the milliseconds there as well")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("it times a GPU, and there is none here")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch._dynamo.config.recompile_limit = 1000  # There is one graph for each shape and way, all of the same code.
    found = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "mlp": {}, "products": {}}
    print(f"{found['gpu']}, torch {torch.__version__}")
    for name in args.shapes:
        for tokens in args.tokens:
            key = f"{name}, {tokens} tokens"
            found["mlp"][key] = measure(SHAPES[name], tokens, args.ways, args.profile)
            print(f"{key}: {line(found['mlp'][key], 'bf16')}", flush=True)
            found["products"][key] = measure_products(SHAPES[name], tokens)
            print(f"{key}, products alone: {line(found['products'][key], 'bf16')}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
