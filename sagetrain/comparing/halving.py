"""The search for the best value of a key: which values run for how many tokens, and what the losses say. Nothing here
starts a run.

If the budget pays for the least number of values at full length, there is one such round. If not, values are left out
by successive halving. Behind the last round the search follows a best value at its edge, one neighbour after the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sagetrain.config.errors import ConfigError

LEAST, MOST = 5, 17
"""The smallest and the largest number of values of the first round. More would be closer than chance tells apart."""
LAST = 3
"""The number of values of the last round: the best one, and a neighbour on each side."""
_SHORTER = 4, 2
"""The length of the runs of each round before the last one, as the share 1 / n of the whole run."""
LEAST_STEPS = 4


def shown(value: float) -> str:
    """Return a value as it is written for a key: whole numbers with all their digits."""
    return f"{value:g}" if value % 1 else f"{value:.0f}"


@dataclass(frozen=True)
class Halving:
    """A search within a budget of tokens. Losses are in nats per token. Rounds are numbered from 0 on."""

    key: str
    low: float
    high: float
    whole: bool
    """Whether the values are whole numbers."""
    total_tokens: int
    """The tokens of a whole run, as in the last round."""
    step_tokens: int
    """The tokens of a step, or of the largest one."""
    seeds: int
    """The number of seeds of the last round. The other rounds have one."""
    budget: int

    def check(self) -> None:
        """Check that the range has values, and that the budget suffices for the smallest search. Raises ConfigError."""
        given = f"--tune {self}"
        if not self.low < self.high:
            raise ConfigError(f"{given}: the first value is not below the second one; write {self.key}=LOW:HIGH")
        if self.low < 0:
            raise ConfigError(f"{given}: begins below 0; name a range of values that are 0 or more")
        if self.whole and (self.low % 1 or self.high % 1):
            written = f"{self.key}={math.ceil(self.low)}:{math.floor(self.high)}"
            raise ConfigError(f"{given}: {self.key} takes whole numbers; write {written}")
        if (needed := self.cost(LEAST)) > self.budget:
            fewer = f", --seeds 1 ({replace(self, seeds=1).cost(LEAST):,} tokens)" if self.seeds > 1 else ""
            raise ConfigError(
                f"--budget {self.budget:,}: a search of {LEAST} values of {self.key} with {self.seeds} seeds takes "
                f"{needed:,} tokens; use a larger budget{fewer}, or a smaller training.total_tokens"
            )
        shortest = self.tokens(0)
        if shortest < (least := LEAST_STEPS * self.step_tokens):
            raise ConfigError(
                f"training.total_tokens = {self.total_tokens}: runs of the first round would have {shortest:,} tokens, "
                f"less than {LEAST_STEPS} steps of {self.step_tokens:,}; use at least "
                f"{least if self.rounds == 1 else _SHORTER[0] * least:,} tokens"
            )
        if len(values := self.values()) < LEAST:
            raise ConfigError(f"{given}: has {len(values)} values; name a range with {LEAST} or more")

    def __str__(self) -> str:
        return f"{self.key}={shown(self.low)}:{shown(self.high)}"

    @property
    def rounds(self) -> int:
        return 1 if self.grid(len(self.values())) <= self.budget else len(_SHORTER) + 1

    def tokens(self, number: int) -> int:
        """Return the tokens of a run in round `number`, which are whole steps in rounds before the last one."""
        return self._shorter(number) if number < self.rounds - 1 else self.total_tokens

    def seeds_of(self, number: int) -> int:
        """Return the number of seeds of each value in round `number`."""
        return 1 if number < self.rounds - 1 else self.seeds

    @property
    def planned(self) -> int:
        """The tokens of the rounds, without values beyond the edge of the last one."""
        count = len(self.values())
        return self.grid(count) if self.rounds == 1 else self._halving(count)

    def cost(self, count: int) -> int:
        """Return the tokens of the cheaper way to search so many values."""
        return min(self.grid(count), self._halving(count))

    def grid(self, count: int) -> int:
        """Return the tokens of so many values at full length."""
        # The last step may pass the end of the run.
        return count * self.seeds * -(-self.total_tokens // self.step_tokens) * self.step_tokens

    def _halving(self, count: int) -> int:
        return count * self._shorter(0) + self._second(count) * self._shorter(1) + self.grid(LAST)

    def _shorter(self, number: int) -> int:
        return self.total_tokens // _SHORTER[number] // self.step_tokens * self.step_tokens

    def values(self) -> list[float]:
        """Return the values of the first round: with equal ratios, or with equal distances in a range that begins at 0.
        They are as many as the budget pays for at full length. Where it pays for fewer than the least number, they are
        as many as it pays for by halving, together with one more value at full length."""
        counts = range(LEAST, MOST + 1)
        paid = [n for n in counts if self.grid(n) <= self.budget]
        paid = paid or [n for n in counts if self._halving(n) + self.grid(1) <= self.budget]
        count = max(paid, default=LEAST)
        parts = [number / (count - 1) for number in range(count)]
        if self.low > 0:
            found = [self.low * (self.high / self.low) ** part for part in parts]
        else:
            found = [self.high * part for part in parts]
        return list(dict.fromkeys(round(value) if self.whole else float(f"{value:.3g}") for value in found))

    def next_round(self, number: int, losses: Mapping[float, float], spent: int = 0) -> list[float]:
        """Return the values of the round behind round `number`, in ascending order; none: the search has ended.

        Args:
            losses: the loss of each value of that round, from the last round on of every value at full length; infinite
                where the run diverged.
            spent: the tokens of all runs so far.
        """
        best = sorted(losses, key=lambda value: (losses[value], value))
        if number < self.rounds - 2:
            return sorted(best[: self._second(len(losses))])
        every = self.values()
        place = every.index(best[0])
        if number == self.rounds - 2:
            first = min(max(0, place - 1), max(0, len(every) - LAST))
            return every[first : first + LAST]
        beyond = [value for value in every[max(0, place - 1) : place + 2] if value not in losses]
        return beyond if spent + self.grid(len(beyond)) <= self.budget else []

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
    """Whether it is the first or the last value of the range, and more values are beyond: none is below 0."""
    lowest: float | None
    """The value at which the parabola has its lowest loss. None: there is none, for example because the best value is
    at an edge of the last round."""
    within: tuple[float, float] | None
    """The range of values whose loss is less than the margin above the lowest one: by the parabola between the values
    that it goes through, and beyond them as far as measured losses are so."""
    twice: float | None
    """The loss at half and at twice the lowest value, above the lowest one: the mean of both. None where values are not
    searched by ratios."""


def flatness(search: Halving, losses: Mapping[float, float], margin: float) -> Flatness:
    """Fit a parabola to the mean losses of the best value of the last round and its neighbours. Its axis is the
    logarithm of the value in a range above 0. `margin` is the difference in loss that does not matter."""
    best = min(losses, key=lambda value: losses[value])
    every = search.values()
    at_edge = best in (every[0], every[-1]) and best != 0
    measured = sorted(losses)
    place = measured.index(best)
    around = measured[place - 1 : place + 2] if place else []
    curve = _parabola([(search.place(value), losses[value]) for value in around])
    if curve is None:
        return Flatness(best, at_edge, None, None, None)
    centre, bend = curve
    half = math.sqrt(margin / bend)
    back = math.exp if search.low > 0 else float
    twice = bend * math.log(2) ** 2 if search.low > 0 else None
    most = losses[best] - bend * (search.place(best) - centre) ** 2 + margin
    low, high = back(centre - half), back(centre + half)
    if low < around[0]:
        low = _last_below(most, measured[place - 1 :: -1], losses)
    if high > around[2]:
        high = _last_below(most, measured[place + 1 :], losses)
    return Flatness(best, at_edge, back(centre), (low, high), twice)


def _last_below(most: float, values: Sequence[float], losses: Mapping[float, float]) -> float:
    """Return the last of the values before one whose loss is above `most`. The first value counts in any case."""
    first, *others = values
    return [first, *itertools.takewhile(lambda value: losses[value] <= most, others)][-1]


def _parabola(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Return the lowest place of the parabola through three points, the middle one of which is the lowest, and its
    factor of the squared distance. Return None where there are fewer points, a loss is not finite, or all are equal."""
    if len(points) != 3 or not all(math.isfinite(loss) for _, loss in points):
        return None
    (x0, y0), (x1, y1), (x2, y2) = points
    left, right = (y1 - y0) / (x1 - x0), (y2 - y1) / (x2 - x1)
    bend = (right - left) / (x2 - x0)
    return ((x0 + x1) / 2 - left / (2 * bend), bend) if bend > 0 else None
