"""The initial weights, which depend on the seed alone, and not on layout or device."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor, nn

from sagetrain.config.schema import ModelConfig
from sagetrain.model.tensors import TensorSpec
from sagetrain.parallel.host import cores_of_rank
from sagetrain.parallel.layers import materialize, shard
from sagetrain.parallel.rng import named_generator
from sagetrain.parallel.topology import ParallelGroups

_Name = tuple[str, tuple[int, ...], float, int, int, int, torch.dtype]
_begun: dict[_Name, Future[Tensor]] = {}
"""The slices that threads draw or have drawn, until `initialize` takes them."""


def _drawn(shape: Sequence[int], std: float, seed: int, name: str) -> Tensor:
    return torch.empty(*shape).normal_(0, std, generator=named_generator(seed, name))


def _std(spec: TensorSpec, model: ModelConfig) -> float:
    if spec.kind == "conv":  # As torch's own convolutions begin, whose outputs have a third of the inputs' variance.
        return 1 / math.sqrt(3 * spec.shape[1])
    if spec.kind in ("decay", "step"):
        return 1.0
    return model.init_std / ((2 * model.num_layers) ** 0.5 if spec.into_stream else 1.0)


def _name(spec: TensorSpec, std: float, groups: ParallelGroups, seed: int, dtype: torch.dtype) -> _Name:
    return spec.name, tuple(spec.shape), std, groups.tp_rank, groups.tp_size, seed, dtype


def _shaped(spec: TensorSpec, drawn: Tensor) -> Tensor:
    """Return the values of a tensor, given normal ones. The rates of decay of a gated delta net begin uniform from 0 to
    16, and its steps from 0.001 to 0.1 with uniform logarithms, as in fla."""
    if spec.kind not in ("decay", "step"):
        return drawn
    share: Tensor = torch.special.ndtr(drawn.double())
    if spec.kind == "decay":
        return (16 * share).log()
    step = torch.exp(share * math.log(100) + math.log(0.001))
    return step.expm1().log()  # softplus makes the step of it


@torch.no_grad()
def _slice(spec: TensorSpec, std: float, groups: ParallelGroups, seed: int, dtype: torch.dtype) -> Tensor:
    full = _shaped(spec, _drawn(spec.shape, std, seed, spec.name))
    return (shard(full, spec.dim, groups) if spec.cut else full).to(dtype, copy=True).contiguous()


def begin(
    specs: Iterable[TensorSpec],
    model: ModelConfig,
    groups: ParallelGroups,
    seed: int,
    dtype: torch.dtype,
    room: float,
) -> None:
    """Begin to draw weights in threads, as long as their slices take no more than `room` bytes. `initialize` takes
    them, and draws the others."""
    forget()
    pool = ThreadPoolExecutor(_workers())
    for spec in specs:
        if spec.begins is None and spec.cut != "experts":
            room -= math.prod(spec.shape) * dtype.itemsize / (groups.tp_size if spec.cut else 1)
            if room < 0:
                break
            std = _std(spec, model)
            _begun[_name(spec, std, groups, seed, dtype)] = pool.submit(_slice, spec, std, groups, seed, dtype)
    pool.shutdown(wait=False)


def forget() -> None:
    """Draw no more of what was begun, and give the memory of what nobody has taken back."""
    while _begun:
        _begun.popitem()[1].cancel()


def _workers() -> int:
    return min(8, cores_of_rank())


@torch.no_grad()
def initialize(
    parameters: Iterable[tuple[TensorSpec, nn.Parameter]],
    model: ModelConfig,
    groups: ParallelGroups,
    seed: int,
    device: torch.device,
    partition: Callable[[TensorSpec, nn.Parameter], None] | None,
) -> None:
    """Give parameters on the meta device their initial values. Gains are 1, biases 0. Weights are normal with init_std,
    divided by sqrt(2 num_layers) for layers that write into the residual stream. A gated delta net has distributions
    of its own (`_shaped`).

    Every weight is drawn in full from a generator named after it, then sliced. Each expert has a generator of its own,
    because a tensor of all experts is too large to be drawn in full. Several weights are drawn at a time, since one
    generator keeps one core busy. They go to the device one after the other.

    Args:
        partition: called with every parameter as soon as it has its values, before the next one takes memory.
    """

    @torch.no_grad()
    def draw(spec: TensorSpec, parameter: nn.Parameter) -> Tensor:
        if spec.begins is not None:
            return torch.full_like(parameter, spec.begins, device="cpu")
        std = _std(spec, model)
        if spec.cut == "experts":
            values = torch.empty_like(parameter, device="cpu")
            experts = values.view(-1, *spec.shape[1:])
            for expert, own in enumerate(experts, groups.ep_rank * len(experts)):
                own.copy_(_drawn(own.shape, std, seed, f"{spec.name}.{expert}"))
            return values
        begun = _begun.pop(_name(spec, std, groups, seed, parameter.dtype), None)
        return begun.result() if begun else _slice(spec, std, groups, seed, parameter.dtype)

    def place(spec: TensorSpec, parameter: nn.Parameter, drawn: Future[Tensor]) -> None:
        materialize(parameter, drawn.result().to(device))
        if partition is not None:
            partition(spec, parameter)

    workers = _workers()
    waiting: deque[tuple[TensorSpec, nn.Parameter, Future[Tensor]]] = deque()
    with ThreadPoolExecutor(workers) as pool:
        for spec, parameter in parameters:
            if len(waiting) > workers:  # this bounds the part of the model that is in host memory
                place(*waiting.popleft())
            waiting.append((spec, parameter, pool.submit(draw, spec, parameter)))
        for each in waiting:
            place(*each)
