"""Round the tokens of a mixture to 8 bits once, and gather their codes into the rows of experts: the torch twins, then
Triton.

A token is the row of several experts, so it is rounded once, and one byte a value is gathered instead of two. What is
rounded along columns has a scale for each column of all tokens, which all experts share. Results have the form of
grouped_casts.py.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .casts import FUSION, NAMES, codes_of, factor_of, largest_triton, quantize, rows_of, scale_of
from .grouped import TILE, gather_twin
from .launch import ceil_div, on_device_of

Four = tuple[Tensor, Tensor, Tensor, Tensor]


def token_casts_twin(
    x: Tensor, choice: Tensor, ends: Tensor, first: Tensor, top: int, number: torch.dtype, tiles: int
) -> Four:
    """Round tokens x [T, K], and return codes [R, K] and scales [R, 1] of rows, and transposed codes
    [K, TILE * tiles] with scales [E, K]."""
    padded = F.pad(x, (0, 0, 0, int(not len(x))))
    (codes, scale), (by_column, of_columns) = quantize(x, number, True), quantize(padded.t(), number, True)
    rows = gather_twin(codes.view(torch.int8), choice, top).view(number)
    turned = torch.zeros(x.shape[1], TILE * tiles, dtype=torch.int8, device=x.device)
    gathered, begin = gather_twin(by_column.view(torch.int8).t(), choice, top).t(), 0
    for end, tile in zip(ends.tolist(), first.tolist(), strict=False):
        turned[:, TILE * tile : TILE * tile + end - begin] = gathered[:, begin:end]
        begin = end
    return rows, gather_twin(scale, choice, top), turned.view(number), of_columns.t().expand(len(ends), -1).contiguous()


ROUND_ROWS, ROUND_COLUMNS, ROUND_WARPS = 16, 512, 8
"""The piece of tokens that a program rounds."""
PICK_ROWS, PICK_COLUMNS, PICK_WARPS = 64, 128, 4
"""The piece of rows that a program gathers. It reads and writes whole lines of 128 bytes."""


@triton.jit(do_not_specialize=["across"])  # See casts._round_both_kernel.
def _round_tokens_kernel(
    X, LARGEST, CODES, SCALE, BY_COLUMN, OF_COLUMNS, tokens, columns, stride, across,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    """Round a piece of tokens along rows and along columns. Both lie as the tokens do."""
    CODES = CODES.to(tl.pointer_type(tl.int8), bitcast=True)
    BY_COLUMN = BY_COLUMN.to(tl.pointer_type(tl.int8), bitcast=True)
    right, down = tl.program_id(0) % across, tl.program_id(0) // across
    token, column = down * ROWS + tl.arange(0, ROWS), right * COLUMNS + tl.arange(0, COLUMNS)
    inside = (token < tokens)[:, None] & (column < columns)[None, :]
    x = tl.load(X + token.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    of_row = tl.load(LARGEST + token, mask=token < tokens, other=0)
    of_column = tl.load(LARGEST + tokens + column, mask=column < columns, other=0)
    at = token.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(CODES + at, codes_of(x * factor_of(of_row, NUMBER)[:, None], NUMBER), mask=inside)
    tl.store(BY_COLUMN + at, codes_of(x * factor_of(of_column, NUMBER)[None, :], NUMBER), mask=inside)
    if right == 0:
        tl.store(SCALE + token, scale_of(of_row, NUMBER), mask=token < tokens)
    if down == 0:
        tl.store(OF_COLUMNS + column, scale_of(of_column, NUMBER), mask=column < columns)


@triton.jit
def _pick_part(
    CODES, SCALE, BY_COLUMN, CHOICE, OUT, OUT_SCALE, row, end, column, columns, right,
    TOP: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Copy a part of rows. Return their codes along columns, as a byte of a word."""
    token = tl.load(CHOICE + row, mask=row < end, other=0) // TOP
    inside = (row < end)[:, None] & (column < columns)[None, :]
    at = token.to(tl.int64)[:, None] * columns + column[None, :]
    codes = tl.load(CODES + at, mask=inside, other=0)
    turned = tl.load(BY_COLUMN + at, mask=inside, other=0)
    tl.store(OUT + row.to(tl.int64)[:, None] * columns + column[None, :], codes, mask=inside)
    if right == 0:
        tl.store(OUT_SCALE + row, tl.load(SCALE + token, mask=row < end, other=0.0), mask=row < end)
    return (turned.to(tl.int32) & 0xFF) << (8 * PART)


