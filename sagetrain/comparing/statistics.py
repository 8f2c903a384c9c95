"""Statistics of paired differences of losses: their size, their uncertainty, and the smallest gap they could have
shown. All functions are pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

_Points = Sequence[tuple[int, float]]
"""Points of (tokens seen, value)."""


def t(freedom: int) -> float:
    """Return the 0.975 quantile of Student's t distribution with a whole number of degrees of freedom, for two-sided
    95 % intervals."""
    low, high = 0.0, 16.0  # With one degree of freedom it is 12.7.
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _t_distribution(middle, freedom) < 0.975 else (low, middle)
    return (low + high) / 2


def _t_distribution(value: float, freedom: int) -> float:
    """Return P(T < value) for value >= 0, by the finite sums for whole degrees of freedom (Abramowitz and Stegun,
    26.7.3-4)."""
    angle = math.atan(value / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    if freedom == 1:
        return 0.5 + angle / math.pi
    term = total = cosine if freedom % 2 else 1.0
    for k in range(3 if freedom % 2 else 2, freedom, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    within = 2 / math.pi * (angle + sine * total) if freedom % 2 else sine * total
    return (1 + within) / 2


def rounding_band(differences: Sequence[float]) -> float | None:
    """Return the root mean square of the differences of pairs that should be equal. Return None without pairs."""
    return math.sqrt(statistics.fmean(d * d for d in differences)) if differences else None


def spread(values: Sequence[float]) -> float | None:
    """Return the standard deviation over seeds, or None with fewer than two."""
    return statistics.stdev(values) if len(values) > 1 else None


@dataclass(frozen=True)
class Difference:
    """The result of paired differences, in nats per token. A positive gap is a higher loss than the baseline's."""

    differences: tuple[float, ...]
    """One difference per seed."""
    gap: float | None
    """The mean of the differences. None without pairs."""
    uncertainty: float | None
    """Half of the 95 % confidence interval of the gap, t(0.975, n - 1) s / sqrt(n). This is also the power: the
    smallest gap that would have been called. None with fewer than two pairs."""
    band: float | None
    """The rounding band of one pair. No claim is made below it."""
    margin: float
    call: str
    """The verdict: worse, better, level or undecided."""

    @property
    def seen(self) -> float | None:
        """The smallest gap that would have been called."""
        return None if self.uncertainty is None else max(self.uncertainty, self.band or 0.0)

    @property
    def power(self) -> str:
        """The smallest gap that would have been called, in words. Two pairs may agree by chance, so that it is small;
        a rounding band bounds it."""
        if self.seen is None:
            return ""
        size = "< 0.0001" if self.seen < 5e-5 else f"{self.seen:.4f}"
        return (
            f"{size} (2 pairs alone, which may agree by chance)"
            if len(self.differences) == 2 and not self.band
            else size
        )

    def __str__(self) -> str:
        if self.gap is None:
            return "no pair"
        gap = f"{round(self.gap, 4) + 0.0:+.4f}"  # The sum makes -0.0 to 0.0.
        if self.uncertainty is None:
            return f"not decided: one pair ({gap}) has no uncertainty"
        size = f"{abs(self.gap):.4f} ± {self.uncertainty:.4f}"
        if self.call == "level":
            return f"level within {self.margin:g} ({gap} ± {self.uncertainty:.4f})"
        if self.call == "undecided":
            return f"not decided ({gap}): could have seen no less than {self.power}"
        return f"{self.call} by {size}"


def judge(differences: Sequence[float], margin: float, band: float | None = None) -> Difference:
    """Judge paired differences, one per seed. level: the whole confidence interval lies within ±margin. worse or
    better: the interval does not reach 0, and the gap is above the rounding band, if it was measured. undecided:
    neither."""
    gap = statistics.fmean(differences) if differences else None
    deviation, uncertainty, call = spread(differences), None, "undecided"
    if gap is not None and deviation is not None:
        count = len(differences)
        uncertainty = t(count - 1) * deviation / math.sqrt(count)
        if abs(gap) + uncertainty <= margin:
            call = "level"
        elif abs(gap) > max(uncertainty, band or 0.0):
            call = "worse" if gap > 0 else "better"
    return Difference(tuple(differences), gap, uncertainty, band, margin, call)


def end_of(points: Sequence[tuple[int, int, float]]) -> float:
    """Return the mean loss over the last 5 % of the tokens, and at least over the last step. `points` are (tokens seen,
    tokens of the step, its loss), one for each reported step."""
    last = points[-1][0]
    kept = [(size, loss) for tokens, size, loss in points if tokens > 0.95 * last] or [points[-1][1:]]
    return sum(size * loss for size, loss in kept) / sum(size for size, _ in kept)


def thinned(points: Sequence[tuple[int, int, float]], steps: int = 10) -> list[tuple[int, float]]:
    """Return (tokens seen, mean loss) of every `steps` steps of a run. The groups are the same in both runs of a pair;
    the last one may be smaller. A run that begins inside of a group (--branch) leaves that group out. `points` are
    (step, tokens seen, loss), one for each reported step."""
    groups = [list(group) for _, group in groupby(points, lambda point: (point[0] - 1) // steps)]
    # This is the step that the run continues from.
    if len(points) > 1 and (points[0][0] - (points[1][0] - points[0][0])) % steps:
        groups = groups[1:]
    return [(group[-1][1], statistics.fmean(loss for _, _, loss in group)) for group in groups]


def gap_curve(curve: _Points, baseline: _Points, points: int = 60) -> list[tuple[int, float]]:
    """Return the difference of two curves over tokens, as means over at most `points` equal pieces of the baseline's
    curve. The other curve is interpolated between its points. Places where the difference is not finite are left
    out."""
    if not (curve and baseline):
        return []
    (seen, values), (tokens, losses) = np.array(curve).T, np.array(baseline).T
    own = np.interp(tokens, seen, values, left=math.nan, right=math.nan)
    there = zip((tokens for tokens, _ in baseline), (own - losses).tolist(), strict=True)
    differences = [(tokens, gap) for tokens, gap in there if math.isfinite(gap)]
    size = -(-len(differences) // points) or 1
    pieces = [differences[start : start + size] for start in range(0, len(differences), size)]
    return [(piece[-1][0], statistics.fmean(value for _, value in piece)) for piece in pieces]


def over(curves: Sequence[_Points], what: Callable[[list[float]], float | None]) -> list[tuple[int, float]]:
    """Apply a function to the values of several curves, at each point that all of them have."""
    values = [dict(curve) for curve in curves]
    shared = [tokens for tokens in values[0] if all(tokens in other for other in values)] if values else []
    found = [(tokens, what([other[tokens] for other in values])) for tokens in shared]
    return [(tokens, value) for tokens, value in found if value is not None]
