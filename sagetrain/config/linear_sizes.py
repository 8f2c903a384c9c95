"""Sizes of linear layers on a rank, and those that can be multiplied in 8 bits."""

from __future__ import annotations

from typing import NamedTuple

LOW_BIT_MULTIPLE = 16
"""Of every side of a matrix in 8 bits, on a rank: torch's FP8 kernels read 16 bytes at a time."""

AUTO_PRECISION = "int8"
"""What linear.precision auto takes where that gains. Never fp8, which is a few percent faster and costs several times
as much in loss (results/linear-layers)."""


class LinearSizes(NamedTuple):
    """Of a linear layer on a rank: of all weights that read one x."""

    inputs: int
    outputs: dict[str, int]
    """Output features by weight."""

    @property
    def weights(self) -> int:
        """How many it has."""
        return self.inputs * sum(self.outputs.values())

    @property
    def odd(self) -> list[int]:
        """Its sides that no 8-bit matmul takes."""
        return [side for side in sorted({self.inputs, *self.outputs.values()}) if side % LOW_BIT_MULTIPLE]
