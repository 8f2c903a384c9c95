"""The slice of a tensor that a rank of a model replica holds, in one place and without torch.

Engines, checkpoints, measurements and prices ask here, and none of them reads how a tensor is cut. A tensor that other
ranks cut, or in another way, is another answer of `place` and `slices_of`.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from sagetrain.model.tensors import TensorSpec


class ModelRanks(Protocol):
    """A rank among those of its model replica; parallel.topology.ParallelGroups is one."""

    @property
    def tp_size(self) -> int: ...

    @property
    def tp_rank(self) -> int: ...

    @property
    def ep_size(self) -> int: ...

    @property
    def ep_rank(self) -> int: ...


class Placement(NamedTuple):
    """The slice of one tensor that a rank holds."""

    slice: int
    """The number of the slice, from 0."""
    slices: int
    """The number of slices that the tensor is cut into; 1: it is not cut."""
    copies: int
    """The number of ranks of a model replica that hold this slice."""
    counted: bool
    """Whether this rank is the first that holds the slice. What counts once, or is saved once, is taken from it."""


def slices_of(spec: TensorSpec, tensor_parallel: int) -> int:
    """Return the number of slices that a tensor is cut into. A rank's experts are a range of their tensor (`first_of`),
    and no slice."""
    return tensor_parallel if spec.cut == "tensor" else 1


def place(spec: TensorSpec, ranks: ModelRanks) -> Placement:
    """Return the slice of a tensor that a rank holds."""
    if spec.cut == "experts" and ranks.ep_size > 1:
        return Placement(0, 1, 1, counted=True)
    slices = slices_of(spec, ranks.tp_size)
    copy, number = divmod(ranks.tp_rank, slices)
    return Placement(number, slices, ranks.tp_size // slices, counted=copy == 0)


def first_of(spec: TensorSpec, ranks: ModelRanks) -> int:
    """Return the place in its flattened slice at which the part of a tensor begins that a rank computes with."""
    return ranks.ep_rank * (spec.size // ranks.ep_size) if spec.cut == "experts" else 0
