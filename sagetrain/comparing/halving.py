"""The search for the best value of a key by successive halving: which values run for how many tokens, and what the
losses say. Nothing here starts a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sagetrain.config.errors import ConfigError

LEAST, MOST = 5, 17
"""The smallest and the largest number of values of the first round. More would be closer than chance tells apart."""
LAST = 3
"""The number of values of the last round: the best one, and a neighbour on each side."""
_SHARES = 4, 2, 1
"""The length of the runs of each round, as the share 1 / n of the whole run."""
LEAST_STEPS = 4


@dataclass(frozen=True)
class Halving:
    """A search within a budget of tokens. Losses are in nats per token."""

    key: str
    low: float
    high: float
    whole: bool
    """Whether the values are whole numbers."""
    total_tokens: int
    """The tokens of a whole run, as in the last round."""
    step_tokens: int
    seeds: int
    """The number of seeds of the last round. The other rounds have one."""
    budget: int

    def check(self) -> None:
        """Check that the range has values, and that the budget suffices for the smallest search. Raises ConfigError."""
        given = f"--tune {self.key}={self.low:g}:{self.high:g}"
        if not self.low < self.high:
            raise ConfigError(f"{given}: the first value is not below the second one; write {self.key}=LOW:HIGH")
        if self.low < 0:
            raise ConfigError(f"{given}: begins below 0; name a range of values that are 0 or more")
        shortest = self.tokens(0)
        if shortest < (least := LEAST_STEPS * self.step_tokens):
            raise ConfigError(
                f"training.total_tokens = {self.total_tokens}: runs of the first round would have {shortest:,} tokens, "
                f"less than {LEAST_STEPS} steps of {self.step_tokens:,}; use at least {_SHARES[0] * least:,} tokens"
            )
        if (needed := self.cost(LEAST)) > self.budget:
            fewer = f", --seeds 1 ({replace(self, seeds=1).cost(LEAST):,} tokens)" if self.seeds > 1 else ""
            raise ConfigError(
                f"--budget {self.budget:,}: {LEAST} values of {self.key} and the {LAST} best ones at full length with "
                f"{self.seeds} seeds take {needed:,} tokens; use a larger budget{fewer}, or a smaller "
                "training.total_tokens"
            )
        if len(values := self.values()) < LEAST:
            raise ConfigError(f"{given}: has {len(values)} values; name a range with {LEAST} or more")

    @property
    def rounds(self) -> int:
        return len(_SHARES)

    def tokens(self, number: int) -> int:
        """Return the tokens of a run in round `number`, which are whole steps but in the last round."""
        if number == self.rounds - 1:
            return self.total_tokens
        return self.total_tokens // _SHARES[number] // self.step_tokens * self.step_tokens

    def cost(self, count: int) -> int:
        """Return the tokens of a search that begins with so many values."""
        return count * self.tokens(0) + self._second(count) * self.tokens(1) + LAST * self.seeds * self.tokens(2)

    def values(self) -> list[float]:
        """Return the values of the first round, as many as the budget has tokens for: with equal ratios, or with equal
        distances in a range that begins at 0."""
        count = max(count for count in range(LEAST, MOST + 1) if count == LEAST or self.cost(count) <= self.budget)
        parts = [number / (count - 1) for number in range(count)]
        if self.low > 0:
            found = [self.low * (self.high / self.low) ** part for part in parts]
        else:
            found = [self.high * part for part in parts]
        return list(dict.fromkeys(round(value) if self.whole else float(f"{value:.3g}") for value in found))

    def next_round(self, number: int, losses: Mapping[float, float]) -> list[float]:
        """Return the values of the round behind round `number`, in ascending order. `losses` has the loss of each value
        of that round; infinite where the run diverged."""
        best = sorted(losses, key=lambda value: (losses[value], value))
        if number == 0:
            return sorted(best[: self._second(len(losses))])
        every = self.values()
        place = every.index(best[0])
        first = min(max(0, place - 1), max(0, len(every) - LAST))
        return every[first : first + LAST]

    @staticmethod
    def _second(count: int) -> int:
        return -(-count // 2)

    def place(self, value: float) -> float:
        """Return where a value lies on the axis of the search."""
        return math.log(value) if self.low > 0 else value


@dataclass(frozen=True)
class Flatness:
    """The shape of the loss about the best value."""

    best: float
    """The value with the lowest measured loss."""
    at_edge: bool
    """Whether it is the first or the last value of the range."""
    lowest: float | None
    """The value at which a parabola through the last round has its lowest loss. None: the parabola has none inside of
    the round."""
    within: tuple[float, float] | None
    """The range of values whose loss is less than the margin above the lowest one, by the parabola."""
    twice: float | None
    """The loss at half and at twice the lowest value, above the lowest one: the mean of both. None where values are not
    searched by ratios."""


def flatness(search: Halving, losses: Mapping[float, float], margin: float) -> Flatness:
    """Fit a parabola to the mean loss of each value of the last round. Its axis is the logarithm of the value in a
    range above 0. `margin` is the difference in loss that does not matter."""
    best = min(losses, key=lambda value: losses[value])
    every = search.values()
    at_edge = best in (every[0], every[-1])
    curve = _parabola([(search.place(value), loss) for value, loss in sorted(losses.items())])
    if curve is None or at_edge:
        return Flatness(best, at_edge, None, None, None)
    centre, bend = curve
    half = math.sqrt(margin / bend)
    back = math.exp if search.low > 0 else float
    twice = bend * math.log(2) ** 2 if search.low > 0 else None
    return Flatness(best, at_edge, back(centre), (back(centre - half), back(centre + half)), twice)


def _parabola(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Return the lowest place of the parabola through three points, and its factor of the squared distance. Return None
    where there are fewer points, a loss is not finite, or the lowest place is not among them."""
    if len(points) != LAST or not all(math.isfinite(loss) for _, loss in points):
        return None
    (x0, y0), (x1, y1), (x2, y2) = points
    left, right = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    bend = (right - left) / (x2 - x0)
    if bend <= 0:
        return None
    centre = (x0 + x1) / 2 - left / (2 * bend)
    return (centre, bend) if x0 <= centre <= x2 else None
