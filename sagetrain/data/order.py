"""The order of samples: a keyed permutation of each source's windows, and the blend of the sources."""

from __future__ import annotations

from bisect import bisect_left
from fractions import Fraction
from itertools import accumulate
from math import gcd, lcm

_ROUNDS = 6
_MASK = (1 << 64) - 1


def permute(position: int, size: int, key: int) -> int:
    """Return the place of `position` in a pseudo-random permutation of range(size) that `key` chooses, in O(1).

    The permutation is a Feistel network on the smallest even number of bits that holds `size`. It is repeated until the
    result is inside of the range, which takes fewer than 4 repetitions on average.
    """
    half = max((size - 1).bit_length() + 1, 2) // 2
    mask = (1 << half) - 1
    keys = [mixed(key, number) for number in range(_ROUNDS)]
    while True:
        left, right = position >> half, position & mask
        for round_key in keys:
            left, right = right, left ^ (mixed(round_key, right) & mask)
        position = left << half | right
        if position < size:
            return position


def mixed(key: int, value: int) -> int:
    """Return 64 well-mixed bits of two integers, by the finalizer of splitmix64."""
    x = (key * 0x9E3779B97F4A7C15 + value + 0x632BE59BD9B4E019) & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


class Blend:
    """The blend of the sources: which source each sample comes from. It is exact however small a share is, takes
    O(log^2 sources), and needs no memory for samples.

    The sources, largest share first, are cut into two parts near half of their weight, and so on down to single
    sources. Of the first m samples that reach two parts, the first part gets its share of m, rounded. A part of several
    sources is at most 2/3 of the two. Therefore no source is ever 2 samples away from its share of the samples so far,
    and most are within 1.
    """

    def __init__(self, weights: list[float]):
        # Fraction of the text makes 0.3 exactly 3/10.
        exact = [Fraction(str(weight)) for weight in weights]
        whole = [int(weight * lcm(*(each.denominator for each in exact))) for weight in exact]
        self.shares = [weight // gcd(*whole) for weight in whole]
        """Whole numbers in the ratio of the weights."""
        self._sources = sorted(range(len(weights)), key=lambda source: -self.shares[source])
        self._ends = [0, *accumulate(self.shares[source] for source in self._sources)]

    def locate(self, index: int) -> tuple[int, int]:
        """Return the source of sample `index`, and how many samples that source had before."""
        first, last, rank, ends = 0, len(self._sources), index, self._ends
        while last - first > 1:
            begin, end = ends[first], ends[last]
            cut = bisect_left(ends, -(-(begin + end) // 2), first + 1, last - 1)
            if cut > first + 1 and begin + end - 2 * ends[cut - 1] < 2 * ends[cut] - begin - end:
                cut -= 1  # The cut before this one is nearer to the middle.
            part, both = ends[cut] - begin, end - begin
            before = (2 * rank * part + both) // (2 * both)
            if (2 * (rank + 1) * part + both) // (2 * both) > before:
                last, rank = cut, before
            else:
                first, rank = cut, rank - before
        return self._sources[first], rank