@triton.jit(do_not_specialize=["across"])
def _pick_codes_kernel(
    CODES, SCALE, BY_COLUMN, CHOICE, TILES, OUT, OUT_SCALE, TURNED, columns, padded, across,
    TOP: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gather ROWS rows of a tile: codes along rows as they lie, codes along columns transposed, as words of four."""
    CODES = CODES.to(tl.pointer_type(tl.int8), bitcast=True)
    BY_COLUMN = BY_COLUMN.to(tl.pointer_type(tl.int8), bitcast=True)
    OUT, TURNED = OUT.to(tl.pointer_type(tl.int8), bitcast=True), TURNED.to(tl.pointer_type(tl.int32), bitcast=True)
    right, below = tl.program_id(0) % across, tl.program_id(0) // across
    tile, down = below // (TILE // ROWS), below % (TILE // ROWS)
    if tl.load(TILES + 4 * tile) >= 0:
        first, end = tl.load(TILES + 4 * tile + 1), tl.load(TILES + 4 * tile + 2)
        column = right * COLUMNS + tl.arange(0, COLUMNS)
        words = tl.zeros([ROWS // 4, COLUMNS], tl.int32)
        for PART in tl.static_range(4):
            words |= _pick_part(
                CODES, SCALE, BY_COLUMN, CHOICE, OUT, OUT_SCALE, first + rows_of(down, PART, ROWS), end, column,
                columns, right, TOP, PART,
            )  # fmt: skip
        word, many = (tile * TILE + down * ROWS) // 4 + tl.arange(0, ROWS // 4), padded // 4
        at = TURNED + column.to(tl.int64)[:, None] * many + word[None, :]
        tl.store(at, tl.trans(words), mask=(column < columns)[:, None] & (word < many)[None, :])


def token_casts_triton(x: Tensor, choice: Tensor, ends: Tensor, table: Tensor, top: int, number: torch.dtype) -> Four:
    """Compute token_casts_twin on a GPU, bit for bit. Codes and scales of empty rows, and columns behind the last
    expert's last tile, are not written."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (tokens, columns), rows, device = x.shape, len(choice), x.device
    codes, by_column = (torch.empty(tokens, columns, dtype=number, device=device) for _ in range(2))
    scale = torch.empty(tokens, 1, dtype=torch.float32, device=device)
    of_columns = torch.empty(1, columns, dtype=torch.float32, device=device)
    out = torch.empty(rows, columns, dtype=number, device=device)
    out_scale = torch.empty(rows, 1, dtype=torch.float32, device=device)
    turned = torch.empty(columns, TILE * len(table), dtype=number, device=device)
    largest = largest_triton(x, True)
    with on_device_of(x):
        across = ceil_div(columns, ROUND_COLUMNS)
        _round_tokens_kernel[(max(1, ceil_div(tokens, ROUND_ROWS)) * across,)](
            x, largest, codes, scale, by_column, of_columns, tokens, columns, x.stride(0), across,
            ROWS=ROUND_ROWS, COLUMNS=ROUND_COLUMNS, NUMBER=NAMES[number],
            num_warps=ROUND_WARPS, enable_fp_fusion=FUSION,
        )  # fmt: skip
        across = ceil_div(columns, PICK_COLUMNS)
        _pick_codes_kernel[(len(table) * (TILE // PICK_ROWS) * across,)](
            codes, scale, by_column, choice, table, out, out_scale, turned, columns, turned.shape[1], across,
            TOP=top, TILE=TILE, ROWS=PICK_ROWS, COLUMNS=PICK_COLUMNS, num_warps=PICK_WARPS,
        )  # fmt: skip
    return out, out_scale, turned, of_columns.expand(len(ends), -1).contiguous()
