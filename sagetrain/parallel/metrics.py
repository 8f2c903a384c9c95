"""The one door for the numbers of a training step: a name, what this rank has to say, and how the ranks become one.

Whatever holds ParallelGroups (every layer, autograd function and the engine) adds to `groups.metrics` while a step
runs, forward, backward or later. Values stay on the device, and nothing waits for them: the engine reduces all of them
at the step's end, in the collective that the loss takes anyway. What was added then is in metrics.jsonl and TensorBoard
under its name; no other place has to know of it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_Key = TypeVar("_Key", tuple[str, int], tuple[str, float])

_PADDING = 64  # as many numbers are reduced, or a multiple: ranks that disagree by a few are told, and not mixed up


class Metrics:
    """Numbers of the step at hand, by name ("train/loss": the slash is how TensorBoard groups them).

    Between two reductions all ranks add the same names, in any order, each of them in one way. A value is a number, or
    a tensor of one element on the step's device. A name that comes again (the next micro-batch) adds to its mean, its
    sum or its maximum. A block that is recomputed in the backward pass adds twice: give it a mean or a maximum. All
    blocks share one compiled graph, and a name of each layer's own would make it many: add such numbers outside of it.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int], Tensor | float] = {}
        self._functions: dict[str, Callable[..., float]] = {}
        self._maxima: dict[tuple[str, float], Tensor | float] = {}

    def clear(self) -> None:
        """Forget what was added since the last reduction (by an evaluation, say)."""
        self._sums.clear()
        self._functions.clear()
        self._maxima.clear()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Forget what is added inside: by passes of the model that are of no step."""
        before = self._sums, self._functions, self._maxima
        self._sums, self._functions, self._maxima = {}, {}, {}
        try:
            yield
        finally:
            self._sums, self._functions, self._maxima = before

    def derive(self, name: str, function: Callable[..., float], *parts: Tensor | float) -> None:
        """Add to what is summed up over all ranks, part by part. The number is function(sums of the parts), as floats:
        a statistic of all that was added anywhere, where a mean of the ranks' own would be another."""
        self._functions[name] = function
        for i, part in enumerate(parts):
            part, before = _float64(part), self._sums.get((name, i))
            self._sums[name, i] = part if before is None else before + part

    def mean(self, name: str, value: Tensor | float, weight: float = 1.0) -> None:
        """Add to the mean, by weight, of everything that all ranks add. It is nan where all weights are 0."""
        value = _float64(value)
        self.derive(name, ratio, value if weight == 1 else value * weight, weight)

    def sum(self, name: str, value: Tensor | float, copies: int = 1) -> None:
        """Add to the sum over all ranks. `copies`: so many ranks report one and the same thing, which counts once.

        The sum over a tensor-parallel group alone, of what is equal on all replicas, has groups.num_replicas copies.
        """
        value = _float64(value)
        self.derive(name, float, value if copies == 1 else value / copies)

    def max(self, name: str, value: Tensor | float) -> None:
        """Take into the maximum over all ranks. A step with any maximum or minimum makes one more small collective."""
        self._take(name, 1.0, _float64(value))

    def min(self, name: str, value: Tensor | float) -> None:
        """Take into the minimum over all ranks."""
        self._take(name, -1.0, -_float64(value))

    def _take(self, name: str, sign: float, value: Tensor | float) -> None:
        before = self._maxima.get((name, sign))
        larger: Callable[..., Tensor | float] = torch.maximum if isinstance(value, Tensor) else max
        self._maxima[name, sign] = value if before is None else larger(before, value)

    def reduce(self, device: torch.device) -> dict[str, float]:
        """All numbers over all ranks, by name, equal on every rank; they are forgotten here. Collective.

        Raises:
            RuntimeError: the ranks have not added the same names.
        """
        sums, maxima = _numbers_first(self._sums), _numbers_first(self._maxima)
        number = int.from_bytes(hashlib.sha256(repr((list(sums), list(maxima))).encode()).digest()[:4], "big")
        total, *reduced = _reduced([float(number), *sums.values()], dist.ReduceOp.SUM, device)
        if total != number * (dist.get_world_size() if dist.is_initialized() else 1):
            raise RuntimeError(f"metrics: the ranks differ in what they have added; this one: {[*sums, *maxima]}")
        parts: dict[str, list[float]] = {name: [] for name, _ in sorted(sums)}
        for (name, _), value in sorted(zip(sums, reduced, strict=True)):
            parts[name].append(value)
        result = {name: self._functions[name](*values) for name, values in parts.items()}
        if maxima:
            largest = _reduced(list(maxima.values()), dist.ReduceOp.MAX, device)
            result.update((name, sign * value) for (name, sign), value in zip(maxima, largest, strict=True))
        self.clear()
        return dict(sorted(result.items()))


def total_over_ranks(count: int, copies: int, device: torch.device) -> int:
    """Return the sum of a count over all ranks, of which `copies` report one and the same. Collective."""
    return round(_reduced([float(count)], dist.ReduceOp.SUM, device)[0]) // copies


def ratio(total: float, weight: float) -> float:
    """For `derive`: a mean by weight, nan where there is no weight."""
    return total / weight if weight else math.nan


def share(part: float, whole: float) -> float:
    """For `derive`: a part of what there is, 0 of nothing."""
    return part / whole if whole else 0.0


def _float64(value: Tensor | float) -> Tensor | float:
    return value.detach().reshape(()).double() if isinstance(value, Tensor) else float(value)


def _numbers_first(values: dict[_Key, Tensor | float]) -> dict[_Key, Tensor | float]:
    """In an order that does not depend on that of the adding."""
    return dict(sorted(values.items(), key=lambda item: (isinstance(item[1], Tensor), item[0])))


def _reduced(values: list[Tensor | float], operation: dist.ReduceOp.RedOpType, device: torch.device) -> list[float]:
    """The values, numbers before tensors, over all ranks; waits for the device."""
    numbers = [value for value in values if not isinstance(value, Tensor)]
    tensors = [value for value in values if isinstance(value, Tensor)]
    padding = [0.0] * (-len(values) % _PADDING)
    packed = torch.tensor(padding + numbers, dtype=torch.float64, device=device)
    if tensors:
        packed = torch.cat([packed, torch.stack([value.to(device) for value in tensors])])
    if dist.is_initialized():
        dist.all_reduce(packed, op=operation)
    return packed[len(padding) :].tolist()
