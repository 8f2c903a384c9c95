"""The plot of every variant's gap over tokens, with the bands of seed and rounding noise."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path

from sagetrain.comparing.analysis import Curves
from sagetrain.comparing.statistics import over


def plot_gaps(rows: Sequence[Curves], baseline: str, path: Path) -> None:
    """Draw one panel per row. Thin lines are seeds, thick lines are their means. The lines set the scale; a wider band
    leaves the panel, and the legend says its width at the end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.6 + 3.2 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    for panel, row in zip(panels, rows, strict=True):
        parted = min((points[0][0] for seeds in row.gaps.values() for points in seeds if points), default=0)
        bands = ((row.seed_band, "0.88", "seeds"), (row.rounding_band, "0.7", "rounding"))
        for whole, grey, name in bands:
            band = [point for point in whole if point[0] >= parted]  # Before --branch there is nothing to compare.
            if band:
                tokens, half = zip(*band, strict=True)
                below = [-value for value in half]
                label = f"{baseline}: {name}, {half[-1]:.4f} at the end"
                panel.fill_between(_millions(tokens), below, half, color=grey, label=label, lw=0)
        panel.axhline(0, color="black", linewidth=0.8)
        for number, (variant, seeds) in enumerate(row.gaps.items()):
            color, drawn = f"C{number}", [points for points in seeds if points]
            for points in drawn:
                panel.plot(_millions([x for x, _ in points]), [y for _, y in points], color=color, lw=0.6, alpha=0.5)
            if mean := over(drawn, statistics.fmean):
                tokens, gaps = zip(*mean, strict=True)
                panel.plot(_millions(tokens), gaps, color=color, linewidth=1.8, label=f"{variant} ({len(drawn)})")
        values = [gap for seeds in row.gaps.values() for points in seeds for _, gap in points if math.isfinite(gap)]
        if values:
            low, high = min(0, *values), max(0, *values)
            room = 0.15 * (high - low) or 1e-4
            panel.set_ylim(low - room, high + room)
        panel.set_title(row.row, fontsize=10)
        # The height of a panel holds this many characters.
        panel.set_ylabel(textwrap.fill(f"training loss - {baseline}", 36))
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=8, loc="best")
    panels[-1].set_xlabel("tokens seen, millions")
    figure.savefig(path, dpi=110)


def _millions(tokens: Sequence[int]) -> list[float]:
    return [value / 1e6 for value in tokens]
