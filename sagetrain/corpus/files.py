"""Readers of files: JSON lines, JSON arrays, tables, plain text. Each yields chunks of consecutive records.

The libraries datasets and pyarrow read such files, too, but they change texts without a word: "2020-01-02" becomes a
date, and the cell "x"y of a table becomes xy. A wrong line has no number there, and a cell may have a megabyte at most.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from codecs import BOM_UTF8, getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from sagetrain.config.arguments import spelled
from sagetrain.config.errors import ConfigError
from sagetrain.corpus.blocks import BLOCK, Content, opened
from sagetrain.corpus.chunk import HASHED_BYTES, SEAM_BYTES, Broken, Chunk, Place, no_such_key, root_of
from sagetrain.corpus.kinds import DELIMITERS, HEAD, Kind, check_head, compression, kind_of

Chunks = Iterator[Chunk]
CHUNK_BYTES = 1 << 19
CHUNK_RECORDS = 4096
_SPACE = re.compile(r"[ \t\n\r]*")
_CUT = 16
"""A mistake this many characters before the end of a text may come from the text being cut inside of a literal or an
escape."""


@dataclass(frozen=True)
class Wanted:
    """The parts of a file that are read."""

    columns: tuple[str, ...]
    """The field that holds the text, or with `fields` the fields that every record has."""
    optional: tuple[str, ...] = ()
    """Fields of a record that may be missing."""
    fields: bool = False
    """Whether records are dicts of fields instead of texts."""
    separator: bytes = b""
    """The bytes between the documents of a plain text file. Empty: the file is one document."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The options of the command line that name the fields. Others are named by --text-key."""

    @property
    def divisible(self) -> bool:
        """Whether documents can be found from any place of a text file on, because no separator can begin inside of
        another."""
        cut = self.separator
        return bool(cut) and not any(cut[:size] == cut[-size:] for size in range(1, len(cut)))


def columns_among(origin: object, names: Sequence[str], wanted: Wanted, nested: bool = True) -> list[str]:
    """Return the columns to read that are among the names of a table's columns. `nested`: the column a may hold the
    field a.b. Raises ConfigError if a column is missing, or several columns have the name of one that is read."""
    found = []
    for column in (*wanted.columns, *wanted.optional):
        if root_of(column, names) if nested else column in names:
            found.append(column)
        elif column in wanted.columns:
            option = wanted.options.get(column, spelled("text_key"))
            raise ConfigError(f"{origin}: {no_such_key(column, names, option)}")
        if names.count(column) > 1:
            raise ConfigError(
                f"{origin}: {names.count(column)} columns have the name {column!r}, and nobody can tell which of them "
                "is meant; rename all but one"
            )
    return found


def read(content: Content, wanted: Wanted, place: Place, start: int = 0, stop: int | None = None) -> Chunks:
    """Yield the chunks of a file that is neither an archive nor Parquet. Records before `place`, up to which the input
    has been read already, may come again.

    Args:
        start: first byte. Only for uncompressed files of lines or of divisible text; records that begin before are left
            out.
        stop: byte after the last one. Records that begin there or later are left out.
    """
    name, kind, separator = content.name, kind_of(content.name), wanted.separator
    before = len(separator) if kind is Kind.TEXT else 1  # Its end is there where a record begins at byte `start`.
    at = begin = place.offset or max(0, start - before)
    with opened(content, at) as (file, progress):
        if not at:
            check_head(name, file.peek()[:HEAD])
            at = len(file.read(len(BOM_UTF8))) if file.peek().startswith(BOM_UTF8) else 0
        chunk = partial(Chunk, f"{name} from byte {start:,}" if start else name)
        consumed = lambda: progress() - start  # noqa: E731
        number, resumes = place.records + 1 if place.offset else 1, content.seekable
        match kind:
            case Kind.TABLE:
                unread, rows = _rows(name, file, wanted)
                yield from _chunks(partial(chunk, "row", unread=unread), rows, consumed)
            case Kind.TEXT:
                if not separator:
                    _refuse_json(name, file.peek())
                chunk, resumes = partial(chunk, "document" if separator else "file"), resumes and bool(separator)
                found = _within(_documents(name, file, separator, at), begin, start, stop)
                yield from _chunks(chunk, found, consumed, number, resumes)
            case Kind.LINES | Kind.JSON if not (start or place.offset) and is_array(file.peek()):
                yield from _chunks(partial(chunk, "element"), _elements(name, file), consumed)
            case _:
                found = _within(_lines(file, at), begin, start, stop)
                yield from _chunks(partial(chunk, "line"), found, consumed, number, resumes)


_Read = tuple[Any, int, int, bool]
"""A record, its size, the byte behind it, and whether it ends there. The next one is then its next part."""


