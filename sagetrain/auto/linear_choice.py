"""Choose how linear layers multiply in a run whose settings say `auto`.

The linear layers of a block are compared at the sizes of one rank. Each layer is checked against fp32, then timed in
each precision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sagekernels.admission import median_seconds
from sagekernels.grouped import Rows, plan_rows
from sagekernels.grouped_matmul import GROUPED_LOW_BIT, GroupedMatmul
from sagekernels.lowbit import LOW_BIT
from sagekernels.matmul import Matmul
from sagetrain.auto.kept import Kept, kept_linear
from sagetrain.auto.timed_choice import FASTEST, StartOfRun, Times, TimeTable, as_before, by_first_rank, decide
from sagetrain.config import layer_specs
from sagetrain.config.arithmetic import parts_of
from sagetrain.config.layer_specs import chosen_layers, linear_layers
from sagetrain.config.layout import Layout
from sagetrain.config.linear_sizes import AUTO_PRECISION, EIGHT_BITS, LOW_BIT_MULTIPLE, LinearSizes
from sagetrain.config.schema import ExpertsConfig, LinearConfig, ModelConfig
from sagetrain.costs.accounting import overlaps, rank_of
from sagetrain.model.moe import Experts
from sagetrain.model.selection import cannot_multiply
from sagetrain.parallel.collectives import Region
from sagetrain.parallel.layers import ColumnParallelLinear, keep_weights
from sagetrain.parallel.topology import ParallelGroups


def settle_linear(start: StartOfRun, before: Kept | None) -> tuple[LinearConfig, str]:
    """Return the settings with nothing left to decide, and a few words that say why if they were `auto`; collective.

    `auto` stands for int8 for the layers that gain by it, or bf16. Each layer is compared with fp32, then timed forward
    and backward at the shape of one rank's calls. The layers from a size on gain together; `smallest` has the rule.
    Collectives are not timed.

    Args:
        before: the choices that the run had, if it continues.
    """
    key, asked, model = "linear.precision", start.cfg.linear, start.cfg.model
    ranks = start.cfg.parallel.tensor_parallel_size
    place: dict[str, Any] = {"tensor_parallel_size": ranks, "device": start.device, "dtype": start.dtype}
    kept = kept_linear(asked, before.linear) if before and before.linear.precision != "auto" else asked
    settled, why = as_before(key, asked, kept, start.say, partial(cannot_multiply, model=model, **place))
    if settled.precision == "auto":
        if by_rule := why_sixteen_bits(settled, model, **place):
            settled, why = settled.model_copy(update={"precision": "bf16"}), f"auto: {by_rule}"
        else:
            settled, why = by_first_rank(f"{key} auto", partial(_fastest, start, settled), start.device), FASTEST
    if before and settled.low_bit:
        _compare(settled, model, before, ranks, start.say)
    return settled, why


def _fastest(start: StartOfRun, settings: LinearConfig) -> LinearConfig:
    """Return the fastest settings among those that `settings` leave open, see settle_linear."""
    cfg, model, rank, device, dtype = start.cfg, start.cfg.model, rank_of(start.cfg), start.device, start.dtype
    tokens, joined = rank.tokens // parts_of(rank.tokens, rank.tensor, overlaps(cfg)), rank.tensor > 1
    # Weights that stay in 8 bits from one step to the next are rounded once a step, which is not timed.
    kept = Layout.of(cfg).zero_stage < 3
    layers = {name: sizes for name, sizes in chosen_layers(model, rank.tensor).items() if not sizes.odd}
    way, least = AUTO_PRECISION, settings.keep_layers_below
    bf16, *low = settings.choices(layers.values())
    named = {"bf16": bf16, **{_name(way, choice.keep_layers_below): choice for choice in low}}

    def measure() -> TimeTable:
        how: dict[str, Any] = {"kept": kept, "compiled": start.compiled, "device": device, "dtype": dtype}
        how["seconds"] = partial(median_seconds, device=device)
        dense = {name: sizes for name, sizes in layers.items() if name != "experts"}
        times, refused = time_layers(dense, [way], tokens=tokens, joined=joined, **how)
        if model.experts is not None:  # Each rank has its own tokens, or as many of others.
            own_experts = model.experts.model_copy(update={"number": model.experts.number // rank.experts})
            last = layer_specs.layers(model)[-1]
            how |= {"activation": last.expert_activation, "biased": last.biased_experts}
            of_rank = tokens // rank.tensor
            times["experts"], why = time_experts(own_experts, model.hidden_size, [way], tokens=of_rank, **how)
            refused += why
        sides = {name: f"{name} {inputs} x {sum(sizes.values())}" for name, (inputs, sizes) in layers.items()}
        about = f"{tokens:,} tokens, {dtype}: forward + backward (times as fast as bf16)"
        return TimeTable(about, {sides[name]: row for name, row in times.items()}, refused)

    def pick(times: Times) -> str:
        weights = {name: sizes.weights for name, sizes in layers.items()}
        below = smallest(dict(zip(layers, times.values(), strict=True)), way, weights, least)
        return "bf16" if below is None else _name(way, below)

    experts = model.experts, model.conventions, cfg.parallel.expert_parallel_size
    key = layers, tokens, joined, kept, start.compiled, dtype, way, least, GAIN, experts
    return named[decide("linear", start, measure, pick, file=start.folder.linear, key=key)]


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
    """Return why `auto` has nothing to choose from, or an empty string."""
    if torch.device(device).type != "cuda":
        return "nothing is timed without a GPU"
    low = linear.model_copy(update={"precision": AUTO_PRECISION})
    return cannot_multiply(low, model, tensor_parallel_size=tensor_parallel_size, device=device, dtype=dtype)


def _name(way: str, below: int) -> str:
    return f"{way}, layers of {below:,} weights and more" if below else way


GAIN = 1.05
"""The speedup from which a layer is taken out of 16 bits. Less is within the noise of clocks and of other jobs on the
machine."""
LIMITS = {"bf16": 0.01, **{name: each.error for name, each in EIGHT_BITS.items()}}
"""The largest relative error of all elements of a result together. bf16: rounding to bf16."""
_CALLS = 8  # so many calls are timed in a row, so that the GPU is timed and not the launches


def errors_of(layer: nn.Module, exact: nn.Module, x: Tensor, grads: Sequence[Tensor]) -> dict[str, float]:
    """Return the relative L2 error of a layer's output and gradients against `exact`, the layer in fp32 with the same
    weights, for x [tokens, in] and a gradient [tokens, out] of each tensor that the layer returns."""

    def results(one: nn.Module, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaf = x.detach().to(dtype).requires_grad_()
        y = one(leaf)
        torch.autograd.backward(y, [grad.to(dtype) for grad in grads])
        made = torch.cat(tuple(y), 1).detach(), _grad(leaf), torch.cat([_grad(p).flatten() for p in one.parameters()])
        one.zero_grad()
        return made

    found, truth = results(layer, x.dtype), results(exact, torch.float32)
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

    The times are keyed by layer and then by precision: 16 bits ("bf16") and the other ways ("fp8"). The casts
    of x and of the gradients are part of the time. The time of a way that is not used is infinite.

    Args:
        joined: join the gradients of several weights in 16 bits (see Matmul), as the run does.
        kept: round the weights once, before the timing, as a run does once a step. Otherwise each call rounds them.
        compiled: the run compiles its blocks. A layer is timed compiled where torch.compile fuses something in it: the
            rounding of weights, or the sum of several products in 16 bits. Elsewhere its kernels are the same, and
            compiling would take seconds for each layer and way.
        seconds: the timer; it returns the seconds of one call of an action.
    """
    matmuls: dict[str, Matmul] = {"bf16": Matmul(joined), **LOW_BIT}
    draw = torch.Generator(device).manual_seed(0)

    def normal(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=draw, device=device, dtype=dtype)

    times: dict[str, dict[str, float]] = {name: {} for name in layers}
    refused = []
    # All sizes and precisions share one code object, so the default limit would be reached.
    with torch._dynamo.config.patch(recompile_limit=1000) if compiled else nullcontext():
        for name, (inputs, sizes) in layers.items():
            weights = [0.02 * normal(size, inputs) for size in sizes.values()]
            x = normal(tokens, inputs).requires_grad_()
            grads = [1e-3 * normal(tokens, size) for size in sizes.values()]
            exact = layer_of(inputs, sizes, [weight.float() for weight in weights], Matmul(), kept=False)

            def make(
                way: str, inputs: int = inputs, sizes: dict[str, int] = sizes, weights: Any = weights
            ) -> nn.Module:
                layer = layer_of(inputs, sizes, weights, matmuls[way], kept=kept)
                if compiled and (not kept or (way == "bf16" and not joined and len(sizes) > 1)):
                    layer.compile(fullgraph=True, dynamic=False)
                return layer

            makes = {way: partial(make, way) for way in ("bf16", *ways)}
            times[name], why = _timed(name, makes, exact, x, grads, seconds)
            refused += why
    if compiled:
        torch._dynamo.reset()
    return times, refused


