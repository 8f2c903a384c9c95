"""The protocol of an optimizer: it updates the pieces of tensors that a rank keeps, whatever engine keeps them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sagekernels.adamw import Master, Moment
from sagetrain.model.tensors import TensorSpec


class State(Protocol):
    """One kind of an optimizer's state for one piece, such as its momentum. Memory may hold it in fewer bits."""

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the range [start, stop) of the state, 1-D in fp32: the memory itself, or a copy if the memory is not
        fp32. `start` is a multiple of STEP."""
        ...

    def write(self, values: Tensor, start: int = 0) -> None:
        """Set the state from position `start` on to `values`, 1-D in fp32. `start` is a multiple of STEP."""
        ...

    def moment(self, start: int = 0, stop: int | None = None) -> Moment:
        """Return the memory of the range [start, stop), which a kernel updates in place. `start` is a multiple of
        STEP."""
        ...


class Weights(Protocol):
    """The master weights of one piece, in fp32 or in fewer bits."""

    def read(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the range [start, stop), 1-D in fp32: the memory itself, or a copy if the memory is not fp32."""
        ...

    def write(self, values: Tensor, start: int = 0, update: int = 0) -> None:
        """Set the weights from position `start` on to `values`, 1-D in fp32, which update number `update` has made.
        What was read is kept as it is."""
        ...

    def master(self, update: int, start: int = 0, stop: int | None = None) -> Master:
        """Return the memory of the range [start, stop), where a kernel makes update number `update` in place."""
        ...


STEP = 4096
"""State is read and written at multiples of this many values, so that no block with a common scale is cut."""


@dataclass(frozen=True)
class TensorPiece:
    """The part of one tensor that a rank updates: the range [start, stop) of a flattened tensor-parallel slice. The
    range is empty on a rank that keeps nothing of the tensor."""

    spec: TensorSpec
    slice: int
    """The number of the tensor-parallel slice, from 0."""
    slices: int
    """The number of slices that the tensor is cut into; 1: it is not cut."""
    start: int
    stop: int
    weight: Tensor
    """The memory of the master weights of the range: 1-D, a view of what the engine keeps."""


class Optimizer(Protocol):
    """An optimizer of some pieces, which all ranks update at the same time."""

    @property
    def state(self) -> Sequence[Mapping[str, State]]:
        """The state of each piece, by the names that checkpoints have for its kinds. The kinds of a tensor are those of
        build.kinds_of, on every rank."""
        ...

    @property
    def weights(self) -> Sequence[Weights]:
        """The master weights of each piece."""
        ...

    def step(self, gradients: Sequence[Tensor], lr: float, update: int, clip: float = 1.0) -> None:
        """Update weights and state in place; collective.

        Args:
            gradients: the gradient of each piece, 1-D in fp32 or bf16. They may be changed.
            lr: the learning rate of the schedule.
            update: the number of this update, from 1. The state has seen all earlier ones.
            clip: what gradients are multiplied by first.
        """
        ...


def clip_gradients(gradients: Sequence[Tensor], factor: float) -> None:
    """Multiply gradients by a factor, in place."""
    # A rank among many may keep nothing, and torch takes no empty list.
    if factor != 1 and gradients:
        torch._foreach_mul_(list(gradients), factor)
