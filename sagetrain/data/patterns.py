"""The blends of runs that earlier versions began, which go on in their order: a pattern of slots, repeated."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

COARSE_SLOTS = 4096
_MOST_SLOTS = 1 << 22
_EXACT = 0.01  # of each source's share


class Pattern:
    """Sample i belongs to the source of slot i mod the slots in all. Blend has taken its place."""

    def __init__(self, slots: list[int]):
        self._slots = slots
        self._sources, self._ranks = blend_pattern(slots)

    def locate(self, index: int) -> tuple[int, int]:
        """(source of sample `index`, how many samples it had before)."""
        block, slot = divmod(index, len(self._sources))
        source = int(self._sources[slot])
        return source, block * self._slots[source] + int(self._ranks[slot])


def earlier_slots(weights: list[float]) -> Iterator[list[int]]:
    """What earlier versions may have given each source: of COARSE_SLOTS, then as few as kept each share to 1 %."""
    share = np.array(weights, dtype=np.float64) / sum(weights)
    total = COARSE_SLOTS
    while total <= _MOST_SLOTS:
        slots = nearest_slots(weights, total)
        exact = np.abs(np.array(slots) / (share * total) - 1).max() <= _EXACT
        if exact or (total == COARSE_SLOTS and 0 not in slots):
            yield slots
        if exact:
            return
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
        sources = np.repeat(np.arange(len(slots), dtype=np.int32), slots)
        rank = np.concatenate([np.arange(count, dtype=np.int32) for count in slots])
        place = np.argsort((rank + 0.5) / np.array(slots)[sources], kind="stable")
        return sources[place], rank[place]
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
