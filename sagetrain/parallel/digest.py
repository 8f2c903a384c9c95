"""The hash of a tensor's bits, computed where the tensor is."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch
from torch import Tensor

ROW = 8192  # bytes of a tensor that are hashed as a row of integers
_ODD = 0x5851F42D4C957F2D, 0x14057B7EF767814F


@lru_cache(maxsize=256)
def _factors(rows: int, columns: int, device: torch.device) -> Tensor:
    """Return the factors of the sums of columns, which are odd, and of those of rows, which are even."""
    of_column, of_row = (torch.arange(count, device=device) for count in (columns, rows))
    return torch.cat([of_column * (2 * _ODD[0]) + 1, of_row * (2 * _ODD[1])])


def digest(values: Tensor) -> Tensor:
    """Return a hash of a tensor's bits, an int64 scalar on the tensor's device.

    It is the sum of the tensor's 64-bit words, each times the odd factor of its column and row, with its bits mixed. A
    change in a single word therefore always changes it.
    """
    return mixed(word_sum(values))


def digest_by(threads: int, data: Tensor) -> Tensor:
    """Return the digest of bytes in the host's memory. Threads add their parts if the rows are whole. A launcher may
    have left torch one thread, and copies of a large model are many GB."""
    if len(data) % ROW:
        return digest(data)
    words = data.view(torch.int64).view(-1, ROW // 8)
    firsts = range(0, len(words), -(-len(words) // threads))

    def part(first: int) -> Tensor:
        rows = words[first : first + firsts.step]
        # The factors of these rows are larger than those of the first ones.
        return word_sum(rows) + rows.sum() * first * (2 * _ODD[1])

    with ThreadPoolExecutor(threads) as pool:
        return mixed(torch.stack([*pool.map(part, firsts)]).sum())


def word_sum(values: Tensor) -> Tensor:
    """Return the sum of a digest before its bits are mixed. Where many tensors are hashed, the sums of all of them are
    mixed at once, which saves more than half of the launches."""
    data = values.detach().contiguous().view(-1)
    if data.is_cuda and not (len(data) * data.itemsize % 8 or data.data_ptr() % 8):
        # This import loads Triton.
        from sagekernels import hashing

        return hashing.word_sum(data.view(torch.int64), ROW // 8, 2 * _ODD[0], 2 * _ODD[1])
    data = data.view(torch.uint8)
    if len(data) % ROW or data.storage_offset() % 8:
        data = torch.cat([data, data.new_zeros(-len(data) % ROW)])
    words = data.view(torch.int64).view(-1, ROW // 8)
    return (torch.cat([words.sum(0), words.sum(1)]) * _factors(*words.shape, data.device)).sum()


def file_sums(vectors: Sequence[Tensor], places: Sequence[tuple[int, int]], files: int) -> Tensor:
    """Return the sums of `word_sum` for files of fp32 vectors that are on a GPU: see sagekernels/hashing.py."""
    from sagekernels import hashing

    return hashing.file_sums(vectors, places, files, ROW // 8, 2 * _ODD[0], 2 * _ODD[1])


def mixed(sums: Tensor) -> Tensor:
    """Return the digests of the tensors that have these sums."""
    # A change of a word's highest bit has changed the highest bit alone.
    half = (sums ^ ((sums >> 32) & 0xFFFFFFFF)) * _ODD[0]
    return half ^ ((half >> 32) & 0xFFFFFFFF)
