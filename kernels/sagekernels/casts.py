"""Round matrices to 8 bits for matmuls, FP8 (e4m3) and INT8, with a scale for each row: the torch twins, then the
Triton kernels.

A product sums along the rows of both its operands. A matrix that two products read along different dims is therefore
needed twice: as it lies in memory and transposed, each with its own scales. `quantize_both` makes both from one matrix.
The first pass finds the largest magnitudes of rows and columns together; the second pass reads the matrix again and
writes both. For 16-bit elements these are 2 + 2 bytes read and 1 + 1 written, 6 bytes an element (NOTES.md). A kernel
that makes a matrix can leave its largest magnitudes behind (swiglu.py, add_norm.py). Then there is no first pass.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from .launch import ceil_div, on_device_of
from .operators import by_device, operator
from .pieces import INTERPRETED, MAGIC

E4M3, INT8 = torch.float8_e4m3fn, torch.int8
NAMES = {E4M3: "e4m3", INT8: "int8"}
NUMBERS = tuple(NAMES)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

MULTIPLE = 16
"""The dim that a matmul sums over must be a multiple of this. The transposed matrix is filled up with rows of zeros."""

# This is the exponent of 2^126 as float32 stores it. The reciprocal of that scale is still a normal number.
_LARGEST_EXPONENT = tl.constexpr(253)


class Rounded(NamedTuple):
    """A matrix in 8 bits: codes times scale. codes: [rows, columns], contiguous. scale: fp32 [rows, 1]; it is NaN where
    a scaled value was not finite."""

    codes: Tensor
    scale: Tensor


def largest_twin(x: Tensor) -> Tensor:
    """Return the largest magnitudes of the rows of x [rows, columns], followed by those of its columns, as the bits
    that float32 has for them: int32 [rows + columns]. These bits order like the numbers, with infinity and then NaN
    above all of them."""
    magnitude = x.abs()
    return torch.cat((magnitude.amax(1), magnitude.amax(0))).float().view(torch.int32)


def quantize(x: Tensor, number: torch.dtype, largest: Tensor | None = None) -> Rounded:
    """Round x [rows, columns] to codes of a number format, so that the largest magnitude of each row comes near the
    largest of the format.

    Args:
        largest: fp32 [rows, 1], the largest magnitudes of the rows, if they are known.

    FP8's scales are powers of two, the largest that keep the codes in range. Nothing is added to a magnitude before the
    division: zeros stay zeros, and a largest magnitude of 1e-33 still uses all of the format. A value that is not
    finite makes its whole row NaN.
    """
    if largest is None:
        largest = x.abs().amax(-1, keepdim=True).float()
    if number == INT8:
        scale = (torch.full_like(largest, 127.0) / largest).clamp(max=2.0**126)  # `127.0 / largest` would round twice
        inverse = scale.reciprocal()
    else:
        # The format ends at 1.75 * 2^8. The exponent of the scale is 8 minus the exponent of `largest`, which counts
        # one more if the mantissa is above 1.75. The arithmetic is in integers, because GPUs round divisions in
        # different ways.
        above = (largest.view(torch.int32) + 0x1FFFFF) >> 23
        exponent = (262 - above).clamp(max=_LARGEST_EXPONENT.value)
        scale, inverse = ((e << 23).view(torch.float32) for e in (exponent, 254 - exponent))
    broken = ~largest.isfinite()
    codes = x.float() * scale.masked_fill(broken, torch.nan)
    codes = codes.round().clamp(-127, 127) if number == INT8 else codes
    return Rounded(codes.to(number).contiguous(), inverse.masked_fill(broken, torch.nan))


def quantize_both_twin(x: Tensor, number: torch.dtype, largest: Tensor | None = None) -> tuple[Rounded, Rounded]:
    """Round x [rows, columns] as it lies, and transposed: [columns, rows and zeros up to a multiple of 16]."""
    turned = F.pad(x, (0, 0, 0, -len(x) % MULTIPLE)).t()
    if largest is None:
        return quantize(x, number), quantize(turned, number)
    of_rows, of_columns = largest.view(torch.float32)[:, None].split(x.shape)
    return quantize(x, number, of_rows), quantize(turned, number, of_columns)


# A product and an addition must not become one instruction, which would round INT8's codes once. Torch rounds the
# product and then the code.
FUSION = False
# These are the constants and options of a program. The first pass takes such pieces of a tile, one below the other, and
# then leaves two atomic maxima a row or column. A tile of one matrix has LARGEST_TILE rows. Lines of at least 128 bytes
# are read and written whole, in both directions.
LARGEST = {"ROWS": 16, "COLUMNS": 512, "STAGES": 3, "num_warps": 4}
LARGEST_TILE = 256
ROUND = {"ROWS": 64, "COLUMNS": 128, "num_warps": 4, "enable_fp_fusion": FUSION}


@triton.jit
def _load_tile(X, row, column, rows, columns, stride):
    """Load a tile as float32, with zeros outside the matrix."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(X + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def magnitude_bits(x):
    """Return the bits of |x|. They order like the numbers, with infinity and then NaN above all of them."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def magnitudes(x, NARROW: tl.constexpr):
    """Return the bits of |x|: those of bfloat16, if that is the type of x (NARROW), else those of float32."""
    return x.to(tl.int16, bitcast=True) & 0x7FFF if NARROW else magnitude_bits(x.to(tl.float32))


@triton.jit
def widened(bits, NARROW: tl.constexpr):
    """Return the bits that float32 has for a value given by its bits in bfloat16 (NARROW), or the bits themselves."""
    return bits.to(tl.int32) << 16 if NARROW else bits


@triton.jit
def tile_of(TILES, tile, rows, outputs, TILE: tl.constexpr, APART: tl.constexpr):
    """Return the expert, the first row and the end of a tile. APART: the rows are matrices of `outputs` rows each.
    TILES: the tiles are those of grouped.Rows. Without both there is one matrix."""
    if APART:
        expert = tile // tl.cdiv(outputs, TILE)
        return expert, expert * outputs + tile % tl.cdiv(outputs, TILE) * TILE, (expert + 1) * outputs
    elif TILES is None:
        return 0, tile * TILE, rows
    else:
        return tl.load(TILES + 4 * tile), tl.load(TILES + 4 * tile + 1), tl.load(TILES + 4 * tile + 2)


@triton.jit
def load_rows(X, CHOICE, row, end, column, columns, stride, TOP: tl.constexpr, GATHERS: tl.constexpr):
    """Load a part of rows that are before `end`, with zeros elsewhere. GATHERS: X has tokens."""
    where = row
    if GATHERS:
        where = tl.load(CHOICE + row, mask=row < end, other=0) // TOP
    inside = (row < end)[:, None] & (column < columns)[None, :]
    return tl.load(X + where.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def largest_kernel(
    X, CHOICE, TILES, LARGEST, rows, columns, stride, outputs, across,
    TOP: tl.constexpr, GATHERS: tl.constexpr, APART: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Write the bits of the largest magnitudes of rows, then of each expert's columns (of all, if there are no
    experts), into an array of zeros. A maximum is the same in any order.

    Columns are compared across threads once, at the end. STAGES tiles are on their way at a time. NARROW: X is
    bfloat16. Its bits order like the numbers too, and one instruction compares two of them.
    """
    expert, first, end = tile_of(TILES, tl.program_id(0) // across, rows, outputs, TILE, APART)
    if expert >= 0:
        column = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
        of_columns = tl.zeros([ROWS, COLUMNS], tl.int16 if NARROW else tl.int32)
        for step in tl.range(TILE // ROWS, num_stages=STAGES):
            row = first + step * ROWS + tl.arange(0, ROWS)
            bits = magnitudes(load_rows(X, CHOICE, row, end, column, columns, stride, TOP, GATHERS), NARROW)
            of_columns = tl.maximum(of_columns, bits)
            tl.atomic_max(LARGEST + row, widened(tl.max(bits, 1), NARROW), mask=row < end, sem="relaxed")
        largest = widened(tl.max(of_columns, 0), NARROW)
        at = LARGEST + rows + expert * columns + column
        tl.atomic_max(at, largest, mask=column < columns, sem="relaxed")


@triton.jit
def _exponent_of(largest):
    """Return the exponent of FP8's factor, from the bits of a largest magnitude."""
    above = (largest + 0x1FFFFF) >> 23
    return tl.minimum(262 - above, _LARGEST_EXPONENT)


@triton.jit
def factor_of(largest, NUMBER: tl.constexpr):
    """Return the factor to multiply by, from the bits of a largest magnitude."""
    if NUMBER == "int8":
        magnitude = largest.to(tl.float32, bitcast=True)
        factor = tl.minimum(tl.div_rn(tl.zeros_like(magnitude) + 127.0, magnitude), 2.0**126)
    else:
        factor = (_exponent_of(largest) << 23).to(tl.float32, bitcast=True)
    return tl.where(largest < 0x7F800000, factor, float("nan"))


@triton.jit
def scale_of(largest, NUMBER: tl.constexpr):
    """Return the scale, which is the reciprocal of the factor."""
    if NUMBER == "int8":
        factor = factor_of(largest, NUMBER)
        return tl.div_rn(tl.zeros_like(factor) + 1.0, factor)
    scale = ((254 - _exponent_of(largest)) << 23).to(tl.float32, bitcast=True)
    return tl.where(largest < 0x7F800000, scale, float("nan"))


@triton.jit
def codes_of(x, NUMBER: tl.constexpr):
    """Round float32 inside the format's range, or NaN, to the nearest code, ties to even. Return the code's bits as
    int8."""
    if NUMBER == "int8":
        return (x + MAGIC).to(tl.int32, bitcast=True).to(tl.int8)
    elif INTERPRETED:  # The interpreter's own conversion does not round ties to even.
        return _fp8_bits(x)
    else:
        return x.to(tl.float8e4nv).to(tl.int8, bitcast=True)


@triton.jit
def _fp8_bits(x):
    """Compute the bits of codes_of by integer arithmetic: 3 bits of mantissa, a bias of 7."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    odd = (magnitude >> 20) & 1
    normal = ((magnitude + (1 << 19) - 1 + odd) >> 20) - (120 << 3)
    # The unit is the smallest subnormal number.
    units = magnitude.to(tl.float32, bitcast=True) * 2.0**9
    subnormal = (tl.minimum(units, 8.0) + MAGIC).to(tl.int32, bitcast=True) & 0xFF
    code = tl.where(magnitude < (121 << 23), subnormal, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def rows_of(down, PART: tl.constexpr, ROWS: tl.constexpr):
    """Return every fourth row of a tile, from the PART-th on. Four such parts are transposed together as 32-bit
    words."""
    return down * ROWS + 4 * tl.arange(0, ROWS // 4) + PART


@triton.jit
def store_rows(
    x, row, column, right, turned_factor, LARGEST, CODES, SCALE, rows, columns,
    PART: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    """Round a part of a tile, float32, along rows and write it. Return the part rounded along columns, as its byte of a
    word."""
    largest = tl.load(LARGEST + row, mask=row < rows, other=0)
    codes = codes_of(x * factor_of(largest, NUMBER)[:, None], NUMBER)
    turned = codes_of(x * turned_factor[None, :], NUMBER)
    if right == 0:  # INT8's divisions are a third of the instructions where every program makes them.
        tl.store(SCALE + row, scale_of(largest, NUMBER), mask=row < rows)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(CODES + row.to(tl.int64)[:, None] * columns + column[None, :], codes, mask=inside)
    return (turned.to(tl.int32) & 0xFF) << (8 * PART)


# With `across` as the constant 1, which it is up to ROUND_COLUMNS columns, the optimizer of ptxas 12.8 (Triton 3.6)
# makes code for Hopper that writes wrong FP8 codes in a tenth of the transposed matrix.
@triton.jit(do_not_specialize=["across"])
def _round_both_kernel(
    X, LARGEST, CODES, SCALE, TURNED, TURNED_SCALE, rows, columns, padded, stride, across,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, NUMBER: tl.constexpr,
):  # fmt: skip
    """Round one tile per program. The tile is read once, and written along rows and along columns, there in words of
    four codes."""
    # The host gives codes in their format, since a view of a tensor costs it microseconds.
    CODES, TURNED = CODES.to(tl.pointer_type(tl.int8), bitcast=True), TURNED.to(tl.pointer_type(tl.int32), bitcast=True)
    right, down = tl.program_id(0) % across, tl.program_id(0) // across
    column = right * COLUMNS + tl.arange(0, COLUMNS)
    row0, row1 = rows_of(down, 0, ROWS), rows_of(down, 1, ROWS)
    row2, row3 = rows_of(down, 2, ROWS), rows_of(down, 3, ROWS)
    x0 = _load_tile(X, row0, column, rows, columns, stride)  # All four loads are issued before the first one is used.
    x1 = _load_tile(X, row1, column, rows, columns, stride)
    x2 = _load_tile(X, row2, column, rows, columns, stride)
    x3 = _load_tile(X, row3, column, rows, columns, stride)
    within = column < columns
    largest = tl.load(LARGEST + rows + column, mask=within, other=0)
    factor = factor_of(largest, NUMBER)
    if down == 0:
        tl.store(TURNED_SCALE + column, scale_of(largest, NUMBER), mask=within)
    words = store_rows(x0, row0, column, right, factor, LARGEST, CODES, SCALE, rows, columns, 0, NUMBER)
    words |= store_rows(x1, row1, column, right, factor, LARGEST, CODES, SCALE, rows, columns, 1, NUMBER)
    words |= store_rows(x2, row2, column, right, factor, LARGEST, CODES, SCALE, rows, columns, 2, NUMBER)
    words |= store_rows(x3, row3, column, right, factor, LARGEST, CODES, SCALE, rows, columns, 3, NUMBER)
    word, many = down * (ROWS // 4) + tl.arange(0, ROWS // 4), padded // 4
    inside = (column < columns)[:, None] & (word < many)[None, :]
    tl.store(TURNED + column.to(tl.int64)[:, None] * many + word[None, :], tl.trans(words), mask=inside)


def largest_triton(
    x: Tensor, choice: Tensor | None, table: Tensor | None, rows: int, experts: int, tiles: int, outputs: int,
    how: dict[str, int],
) -> Tensor:  # fmt: skip
    """Compute largest_twin, or grouped_casts.grouped_largest_twin, of x on a GPU. how: the constants of rows."""
    columns = x.shape[1]
    largest = torch.zeros(rows + experts * columns, dtype=torch.int32, device=x.device)
    across = ceil_div(columns, LARGEST["COLUMNS"])
    largest_kernel[(tiles * across,)](
        x, choice, table, largest, rows, columns, x.stride(0), outputs, across,
        NARROW=x.dtype == torch.bfloat16, **how, **LARGEST,
    )  # fmt: skip
    return largest


def largest_of_triton(x: Tensor) -> Tensor:
    """Compute largest_twin of a matrix with rows in one piece, on a GPU."""
    how = {"TOP": 1, "GATHERS": False, "APART": False, "TILE": LARGEST_TILE}
    with on_device_of(x):
        return largest_triton(x, None, None, len(x), 1, ceil_div(len(x), LARGEST_TILE), 0, how)


def _largest_fake(x: Tensor) -> Tensor:
    return x.new_empty(sum(x.shape), dtype=torch.int32)


LARGEST_OF = by_device("largest", largest_twin, largest_of_triton, _largest_fake)


def quantize_both_triton(x: Tensor, number: torch.dtype, largest: Tensor | None = None) -> tuple[Rounded, Rounded]:
    """Compute quantize_both_twin on a GPU, bit for bit. Where a value is not finite, the scale is NaN and the codes are
    arbitrary."""
    if x.stride(1) != 1:
        x = x.contiguous()
    (rows, columns), ((codes, scale), (turned, turned_scale)) = x.shape, _empty(x, number)
    padded = turned.shape[1]
    with on_device_of(x):
        largest = largest_of_triton(x) if largest is None else largest
        across, down = ceil_div(columns, ROUND["COLUMNS"]), ceil_div(padded, ROUND["ROWS"])
        _round_both_kernel[(across * down,)](
            x, largest, codes, scale, turned, turned_scale,
            rows, columns, padded, x.stride(0), across, NUMBER=NAMES[number], **ROUND,
        )  # fmt: skip
    return Rounded(codes, scale), Rounded(turned, turned_scale)


def _empty(x: Tensor, number: torch.dtype) -> tuple[Rounded, Rounded]:
    rows, columns = x.shape
    return tuple(
        Rounded(
            torch.empty(shape, dtype=number, device=x.device),
            torch.empty(shape[0], 1, dtype=torch.float32, device=x.device),
        )
        for shape in ((rows, columns), (columns, (rows + MULTIPLE - 1) // MULTIPLE * MULTIPLE))
    )


Four = tuple[Tensor, Tensor, Tensor, Tensor]


def _quantize_both(x: Tensor, number: torch.dtype, largest: Tensor | None = None) -> Four:
    rounded, turned = (quantize_both_triton if x.is_cuda else quantize_both_twin)(x, number, largest)
    return *rounded, *turned


def _quantize_both_fake(x: Tensor, number: torch.dtype, largest: Tensor | None = None) -> Four:
    rounded, turned = _empty(x, number)
    return *rounded, *turned


QUANTIZE_BOTH = operator(_quantize_both, _quantize_both_fake)


def quantize_both(x: Tensor, number: torch.dtype, largest: Tensor | None = None) -> tuple[Rounded, Rounded]:
    """Round a matrix to 8 bits, as it lies and transposed, by one operator that torch.compile takes as one node.

    Args:
        x: [rows, columns], bf16, fp16 or fp32, any strides. No gradient goes through.
        number: torch.float8_e4m3fn or torch.int8.
        largest: what largest_twin returns for x, if whoever made x has left it. x is then read once.

    Returns:
        Codes [rows, columns] with scales [rows, 1], and codes [columns, rows and zeros up to a multiple of 16] with
        scales [columns, 1].

    Raises:
        TypeError: x has another dtype, or the number format is none of these.
        ValueError: x is no matrix, or there are largest magnitudes of other rows and columns.
    """
    if x.dtype not in DTYPES or number not in NUMBERS:
        raise TypeError(f"quantize_both takes bf16, fp16 or fp32 to e4m3 or int8, got {x.dtype} to {number}")
    if x.dim() != 2:
        raise ValueError(f"quantize_both takes a matrix, got shape {tuple(x.shape)}")
    if largest is not None and largest.shape != (sum(x.shape),):
        raise ValueError(
            f"quantize_both takes largest magnitudes of {sum(x.shape)} rows and columns, got shape "
            f"{tuple(largest.shape)}"
        )
    codes, scale, turned, turned_scale = QUANTIZE_BOTH(x, number, largest)
    return Rounded(codes, scale), Rounded(turned, turned_scale)
