"""Linear layers in 8 bits: FP8 (e4m3) and INT8, as values that layers multiply with (matmul.py).

Every product is a b^T of two matrices whose rows run along the dim that is summed over. Hopper's FP8 matmuls read both
operands like this. A matrix becomes 8-bit codes and fp32 scales, one for each row. The scales come back as factors of
the sum. Rows have their own scales in each of the three products, along different dims:

    output            x W^T      rows of x are tokens, rows of W output features
    gradient of x     dY W       tokens, input features
    gradient of W     dY^T x     output features, input features

A matrix that two products read along different dims is rounded both ways at once (casts.py). x and dY are
rounded separately. x is rounded when the output is computed, so that only its 8-bit codes are kept for the backward
pass.

A scale is computed from the present values, not from those of earlier steps. FP8's scales are powers of two, so
multiplying and dividing by them rounds nothing. A value that is not among the smallest is rounded alike with every such
scale, on however many ranks its row is spread. Weights that read the same x are one matrix.

Sequence parallelism gathers the inputs of column-parallel layers, and the gradients of the outputs of row-parallel
layers. FP8 travels in 8 bits, which are half the bytes (packing.py).

Each rank computes its own scales: a shard of W, or of the tokens, is scaled by the values that it holds. No collective
agrees on them. A tensor that is spread over ranks therefore has finer scales.

On a GPU torch's own kernels multiply FP8, and ours multiply INT8 (int8_matmul.py). Without a GPU the
dequantized values are multiplied in float64, so that the only errors are the rounding to codes and the rounding of the
result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from . import packing
from .casts import E4M3, INT8, Rounded, quantize, quantize_both
from .int8_matmul import int8_product, product_twin
from .matmul import Matmul


def product(a: Rounded, b: Rounded, dtype: torch.dtype) -> Tensor:
    """Return a b^T: [rows of a, rows of b]."""
    return library_product(a, b, dtype) if a.codes.is_cuda else product_twin(*a, *b, dtype)


def library_product(a: Rounded, b: Rounded, dtype: torch.dtype) -> Tensor:
    """Return a b^T by the kernels of a GPU: [rows of a, rows of b].

    INT8 is added up in int32. On Hopper FP8 is added up in the tensor cores' own precision, about 14 bits: widening the
    sums every 128 columns, as torch can, would make these products slower than in 16 bits.
    """
    if a.codes.dtype == INT8:
        return int8_product(*a, *b, dtype)
    (codes, scale), (others, other_scale) = a, (b.codes.t(), b.scale.t())
    return torch._scaled_mm(codes, others, scale, other_scale, out_dtype=dtype, use_fast_accum=codes.is_cuda)


@dataclass(frozen=True)
class LowBit(Matmul):
    """Products of operands in 8 bits, with results in the dtype of x.

    Args:
        number: the format of x and of the weights.
        gradient: the format of dY. None: both gradients are computed in 16 bits (the dtype of x), from dY, x and the
            weights.
    """

    joined: bool = True
    differentiable = False
    number: torch.dtype = E4M3
    gradient: torch.dtype | None = E4M3

    def keep(self, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return codes and scales of the weights, first as the output reads them, then transposed for the gradient of
        x, if that is in 8 bits."""
        if self.gradient is None:
            return self._rounded(_whole(weights))
        rounded, turned = quantize_both(_whole(weights), self.number)
        return *rounded, *turned

    @property
    def travels(self) -> bool:
        """Whether x may be gathered in 8 bits."""
        return self.number == E4M3 and self.gradient is not None

    @property
    def gradient_travels(self) -> bool:
        """Whether dY may be gathered in 8 bits."""
        return self.gradient == E4M3

    def pack(self, x: Tensor) -> Tensor:
        """Return x in 8 bits, uint8 [tokens, in + 16], or x itself if it does not travel in 8 bits."""
        return packing.pack(x) if self.travels else x

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """Return x [tokens, in] from its packed form. Layers round it again, to the same codes."""
        return packing.unpack(packed, dtype) if packed.dtype == torch.uint8 else packed

    @property
    def measured(self) -> bool:
        """Whether `read` and `prepare` are spared work by the largest magnitudes of what they are given."""
        return self.gradient is not None

    def read(self, x: Tensor, largest: Tensor | None = None) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return codes and scales of x for `forward`, and of x transposed for `weight_gradients`."""
        if self.gradient is None:
            return self._rounded(x), (x,)
        return quantize_both(x, self.number, largest)

    def operand(self, x: Tensor) -> Sequence[Tensor]:
        """Return codes and scales of x."""
        return self._rounded(x)

    def forward(
        self, operand: Sequence[Tensor], weights: Sequence[Tensor], kept: Sequence[Tensor] = ()
    ) -> tuple[Tensor, ...]:
        """Return x W^T of each weight: [tokens, out] each, views of one tensor."""
        weight = Rounded(*kept[:2]) if kept else self._rounded(_whole(weights))
        y = product(Rounded(*operand), weight, weights[0].dtype)
        parts: tuple[Tensor, ...] = y.split([len(own) for own in weights], 1)
        return parts

    def prepare(self, grads: Sequence[Tensor], largest: Tensor | None = None) -> Sequence[Tensor]:
        """Return codes and scales of dY, the gradients of all weights joined, followed by those of dY transposed or by
        dY itself."""
        (grad,) = super().prepare(grads)
        if self.gradient is None:
            return (grad,)
        rounded, turned = quantize_both(grad, self.gradient, largest)
        return *rounded, *turned

    def input_gradient(
        self,
        prepared: Sequence[Tensor],
        weights: Sequence[Tensor],
        out: Tensor | None = None,
        kept: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return the gradient of x: [tokens, in]."""
        if self.gradient is None:
            return super().input_gradient(prepared, weights, out)
        weight = Rounded(*kept[2:]) if kept else self._rounded(_whole_now(list(weights), prepared[0]).t())
        total = product(Rounded(*prepared[:2]), weight, weights[0].dtype)
        return total if out is None else out.copy_(total)

    def weight_gradients(
        self, prepared: Sequence[Tensor], saved: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Return the gradient of each weight, in its shape. The gradients are views of one tensor."""
        whole = self._weight_gradient(prepared, saved, weights[0].dtype)
        parts: Sequence[Tensor] = whole.split([len(weight) for weight in weights])
        return parts

    def add_weight_gradient(self, total: Tensor, prepared: Sequence[Tensor], saved: Sequence[Tensor]) -> None:
        """Add the gradient of one weight to an fp32 total."""
        if self.gradient is None:
            super().add_weight_gradient(total, prepared, saved)
            return
        # A GPU's kernel for FP8 writes bf16 alone.
        narrow = prepared[0].is_cuda and self.number != INT8
        total += self._weight_gradient(prepared, saved, torch.bfloat16 if narrow else total.dtype)

    def _weight_gradient(self, prepared: Sequence[Tensor], saved: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        if self.gradient is None:
            return prepared[0].t() @ saved[0]
        return product(Rounded(*prepared[2:]), Rounded(*saved), dtype)

    def _rounded(self, operand: Tensor) -> Rounded:
        return quantize(operand, self.number)


def _whole(weights: Sequence[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(tuple(weights))


@torch.library.custom_op("sagekernels::whole_now", mutates_args=())
def _whole_now(weights: Sequence[Tensor], gradient: Tensor) -> Tensor:
    """Join weights in the backward pass.

    The unused argument makes it wait for a gradient. Otherwise torch.compile would keep the weights that the forward
    pass has joined or rounded. At ZeRO 3, which gathers weights again, the weights of all layers would be kept.
    """
    return torch.cat(tuple(weights))


@_whole_now.register_fake
def _whole_now_fake(weights: Sequence[Tensor], gradient: Tensor) -> Tensor:
    return torch.cat(tuple(weights))


Precision = Literal["int8", "fp8"]

LOW_BIT = {"fp8": LowBit(), "int8": LowBit(number=INT8, gradient=INT8)}
"""The products of linear layers, by the key linear.precision of SageTrain."""

HEADS = {"fp8": LOW_BIT["fp8"], "int8": LowBit(number=INT8, gradient=None)}
"""The products of an output projection before a cross-entropy, by the key linear.head of SageTrain. Its gradient is
a softmax less a one. 127 steps below the one would round a quarter to a half of the other probabilities to zero, so
INT8 has gradients in 16 bits. e4m3 loses 0.3 % of them."""
