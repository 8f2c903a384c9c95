"""What checkpoints ask of an engine: the ranges of tensors that a rank keeps, to be written and filled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from torch import Tensor

from sagetrain.model.tensors import TensorSpec
from sagetrain.parallel.topology import ParallelGroups


class OwnedRange(Protocol):
    """What a rank keeps of one tensor of the model: a range of its flattened tensor-parallel slice."""

    @property
    def name(self) -> str: ...

    @property
    def spec(self) -> TensorSpec: ...

    @property
    def start(self) -> int: ...

    @property
    def stop(self) -> int: ...

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The weight and the moments of the range, 1-D, by the kinds of on_disk.py; {} of an empty range."""
        ...

    @property
    def twin(self) -> bool:
        """Whether another replica keeps the same range, and saves and loads it for this one."""
        ...


class Stateful(Protocol):
    """An engine, as far as a checkpoint restores it."""

    @property
    def groups(self) -> ParallelGroups: ...

    def owned(self) -> Iterable[OwnedRange]:
        """Return what this rank keeps of every tensor, in the order of the model."""
        ...

    def state_changed(self, optimizer_steps: int | None = None) -> None:
        """Take over what was written to weights and moments, and how many updates the moments have seen; collective."""
        ...
