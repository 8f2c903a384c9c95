"""The share of attention that documents leave of a packed sequence."""

from __future__ import annotations

import itertools
import math

# The table maps the tokens of a sequence to the share of its causal square that lies inside documents. The text is that
# of the measured runs: English documentation and books, 1,100 tokens a document on average, half of the documents below
# 320.
_DOCUMENT_SHARES = {
    128: 1.0, 1024: 0.79, 2048: 0.69, 4096: 0.58, 8192: 0.45, 16384: 0.32, 32768: 0.21, 65536: 0.145, 131072: 0.10
}  # fmt: skip


def document_share(seq_length: int) -> float:
    """Return the share of a packed sequence's causal square that attention inside documents computes, for text as
    measured.

    The share is linear in the logarithm of the length between the entries of _DOCUMENT_SHARES. Past the last entry, the
    number of keys that a token sees stays the same.
    """
    points = list(_DOCUMENT_SHARES.items())
    if seq_length >= points[-1][0]:
        return points[-1][1] * points[-1][0] / seq_length
    for (low, before), (high, after) in itertools.pairwise(points):
        if low <= seq_length < high:
            return before + (after - before) * math.log(seq_length / low) / math.log(high / low)
    return 1.0
