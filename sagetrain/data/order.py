"""The order of samples: a keyed permutation of each source's windows, and the pattern that blends the sources."""

from __future__ import annotations

import numpy as np

from sagetrain.config.errors import ConfigError

COARSE_SLOTS = 4096
_MOST_SLOTS = 1 << 22
_EXACT = 0.01  # of each source's share
_ROUNDS = 6
_MASK = (1 << 64) - 1


def permute(position: int, size: int, key: int) -> int:
    """Place of `position` in a pseudo-random permutation of range(size), chosen by `key`; O(1).

    A Feistel network on the smallest even number of bits that holds `size`, walked until it comes back into the range
    (fewer than 4 rounds of it on average).
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
    """64 well-mixed bits (the finalizer of splitmix64) of two integers."""
    x = (key * 0x9E3779B97F4A7C15 + value + 0x632BE59BD9B4E019) & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31


def blend_slots(weights: list[float], names: list[str]) -> list[int]:
    """Slots of the pattern for each source: as few as keep each share to 1 %, from COARSE_SLOTS in all, doubling.

    ConfigError if a share is so small that the largest pattern does not keep it.
    """
    share = np.array(weights, dtype=np.float64) / sum(weights)
    total = COARSE_SLOTS
    while True:
        slots = nearest_slots(weights, total)
        off = np.abs(np.array(slots) / (share * total) - 1)
        if off.max() <= _EXACT:
            return slots
        if total == _MOST_SLOTS:
            worst = int(off.argmax())
            raise ConfigError(
                f"data source {names[worst]}: weight {weights[worst]:g} of {sum(weights):g} is a share of "
                f"{share[worst]:.1e}, too small for the mix to keep to 1 %: raise it to 1/{_MOST_SLOTS // 100}, or "
                "leave the source out"
            )
        total *= 2


def nearest_slots(weights: list[float], total: int) -> list[int]:
    """The nearest to each share, `total` in all (largest remainders)."""
    exact = [weight / sum(weights) * total for weight in weights]
    slots = [int(share) for share in exact]
    by_remainder = sorted(range(len(weights)), key=lambda source: slots[source] - exact[source])
    for source in by_remainder[: total - sum(slots)]:
        slots[source] += 1
    return slots


def blend_pattern(slots: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(source of each slot, how many earlier slots have the same source): int [slots in all] each.

    Any stretch has nearly the right mix: of COARSE_SLOTS, each goes to the source that is furthest behind its share; in
    larger patterns the n-th slot of a source is the one nearest to (n + 1/2) / its slots.
    """
    total = sum(slots)
    if total > COARSE_SLOTS:
        source = np.repeat(np.arange(len(slots), dtype=np.int32), slots)
        rank = np.concatenate([np.arange(count, dtype=np.int32) for count in slots])
        place = np.argsort((rank + 0.5) / np.array(slots)[source], kind="stable")
        return source[place], rank[place]
    share = np.array(slots, dtype=np.float64) / total
    used = np.zeros(len(slots), dtype=np.int64)
    pattern = np.empty(total, dtype=np.int64)
    ranks = np.empty(total, dtype=np.int64)
    for slot in range(total):
        behind = np.where(used < slots, share * (slot + 1) - used, -np.inf)
        source = int(behind.argmax())
        pattern[slot], ranks[slot] = source, used[source]
        used[source] += 1
    return pattern, ranks
