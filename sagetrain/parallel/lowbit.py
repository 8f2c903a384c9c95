"""Linear layers in 8 bits: FP8 (e4m3, e5m2) and INT8, as values that layers multiply with (matmul.py).

Every product is a b^T of two matrices whose rows run along what is summed over, which is how Hopper's FP8 matmuls read
both. A matrix becomes 8-bit codes and scales in fp32, one for all of it or one for each row; the scales come back as
factors of the sum, so rows may have their own in each of the three products, along different dims:

    output            x W^T      rows of x are tokens, rows of W output features
    gradient of x     dY W       tokens, input features
    gradient of W     dY^T x     output features, input features

A scale is that of the values at hand, not of steps before. FP8's are powers of two: multiplying and dividing by them
rounds nothing, and a value that is not among the smallest is rounded alike with every such scale, on however many
ranks its row is spread. Weights that read the same x are one matrix.

Sequence parallelism gathers what column-parallel layers read: FP8 travels in 8 bits, half the bytes (`pack`).

Scales are a rank's own: a shard of W, or of the tokens, is scaled by what it holds. No collective agrees on them; a
tensor that is spread over ranks has a finer scale for it.

On a GPU torch's own kernels multiply. Without one, what the codes stand for is multiplied in float64, so that rounding
to codes and to the result are all the error there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sagetrain.parallel.matmul import Matmul

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8

MULTIPLE = 16
"""Of every dim that a product sums over or that its second operand has, the tokens excepted: those are padded."""

_EXPONENT = 0x7F800000  # of an fp32: what remains of it is a power of two
_MANTISSA = 23  # bits of an fp32 below its exponent
_LARGEST_SCALE = 2.0**126  # its reciprocal is still a normal fp32


class Rounded(NamedTuple):
    """A matrix in 8 bits: codes times scale. codes: [rows, columns], contiguous. scale: fp32 [rows, 1] or [1, 1]; NaN
    where what it scales was not finite."""

    codes: Tensor
    scale: Tensor


def quantize(x: Tensor, number: torch.dtype, per_row: bool) -> Rounded:
    """x [rows, columns] in codes of a number format, the largest magnitude of all or of each row near its largest.

    Nothing is added to a magnitude that it divides by: zeros stay zeros, and a largest one of 1e-33 still uses all of
    the format. What is not finite makes all that shares its scale NaN.
    """
    limit = 127.0 if number == INT8 else torch.finfo(number).max
    magnitude = x.abs()
    largest = (magnitude.amax(-1, keepdim=True) if per_row else magnitude.amax().reshape(1, 1)).float()
    scale = (limit / largest).clamp(max=_LARGEST_SCALE)
    if number != INT8:
        scale = (scale.view(torch.int32) & _EXPONENT).view(torch.float32)
    scale = scale.masked_fill(~largest.isfinite(), torch.nan)
    # Clamped first: before torch 2.12 a cast to e4m3 makes NaN of what is too large by rounding.
    codes = (x.float() * scale).clamp(-limit, limit)
    codes = (codes.round() if number == INT8 else codes).to(number)
    return Rounded(codes.contiguous(), scale.reciprocal())


def product(a: Rounded, b: Rounded, dtype: torch.dtype, fast_accumulation: bool = False) -> Tensor:
    """a b^T: [rows of a, rows of b].

    fast_accumulation: on Hopper, add up in the tensor cores' own precision (FP8: about 14 bits) all along, not only
    for 128 columns at a time.
    """
    if a.codes.is_cuda:
        return library_product(a, b, dtype, fast_accumulation)
    return (a.codes.double() @ b.codes.double().t() * a.scale * b.scale.t()).to(dtype)


def library_product(a: Rounded, b: Rounded, dtype: torch.dtype, fast_accumulation: bool) -> Tensor:
    """The same by torch's kernels, added up in fp32, or in int32."""
    (codes, scale), (others, other_scale) = a, (b.codes.t(), b.scale.t())
    if codes.dtype == INT8:
        return (torch._int_mm(codes, others) * scale * other_scale).to(dtype)
    return torch._scaled_mm(
        codes, others, scale, other_scale, out_dtype=dtype, use_fast_accum=fast_accumulation and codes.is_cuda
    )


