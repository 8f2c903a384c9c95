"""The page of a search: its verdict, the loss of each value in each round, a plot, and what it does not show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sagetrain.comparing.halving import Flatness, Halving, flatness, shown
from sagetrain.comparing.statistics import Difference, judge
from sagetrain.config.errors import many

PLOT = "tune.png"
_SHORT = 400
"""A first round of fewer steps may choose wrong learning rates."""


@dataclass(frozen=True)
class Round:
    """The result of a round."""

    tokens: int
    """The tokens of each of its runs."""
    losses: Mapping[float, Sequence[float]]
    """The losses of each value, one for each seed; infinite where a run diverged."""
    spent: int
    """The tokens that all its runs have seen."""

    @property
    def means(self) -> dict[float, float]:
        return {value: statistics.fmean(losses) for value, losses in self.losses.items()}


def page(
    search: Halving, rounds: Sequence[Round], margin: float, command: str, measured: str
) -> tuple[str, dict[str, Any]]:
    """Return the page as Markdown, and its numbers for JSON."""
    complete = len(rounds) == search.rounds
    found = flatness(search, rounds[-1].means, margin) if complete else None
    verdict = _verdict(search, found, rounds[-1], margin)
    spent = sum(each.spent for each in rounds)
    tree = {
        "key": search.key,
        "verdict": verdict,
        "tokens": spent,
        "rounds": [
            {"tokens": each.tokens, "losses": {shown(v): [*x] for v, x in each.losses.items()}} for each in rounds
        ],
        "best": found.best if found else None,
        "lowest": found.lowest if found else None,
        "within": found.within if found else None,
    }
    lines = [f"# Which {search.key} is best?", "", f"**{verdict}**", "", *_table(search, rounds, complete), ""]
    lines += [f"Losses: {measured}, in nats per token. {spent:,} tokens were trained of a budget of {search.budget:,}."]
    lines += ["", f"![{measured} over {search.key}]({PLOT})", "", "```", command, "```", "", *_limits(search, rounds)]
    return "\n".join(lines) + "\n", tree


def _verdict(search: Halving, found: Flatness | None, last: Round, margin: float) -> str:
    means = last.means
    if found is None:
        best = min(means, key=lambda value: means[value])
        return f"Not finished: {search.key}={shown(best)} is the best after runs of {last.tokens:,} tokens"
    words = f"{search.key}={shown(found.best)} is the best of those measured, with a loss of {means[found.best]:.4f}"
    above = {value: _above(last, value, found.best) for value in sorted(means)}
    seeds = len(last.losses[found.best])
    if alike := [shown(value) for value, judged in above.items() if seeds > 1 and judged and judged.call != "worse"]:
        words += f" (not told apart from {', '.join(alike)} by {seeds} seeds)"
    if found.at_edge:
        edge = "lowest" if found.best == search.values()[0] else "highest"
        beyond = f"the best one may lie beyond; widen {shown(search.low)}:{shown(search.high)}"
        return f"{words}: it is the {edge} value of the range, so {beyond}"
    if found.within is None:
        low, high = min(means), max(means)
        if found.best == 0:
            return f"{words}, and none is below"
        if found.best in (low, high):
            edge = "lowest" if found.best == low else "highest"
            words += f": it is the {edge} value of the last round, so the best one may lie beyond"
            return f"{words}; search on with --tune {search.key}={shown(found.best / 2)}:{shown(found.best * 2)}"
        return f"{words}. No parabola through the last round has its lowest point there, so no range is given"
    low, high = found.within
    words += (
        f". From {low:.2g} to {high:.2g} the loss is less than {margin:g} above the lowest one, at {found.lowest:.2g}"
    )
    if found.twice is not None:
        words += (
            f"; half or twice of it costs {found.twice:.3f}, by the parabola through the best value and the next ones"
        )
    return words


def _table(search: Halving, rounds: Sequence[Round], complete: bool) -> Iterator[str]:
    """Yield a row for each value, with its loss in each round, and its distance from the best in the last one."""
    names = [f"{each.tokens:,} tokens" for each in rounds]
    yield "| " + " | ".join([search.key, *names, *(["above the best"] if complete else [])]) + " |"
    yield "|" + "---|" * (1 + len(rounds) + complete)
    last = rounds[-1]
    best = min(last.means, key=lambda value: last.means[value])
    for value in search.values():
        cells = [_cell(each.losses.get(value)) for each in rounds]
        more = [_gap(_above(last, value, best))] if complete else []
        yield "| " + " | ".join([f"**{shown(value)}**" if value == best else shown(value), *cells, *more]) + " |"


def _cell(losses: Sequence[float] | None) -> str:
    if losses is None:
        return ""
    mean = statistics.fmean(losses)
    seeds = f" ({many(len(losses), 'seed')})" if len(losses) > 1 else ""
    return f"{mean:.4f}{seeds}" if math.isfinite(mean) else "diverged"


def _above(last: Round, value: float, best: float) -> Difference | None:
    """Return how far a value is above the best one. None if it was not measured, or diverged."""
    if value == best or value not in last.losses:
        return None
    pairs = [ours - theirs for ours, theirs in zip(last.losses[value], last.losses[best], strict=True)]
    return judge(pairs, 0.0) if all(map(math.isfinite, pairs)) else None


def _gap(judged: Difference | None) -> str:
    if judged is None:
        return ""
    return f"{judged.gap:.4f}" + (f" ± {judged.uncertainty:.4f}" if judged.uncertainty is not None else "")


def _limits(search: Halving, rounds: Sequence[Round]) -> Iterator[str]:
    yield "What it does not show:"
    yield ""
    steps = rounds[0].tokens // search.step_tokens
    if search.rounds > 1:
        yield (
            f"- Short runs chose the values of the last round. Those of {rounds[0].tokens:,} tokens "
            f"({many(steps, 'step')}) have a whole schedule of their own, and a longer run may like another value."
        )
    if search.rounds > 1 and search.key.startswith("optimizer.lr") and steps < _SHORT:
        yield (
            f"- Below {_SHORT} steps the best learning rate may be far from that of the whole run: at 43M AdamW's was "
            "5e-4 in 100 steps and 2e-3 in 400 (results/muon-loss)."
        )
    yield "- All other keys stayed as they are: another warm-up or another size has another best value."
    if search.seeds < 3:
        yield f"- The last round had {many(search.seeds, 'seed')}: differences of 0.005 may be chance."


def draw(search: Halving, rounds: Sequence[Round], measured: str, path: Path) -> None:
    """Draw the loss over the value, a line for each round."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    panel = figure.subplots()
    for each in rounds:
        points = [(value, loss) for value, loss in sorted(each.means.items()) if math.isfinite(loss)]
        if points:
            panel.plot(*zip(*points, strict=True), marker="o", label=f"{each.tokens:,} tokens")
    panel.set_xscale("log" if search.low > 0 else "linear")
    panel.set_xlabel(search.key)
    panel.set_ylabel(measured)
    panel.legend(fontsize=8)
    figure.savefig(path, dpi=110)
