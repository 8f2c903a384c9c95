"""Round the rows of a mixture of experts, and the experts' weights, to 8 bits for grouped products: the torch twins.

An output and a gradient of x sum along rows, which have a scale each. The gradient of a weight sums over the rows of
one expert. It reads codes that lie transposed, with a scale for each column and expert: expert e's rows are the columns
from TILE * first[e] on, and zeros fill its last tile. `grouped_casts` makes both from one matrix.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .casts import MULTIPLE, Rounded, quantize
from .grouped import TILE, Rows, gather_twin
from .operators import operator

Four = tuple[Tensor, Tensor, Tensor, Tensor]


def row_casts_twin(x: Tensor, choice: Tensor, top: int, number: torch.dtype, gathers: bool) -> Rounded:
    """Round each row to codes [R, K] with scales [R, 1]. gathers: x has tokens, else rows."""
    return quantize(gather_twin(x, choice, top) if gathers else x, number, True)


def turned_casts_twin(
    x: Tensor, choice: Tensor, ends: Tensor, first: Tensor, top: int, number: torch.dtype, gathers: bool, tiles: int
) -> tuple[Tensor, Tensor]:
    """Round along the columns of each expert: transposed codes [K, TILE * tiles], scales [E, K]."""
    x = gather_twin(x, choice, top) if gathers else x
    turned = torch.zeros(x.shape[1], TILE * tiles, dtype=number, device=x.device)
    scale = torch.empty(len(ends), x.shape[1], dtype=torch.float32, device=x.device)
    begin = 0
    for expert, (end, tile) in enumerate(zip(ends.tolist(), first.tolist(), strict=False)):
        codes, of_columns = quantize(F.pad(x[begin:end], (0, 0, 0, int(begin == end))).t(), number, True)
        turned[:, TILE * tile : TILE * tile + end - begin] = codes[:, : end - begin]
        scale[expert] = of_columns[:, 0]
        begin = end
    return turned, scale


def weight_casts_twin(weight: Tensor, number: torch.dtype) -> Four:
    """Round weights [E, N, K] as they lie, to codes [E, N, K] with scales [E, N], and transposed, to codes [E, K, N and
    zeros up to a multiple of 16] with scales [E, K]."""
    experts, outputs, inputs = weight.shape
    codes, scale = quantize(weight.reshape(-1, inputs), number, True)
    turned = F.pad(weight, (0, 0, 0, -outputs % MULTIPLE)).mT
    turned_codes, turned_scale = quantize(turned.reshape(experts * inputs, -1), number, True)
    return (
        codes.view(weight.shape),
        scale.view(experts, outputs),
        turned_codes.view(turned.shape),
        turned_scale.view(experts, inputs),
    )


def _grouped_row_casts(
    x: Tensor, choice: Tensor, top: int, number: torch.dtype, gathers: bool
) -> tuple[Tensor, Tensor]:
    return tuple(row_casts_twin(x, choice, top, number, gathers))


def _grouped_row_casts_fake(
    x: Tensor, choice: Tensor, top: int, number: torch.dtype, gathers: bool
) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(choice.shape[0], x.shape[1], dtype=number)
    return codes, x.new_empty(choice.shape[0], 1, dtype=torch.float32)


GROUPED_ROW_CASTS = operator(_grouped_row_casts, _grouped_row_casts_fake)


def _grouped_casts(
    x: Tensor, choice: Tensor, ends: Tensor, tiles: Tensor, first: Tensor, top: int, number: torch.dtype, gathers: bool
) -> Four:
    turned = turned_casts_twin(x, choice, ends, first, top, number, gathers, len(tiles))
    return *row_casts_twin(x, choice, top, number, gathers), *turned


def _grouped_casts_fake(
    x: Tensor, choice: Tensor, ends: Tensor, tiles: Tensor, first: Tensor, top: int, number: torch.dtype, gathers: bool
) -> Four:
    turned = x.new_empty(x.shape[1], TILE * tiles.shape[0], dtype=number)
    scale = x.new_empty(ends.shape[0], x.shape[1], dtype=torch.float32)
    return *_grouped_row_casts_fake(x, choice, top, number, gathers), turned, scale


GROUPED_CASTS = operator(_grouped_casts, _grouped_casts_fake)


def _weight_casts(weight: Tensor, number: torch.dtype) -> Four:
    return weight_casts_twin(weight, number)


def _weight_casts_fake(weight: Tensor, number: torch.dtype) -> Four:
    experts, outputs, inputs = weight.shape
    padded = (outputs + MULTIPLE - 1) // MULTIPLE * MULTIPLE
    return (
        weight.new_empty(weight.shape, dtype=number),
        weight.new_empty(experts, outputs, dtype=torch.float32),
        weight.new_empty(experts, inputs, padded, dtype=number),
        weight.new_empty(experts, inputs, dtype=torch.float32),
    )


WEIGHT_CASTS = operator(_weight_casts, _weight_casts_fake)


def row_casts(x: Tensor, rows: Rows, number: torch.dtype, gathers: bool) -> tuple[Tensor, Tensor]:
    """Return codes [R, K] of rows, with scales [R, 1].

    Args:
        x: [R, K], or with `gathers` the tokens [T, K]. No gradient goes through.
        number: torch.float8_e4m3fn or torch.int8.
    """
    return GROUPED_ROW_CASTS(x, rows.choice, rows.slot.shape[1], number, gathers)


def grouped_casts(x: Tensor, rows: Rows, number: torch.dtype, gathers: bool) -> Four:
    """Return what row_casts does, and transposed codes [K, TILE * tiles] with scales [E, K], in one pass over x behind
    the one that finds largest magnitudes. Columns behind the last expert's last tile hold anything, and nothing reads
    them."""
    top = rows.slot.shape[1]
    return GROUPED_CASTS(x, rows.choice, rows.ends, rows.tiles, rows.first, top, number, gathers)


def weight_casts(weight: Tensor, number: torch.dtype) -> Four:
    """Return codes and scales of weights [E, N, K]: [E, N, K] and [E, N] for outputs, then [E, K, N up to a multiple of
    16] and [E, K] for gradients of x."""
    return WEIGHT_CASTS(weight, number)
