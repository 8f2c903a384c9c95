"""Round the rows of a mixture of experts, and the experts' weights, to 8 bits for grouped products: the torch twins,
then Triton.

An output and a gradient of x sum along rows, which have a scale each. The gradient of a weight sums over the rows of
one expert. It reads codes that lie transposed, with a scale for each column and expert: expert e's rows are the columns
from TILE * first[e] on, and zeros fill its last tile. `grouped_casts` makes both from one matrix: a pass that finds the
largest magnitudes of rows and of columns, and a pass that reads again and writes both. The kernels are those of
casts.py, by the tiles of the experts.
"""

import itertools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .casts import (
    FUSION,
    MULTIPLE,
    NAMES,
    ROUND,
    Rounded,
    codes_of,
    factor_of,
    largest_triton,
    load_rows,
    magnitude_bits,
    quantize,
    rows_of,
    scale_of,
    store_rows,
    tile_of,
)
from .grouped import TILE, Rows, gather_twin
from .launch import ceil_div, on_device_of
from .operators import by_device, operator

Four = tuple[Tensor, Tensor, Tensor, Tensor]


def grouped_largest_twin(x: Tensor, ends: Tensor) -> Tensor:
    """Return the largest magnitudes of the rows of x [R, K], followed by those of each expert's columns, as the bits
    that float32 has for them: int32 [R + E K]. See casts.largest_twin."""
    magnitude = x.abs()
    bounds = itertools.pairwise([0, *ends.tolist()])
    of_columns = [F.pad(magnitude[begin:end], (0, 0, 0, int(begin == end))).amax(0) for begin, end in bounds]
    return torch.cat((magnitude.amax(1), *of_columns)).float().view(torch.int32)


def row_casts_twin(
    x: Tensor, choice: Tensor, top: int, number: torch.dtype, gathers: bool, largest: Tensor | None = None
) -> Rounded:
    """Round each row to codes [R, K] with scales [R, 1]. gathers: x has tokens, else rows. largest: what
    grouped_largest_twin returns for x, if it is known."""
    of_rows = None if largest is None else largest[: len(x), None].view(torch.float32)
    return quantize(gather_twin(x, choice, top) if gathers else x, number, of_rows)


