"""The sizes of linear layers on a rank, and the rule that says which of them can be multiplied in 8 bits."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

LOW_BIT_MULTIPLE = 16
"""Every side of a matrix in 8 bits has to be a multiple of this on a rank, because torch's FP8 kernels read 16 bytes at
a time."""

LowBit = Literal["fp8", "int8"]
LOW_BIT: tuple[LowBit, ...] = get_args(LowBit)
"""The precisions in 8 bits: what they multiply by is in sagekernels/lowbit.py, their rates in costs/hardware.py."""
AUTO_PRECISION: LowBit = "int8"
"""The precision that linear.precision auto takes where 8 bits gain. It is never fp8, which is a few percent faster and
costs several times as much in loss (results/linear-layers)."""


class LinearSizes(NamedTuple):
    """The sizes of a linear layer on a rank. All weights that read the same input count as one layer."""

    inputs: int
    outputs: dict[str, int]
    """The output features of each weight, by name."""

    @property
    def weights(self) -> int:
        """The number of weights of the layer."""
        return self.inputs * sum(self.outputs.values())

    @property
    def odd(self) -> list[int]:
        """The sides of the layer that no 8-bit matmul takes."""
        return [side for side in sorted({self.inputs, *self.outputs.values()}) if side % LOW_BIT_MULTIPLE]