def _chunks(
    chunk: Callable[..., Chunk],
    records: Iterable[_Read],
    consumed: Callable[[], int],
    first: int = 1,
    resumes: bool = False,
) -> Chunks:
    """Gather records into chunks. Each part of a record is a chunk of its own.

    Args:
        chunk: makes one of the number of its first record and its records.
        consumed: returns how many bytes of the file have been read.
        first: the number of the first record.
        resumes: whether reading can begin at any byte.
    """
    gathered: list[Any] = []
    size, where, key = 0, 0, None
    held: Chunk | None = None  # A part waits for the one behind it.
    for record, length, end, whole in records:
        if gathered and (size >= CHUNK_BYTES or len(gathered) >= CHUNK_RECORDS or not whole):
            yield chunk(first, gathered, consumed(), offset=where)
            first, gathered, size = first + len(gathered), [], 0
        where = end if resumes and whole else 0
        if whole and key is None:
            gathered.append(record)
            size += length
            continue
        continues, key = key is not None, key or record[:HASHED_BYTES]
        part = chunk(first, [record], consumed(), key, continues, not whole, where)
        if held:
            held.behind, part.before = record[:SEAM_BYTES], held.records[0][-SEAM_BYTES:]
            yield held
        held = None if whole else part
        if whole:
            yield part
            first, key = first + 1, None
    if gathered:
        yield chunk(first, gathered, consumed(), offset=where)


def _within(records: Iterable[_Read], at: int, start: int, stop: int | None) -> Iterator[_Read]:
    """Yield the records that begin at bytes `start` to `stop` - 1. The first one begins at byte `at`."""
    for record in records:
        if stop is not None and at >= stop:
            return
        if at >= start:
            yield record
        _, _, end, whole = record
        at = end if whole else at


# -- lines and arrays --------------------------------------------------------------------------------------------------


def _lines(file: Iterable[bytes], at: int) -> Iterator[_Read]:
    for line in file:
        at += len(line)
        yield line.removesuffix(b"\n"), len(line), at, True


def is_array(head: bytes) -> bool:
    """Whether JSON with this beginning is an array of objects or texts. "[INFO]" begins a line of a log."""
    return re.match(rb"\s*\[(?!\s*\w)", head.removeprefix(BOM_UTF8)) is not None


def _is_cut(text: str, error: ValueError | RecursionError) -> bool:
    """Whether a text may be no JSON only because its end is missing."""
    return getattr(error, "pos", 0) >= len(text) - _CUT or str(error).startswith("Unterminated string")


def _elements(name: str, file: BinaryIO) -> Iterator[_Read]:
    """Yield the elements of a JSON array as bytes. The file is read piece by piece, so that only a chunk of them has to
    be in memory."""
    decoder, characters = json.JSONDecoder(parse_int=float), getincrementaldecoder("utf-8")()
    text, at, number, ended = "", 0, 0, False

    def error(what: str) -> ConfigError:
        return ConfigError(f"{name}, after element {number:,} of its JSON array: {what}")

    def more() -> None:
        """Read as much again as follows the place, or a block."""
        nonlocal text, at, ended
        block = file.read(max(BLOCK, len(text) - at))
        try:
            text, at, ended = text[at:] + characters.decode(block, not block), 0, not block
        except UnicodeDecodeError as no_text:
            raise error(f"not UTF-8 (byte {no_text.object[no_text.start]:#04x})") from no_text

    def following() -> str:
        """Return the next character that is not white space, and go there. Return "" at the end."""
        nonlocal at
        while True:
            at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
            if at < len(text) or ended:
                return text[at : at + 1]
            more()

    following()
    at += 1  # This is the bracket that begins the array.
    found = following()
    if found == "]":
        at += 1
    while found != "]":
        while True:
            try:
                _, end = decoder.raw_decode(text, at)
                if end < len(text) or ended:  # The text may be cut inside of a number.
                    break
            except (ValueError, RecursionError) as wrong:
                if ended or not _is_cut(text, wrong):
                    raise error(f"not valid JSON: {wrong}") from wrong
            more()
        element, at, number = text[at:end], end, number + 1
        yield element.encode(), len(element), 0, True
        found = following()
        if found not in (",", "]"):
            expected = f", or ] is expected there, not {found!r}" if found else "the array does not end (cut short?)"
            raise error(expected)
        at += 1
        following()
    if following():
        fix = "jq -c '{messages: .}' FILE"
        raise error(f"text follows the end of the array (a list on each line? write each as an object: {fix})")


# -- tables ------------------------------------------------------------------------------------------------------------


def _rows(name: str, file: Iterable[bytes], wanted: Wanted) -> tuple[tuple[str, ...], Iterator[_Read]]:
    """Return the columns of a .csv or .tsv that are not read, and its rows: texts of one column, or dicts of fields.
    Its first line names the columns."""
    csv.field_size_limit(sys.maxsize)
    delimiter = DELIMITERS[Path(name.lower().removesuffix(compression(name))).suffix]
    rows = _rows_of(name, csv.reader(_table_lines(name, file), delimiter=delimiter, strict=True))
    if (names := next(rows, None)) is None:
        return (), iter(())
    try:
        read = {each: names.index(each) for each in columns_among(name, names, wanted, nested=False)}
    except ConfigError as error:
        other = next((each for each in ";\t|," if each in names[0]), None) if len(names) == 1 else None
        hint = f"; it seems to be separated by {other!r}, and not by {delimiter!r}" if other else ""
        raise ConfigError(f"{error}{hint}") from error

    def found() -> Iterator[_Read]:
        for row in rows:
            if len(row) == len(names):
                record = {each: row[place] for each, place in read.items()}
                size = sum(map(len, record.values()))
                yield record if wanted.fields else record[wanted.columns[0]], size, 0, True
            else:
                yield Broken(f"it has {len(row)} cells, and the first line has {len(names)}"), 0, 0, True

    return tuple(each for each in names if each not in read) if wanted.fields else (), found()


