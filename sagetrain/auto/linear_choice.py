"""Choose how linear layers multiply in a run whose settings say `auto`. The choice is made when the run begins, and
kept when it continues.

The linear layers of a block are compared at the sizes of one rank. Each layer is checked against fp32, then timed in
each precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sagekernels.admission import SOURCES, decided_once, median_seconds
from sagekernels.lowbit import RECIPES
from sagekernels.matmul import Matmul
from sagetrain.auto.calls import RankCalls
from sagetrain.auto.kept import Kept, kept_linear
from sagetrain.config.arithmetic import parts_of
from sagetrain.config.layer_specs import linear_layers
from sagetrain.config.linear_sizes import AUTO_PRECISION, LOW_BIT_MULTIPLE, LinearSizes
from sagetrain.config.schema import LinearConfig, ModelConfig
from sagetrain.model.selection import cannot_multiply
from sagetrain.parallel.layers import ColumnParallelLinear, keep_weights
from sagetrain.parallel.topology import ParallelGroups


def settle_linear(
    asked: LinearConfig,
    model: ModelConfig,
    before: Kept | None,
    *,
    tensor_parallel_size: int,
    device: torch.device,
    dtype: torch.dtype,
    choose: Callable[[LinearConfig], LinearConfig],
    say: Callable[[str], None],
) -> tuple[LinearConfig, str]:
    """Return the settings with nothing left to decide, and a few words that say why if they were `auto`.

    Args:
        before: the choices that the run had, if it continues.
        choose: returns the fastest settings on this hardware; all ranks call it.
        say: receives the reason where the choice that the run had cannot be kept, for example on other hardware.
    """
    if asked.precision != "auto":
        settled, why = asked, ""
    elif before and (settled := kept_linear(asked, before.linear)).precision != "auto":
        why = "as the run had it: auto decides once, the name of a precision changes it"
        if problem := cannot_multiply(
            settled, model, tensor_parallel_size=tensor_parallel_size, device=device, dtype=dtype
        ):
            precision = settled.precision
            say(f"linear.precision {precision}, which the run had so far, cannot run here ({problem}): decided anew")
            settled = asked
    else:
        settled = asked
    if settled.precision == "auto":
        why = why_sixteen_bits(asked, model, tensor_parallel_size=tensor_parallel_size, device=device, dtype=dtype)
        if why:
            settled, why = asked.model_copy(update={"precision": "bf16"}), f"auto: {why}"
        else:
            settled, why = choose(asked), "auto: the fastest"
    if before and settled.low_bit:
        _compare(settled, model, before, tensor_parallel_size, say)
    return settled, why


def _compare(
    settled: LinearConfig, model: ModelConfig, kept: Kept, tensor_parallel_size: int, say: Callable[[str], None]
) -> None:
    """Say which layers multiply in 8 bits where another tensor-parallel size changes that. The sizes of a rank's layers
    decide."""
    before = settled.model_copy(update=asdict(kept.linear))
    sizes = kept.tensor_parallel_size, tensor_parallel_size
    was, now = (
        [name for name, layer in linear_layers(model, size).items() if linear.takes(layer)]
        for linear, size in zip((before, settled), sizes, strict=True)
    )
    if sizes[0] != sizes[1] and before.low_bit and was != now:
        say(f"a rank's sizes decide which linear layers are in 8 bits (linear.keep_layers_below "
            f"{settled.keep_layers_below:,}, sides of multiples of {LOW_BIT_MULTIPLE}): at tensor_parallel_size "
            f"{sizes[1]} {', '.join(now) or 'none'}, so far, at {sizes[0]}, {', '.join(was) or 'none'}")  # fmt: skip


def why_sixteen_bits(
    linear: LinearConfig, model: ModelConfig, *, tensor_parallel_size: int, device: torch.device, dtype: torch.dtype
) -> str:
    """Return why choose_linear has nothing to choose from, or an empty string."""
    if torch.device(device).type != "cuda":
        return "nothing is timed without a GPU"
    low = linear.model_copy(update={"precision": AUTO_PRECISION})
    return cannot_multiply(low, model, tensor_parallel_size=tensor_parallel_size, device=device, dtype=dtype)


def choose_linear(
    linear: LinearConfig,
    model: ModelConfig,
    calls: RankCalls,
    *,
    kept: bool,
    compiled: bool,
    cache: Path,
    say: Callable[[str], None],
) -> LinearConfig:
    """Return the settings that `linear.precision: auto` stands for: int8 for the layers that gain by it, or bf16.

    Each layer is compared with fp32, then timed forward and backward at the shape of one rank's calls. The layers from
    a size on gain together; `smallest` has the rule. Collectives are not timed. With `kept`, the rounding of weights
    once a step is not timed either.

    The table of times goes to `say`. The table and the choice go to the file `cache`, as those of choose_attention do.
    """
    device, dtype, tp_size = calls.device, calls.dtype, calls.tensor_parallel_size
    tokens = calls.own_tokens // parts_of(calls.own_tokens, tp_size, calls.overlap)
    layers = {name: sizes for name, sizes in linear_layers(model, tp_size).items() if not sizes.odd}
    weights = {name: sizes.weights for name, sizes in layers.items()}
    way, least = f"{AUTO_PRECISION} {linear.recipe}", linear.keep_layers_below
    bf16, *low = linear.choices(layers.values())
    named = {"bf16": bf16, **{_name(way, choice.keep_layers_below): choice for choice in low}}

    joined = tp_size > 1

    def fastest() -> tuple[str, list[str]]:
        timer = partial(median_seconds, device=device)
        times, refused = time_layers(
            layers, [way], tokens=tokens, joined=joined, kept=kept, compiled=compiled, device=device, dtype=dtype,
            seconds=timer,
        )  # fmt: skip
        first = f"{tokens:,} tokens, {dtype}: forward + backward (times as fast as bf16)"
        below = smallest(times, way, weights, least)
        chosen = "bf16" if below is None else _name(way, below)
        return chosen, [first, *table(times, layers, refused)]

    key = " | ".join(map(str, (layers, tokens, joined, kept, compiled, dtype, way, least, GAIN)))
    sources = SOURCES, Path(__file__).parent.parent / "parallel"
    return named[decided_once("linear", key, fastest, sources=sources, device=device, cache=cache, say=say)]


def _name(way: str, below: int) -> str:
    return f"{way}, layers of {below:,} weights and more" if below else way


GAIN = 1.05
"""The speedup from which a layer is taken out of 16 bits. Less is within the noise of clocks and of other jobs on the
machine."""
LIMITS = {"bf16": 0.01, "int8": 0.03, "fp8": 0.1}
"""The largest relative error of all elements of a result together. bf16: rounding to bf16. int8: INT8 with a scale per
row. fp8: e4m3 and e5m2."""
_CALLS = 8  # so many calls are timed in a row, so that the GPU is timed and not the launches


def errors_of(layer: nn.Module, x: Tensor, grads: Sequence[Tensor]) -> dict[str, float]:
    """Return the relative L2 error of a layer's output and gradients against fp32.

    Args:
        x: [tokens, in].
        grads: the gradient [tokens, out] of each tensor that the layer returns.
    """
    weights = [p.detach().float().requires_grad_() for p in layer.parameters()]
    own, wide = x.detach().requires_grad_(), x.detach().float().requires_grad_()
    y, exact = layer(own), [F.linear(wide, weight) for weight in weights]
    torch.autograd.backward(y, list(grads))
    torch.autograd.backward(exact, [grad.float() for grad in grads])
    found = torch.cat(tuple(y), 1).detach(), _grad(own), torch.cat([_grad(p) for p in layer.parameters()])
    truth = torch.cat(exact, 1).detach(), _grad(wide), torch.cat([_grad(weight) for weight in weights])
    layer.zero_grad()
    names = "output", "gradient of x", "gradient of the weights"
    pairs = zip(names, found, truth, strict=True)
    return {name: ((ours.float() - exact).norm() / exact.norm()).item() for name, ours, exact in pairs}


def _grad(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


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
    """Return the seconds of forward and backward of each layer, and the reasons why some were refused.

    The times are keyed by layer and then by precision: 16 bits ("bf16") and the other ways ("fp8 rowwise"). The casts
    of x and of the gradients are part of the time. The time of a way that is not used is infinite.

    Args:
        joined: join the gradients of several weights in 16 bits (see Matmul), as the run does.
        kept: round the weights once, before the timing, as a run does once a step. Otherwise each call rounds them.
        compiled: time the layer as compiled by torch.compile.
        seconds: the timer; it returns the seconds of one call of an action.
    """
    matmuls: dict[str, Matmul] = {"bf16": Matmul(joined), **{" ".join(name): low for name, low in RECIPES.items()}}
    draw = torch.Generator(device).manual_seed(0)

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=draw, device=device, dtype=dtype)

    times: dict[str, dict[str, float]] = {name: {} for name in layers}
    refused = []
    # All sizes and precisions share one code object, so the default limit would be reached.
    with torch._dynamo.config.patch(recompile_limit=1000):
        for name, (inputs, sizes) in layers.items():
            weights = [0.02 * normal(size, inputs) for size in sizes.values()]
            x = normal(tokens, inputs).requires_grad_()
            grads = [1e-3 * normal(tokens, size) for size in sizes.values()]
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
    """Build a layer with copies of these weights [out, in]. With `kept` they are rounded already."""
    groups, dtype, device = ParallelGroups.single(), weights[0].dtype, weights[0].device
    layer = ColumnParallelLinear(inputs, sizes, groups, matmul=matmul, dtype=dtype, device=device)
    with torch.no_grad():
        for parameter, weight in zip(layer.parameters(), weights, strict=True):
            parameter.copy_(weight)
    if kept:
        keep_weights(layer)
    return layer


def _wrong(layer: nn.Module, x: Tensor, grads: Sequence[Tensor], limit: float) -> str:
    """Return why a layer is not used, or an empty string."""
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
    """Return the number of weights from which a layer is multiplied this way, at least `least`. None: no layer is.

    A layer is multiplied this way if it and all larger layers gain by GAIN, so only its size decides.
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
    """Format the lines of the report: each layer's milliseconds in the ways that are used, then the reasons of those
    that are not."""
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
