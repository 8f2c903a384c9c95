"""The sizes of linear layers on a rank, and the rule that says which of them can be multiplied in 8 bits."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

LOW_BIT_MULTIPLE = 16
"""Every side of a matrix in 8 bits has to be a multiple of this on a rank, because torch's FP8 kernels read 16 bytes at
a time."""


class EightBits(NamedTuple):
    """The facts of a precision in 8 bits that other rooms read. The arithmetic itself is in sagekernels/lowbit.py, the
    rates are in costs/hardware.py, and the cost in loss is in config/rules/linear.py."""

    capability: tuple[int, int]
    """The least compute capability of a GPU that has these products."""
    error: float
    """The largest relative error of all elements of a result together, against fp32, with which `auto` and the doctor
    accept a layer."""
    travels: bool
    """True if sequence parallelism gathers the inputs of layers as codes in 8 bits (sagekernels/packing.py)."""
    head_gradients: bool
    """True if the gradients of an output projection in this precision are products in 8 bits, too."""
    most_terms: int | None = None
    """The largest number of products that experts may add up, or None. Other layers add longer sums in parts."""


LowBit = Literal["fp8", "int8"]
LOW_BIT: tuple[LowBit, ...] = get_args(LowBit)
EIGHT_BITS: dict[str, EightBits] = {
    "fp8": EightBits((8, 9), error=0.1, travels=True, head_gradients=True),
    "int8": EightBits((8, 0), error=0.03, travels=False, head_gradients=False, most_terms=131072),
}
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
