"""The metrics of a training step. Each has a name, a value on every rank, and a rule that makes one number of the
values.

Whatever holds ParallelGroups (every layer, every autograd function and the engine) adds to `groups.metrics` while a
step runs, in the forward pass, the backward pass or later. Values stay on the device, and nothing waits for them. The
engine reduces all of them at the end of the step, in the collective that the loss takes anyway. A metric that was added
appears in metrics.jsonl and TensorBoard under its name, and no other place has to know it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sagetrain.parallel.objects import of_every_rank

# The collective reduces a multiple of this many numbers. Ranks that disagree by a few numbers then get an error, and
# their numbers are not mixed up.
_PADDING = 64


class Metrics:
    """The metrics of the present step, keyed by name. TensorBoard groups them by the slash, as in "train/loss".

    Between two reductions all ranks add the same names, in any order, and each name in one way. A value is a number, or
    a tensor of one element on the step's device. A name that comes again (in the next micro-batch) adds to its mean,
    its sum or its maximum. A block that is recomputed in the backward pass adds twice, so give it a mean or a maximum.
    All blocks share one compiled graph, and a separate name for each layer would make it many graphs: add such metrics
    outside of the block.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int], Tensor | float] = {}
        self._functions: dict[str, Callable[..., float]] = {}
        self._maxima: dict[tuple[str, float], Tensor | float] = {}
        self._vectors: dict[str, Tensor] = {}
        self.vectors: dict[str, Tensor] = {}
        """The vectors of the last reduction over all ranks, keyed by name: 1-D, fp64, on the CPU. They are not
        logged."""

    def clear(self) -> None:
        """Forget everything that was added since the last reduction, by an evaluation for example."""
        self._sums.clear()
        self._functions.clear()
        self._maxima.clear()
        self._vectors.clear()

    def added(self) -> list[tuple[Any, int]]:
        """Return what was added since the last reduction, in a form that differs if anything is added."""
        every = (self._sums, self._functions, self._maxima, self._vectors)
        return [(name, id(value)) for values in every for name, value in values.items()]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Forget everything that is added inside, by passes of the model that belong to no step."""
        before = self._sums, self._functions, self._maxima, self._vectors
        self._sums, self._functions, self._maxima, self._vectors = {}, {}, {}, {}
        try:
            yield
        finally:
            self._sums, self._functions, self._maxima, self._vectors = before

    def derive(self, name: str, function: Callable[..., float], *parts: Tensor | float) -> None:
        """Add to sums over all ranks, part by part. The metric is function(sums of the parts), as floats.

        It is a statistic of everything that was added on any rank, where the mean of the ranks' own statistics would
        differ.
        """
        self._functions[name] = function
        for i, part in enumerate(parts):
            part, before = _float64(part), self._sums.get((name, i))
            self._sums[name, i] = part if before is None else before + part

    def mean(self, name: str, value: Tensor | float, weight: float = 1.0) -> None:
        """Add to the weighted mean of everything that all ranks add. It is nan where all weights are 0."""
        value = _float64(value)
        self.derive(name, ratio, value if weight == 1 else value * weight, weight)

    def sum(self, name: str, value: Tensor | float, copies: int = 1) -> None:
        """Add to the sum over all ranks. `copies` ranks report one and the same value, which counts once.

        For a sum over a tensor-parallel group alone, whose values are equal on all replicas, `copies` is
        groups.num_replicas.
        """
        value = _float64(value)
        self.derive(name, float, value if copies == 1 else value / copies)

    def vector(self, name: str, values: Tensor) -> None:
        """Add to a vector of sums over all ranks, which is in `vectors` after the next reduction. All ranks add vectors
        of one length, and nothing is logged of them."""
        values = values.detach().double().flatten()
        before = self._vectors.get(name)
        self._vectors[name] = values if before is None else before + values

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

    def reduce(self, device: torch.device, stages: dist.ProcessGroup | None = None) -> dict[str, float]:
        """Return all metrics over all ranks, keyed by name and equal on every rank, and forget them. All ranks call it.
        Raises RuntimeError if the ranks have not added the same names.

        Args:
            device: the device of the collective.
            stages: the stages of a pipeline if they may have added different names, those of their own layers for
                example. A stage that has not added a name counts for nothing in it.
        """
        if stages is not None:
            self._add_names_of(stages)
        sums, maxima = dict(sorted(self._sums.items())), dict(sorted(self._maxima.items()))
        vectors = dict(sorted(self._vectors.items()))
        added = list(sums), list(maxima), [(name, len(values)) for name, values in vectors.items()]
        number = int.from_bytes(hashlib.sha256(repr(added).encode()).digest()[:4], "big")
        total, *reduced = _reduced([float(number), *sums.values()], dist.ReduceOp.SUM, device, list(vectors.values()))
        if total != number * (dist.get_world_size() if dist.is_initialized() else 1):
            names = [*sums, *maxima, *vectors]
            raise RuntimeError(f"metrics: the ranks differ in what they have added; this one: {names}")
        reduced, of_vectors = reduced[: len(sums)], torch.tensor(reduced[len(sums) :], dtype=torch.float64)
        self.vectors = dict(zip(vectors, of_vectors.split([len(values) for values in vectors.values()]), strict=True))
        parts: dict[str, list[float]] = {name: [] for name, _ in sums}
        for (name, _), value in zip(sums, reduced, strict=True):
            parts[name].append(value)
        result = {name: self._functions[name](*values) for name, values in parts.items()}
        if maxima:
            largest = _reduced(list(maxima.values()), dist.ReduceOp.MAX, device)
            result.update((name, sign * value) for (name, sign), value in zip(maxima, largest, strict=True))
        self.clear()
        return dict(sorted(result.items()))

    def _add_names_of(self, stages: dist.ProcessGroup) -> None:
        # A function without a name cannot be sent. Its metric is then missing here, which `reduce` refuses.
        named = {name: function for name, function in self._functions.items() if "<" not in function.__qualname__}
        every: list[Any] = of_every_rank((list(self._sums), list(self._maxima), named), stages)
        for sums, maxima, functions in every:
            self._functions = functions | self._functions
            for key in sums:
                if key[0] in self._functions:
                    self._sums.setdefault(key, 0.0)
            for key in maxima:
                self._maxima.setdefault(key, -math.inf)


def root_mean_square(squares: float, count: float) -> float:
    """Return the root of a mean of squares. It is a function for `derive`."""
    return math.sqrt(squares / count)


def total_over_ranks(count: int, copies: int, device: torch.device) -> int:
    """Return the sum of a count over all ranks, where `copies` ranks report one and the same value. All ranks call
    it."""
    return round(_reduced([float(count)], dist.ReduceOp.SUM, device)[0]) // copies


def ratio(total: float, weight: float) -> float:
    """Return the mean `total / weight`, or nan if the weight is 0. It is a function for `derive`."""
    return total / weight if weight else math.nan


def share(part: float, whole: float) -> float:
    """Return `part / whole`, or 0 if the whole is 0. It is a function for `derive`."""
    return part / whole if whole else 0.0


def _float64(value: Tensor | float) -> Tensor | float:
    return value.detach().reshape(()).double() if isinstance(value, Tensor) else float(value)


def _reduced(
    values: list[Tensor | float],
    operation: dist.ReduceOp.RedOpType,
    device: torch.device,
    vectors: Sequence[Tensor] = (),
) -> list[float]:
    """Reduce the values, then those of the vectors, over all ranks. It waits for the device."""
    count = len(values) + sum(map(len, vectors))
    padded = [*values, *[0.0] * (-count % _PADDING)]
    # All numbers go to the device in one copy. What is a number on one rank may be a tensor on another.
    numbers = [value for value in padded if not isinstance(value, Tensor)]
    there = iter(torch.tensor(numbers, dtype=torch.float64, device=device).unbind())
    packed = torch.stack([value.to(device) if isinstance(value, Tensor) else next(there) for value in padded])
    if vectors:
        packed = torch.cat([packed[: len(values)], *(vector.to(device) for vector in vectors), packed[len(values) :]])
    if dist.is_initialized():
        dist.all_reduce(packed, op=operation)
    return packed[:count].tolist()
