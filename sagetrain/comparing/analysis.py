"""The step from runs to verdicts: runs of one seed are paired, for each row, variant and kind of loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sagetrain.comparing.results import Results
from sagetrain.comparing.run_records import DIVERGED, FAILED, FINISHED, Record, curve
from sagetrain.comparing.statistics import Difference, gap_curve, judge, over, rounding_band, spread

LOSSES = {"training": "train_end", "validation": "valid_end"}
"""The field of a Record that holds each kind of loss."""


@dataclass(frozen=True)
class Line:
    """The result of one variant in one row."""

    variant: str
    losses: dict[str, float | None]
    """Mean loss over the finished seeds, by kind of loss. None where there is no value."""
    verdicts: dict[str, Difference]
    """The verdict against the baseline, by kind of loss. Empty for the baseline itself."""
    finished: int
    """Number of seeds whose run is finished."""
    diverged: tuple[int, ...]
    """Seeds whose run diverged."""
    failed: tuple[int, ...]
    tokens_per_second: float | None
    events: dict[str, int]
    """Number of events by kind, of all seeds together."""
    seed_band: dict[str, float | None]
    """Standard deviation of the baseline over seeds, by kind of loss."""
    bias_to_gradient: float | None
    """Mean over seeds, where it was measured."""

    def verdict(self, kind: str) -> str:
        """Return the verdict in words. Runs that diverged come first, because they are in no mean."""
        verdict, band = self.verdicts[kind], self.seed_band[kind]
        said, where = "", ""
        if self.diverged:
            said = f"diverged in {len(self.diverged)} of {self.finished + len(self.diverged)}; "
        if verdict.call in ("worse", "better") and band is not None and verdict.gap is not None:
            where = f", {'inside' if abs(verdict.gap) <= band else 'outside'} the seed band"
        return f"{said}{verdict}{where}"


@dataclass(frozen=True)
class Comparison:
    """A row of the question: the baseline, its bands, and every variant beside it."""

    row: str
    tokens_per_step: int
    noise_scale: float | None
    """Gradient noise scale of the baseline, in tokens."""
    baseline: Line
    rounding_band: dict[str, float | None]
    """Root mean square difference of equal runs, by kind of loss."""
    again: int
    """Number of pairs of equal runs."""
    lines: tuple[Line, ...]


def tables(results: Results, margin: float) -> list[Comparison]:
    """Build a Comparison for each row. Differences within `margin` (nats per token) count as level."""
    return [_table(results, row.name, margin) for row in results.rows]


def _table(results: Results, row: str, margin: float) -> Comparison:
    base, again = results.of(row, results.baseline), results.of(row, results.baseline, again=True)
    bands = {kind: rounding_band(_pairs(again, base, key)) for kind, key in LOSSES.items()}
    scales = [run.noise_scale for run in base.values() if run.noise_scale is not None]
    seed_band = {kind: spread(_values(base, key)) for kind, key in LOSSES.items()}
    lines = []
    for variant in results.question.variants[1:]:
        runs = results.of(row, variant.name)
        verdicts = {kind: judge(_pairs(runs, base, key), margin, bands[kind]) for kind, key in LOSSES.items()}
        lines.append(_line(variant.name, runs, verdicts, seed_band))
    return Comparison(
        row,
        max((run.tokens_per_step for run in base.values()), default=0),
        _mean(scales),
        _line(results.baseline, base, {}, seed_band),
        bands,
        len(_pairs(again, base, LOSSES["training"])),
        tuple(lines),
    )


def _line(
    variant: str, runs: Mapping[int, Record], verdicts: dict[str, Difference], seed_band: dict[str, float | None]
) -> Line:
    events: dict[str, int] = {}
    for run in runs.values():
        for kind, count in run.events.items():
            events[kind] = events.get(kind, 0) + count
    return Line(
        variant,
        {kind: _mean(_values(runs, key)) for kind, key in LOSSES.items()},
        verdicts,
        sum(run.status == FINISHED for run in runs.values()),
        tuple(seed for seed, run in runs.items() if run.status == DIVERGED),
        tuple(seed for seed, run in runs.items() if run.status == FAILED),
        _mean([run.tokens_per_second for run in runs.values() if run.tokens_per_second]),
        events,
        seed_band,
        _mean(_values(runs, "bias_to_gradient")),
    )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _values(runs: Mapping[int, Record], key: str) -> list[float]:
    found = (getattr(run, key) for run in runs.values() if run.status == FINISHED)
    return [value for value in found if value is not None]


def _pairs(runs: Mapping[int, Record], base: Mapping[int, Record], key: str) -> list[float]:
    """Return the differences to the baseline for each seed that is finished in both."""
    found = []
    for seed, run in runs.items():
        other = base.get(seed)
        if other is None or not run.status == other.status == FINISHED:
            continue
        ours, theirs = getattr(run, key), getattr(other, key)
        if ours is not None and theirs is not None:
            found.append(ours - theirs)
    return found


@dataclass(frozen=True)
class Curves:
    """The gaps of training losses to the baseline over tokens, for a plot. Curves are lists of (tokens seen, nats per
    token)."""

    row: str
    gaps: dict[str, list[list[tuple[int, float]]]]
    """The curves of each variant, one for each seed. A run that ended early has a curve as far as it came."""
    seed_band: list[tuple[int, float]]
    """Standard deviation of the baseline over seeds. Empty with fewer than two seeds."""
    rounding_band: list[tuple[int, float]]
    """Root mean square difference of equal runs. Empty without any."""


def curves(results: Results) -> list[Curves]:
    """Build the Curves of each row."""
    return [_curves(results, row.name) for row in results.rows]


def _curves(results: Results, row: str) -> Curves:
    base = {seed: curve(run) for seed, run in results.of(row, results.baseline).items()}
    again = {seed: curve(run) for seed, run in results.of(row, results.baseline, again=True).items()}
    gaps = {
        variant.name: [
            gap_curve(curve(run), base[seed])
            for seed, run in results.of(row, variant.name).items()
            if seed in base and run.train
        ]
        for variant in results.question.variants[1:]
    }
    equal = [gap_curve(points, base[seed]) for seed, points in again.items() if seed in base]
    first = next(iter(base.values()), [])
    seeds = [gap_curve(points, first) for points in base.values() if points]
    return Curves(row, gaps, over(seeds, spread), over(equal, rounding_band))
