"""Products of a mixture of experts: each row by the weight of its expert, and the gradients of the weights. The torch
twins.

Codes in 8 bits are multiplied as int8_matmul.py does: exact sums, scaled where they were made, the rows' scales first.
"""

import itertools

import torch
from torch import Tensor

from .operators import operator


def grouped_product_twin(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return each row of x [R, K] times the matrix [K, N] of its expert; zeros for empty rows."""
    out = x.new_zeros(len(x), weight.shape[2])
    begin = 0
    for of_expert, end in zip(weight, ends.tolist(), strict=True):
        out[begin:end] = x[begin:end] @ of_expert
        begin = end
    return out


def grouped_weight_product_twin(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """Return a^T b over the rows of each expert: [R, N] and [R, K] to [E, N, K]; zeros where an expert has no rows."""
    out = a.new_empty(len(ends), a.shape[1], b.shape[1])
    begin = 0
    for expert, end in enumerate(ends.tolist()):
        torch.mm(a[begin:end].t(), b[begin:end], out=out[expert])
        begin = end
    return out


def grouped_codes_product_twin(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return each row of a [R, K] times the codes [N, K] of its expert, transposed: exact in float64, rounded once."""
    scaled = b[..., : a.shape[1]].double() * b_scale.double()[..., None]
    return grouped_product_twin(a.double() * a_scale.double(), scaled.mT, ends).to(dtype)


def grouped_codes_weight_product_twin(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, first: Tensor, tile: int, dtype: torch.dtype
) -> Tensor:
    """Return a b^T over the columns of each expert, of transposed codes [N, P] and [K, P] with scales [E, N] and
    [E, K]: [E, N, K], exact in float64 and rounded once."""
    bounds = [tile * place for place in first.tolist()]
    parts = (a[:, s:e].double() @ b[:, s:e].double().t() for s, e in itertools.pairwise(bounds))
    return (torch.stack(list(parts)) * a_scale.double()[:, :, None] * b_scale.double()[:, None]).to(dtype)


def _grouped_product(x: Tensor, weight: Tensor, ends: Tensor, tiles: Tensor) -> Tensor:
    return grouped_product_twin(x, weight, ends)


def _grouped_product_fake(x: Tensor, weight: Tensor, ends: Tensor, tiles: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


GROUPED_PRODUCT = operator(_grouped_product, _grouped_product_fake)


def _grouped_weight_product(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return grouped_weight_product_twin(a, b, ends)


def _grouped_weight_product_fake(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    return a.new_empty(ends.shape[0], a.shape[1], b.shape[1])


GROUPED_WEIGHT_PRODUCT = operator(_grouped_weight_product, _grouped_weight_product_fake)


def _grouped_codes_product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, ends: Tensor, tiles: Tensor, dtype: torch.dtype
) -> Tensor:
    return grouped_codes_product_twin(a, a_scale, b, b_scale, ends, dtype)


def _grouped_codes_product_fake(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, ends: Tensor, tiles: Tensor, dtype: torch.dtype
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


GROUPED_CODES_PRODUCT = operator(_grouped_codes_product, _grouped_codes_product_fake)


def _grouped_codes_weight_product(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, first: Tensor, tile: int, dtype: torch.dtype
) -> Tensor:
    return grouped_codes_weight_product_twin(a, a_scale, b, b_scale, first, tile, dtype)


def _grouped_codes_weight_product_fake(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, first: Tensor, tile: int, dtype: torch.dtype
) -> Tensor:
    return a.new_empty(a_scale.shape[0], a.shape[0], b.shape[0], dtype=dtype)


GROUPED_CODES_WEIGHT_PRODUCT = operator(_grouped_codes_weight_product, _grouped_codes_weight_product_fake)
