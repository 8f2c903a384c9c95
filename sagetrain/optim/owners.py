"""Deal the matrices that Muon orthogonalizes out to ranks, by what they cost. No torch, because plans ask as well."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

MUON_ROUND = 2**26
"""The number of values of the matrices that Muon orthogonalizes between two exchanges on a rank (muon.py)."""


def cost(shape: tuple[int, ...], steps: int) -> int:
    """Return the floating point operations of orthogonalizing a matrix by Newton-Schulz steps. Half of X X^T and of its
    square is computed (sagekernels/muon.py)."""
    short, long = sorted(shape)
    return steps * (3 * short * short * long + short**3)


def owners(shapes: Sequence[tuple[int, ...]], ranks: int, steps: int) -> list[int]:
    """Return the owner of each matrix: the dearest matrix first, each to the rank that has least to do."""
    loads, owner = [(0, rank) for rank in range(ranks)], [0] * len(shapes)
    for number in sorted(range(len(shapes)), key=lambda number: (-cost(shapes[number], steps), number)):
        load, rank = heapq.heappop(loads)
        owner[number] = rank
        heapq.heappush(loads, (load + cost(shapes[number], steps), rank))
    return owner
