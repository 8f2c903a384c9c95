"""What the plots of several pages share: tables as they are read, numbers of their cells, bars and intervals."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

HERE = Path(__file__).parent
Table = list[dict[str, str]]
"""A table as a list of rows. A row maps a column's name to the cell. A second column of the same name ends in ' 2'."""


def tables(page: str) -> list[Table]:
    """Return the tables of a page, in their order. The page is a folder's name, or log/NAME."""
    path = HERE / (f"{page}.md" if page.startswith("log/") else f"{page}/README.md")
    found: list[Table] = []
    for block in re.findall(r"(?:^\|.*\n)+", path.read_text(), re.M):
        lines = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()]
        names = [name if name not in lines[0][:i] else f"{name} 2" for i, name in enumerate(lines[0])]
        found.append([dict(zip(names, line, strict=False)) for line in lines[2:]])
    return found


def number(cell: str) -> float:
    """Return the first number of a cell, without its sign: `65,247`, `0.449`, `59.9 GiB`, `**1.128**`."""
    found = re.search(r"\d[\d,]*\.?\d*|\.\d+", cell)
    assert found, f"no number in {cell!r}"
    return float(found[0].replace(",", ""))


def numbers(rows: Table, column: str) -> list[float]:
    """Return the numbers of a column, without its empty cells."""
    return [number(row[column]) for row in rows if row.get(column)]


def interval(cell: str) -> tuple[float, float]:
    """Return the mean and the half width of a cell such as `**0.0004 ± 0.0001** (four)`."""
    found = re.search(r"([-+]?\d+\.\d+) ± (\d+\.\d+)", cell)
    assert found, f"no interval in {cell!r}"
    return float(found[1]), float(found[2])


def plain(text: str) -> str:
    """Return the text of a cell without its markup."""
    return re.sub(r"[`*\\]", "", text).strip()


def bars(panel: Axes, names: list[str], values: list[float], unit: str, one: float | None = None) -> None:
    """Draw horizontal bars with their numbers, and a line at `one`."""
    drawn = panel.barh(range(len(names)), values, color=[f"C{int('SageTrain' in n or 'sage' in n)}" for n in names])
    panel.bar_label(
        drawn, [f"{value:,.3g}" if value < 1000 else f"{value:,.0f}" for value in values], padding=3, fontsize=8
    )
    panel.set_yticks(range(len(names)), names, fontsize=8)
    panel.invert_yaxis()
    panel.set_xlim(0, 1.15 * max(values))
    panel.set_xlabel(unit)
    if one is not None:
        panel.axvline(one, color="black", linewidth=0.8)


def paired(
    panel: Axes, names: list[str], columns: dict[str, Sequence[float | None]], unit: str, base: float = 0
) -> None:
    """Draw the bars of a row beside each other, one for each column, from `base` on. None leaves a place empty."""
    height = 0.8 / len(columns)
    for place, (label, values) in enumerate(columns.items()):
        shown = [(row + place * height, value - base) for row, value in enumerate(values) if value is not None]
        panel.barh(*zip(*shown, strict=True), height=height, left=base, label=label)
    panel.set_yticks([row + (len(columns) - 1) * height / 2 for row in range(len(names))], names, fontsize=8)
    panel.invert_yaxis()
    panel.set_xlabel(unit)
    panel.legend(fontsize=7)


def ranked(page: str, name: str, column: str, unit: str, one: float | None = None) -> Callable[[Figure], None]:
    """Return what draws a page's first table as bars. `name` has the columns of a bar's name in braces."""

    def drawn(figure: Figure) -> None:
        rows = [row for row in tables(page)[0] if row[column]]
        bars(figure.subplots(), [plain(name.format_map(row)) for row in rows], numbers(rows, column), unit, one)

    return drawn


def gaps(page: str, name: str, unit: str) -> Callable[[Figure], None]:
    """Return what draws the differences of a page's first table to 16 bits with their intervals. `name` has the columns
    of a row's name in braces."""

    def drawn(figure: Figure) -> None:
        rows, panel = [row for row in tables(page)[0] if "±" in row["training loss"]], figure.subplots()
        for shift, kind in enumerate(("training loss", "held-out text")):
            means, widths = zip(*(interval(row[kind]) for row in rows), strict=True)
            places = [row + 0.2 * shift for row in range(len(rows))]
            panel.errorbar(means, places, xerr=widths, fmt="o", markersize=4, capsize=3, label=kind)
        names = [plain(name.format_map(row)) for row in rows]
        panel.set_yticks([row + 0.1 for row in range(len(rows))], names, fontsize=8)
        panel.tick_params(axis="x", labelsize=8)
        panel.invert_yaxis()
        panel.axvline(0, color="black", linewidth=0.8)
        panel.set_xlabel(unit)
        panel.legend(fontsize=8)

    return drawn


def cut(figure: Figure) -> list[str]:
    """Return the titles and labels of axes that are not whole in the drawn picture."""
    texts = [text for panel in figure.axes for text in (panel.title, panel.xaxis.label, panel.yaxis.label)]
    return [text.get_text() for text in texts if text.get_text() and not _inside(text.get_window_extent(), figure.bbox)]


def _inside(box: Bbox, page: Bbox) -> bool:
    """Say whether a box lies in the page."""
    return page.x0 <= box.x0 and page.y0 <= box.y0 and box.x1 <= page.x1 and box.y1 <= page.y1
