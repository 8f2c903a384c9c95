"""Tables for terminals of any width. Words are never cut, and a table that does not fit becomes a list."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Literal

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

PAGE = 100
"""Width in columns of a page that is read line by line."""
_NO_LIMIT = 10_000


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns. The first cell names its row."""

    title: str
    columns: Sequence[str]
    """Names of the columns. If all are empty, the rows are facts: a name, and a text about it."""
    rows: Sequence[Sequence[str]]
    numbers: Sequence[str] = ()
    """Columns that hold numbers. They are aligned right, and a number and its unit stay on one line."""
    caption: str = ""
    total: bool = False
    """Whether the last row is the sum of the others."""


def facts(title: str, rows: Sequence[tuple[str, str]]) -> Table:
    """Build a table of facts: names, each with a text about it."""
    return Table(title, ("", ""), rows)


def console(file: IO[str] | None = None, most: int = _NO_LIMIT) -> Console:
    """Return a console as wide as the terminal, but no wider than `most`; as wide as that if there is no terminal."""
    result = Console(file=file)
    return result if result.is_terminal and result.width <= most else Console(file=file, width=most)


def print_text(console: Console, text: str, style: str = "", indent: str = "", width: int | None = None) -> None:
    """Print paragraphs, one per line of the text. They are broken between words at `width`, by default that of the
    console. `indent` is put before the further lines of a paragraph."""
    for line in text.splitlines():
        start = line[: len(line) - len(line.lstrip())]
        lines = textwrap.TextWrapper(
            width or console.width, subsequent_indent=start + indent, break_long_words=False, break_on_hyphens=False
        )
        for part in lines.wrap(line) or [""]:
            print_line(console, part, style)


def print_line(console: Console, line: str, style: str = "") -> None:
    """Print a line without breaking it, so that it can be pasted from a terminal of any width."""
    console.print(Text(line, style), soft_wrap=True)


def print_command(console: Console, name: str, words: Sequence[str]) -> None:
    """Print words of a command line after a name. A line that goes on ends in a backslash, so that all of them can be
    pasted into a shell together."""
    text = f"{name} {' '.join(words)}"
    wrapper = textwrap.TextWrapper(
        console.width - 2, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    lines = [text] if len(text) <= console.width else wrapper.wrap(text)
    for line in lines[:-1]:
        print_line(console, f"{line} \\")
    print_line(console, lines[-1])


def print_table(console: Console, table: Table) -> None:
    """Print a table as a grid if all words fit, or else as a list."""
    print_text(console, table.title, "italic")
    widths = _widths(table, console.width)
    if widths is None:
        _print_list(console, table)
    else:
        _print_grid(console, table, widths)
    print_text(console, table.caption, "italic")


def _print_grid(console: Console, table: Table, widths: list[int]) -> None:
    named = any(table.columns)
    grid = RichTable(box=box.SIMPLE_HEAD, show_header=named, show_edge=False, pad_edge=False, collapse_padding=True)
    for number, (name, width) in enumerate(zip(table.columns, widths, strict=True)):
        justify: Literal["left", "right"] = "right" if name in table.numbers else "left"
        grid.add_column(Text(name), justify=justify, width=width, style="" if named or number else "bold")
    for number, row in enumerate(table.rows):
        if table.total and number == len(table.rows) - 1:
            grid.add_section()
        grid.add_row(*map(Text, row))
    with console.capture() as printed:
        console.print(grid, soft_wrap=True)
    for line in Text.from_ansi(printed.get()).split():
        # rich fills lines up with spaces.
        line.rstrip()
        console.print(line, soft_wrap=True)


def _print_list(console: Console, table: Table) -> None:
    for row in table.rows:
        first, *rest = (f"{name} {cell}".strip() for name, cell in zip(table.columns, row, strict=True) if cell)
        print_text(console, first, "bold")
        print_text(console, f"    {'; '.join(rest)}")


def _widths(table: Table, available: int) -> list[int] | None:
    """Return the widths of the columns, such that no word and no number is broken. Return None if there is no room for
    that."""
    # There are two spaces between columns.
    available -= 2 * (len(table.columns) - 1)
    columns = list(zip(table.columns, *table.rows, strict=True))
    most = [max(map(len, cells)) for cells in columns]
    least = [max(map(_longest_word, cells)) for cells in columns]
    for number, (name, *cells) in enumerate(columns):
        if number == 0 or name in table.numbers:
            least[number] = max([least[number], *map(len, cells)])
    spare, wanted = available - sum(least), sum(most) - sum(least)
    if spare < 0:
        return None
    if wanted <= spare:
        return most
    return [low + spare * (high - low) // wanted for low, high in zip(least, most, strict=True)]


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)


def size(count: float) -> str:
    """Return a number of bytes in words."""
    if count < 2**20:
        return f"{count / 2**10:.1f} KiB"
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.1f} MiB"


def milliseconds(seconds: float) -> str:
    """Return a time in words."""
    return f"{1e3 * seconds:,.1f} ms"
