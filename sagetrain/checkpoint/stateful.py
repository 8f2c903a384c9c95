"""The part of an engine that checkpoints need: the ranges of tensors that a rank keeps, to be written and filled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from sagetrain.model.tensors import TensorSpec
from sagetrain.optim.pieces import State, Weights
from sagetrain.parallel.topology import ParallelGroups


@dataclass(frozen=True)
class Owned:
    """The part of one tensor that this rank keeps: a range of the flattened tensor-parallel slice.

    `weight` and `copies` are 1-D views of the engine's own memory. After writing to all of them, call
    `weights_changed` of the engine. After writing to `weight` and `state`, call `state_changed`.
    """

    spec: TensorSpec
    start: int
    stop: int
    """The range is [start, stop). Both are equal on a rank that keeps nothing of this tensor."""
    weight: Tensor
    """The memory of the master weights of the range, fp32 or bf16 (optimizer.master)."""
    state: Mapping[str, State]
    """The optimizer's state of the range, by the names that checkpoints have for its kinds."""
    copies: tuple[Tensor, ...] = ()
    """This rank's other copies of the values, in the model's dtype. The model computes with these copies, and they may
    cover any range."""
    masters: Weights | None = None
    """The master weights where `weight` alone does not say them. None: `weight` does."""
    twin: bool = False
    """Whether another replica keeps the same range, and saves and loads it for this one."""

    @property
    def name(self) -> str:
        """The tensor's name in the model."""
        return self.spec.name

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names in checkpoints of the weight and of the kinds of state, the same on all ranks."""
        return "weight", *self.state

    def read(self, kind: str) -> Tensor:
        """Return the values of a kind, 1-D in fp32: the memory itself, or a copy if it is not fp32."""
        if kind == "weight":
            return self.masters.read() if self.masters else self.weight
        return self.state[kind].read()

    def write(self, kind: str, values: Tensor, start: int = 0) -> None:
        """Set the values of a kind from position `start` of the range on: see optim/pieces.State."""
        if kind == "weight" and self.masters:
            self.masters.write(values, start)
        elif kind == "weight":
            self.weight[start : start + len(values)] = values
        else:
            self.state[kind].write(values, start)


class Stateful(Protocol):
    """The part of an engine that a checkpoint restores."""

    @property
    def groups(self) -> ParallelGroups: ...

    def owned(self) -> Iterable[Owned]:
        """Return the ranges that this rank keeps of every tensor, in the order of the model."""
        ...

    def state_changed(self, optimizer_steps: int | None = None) -> None:
        """Take over the weights and moments that were written, and the number of updates that the moments have seen;
        collective."""
        ...