@dataclass(frozen=True)
class LowBit(Matmul):
    """Products of operands in 8 bits, with results in the dtype of x.

    Args:
        number: format of x and of the weights.
        gradient: format of dY.
        per_row: a scale for each row of every operand, not one for all of it.
        wide_weight_gradient: the gradient of the weights is made of what 16 bits (the dtype of x) hold of dY and x. It
            sums over tokens, whose magnitudes differ most.
        least_weights: layers of fewer stay in 16 bits.
    """

    joined: bool = True
    number: torch.dtype = E4M3
    gradient: torch.dtype = E4M3
    per_row: bool = True
    wide_weight_gradient: bool = False
    least_weights: int = 0

    def suits(self, weights: int) -> bool:
        """Whether a layer is large enough."""
        return weights >= self.least_weights

    def keep(self, weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Codes and scales of the weights, as the output reads them, and transposed, for the gradient of x."""
        whole = _whole(weights)
        return *self._rounded(whole), *self._rounded(whole.t())

    @property
    def travels(self) -> bool:
        """Whether x may be gathered in 8 bits: what e4m3 has rounded once, with a power of two for a scale, no other
        such scale rounds again, along tokens either, but among the smallest."""
        return self.number == E4M3 and not self.wide_weight_gradient

    def pack(self, x: Tensor) -> Tensor:
        """uint8 [tokens, in + 16]: codes, then the exponent of the token's scale, as often as keeps rows aligned."""
        if not self.travels:
            return x
        codes, scale = quantize(x, E4M3, per_row=True)
        exponent = (scale.view(torch.int32) >> _MANTISSA).to(torch.uint8)
        return torch.cat([codes.view(torch.uint8), exponent.expand(-1, MULTIPLE)], 1)

    def unpack(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """[tokens, in]. Layers round it again, to the same codes; inside a graph that is one pass over the bytes."""
        if packed.dtype != torch.uint8:
            return packed
        codes, exponent = packed[:, :-MULTIPLE].view(E4M3), packed[:, -MULTIPLE:][:, :1]
        return (codes.float() * (exponent.to(torch.int32) << _MANTISSA).view(torch.float32)).to(dtype)

    def forward(self, x: Tensor, weights: Sequence[Tensor], kept: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """x W^T of each weight: [tokens, out] each, views of one tensor."""
        weight = Rounded(*kept[:2]) if kept else self._rounded(_whole(weights))
        y = product(self._rounded(x), weight, x.dtype, fast_accumulation=True)
        return y.split([len(own) for own in weights], 1)

    def input_gradient(
        self,
        prepared: Sequence[Tensor],
        weights: Sequence[Tensor],
        out: Tensor | None = None,
        kept: Sequence[Tensor] = (),
    ) -> Tensor:
        """[tokens, in]."""
        (grad,) = prepared
        weight = Rounded(*kept[2:]) if kept else self._rounded(_whole(weights).t())
        total = product(quantize(grad, self.gradient, self.per_row), weight, grad.dtype, self._fast_backward)
        return total if out is None else out.copy_(total)

    def weight_gradients(self, prepared: Sequence[Tensor], x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """Of each weight, in its shape: views of one tensor."""
        (grad,) = prepared
        return self._weight_gradient(grad, x).split([len(weight) for weight in weights])

    def add_weight_gradient(self, total: Tensor, prepared: Sequence[Tensor], x: Tensor) -> None:
        """Add that of one weight to an fp32 total, rounded to the dtype of x before."""
        total += self._weight_gradient(*prepared, x)

    def _weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        if self.wide_weight_gradient:
            return grad.t() @ x
        more = -len(x) % MULTIPLE  # tokens of zeros
        grad, x = F.pad(grad, (0, 0, 0, more)), F.pad(x, (0, 0, 0, more))
        return product(
            quantize(grad.t(), self.gradient, self.per_row), self._rounded(x.t()), grad.dtype, self._fast_backward
        )

    def _rounded(self, operand: Tensor) -> Rounded:
        return quantize(operand, self.number, self.per_row)

    @property
    def _fast_backward(self) -> bool:
        """Without it row-wise products are slower than 16-bit ones; with one scale for all both are at hand."""
        return self.per_row


def _whole(weights: Sequence[Tensor]) -> Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(tuple(weights))


RECIPES = {
    ("fp8", "tensorwise"): LowBit(gradient=E5M2, per_row=False),
    ("fp8", "rowwise"): LowBit(),
    ("fp8", "rowwise_bf16_wgrad"): LowBit(wide_weight_gradient=True),
    ("int8", "rowwise"): LowBit(number=INT8, gradient=INT8),
    ("int8", "rowwise_bf16_wgrad"): LowBit(number=INT8, gradient=INT8, wide_weight_gradient=True),
}
"""By linear.precision and linear.recipe."""
