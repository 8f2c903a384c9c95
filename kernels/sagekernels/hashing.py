"""Sum up the 64-bit words of a tensor or a file, each times a factor of its place, for a hash of its bits."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import on_device_of

BLOCK, WARPS = 4096, 8
PROGRAMS = 64
"""The programs that share a vector of a file."""


@triton.jit
def _word_sum_kernel(
    WORDS, SUM, size, COLUMNS: tl.constexpr, OF_COLUMN: tl.constexpr, OF_ROW: tl.constexpr, BLOCK: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(WORDS + place, mask=place < size, other=0)
    factors = (place % COLUMNS) * OF_COLUMN + (place // COLUMNS) * OF_ROW + 1
    # Whole numbers have the same sum in any order.
    tl.atomic_add(SUM, tl.sum(words * factors, 0), sem="relaxed")


def word_sum(words: Tensor, columns: int, of_column: int, of_row: int) -> Tensor:
    """Return the sum of the words at places p, each times (p % columns) * of_column + (p // columns) * of_row + 1.

    All numbers are modulo 2^64. The host makes two launches, and the words are read once.

    Args:
        words: a contiguous int64 vector on a GPU.
        columns: the number of words of a row.
        of_column: the step of the factors along a row.
        of_row: the step of the factors from row to row.

    Returns:
        An int64 scalar on the device of the words.
    """
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    if size := words.numel():
        with on_device_of(words):
            _word_sum_kernel[(triton.cdiv(size, BLOCK),)](
                words, total, size, columns, _signed(of_column), _signed(of_row), BLOCK, num_warps=WARPS
            )
    return total


@triton.jit
def _file_sums_kernel(
    TABLE, SUMS, COLUMNS: tl.constexpr, OF_COLUMN: tl.constexpr, OF_ROW: tl.constexpr, FURTHER: tl.constexpr,
    BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    row = TABLE + tl.program_id(0) * 4
    values, size, first = tl.load(row).to(tl.pointer_type(tl.uint32)), tl.load(row + 1), tl.load(row + 2)
    begin = tl.program_id(1) * BLOCK
    # A vector may begin in the middle of a word.
    place = first + begin + tl.arange(0, BLOCK)
    word = place // 2
    factors = (word % COLUMNS) * OF_COLUMN + (word // COLUMNS) * OF_ROW + 1
    total = tl.zeros((BLOCK,), tl.int64)
    for start in range(begin, size, PROGRAMS * BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(values + at, mask=at < size, other=0).to(tl.int64) * factors
        # The next values are in the same columns, some rows further down.
        factors += FURTHER
    tl.atomic_add(SUMS + tl.load(row + 3), tl.sum(total << place % 2 * 32, 0), sem="relaxed")


def file_sums(
    vectors: Sequence[Tensor],
    places: Sequence[tuple[int, int]],
    files: int,
    columns: int,
    of_column: int,
    of_row: int,
) -> Tensor:
    """Return the sums of `word_sum` for files that consist of vectors and zeros. One launch reads all vectors.

    Args:
        vectors: contiguous fp32 vectors on a GPU, one or more.
        places: for each vector the number of its file, and its place there in values of 4 bytes.
        files: the number of files.
        columns: the number of words of a row, a divisor of BLOCK / 2.
        of_column: the step of the factors along a row.
        of_row: the step of the factors from row to row.

    Returns:
        int64 [files] on the device of the vectors.
    """
    device = vectors[0].device
    rows = [[each.data_ptr(), each.numel(), place, file] for each, (file, place) in zip(vectors, places, strict=True)]
    table = torch.tensor(rows, pin_memory=device.type == "cuda").to(device, non_blocking=True)
    sums = torch.zeros(files, dtype=torch.int64, device=device)
    further = PROGRAMS * BLOCK // (2 * columns) * of_row
    factors = [_signed(each) for each in (of_column, of_row, further)]
    with on_device_of(table):
        _file_sums_kernel[(len(rows), PROGRAMS)](table, sums, columns, *factors, BLOCK, PROGRAMS, num_warps=WARPS)
    return sums


def _signed(number: int) -> int:
    """Return the number of an int64 that has the low 64 bits of `number`."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
