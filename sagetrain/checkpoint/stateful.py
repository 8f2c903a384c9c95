"""The protocol that checkpoints need from an engine: the ranges of tensors that a rank keeps, to be written and
filled."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from sagetrain.model.tensors import TensorSpec
from sagetrain.parallel.topology import ParallelGroups


class OwnedRange(Protocol):
    """The part of one tensor of the model that a rank keeps: a range of the flattened tensor-parallel slice."""

    @property
    def name(self) -> str: ...

    @property
    def spec(self) -> TensorSpec: ...

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of values that the range has: `weight`, and those of the optimizer's state. They are the
        same on all ranks."""
        ...

    def read(self, kind: str) -> Tensor:
        """Return the values of a kind, 1-D in fp32."""
        ...

    def write(self, kind: str, values: Tensor, start: int = 0) -> None:
        """Set the values of a kind from position `start` on, which is a multiple of 4096."""
        ...

    @property
    def twin(self) -> bool:
        """Whether another replica keeps the same range, and saves and loads it for this one."""
        ...


class Stateful(Protocol):
    """The part of an engine that a checkpoint restores."""

    @property
    def groups(self) -> ParallelGroups: ...

    def owned(self) -> Iterable[OwnedRange]:
        """Return the ranges that this rank keeps of every tensor, in the order of the model."""
        ...

    def state_changed(self, optimizer_steps: int | None = None) -> None:
        """Take over the weights and moments that were written, and the number of updates that the moments have seen;
        collective."""
        ...