def time_experts(
    experts: ExpertsConfig,
    hidden: int,
    ways: Sequence[str],
    *,
    activation: str = "swiglu",
    biased: bool = False,
    tokens: int,
    kept: bool,
    compiled: bool,
    device: torch.device,
    dtype: torch.dtype,
    seconds: Callable[[Callable[[], None]], float],
) -> tuple[dict[str, float], list[str]]:
    """Return the seconds of forward and backward of a rank's experts by way, and the reasons why some were refused.
    Tokens go to experts by chance. The router is no part of it. activation, biased: those of the LayerSpec. The other
    arguments are those of time_layers."""
    matmuls = {"bf16": GroupedMatmul(), **GROUPED_LOW_BIT}
    draw = torch.Generator(device).manual_seed(0)
    x, grad = (torch.randn(tokens, hidden, generator=draw, device=device, dtype=dtype) for _ in range(2))
    scores = torch.rand(tokens, experts.number, generator=draw, device=device)
    weights, choices = scores.topk(min(experts.per_token, experts.number))
    rows = plan_rows(choices, experts.number)

    def make(way: str, wide: bool) -> nn.Module:
        region = Region(ParallelGroups.single(), dtype=torch.float32 if wide else dtype, device=device)
        how: dict[str, Any] = {"activation": activation, "biased": biased, "matmul": matmuls[way]}
        layer = Experts(experts.number, hidden, experts.ffn_size, region, **how)
        own = torch.Generator(device).manual_seed(1)
        with torch.no_grad():
            for p in layer.parameters():
                p.copy_(0.02 * torch.randn(p.shape, generator=own, device=device, dtype=dtype))
        if kept:
            keep_weights(layer)
        routed = _Routed(layer, weights, rows)
        if compiled and not wide:
            routed.compile(fullgraph=True, dynamic=False)
        return routed

    makes = {way: partial(make, way, False) for way in ("bf16", *ways)}
    exact = make("bf16", True)
    found = _timed("experts", makes, exact, x.requires_grad_(), [1e-3 * grad], seconds)
    if compiled:
        torch._dynamo.reset()
    return found


