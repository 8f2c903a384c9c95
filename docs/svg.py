"""Write pictures as SVG that follow the reader's light or dark colours. What is wider than its place is an error."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

WIDTH = 480
"""Units of a picture's width: few, so that its letters can be read on a phone."""

# (light, dark) of every class. Letters and words on a filled box are `on`.
COLORS = {
    "paper": ("#ffffff", "#161c23"),
    "ink": ("#1d2733", "#e8edf2"),
    "faint": ("#56626e", "#a9b4bf"),
    "box": ("#eef1f4", "#27313b"),
    "on": ("#ffffff", "#10161d"),
    "a": ("#1d4ed8", "#93c5fd"),
    "b": ("#b45309", "#fcd34d"),
    "c": ("#6d28d9", "#c4b5fd"),
    "d": ("#0f766e", "#5eead4"),
}
FILLED = {"a", "b", "c", "d"}
_NARROW, _BROAD = set("iljtfrI.,:;'|!()[]/ -"), set("mwMW@%—→")


def width_of(text: str, size: float, *, mono: bool = False, bold: bool = False) -> float:
    """Return about how wide a text is, on the safe side: the reader's font is not known."""
    if mono:
        return 0.62 * size * len(text)
    widths = (0.38 if c in _NARROW else 0.95 if c in _BROAD else 0.72 if c.isupper() else 0.62 for c in text)
    return size * sum(widths) * (1.1 if bold else 1)


class Picture:
    """Collect shapes and write them as SVG.

    Args:
        title: what the picture shows, for people who cannot see it.
    """

    def __init__(self, title: str) -> None:
        self.title, self._parts, self._bottom = title, [f"<title>{escape(title)}</title>"], 0.0

    def rectangle(self, x: float, y: float, w: float, h: float, kind: str, *, round_: float = 4) -> None:
        """Draw a filled rectangle; `kind` is a key of COLORS."""
        assert x >= 0 and x + w <= WIDTH and y >= 0, f"{self.title}: {x, y, w, h} is outside"
        self._bottom = max(self._bottom, y + h)
        self._parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{round_:g}"/>')

    def frame(self, x: float, y: float, w: float, h: float) -> None:
        """Draw an empty, dashed rectangle around what belongs together."""
        self._parts.append(f'<rect class="frame" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="6"/>')

    def text(
        self, x: float, y: float, text: str, size: float = 14, *, anchor: str = "start", kind: str = "ink",
        bold: bool = False, mono: bool = False,
    ) -> None:  # fmt: skip
        """Write a line of text whose baseline is at y."""
        wide = width_of(text, size, mono=mono, bold=bold)
        self._bottom = max(self._bottom, y + size / 3)
        left = {"start": x, "middle": x - wide / 2, "end": x - wide}[anchor]
        assert left >= 0 and left + wide <= WIDTH, (
            f"{self.title}: {text!r} reaches from {left:.0f} to {left + wide:.0f}"
        )
        style = f"{kind}{' bold' * bold}{' mono' * mono}"
        place = f'x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"'
        self._parts.append(f'<text class="{style}" {place}>{escape(text)}</text>')

    def box(
        self, x: float, y: float, w: float, h: float, lines: str | Iterable[str], kind: str = "box", *,
        size: float = 14, mono: bool = False,
    ) -> None:  # fmt: skip
        """Draw a rectangle with lines of text in its middle; the first of several is bold."""
        lines = [lines] if isinstance(lines, str) else list(lines)
        self.rectangle(x, y, w, h, kind)
        step = 1.3 * size
        top = y + h / 2 - step * (len(lines) - 1) / 2 + 0.35 * size
        for i, line in enumerate(lines):
            assert width_of(line, size, mono=mono) <= w - 4, f"{self.title}: {line!r} is wider than its box"
            on = "on" if kind in FILLED else "ink"
            bold = len(lines) > 1 and i == 0
            self.text(x + w / 2, top + i * step, line, size, anchor="middle", kind=on, bold=bold, mono=mono)

    def line(self, *points: tuple[float, float], arrow: bool = True) -> None:
        """Draw a line through points, with an arrow head at its end."""
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        head = ' marker-end="url(#head)"' if arrow else ""
        self._parts.append(f'<path class="line" d="{path}"{head}/>')

    def legend(self, y: float, entries: Iterable[tuple[str, str]], x: float = 14, size: float = 13) -> None:
        """Explain colours in one line: (kind, words)."""
        for kind, words in entries:
            self.rectangle(x, y - 11, 13, 13, kind, round_=2)
            self.text(x + 19, y, words, size)
            x += 33 + width_of(words, size)

    def svg(self) -> str:
        """Return the whole file, as high as what was drawn."""
        height = self._bottom + 10
        rules = []
        for mode in (0, 1):
            fills = "".join(f".{kind}{{fill:{colors[mode]}}}" for kind, colors in COLORS.items())
            line = COLORS["faint"][mode]
            drawn = f".line,.frame{{stroke:{line};fill:none}}.tip{{fill:{line}}}"
            rules.append(fills + drawn)
        style = (
            "text{font-family:system-ui,'Segoe UI',Roboto,Helvetica,Arial,sans-serif}"
            ".mono{font-family:ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace}.bold{font-weight:600}"
            ".line{stroke-width:1.5}.frame{stroke-width:1;stroke-dasharray:4 3}"
            f"{rules[0]}@media (prefers-color-scheme:dark){{{rules[1]}}}"
        )
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path class="tip" d="M0 0 L8 4 L0 8 z"/></marker>'
        )
        body = "\n".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="560" role="img">\n'
            f"<style>{style}</style>\n<defs>{head}</defs>\n"
            f'<rect class="paper" width="{WIDTH}" height="{height:g}" rx="8"/>\n{body}\n</svg>\n'
        )
