"""What `linear.precision: auto` weighs: the linear layers of a block at a rank's sizes, checked and timed each way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sagetrain.config.linear_sizes import LinearSizes
from sagetrain.parallel.layers import ColumnParallelLinear, keep_weights
from sagetrain.parallel.lowbit import RECIPES
from sagetrain.parallel.matmul import Matmul
from sagetrain.parallel.topology import ParallelGroups

GAIN = 1.05
"""So many times as fast a layer has to be to be taken out of 16 bits. Less is within what a clock and a neighbour do to
a measurement."""
LIMITS = {"bf16": 0.01, "int8": 0.03, "fp8": 0.1}
"""Of an error, of all elements of a result together: rounding to bf16; to INT8 with a scale per row; to e4m3 and e5m2.
"""
_CALLS = 8  # at a time, so that what is timed is the GPU


def errors_of(layer: nn.Module, x: Tensor, grads: Sequence[Tensor]) -> dict[str, float]:
    """rel-L2 of a layer's output and gradients against fp32's, for x [tokens, in] and the gradients [tokens, out] of
    what it returns."""
    weights = [p.detach().float().requires_grad_() for p in layer.parameters()]
    own, wide = x.detach().requires_grad_(), x.detach().float().requires_grad_()
    y, exact = layer(own), [F.linear(wide, weight) for weight in weights]
    torch.autograd.backward(y, list(grads))
    torch.autograd.backward(exact, [grad.float() for grad in grads])
    found = torch.cat(tuple(y), 1).detach(), own.grad, torch.cat([p.grad for p in layer.parameters()])
    truth = torch.cat(exact, 1).detach(), wide.grad, torch.cat([weight.grad for weight in weights])
    layer.zero_grad()
    names = "output", "gradient of x", "gradient of the weights"
    pairs = zip(names, found, truth, strict=True)
    return {name: ((ours.float() - exact).norm() / exact.norm()).item() for name, ours, exact in pairs}


def time_layers(
    layers: Mapping[str, LinearSizes],
    ways: Sequence[str],
    *,
    tokens: int,
    joined: bool,
    kept: bool,
    compiled: bool,
    device: torch.device,
    dtype: torch.dtype,
    seconds: Callable[[Callable[[], None]], float],
) -> tuple[dict[str, dict[str, float]], list[str]]:
    """Seconds of forward and backward of each layer in 16 bits ("bf16") and in other ways ("fp8 rowwise"), casts of x
    and of the gradients with them, and what is wrong with those that are not used, whose time is infinite.

    Args:
        joined: how the layers in 16 bits take gradients (Matmul), as a run's do.
        kept: weights are rounded once a step, which is not timed, and not for each call.
        compiled: time what torch.compile makes of a layer.
        seconds: the timer.
    """
    matmuls: dict[str, Matmul] = {"bf16": Matmul(joined), **{" ".join(name): low for name, low in RECIPES.items()}}
    draw, place = torch.Generator(device).manual_seed(0), {"device": device, "dtype": dtype}
    times: dict[str, dict[str, float]] = {name: {} for name in layers}
    refused = []
    with torch._dynamo.config.patch(recompile_limit=1000):  # all sizes and ways are one code
        for name, (inputs, sizes) in layers.items():
            weights = [0.02 * torch.randn(size, inputs, generator=draw, **place) for size in sizes.values()]
            x = torch.randn(tokens, inputs, generator=draw, **place).requires_grad_()
            grads = [1e-3 * torch.randn(tokens, size, generator=draw, **place) for size in sizes.values()]
            for way in ("bf16", *ways):
                layer = layer_of(inputs, sizes, weights, matmuls[way], kept=kept)
                if compiled:
                    layer.compile(fullgraph=True, dynamic=False)
                reason = _wrong(layer, x, grads, LIMITS[way.split()[0]]) if way != "bf16" else ""
                if reason:
                    refused.append(f"{name} in {way}: {reason}")
                times[name][way] = float("inf") if reason else seconds(_calls(layer, x, grads)) / _CALLS
    if compiled:
        torch._dynamo.reset()
    return times, refused


def layer_of(
    inputs: int, sizes: dict[str, int], weights: Sequence[Tensor], matmul: Matmul, *, kept: bool
) -> ColumnParallelLinear:
    """A layer with copies of these weights [out, in], rounded already if `kept`."""
    place = {"dtype": weights[0].dtype, "device": weights[0].device}
    layer = ColumnParallelLinear(inputs, sizes, ParallelGroups.single(), matmul=matmul, **place)
    with torch.no_grad():
        for parameter, weight in zip(layer.parameters(), weights, strict=True):
            parameter.copy_(weight)
    if kept:
        keep_weights(layer)
    return layer


def _wrong(layer: nn.Module, x: Tensor, grads: Sequence[Tensor], limit: float) -> str:
    """Why a layer is not used, or nothing."""
    try:
        errors = errors_of(layer, x, grads)
    except Exception as problem:  # noqa: BLE001 whatever a kernel raises is the reason that it is not used
        return f"{type(problem).__name__}: {problem}"
    return ", ".join(f"the {what} is wrong by {error:.3g}" for what, error in errors.items() if not error < limit)


def _calls(layer: nn.Module, x: Tensor, grads: Sequence[Tensor]) -> Callable[[], None]:
    def action() -> None:
        for _ in range(_CALLS):
            x.grad = None
            layer.zero_grad()
            torch.autograd.backward(layer(x), grads)

    return action


def smallest(times: Mapping[str, Mapping[str, float]], way: str, weights: Mapping[str, int], least: int) -> int | None:
    """How many weights a layer must have (at least `least`) to be multiplied this way; None: none is to be.

    A layer is if it and all that are larger gain (GAIN): what decides is its size.
    """
    below, large = None, sorted({count for count in weights.values() if count >= least}, reverse=True)
    for count in large:
        if any(times[name][way] * GAIN > times[name]["bf16"] for name in weights if weights[name] == count):
            break
        below = count
    return least if large and below == large[-1] else below


def table(
    times: Mapping[str, Mapping[str, float]], layers: Mapping[str, LinearSizes], refused: Sequence[str]
) -> list[str]:
    """Lines: each layer's milliseconds, those of a way that is not used excepted, then why."""
    _, *ways = next(iter(times.values()))
    lines = [f"  {'layer':<24}{'bf16':>12}" + "".join(f"{way:>24}" for way in ways)]
    for name, row in times.items():
        inputs, sizes = layers[name]
        figures = [f"{1e3 * row[way]:.3f} ms ({row['bf16'] / row[way]:.2f})" if row[way] < float("inf") else "not used"
                   for way in ways]  # fmt: skip
        wide = f"{1e3 * row['bf16']:.3f} ms"
        lines.append(
            f"  {f'{name} {inputs} x {sum(sizes.values())}':<24}{wide:>12}" + "".join(map("{:>24}".format, figures))
        )
    return [*lines, *(f"  {line}" for line in refused)]