def _table_lines(name: str, file: Iterable[bytes]) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        _refuse_zeros(name, line)
        try:
            yield line.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{name}, line {number:,}: not UTF-8 (byte {line[error.start]:#04x}); convert the file: iconv "
                "-f WINDOWS-1252 -t UTF-8, or from what it is written in"
            ) from error


def _rows_of(name: str, reader: Any) -> Iterator[list[str]]:
    """Yield the rows that are not empty lines. A csv.Error becomes a ConfigError with its line."""
    try:
        yield from (row for row in reader if row)
    except csv.Error as error:
        fix = "a cell that holds quotation marks is put into quotation marks, and has them twice"
        if "new-line character" in str(error):
            fix = (
                "if \\r ends the lines, write \\n: tr '\\r' '\\n'; if it stands in a text, put the cells into "
                "quotation marks (quoting=csv.QUOTE_ALL, in pandas, too)"
            )
        raise ConfigError(f"{name}, line {reader.line_num:,}: {error}; {fix}") from error


# -- plain text --------------------------------------------------------------------------------------------------------


def _refuse_zeros(name: str, read: bytes) -> None:
    """Refuse bytes of zero in text or a table. Lines of JSON that hold some can be left out. Raises ConfigError."""
    if b"\0" in read:
        raise ConfigError(
            f"{name}: holds bytes of zero behind its beginning, as no text does (was writing it cut off by a crash?): "
            f"take them out (tr -d '\\000'), or leave it out with {spelled('glob')}"
        )


def _refuse_json(name: str, begin: bytes) -> None:
    """Refuse plain text whose first line is a JSON object, and text that begins as an array of JSON objects. `begin` is
    its first block, which may end inside of the first line. Raises ConfigError if it is JSON."""
    begin = begin.lstrip()
    line, newline, _ = begin.partition(b"\n")
    try:
        if begin.startswith(b"{"):
            what, suffix, text = "its first line is a JSON object", ".jsonl", line.decode(errors="replace")
            json.loads(text)
        elif re.match(rb"\[\s*\{", begin):
            what, suffix, text = "it begins as a JSON array of objects does", ".json", begin.decode(errors="replace")
            json.JSONDecoder().raw_decode(text, text.index("{"))
        else:
            return
    except (ValueError, RecursionError) as error:
        if newline or len(text) < HEAD or not _is_cut(text, error):
            return
    packed = name[len(name) - len(compression(name)) :]
    raise ConfigError(
        f"{name}: {what}, and a file with this suffix would be one document of plain text: rename it to end in "
        f"{suffix}{packed}, or leave it out with {spelled('glob')}"
    )


def _documents(name: str, file: BinaryIO, separator: bytes, at: int) -> Iterator[_Read]:
    """Yield the documents of a text file that have a separator between them, or the whole file if the separator is
    empty. The first one begins at byte `at`.

    A long document comes in parts that end with a newline where there is one in their second half. The encoder moves
    the cut to where it changes no token (long_texts.py).
    """
    rest, begun = b"", False
    while block := file.read(BLOCK):
        _refuse_zeros(name, block)
        rest = b"".join((rest, block))  # A copy, because a short block keeps the memory of a whole one.
        *documents, rest = rest.split(separator) if separator else [rest]
        for document in documents:
            at += len(document) + len(separator)
            yield document, len(document), at, True
            begun = False
        if len(rest) >= CHUNK_BYTES + len(separator):
            # The rest may be the beginning of a separator.
            limit = len(rest) - max(len(separator) - 1, 0)
            part = rest.rfind(b"\n", limit // 2, limit) + 1 or _character_boundary(rest[:limit])
            at += part
            yield rest[:part], part, at, False
            rest, begun = rest[part:], True
    if rest or begun or not separator:
        yield rest, len(rest), at + len(rest), True


def contains(content: Content, wanted: bytes) -> bool:
    """Whether a file contains these bytes."""
    rest = b""
    with opened(content) as (file, _):
        while block := file.read(BLOCK):
            if wanted in (rest := rest + block):
                return True
            rest = rest[len(rest) - len(wanted) + 1 :]
    return False


def _character_boundary(data: bytes) -> int:
    """Return the last position that does not cut a UTF-8 character."""
    for position in range(len(data) - 1, max(len(data) - 4, 0), -1):
        if data[position] & 0xC0 != 0x80:
            return position
    return len(data)
