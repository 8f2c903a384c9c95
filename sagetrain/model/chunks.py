"""The chunks of a model in a pipeline. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelChunk:
    """A range of a model's blocks, and whether the chunk has the embedding and the output projection."""

    number: int
    blocks: range
    first: bool
    """Whether the chunk begins with the embedding."""
    last: bool
    """Whether the chunk ends with the final norm and the output projection."""


def whole(num_layers: int) -> ModelChunk:
    """Return the chunk that is a whole model."""
    return ModelChunk(0, range(num_layers), first=True, last=True)