class _Routed(nn.Module):
    """Experts whose tokens have been routed. Like a linear layer of several weights it returns a tuple."""

    def __init__(self, experts: Experts, weights: Tensor, rows: Rows) -> None:
        super().__init__()
        self.experts, self.weights, self.rows = experts, weights, rows

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.experts(x, self.weights, self.rows),)


def _timed(
    name: str,
    makes: Mapping[str, Callable[[], nn.Module]],
    exact: nn.Module,
    x: Tensor,
    grads: Sequence[Tensor],
    seconds: Callable[[Callable[[], None]], float],
) -> tuple[dict[str, float], list[str]]:
    """Return the seconds of a layer that is made in several ways, and the reasons why some were refused."""
    times, refused = {}, []
    for way, make in makes.items():
        layer = make()
        reason = _wrong(layer, exact, x, grads, LIMITS[way.split()[0]]) if way != "bf16" else ""
        if reason:
            refused.append(f"{name} in {way}: {reason}")
        times[way] = float("inf") if reason else seconds(_calls(layer, x, grads)) / _CALLS
    return times, refused


def layer_of(
    inputs: int, sizes: dict[str, int], weights: Sequence[Tensor], matmul: Matmul, *, kept: bool
) -> ColumnParallelLinear:
    """Build a layer with copies of these weights [out, in]. With `kept` they are rounded already."""
    region = Region(ParallelGroups.single(), dtype=weights[0].dtype, device=weights[0].device)
    layer = ColumnParallelLinear(inputs, sizes, region, matmul=matmul)
    with torch.no_grad():
        for parameter, weight in zip(layer.parameters(), weights, strict=True):
            parameter.copy_(weight)
    if kept:
        keep_weights(layer)
    return layer


def _wrong(layer: nn.Module, exact: nn.Module, x: Tensor, grads: Sequence[Tensor], limit: float) -> str:
    """Return why a layer is not used, or an empty string."""
    try:
        errors = errors_of(layer, exact, x, grads)
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