def turned_casts_twin(
    x: Tensor, choice: Tensor, ends: Tensor, first: Tensor, top: int, number: torch.dtype, gathers: bool, tiles: int,
    largest: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Round along the columns of each expert: transposed codes [K, TILE * tiles], scales [E, K]."""
    known = None if largest is None else largest[len(x) :].view(torch.float32).view(len(ends), -1, 1)
    x = gather_twin(x, choice, top) if gathers else x
    turned = torch.zeros(x.shape[1], TILE * tiles, dtype=number, device=x.device)
    scale = torch.empty(len(ends), x.shape[1], dtype=torch.float32, device=x.device)
    begin = 0
    for expert, (end, tile) in enumerate(zip(ends.tolist(), first.tolist(), strict=False)):
        of = None if known is None else known[expert]
        codes, of_columns = quantize(F.pad(x[begin:end], (0, 0, 0, int(begin == end))).t(), number, of)
        turned[:, TILE * tile : TILE * tile + end - begin] = codes[:, : end - begin]
        scale[expert] = of_columns[:, 0]
        begin = end
    return turned, scale


def weight_casts_twin(weight: Tensor, number: torch.dtype) -> Four:
    """Round weights [E, N, K] as they lie, to codes [E, N, K] with scales [E, N], and transposed, to codes [E, K, N and
    zeros up to a multiple of 16] with scales [E, K]."""
    experts, outputs, inputs = weight.shape
    codes, scale = quantize(weight.reshape(-1, inputs), number)
    turned = F.pad(weight, (0, 0, 0, -outputs % MULTIPLE)).mT
    turned_codes, turned_scale = quantize(turned.reshape(experts * inputs, -1), number)
    return (
        codes.view(weight.shape),
        scale.view(experts, outputs),
        turned_codes.view(turned.shape),
        turned_scale.view(experts, inputs),
    )


ROW_COLUMNS, ROW_WARPS = 4096, 4
"""The largest part of a row that a program rounds at a time, where rows alone are rounded."""


@triton.jit(do_not_specialize=["across"])  # See casts._round_both_kernel.
def _grouped_round_kernel(
    X, CHOICE, TILES, FIRST, LARGEST, CODES, SCALE, TURNED, TURNED_SCALE,
    rows, columns, padded, stride, outputs, across,
    TOP: tl.constexpr, GATHERS: tl.constexpr, APART: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    """Round ROWS rows of a tile, and write them along rows and along columns (see casts._round_both_kernel)."""
    CODES, TURNED = CODES.to(tl.pointer_type(tl.int8), bitcast=True), TURNED.to(tl.pointer_type(tl.int32), bitcast=True)
    right, below = tl.program_id(0) % across, tl.program_id(0) // across
    tile, down = below // (TILE // ROWS), below % (TILE // ROWS)
    expert, first, end = tile_of(TILES, tile, rows, outputs, TILE, APART)
    if expert >= 0:
        column = right * COLUMNS + tl.arange(0, COLUMNS)
        row0, row1 = first + rows_of(down, 0, ROWS), first + rows_of(down, 1, ROWS)
        row2, row3 = first + rows_of(down, 2, ROWS), first + rows_of(down, 3, ROWS)
        x0 = load_rows(X, CHOICE, row0, end, column, columns, stride, TOP, GATHERS).to(tl.float32)
        x1 = load_rows(X, CHOICE, row1, end, column, columns, stride, TOP, GATHERS).to(tl.float32)
        x2 = load_rows(X, CHOICE, row2, end, column, columns, stride, TOP, GATHERS).to(tl.float32)
        x3 = load_rows(X, CHOICE, row3, end, column, columns, stride, TOP, GATHERS).to(tl.float32)
        within, of_column = column < columns, expert * columns + column
        largest = tl.load(LARGEST + rows + of_column, mask=within, other=0)
        factor = factor_of(largest, NUMBER)
        if APART:
            start = first - expert * outputs
            many = padded // 4
            TURNED += expert.to(tl.int64) * columns * many
        else:
            start = tile * TILE
            many = padded // 4
        if down == 0:
            begins = start == 0 if APART else tile == tl.load(FIRST + expert)
            tl.store(TURNED_SCALE + of_column, scale_of(largest, NUMBER), mask=within & begins)
        words = store_rows(x0, row0, column, right, factor, LARGEST, CODES, SCALE, end, columns, 0, NUMBER)
        words |= store_rows(x1, row1, column, right, factor, LARGEST, CODES, SCALE, end, columns, 1, NUMBER)
        words |= store_rows(x2, row2, column, right, factor, LARGEST, CODES, SCALE, end, columns, 2, NUMBER)
        words |= store_rows(x3, row3, column, right, factor, LARGEST, CODES, SCALE, end, columns, 3, NUMBER)
        word = (start + down * ROWS) // 4 + tl.arange(0, ROWS // 4)
        inside = within[:, None] & (word < many)[None, :]
        tl.store(TURNED + column.to(tl.int64)[:, None] * many + word[None, :], tl.trans(words), mask=inside)


@triton.jit
def _grouped_round_rows_kernel(
    X, CHOICE, CODES, SCALE, columns, stride,
    TOP: tl.constexpr, GATHERS: tl.constexpr, COLUMNS: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    """Round one row, COLUMNS numbers at a time. It is read twice, the second time from a cache."""
    CODES = CODES.to(tl.pointer_type(tl.int8), bitcast=True)
    row = tl.program_id(0)
    where = row
    if GATHERS:
        choice = tl.load(CHOICE + row)
        where = tl.where(choice < 0, -1, choice // TOP)
    X += where.to(tl.int64) * stride
    most = tl.zeros([COLUMNS], tl.int32)
    for at in range(0, columns, COLUMNS):
        column = at + tl.arange(0, COLUMNS)
        x = tl.load(X + column, mask=(column < columns) & (where >= 0), other=0.0).to(tl.float32)
        most = tl.maximum(most, magnitude_bits(x))
    largest = tl.max(most, 0)
    factor = factor_of(largest, NUMBER)
    tl.store(SCALE + row, scale_of(largest, NUMBER))
    for at in range(0, columns, COLUMNS):
        column = at + tl.arange(0, COLUMNS)
        x = tl.load(X + column, mask=(column < columns) & (where >= 0), other=0.0).to(tl.float32)
        tl.store(CODES + row.to(tl.int64) * columns + column, codes_of(x * factor, NUMBER), mask=column < columns)


def row_casts_triton(x: Tensor, choice: Tensor, top: int, number: torch.dtype, gathers: bool) -> Rounded:
    """Compute row_casts_twin on a GPU, bit for bit. Where a value is not finite, the scale is NaN and the codes are
    arbitrary."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, columns = len(choice), x.shape[1]
    codes = torch.empty(rows, columns, dtype=number, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        with on_device_of(x):
            _grouped_round_rows_kernel[(rows,)](
                x, choice, codes, scale, columns, x.stride(0),
                TOP=top, GATHERS=gathers, COLUMNS=min(triton.next_power_of_2(columns), ROW_COLUMNS),
                NUMBER=NAMES[number], num_warps=ROW_WARPS, enable_fp_fusion=FUSION,
            )  # fmt: skip
    return Rounded(codes, scale)


def _round_both(
    x: Tensor, plan: tuple[Tensor, Tensor, Tensor], rows: int, experts: int, tiles: int, outputs: int, top: int,
    gathers: bool, turned: Tensor, largest: Tensor | None,
) -> Four:  # fmt: skip
    """Launch both passes over rows. plan: choices, tiles and first tiles. outputs: the rows of each matrix, if there is
    no table of tiles, else 0. turned: the tensor for the transposed codes."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (choice, table, first), columns, number = plan, x.shape[1], turned.dtype
    codes = torch.empty(rows, columns, dtype=number, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    turned_scale = torch.empty(experts, columns, dtype=torch.float32, device=x.device)
    how = {"TOP": top, "GATHERS": gathers, "APART": outputs > 0, "TILE": TILE}
    with on_device_of(x):
        if largest is None:
            largest = largest_triton(x, choice, table, rows, experts, tiles, outputs, how)
        across = ceil_div(columns, ROUND["COLUMNS"])
        _grouped_round_kernel[(tiles * (TILE // ROUND["ROWS"]) * across,)](
            x, choice, table, first, largest, codes, scale, turned, turned_scale,
            rows, columns, turned.shape[-1], x.stride(0), outputs, across, NUMBER=NAMES[number], **how, **ROUND,
        )  # fmt: skip
    return codes, scale, turned, turned_scale


def grouped_casts_triton(
    x: Tensor, choice: Tensor, tiles: Tensor, first: Tensor, top: int, number: torch.dtype, gathers: bool,
    largest: Tensor | None = None,
) -> Four:  # fmt: skip
    """Compute row_casts_twin and turned_casts_twin on a GPU, bit for bit. Codes and scales of empty rows, and columns
    behind the last expert's last tile, are not written."""
    turned = torch.empty(x.shape[1], TILE * len(tiles), dtype=number, device=x.device)
    plan = choice, tiles, first
    return _round_both(x, plan, len(choice), len(first) - 1, len(tiles), 0, top, gathers, turned, largest)


def weight_casts_triton(weight: Tensor, number: torch.dtype) -> Four:
    """Compute weight_casts_twin on a GPU, bit for bit."""
    (experts, outputs, inputs), device = weight.shape, weight.device
    padded = ceil_div(outputs, MULTIPLE) * MULTIPLE
    turned = torch.empty(experts, inputs, padded, dtype=number, device=device)
    x, none = weight.reshape(-1, inputs), torch.empty(0, dtype=torch.int32, device=device)
    tiles = experts * ceil_div(outputs, TILE)
    codes, scale, *turned_both = _round_both(
        x, (none, none, none), len(x), experts, tiles, outputs, 1, False, turned, None
    )
    return codes.view(weight.shape), scale.view(experts, outputs), *turned_both


def _grouped_row_casts(
    x: Tensor, choice: Tensor, top: int, number: torch.dtype, gathers: bool
) -> tuple[Tensor, Tensor]:
    return tuple((row_casts_triton if x.is_cuda else row_casts_twin)(x, choice, top, number, gathers))


def _grouped_row_casts_fake(
    x: Tensor, choice: Tensor, top: int, number: torch.dtype, gathers: bool
) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(choice.shape[0], x.shape[1], dtype=number)
    return codes, x.new_empty(choice.shape[0], 1, dtype=torch.float32)


GROUPED_ROW_CASTS = operator(_grouped_row_casts, _grouped_row_casts_fake)


def _grouped_casts(
    x: Tensor, choice: Tensor, ends: Tensor, tiles: Tensor, first: Tensor, top: int, number: torch.dtype, gathers: bool,
    largest: Tensor | None = None,
) -> Four:  # fmt: skip
    if x.is_cuda:
        return grouped_casts_triton(x, choice, tiles, first, top, number, gathers, largest)
    turned = turned_casts_twin(x, choice, ends, first, top, number, gathers, len(tiles), largest)
    return *row_casts_twin(x, choice, top, number, gathers, largest), *turned


def _grouped_casts_fake(
    x: Tensor, choice: Tensor, ends: Tensor, tiles: Tensor, first: Tensor, top: int, number: torch.dtype, gathers: bool,
    largest: Tensor | None = None,
) -> Four:  # fmt: skip
    turned = x.new_empty(x.shape[1], TILE * tiles.shape[0], dtype=number)
    scale = x.new_empty(ends.shape[0], x.shape[1], dtype=torch.float32)
    return *_grouped_row_casts_fake(x, choice, top, number, gathers), turned, scale


GROUPED_CASTS = operator(_grouped_casts, _grouped_casts_fake)


def _weight_casts_fake(weight: Tensor, number: torch.dtype) -> Four:
    experts, outputs, inputs = weight.shape
    padded = (outputs + MULTIPLE - 1) // MULTIPLE * MULTIPLE
    return (
        weight.new_empty(weight.shape, dtype=number),
        weight.new_empty(experts, outputs, dtype=torch.float32),
        weight.new_empty(experts, inputs, padded, dtype=number),
        weight.new_empty(experts, inputs, dtype=torch.float32),
    )


WEIGHT_CASTS = by_device("weight_casts", weight_casts_twin, weight_casts_triton, _weight_casts_fake)


def row_casts(x: Tensor, rows: Rows, number: torch.dtype, gathers: bool) -> tuple[Tensor, Tensor]:
    """Return codes [R, K] of rows, with scales [R, 1].

    Args:
        x: [R, K], or with `gathers` the tokens [T, K]. No gradient goes through.
        number: torch.float8_e4m3fn or torch.int8.
    """
    return GROUPED_ROW_CASTS(x, rows.choice, rows.slot.shape[1], number, gathers)


def grouped_casts(x: Tensor, rows: Rows, number: torch.dtype, gathers: bool, largest: Tensor | None = None) -> Four:
    """Return what row_casts does, and transposed codes [K, TILE * tiles] with scales [E, K]. Columns behind the last
    expert's last tile hold anything, and nothing reads them.

    Args:
        largest: what grouped_largest_twin returns for x, if whoever made x has left it. x is then read once.
    """
    top = rows.slot.shape[1]
    return GROUPED_CASTS(x, rows.choice, rows.ends, rows.tiles, rows.first, top, number, gathers, largest)


def weight_casts(weight: Tensor, number: torch.dtype) -> Four:
    """Return codes and scales of weights [E, N, K]: [E, N, K] and [E, N] for outputs, then [E, K, N up to a multiple of
    16] and [E, K] for gradients of x."""
    return WEIGHT_CASTS(weight, number)
