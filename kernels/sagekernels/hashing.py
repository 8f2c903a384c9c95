"""Sum up the 64-bit words of a tensor, each times a factor of its place, for a hash of the tensor's bits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import on_device_of

BLOCK, WARPS = 4096, 8


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


def _signed(number: int) -> int:
    """Return the number of an int64 that has the low 64 bits of `number`."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)
