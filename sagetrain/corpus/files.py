"""Readers of files: JSON lines, JSON arrays, tables, Parquet, plain text. Each yields chunks of consecutive records."""

from __future__ import annotations

import codecs
import csv
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sagetrain.config.errors import ConfigError
from sagetrain.corpus.blocks import Content, blocks, lines
from sagetrain.corpus.chunk import Broken, Chunk, Place, no_such_key, root_of
from sagetrain.corpus.kinds import DELIMITERS, HEAD, Kind, check_head, compression, kind_of

CHUNK_BYTES = 1 << 19
CHUNK_RECORDS = 4096
_HASHED_BYTES = 1 << 16
_FIRST_LINE = 1 << 26
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


def check_columns(origin: object, names: Sequence[str], wanted: Wanted, nested: bool = True) -> None:
    """Check that the columns to read are among the names of a table's columns, each once. `nested`: the column a may
    hold the field a.b.

    Raises:
        ConfigError: a column is missing, or several columns have the name of one that is read.
    """
    for column in wanted.columns:
        if not (root_of(column, names) if nested else column in names):
            option = wanted.options.get(column, "--text-key")
            raise ConfigError(f"{origin}: {no_such_key(column, names, option)}")
    for column in (*wanted.columns, *wanted.optional):
        if names.count(column) > 1:
            raise ConfigError(
                f"{origin}: {names.count(column)} columns have the name {column!r}, and nobody can tell which of them "
                "is meant; rename all but one"
            )


def read(content: Content, wanted: Wanted, place: Place, start: int = 0, stop: int | None = None) -> Iterator[Chunk]:
    """Yield the chunks of a file that is neither an archive nor Parquet.

    Records before `place` may come again.

    Args:
        content: the file.
        wanted: the columns to read, or the separator of documents.
        place: the place up to which the input has been read already.
        start: first byte. Only for uncompressed files of lines or of divisible text; records that begin before are left
            out.
        stop: byte after the last one. Records that begin there or later are left out.
    """
    match kind_of(content.name):
        case Kind.LINES:
            return _read_lines(content, place, start, stop)
        case Kind.JSON:
            return _read_json(content, place, start, stop)
        case Kind.TABLE:
            return _read_table(content, wanted)
        case _ if wanted.separator:
            return _read_documents(content, wanted.separator, place, start, stop)
        case _:
            return _read_text(content)


def _text_blocks(content: Content, start: int = 0) -> Iterator[tuple[bytes, int]]:
    """Yield the blocks of a file whose first bytes are text. Raises ConfigError if they are not, or if text or a table
    holds bytes of zero. Lines that hold some can be left out."""
    first, zeros_allowed = start == 0, kind_of(content.name) in (Kind.LINES, Kind.JSON)
    for block, consumed in blocks(content, start):
        if first:
            check_head(content.name, block[:HEAD])
            first = False
        if not zeros_allowed and b"\0" in block:
            raise ConfigError(
                f"{content.name}: holds bytes of zero behind its beginning, as no text does (was writing it cut off by "
                "a crash?): take them out (tr -d '\\000'), or leave it out with --glob"
            )
        yield block, consumed


# -- lines and arrays --------------------------------------------------------------------------------------------------


def _read_lines(
    content: Content, place: Place, start: int, stop: int | None, given: Iterator[tuple[bytes, int]] | None = None
) -> Iterator[Chunk]:
    """Yield chunks of whole lines. Of an uncompressed file these are the lines that begin at bytes `start` to `stop` -
    1. `given` are the blocks, if somebody has looked at them already."""
    name = f"{content.name} from byte {start:,}" if start else content.name
    number = place.records + 1 if place.offset else 1
    size, consumed, offset, chunk = 0, 0, place.offset or start, []
    plain = not compression(content.name)
    # A part begins at the first line that begins in it, after the end of the line that its first byte is in.
    cut = bool(start) and not place.offset
    for line, consumed, rest in lines(given or _text_blocks(content, offset - 1 if cut else offset)):
        if plain and stop is not None and offset >= stop:
            break
        if plain:
            offset = consumed - rest
        if cut:
            cut = False
            continue
        chunk.append(line)
        size += len(line)
        if size >= CHUNK_BYTES or len(chunk) >= CHUNK_RECORDS:
            yield Chunk(name, "line", number, chunk, consumed - start, offset=offset)
            number, size, chunk = number + len(chunk), 0, []
    if chunk:
        yield Chunk(name, "line", number, chunk, consumed - start, offset=offset)


def is_array(head: bytes) -> bool:
    """Whether JSON with this beginning is an array."""
    return head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _read_json(content: Content, place: Place, start: int, stop: int | None) -> Iterator[Chunk]:
    """Yield chunks of an array's elements, or of JSON lines."""
    if start or place.offset:
        yield from _read_lines(content, place, start, stop)
        return
    given = _text_blocks(content)
    before: list[tuple[bytes, int]] = []
    for block in given:
        before.append(block)
        if block[0].strip():
            break
    array = bool(before) and is_array(before[-1][0])
    together = _chained(before, given)
    yield from _read_array(content, together) if array else _read_lines(content, place, start, stop, together)


def _chained(before: list[tuple[bytes, int]], given: Iterator[tuple[bytes, int]]) -> Iterator[tuple[bytes, int]]:
    yield from before
    yield from given


def _read_array(content: Content, given: Iterator[tuple[bytes, int]]) -> Iterator[Chunk]:
    """Yield the elements of a JSON array as bytes, so that only a chunk of them has to be in memory."""
    array, chunk, size = _Array(content.name, given), [], 0
    for element in array:
        chunk.append(element.encode())
        size += len(element)
        if size >= CHUNK_BYTES or len(chunk) >= CHUNK_RECORDS:
            yield Chunk(content.name, "element", array.number - len(chunk) + 1, chunk, array.consumed)
            chunk, size = [], 0
    if chunk:
        yield Chunk(content.name, "element", array.number - len(chunk) + 1, chunk, array.consumed)


class _Array:
    """An iterator over the elements of a JSON array as text. The file is read block by block."""

    def __init__(self, name: str, given: Iterator[tuple[bytes, int]]) -> None:
        self.number = self.consumed = 0
        self._name, self._given = name, given
        self._decoder, self._characters = json.JSONDecoder(parse_int=float), codecs.getincrementaldecoder("utf-8")()
        self._text, self._place, self._ended = "", 0, False

    def __iter__(self) -> Iterator[str]:
        self._take("[")
        if self._next() == "]":
            self._place += 1
        else:
            yield self._element()
            while self._take(",]") == ",":
                yield self._element()
        if self._next():
            raise self._error("text follows the end of the array")

    def _element(self) -> str:
        self._next()
        while True:
            begin = self._place
            try:
                _, end = self._decoder.raw_decode(self._text, begin)
                if end < len(self._text) or self._ended:  # The text may be cut inside of a number.
                    self.number, self._place = self.number + 1, end
                    return self._text[begin:end]
            except (ValueError, RecursionError) as error:
                at = getattr(error, "pos", 0)
                cut = at >= len(self._text) - _CUT or str(error).startswith("Unterminated string")
                if self._ended or not cut:
                    raise self._error(f"not valid JSON: {error}") from error
            self._more(2 * (len(self._text) - begin))

    def _next(self) -> str:
        """Return the next character that is not white space, without consuming it. Return "" at the end."""
        while True:
            place = _SPACE.match(self._text, self._place).end()  # type: ignore[union-attr]
            self._place = place
            if place < len(self._text):
                return self._text[place]
            if self._ended:
                return ""
            self._more(1)

    def _take(self, allowed: str) -> str:
        found = self._next()
        if not found:
            raise self._error("the array does not end (cut short?)")
        if found not in allowed:
            raise self._error(f"{' or '.join(allowed)} is expected there, not {found!r}")
        self._place += 1
        return found

    def _more(self, size: int) -> None:
        """Read until `size` characters follow the current position, or until the end."""
        parts = [self._text[self._place :]]
        self._place, there = 0, len(parts[0])
        while there < size and not self._ended:
            block, self.consumed = next(self._given, (b"", self.consumed))
            self._ended = not block
            try:
                parts.append(self._characters.decode(block, final=self._ended))
            except UnicodeDecodeError as error:
                raise self._error(f"not UTF-8 (byte {error.object[error.start]:#04x})") from error
            there += len(parts[-1])
        self._text = "".join(parts)

    def _error(self, what: str) -> ConfigError:
        return ConfigError(f"{self._name}, after element {self.number:,} of its JSON array: {what}")


# -- tables ------------------------------------------------------------------------------------------------------------


def _read_table(content: Content, wanted: Wanted) -> Iterator[Chunk]:
    """Yield the rows of a .csv or .tsv, whose first line names the columns. Rows are the texts of one column, or dicts
    of fields."""
    csv.field_size_limit(sys.maxsize)
    delimiter = DELIMITERS[Path(content.name.lower().removesuffix(compression(content.name))).suffix]
    progress = [0]
    reader = csv.reader(_table_lines(content, progress), delimiter=delimiter, strict=True)
    rows = _rows_of(content.name, reader)
    names = next(rows, None)
    if names is None:
        return
    try:
        check_columns(content.name, names, wanted, nested=False)
    except ConfigError as error:
        other = next((each for each in ";\t|," if each in names[0]), None) if len(names) == 1 else None
        hint = f"; it seems to be separated by {other!r}, and not by {delimiter!r}" if other else ""
        raise ConfigError(f"{error}{hint}") from error
    read = [name for name in (*wanted.columns, *wanted.optional) if name in names]
    places = [names.index(name) for name in read]
    unread = tuple(name for name in names if name not in read) if wanted.fields else ()
    number, size, chunk = 1, 0, []
    for row in rows:
        record: Any = Broken(f"it has {len(row)} cells, and the first line has {len(names)}")
        if len(row) == len(names):
            cells = [row[place] for place in places]
            record = dict(zip(read, cells, strict=True)) if wanted.fields else cells[0]
            size += sum(map(len, cells))
        chunk.append(record)
        if size >= CHUNK_BYTES or len(chunk) >= CHUNK_RECORDS:
            yield Chunk(content.name, "row", number, chunk, progress[0], unread=unread)
            number, size, chunk = number + len(chunk), 0, []
    if chunk:
        yield Chunk(content.name, "row", number, chunk, progress[0], unread=unread)


def _table_lines(content: Content, progress: list[int]) -> Iterator[str]:
    for number, (line, consumed, _) in enumerate(lines(_text_blocks(content)), 1):
        progress[0] = consumed
        try:
            yield line.decode() + "\n"
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{content.name}, line {number:,}: not UTF-8 (byte {line[error.start]:#04x}); convert the file: iconv "
                "-f WINDOWS-1252 -t UTF-8, or from what it is written in"
            ) from error


def _rows_of(name: str, reader: Any) -> Iterator[list[str]]:
    """Yield the rows that are not empty lines. A csv.Error becomes a ConfigError with its line."""
    try:
        yield from (row for row in reader if row)
    except csv.Error as error:
        fix = "a cell that holds quotation marks is put into quotation marks, and has them twice"
        if "new-line character" in str(error):
            fix = "write the ends of lines as \\n: tr '\\r' '\\n'"
        raise ConfigError(f"{name}, line {reader.line_num:,}: {error}; {fix}") from error


# -- plain text --------------------------------------------------------------------------------------------------------


def _read_text(content: Content) -> Iterator[Chunk]:
    """Yield one document, the whole file, in parts that end with a newline where there is one.

    In the tokenizers that `sagetrain prepare` trains, newlines are tokens of their own, so the parts have the same
    tokens as the whole. Other tokenizers may have a token that spans the cut.
    """
    rest, consumed, split_key, pending, started = bytearray(), 0, None, None, False
    for block, consumed in _text_blocks(content):
        rest += block
        if not started:
            if _may_be_cut_json(rest):
                continue
            started = True
            _refuse_json(content.name, rest)
        if len(rest) < CHUNK_BYTES:
            continue
        cut = rest.rfind(b"\n") + 1 or _character_boundary(rest)
        split_key = split_key or bytes(rest[:_HASHED_BYTES])
        if pending:
            yield pending
        pending = Chunk(content.name, "file", 1, [bytes(rest[:cut])], consumed, split_key, pending is not None, True)
        del rest[:cut]
    if not started:
        _refuse_json(content.name, rest)
    if pending and not rest:
        pending.unfinished = False
        yield pending
        return
    if pending:
        yield pending
    yield Chunk(content.name, "file", 1, [bytes(rest)], consumed, split_key, pending is not None)


def _may_be_cut_json(text: bytearray) -> bool:
    """Whether a text that goes on may begin with a line of JSON that is not complete yet."""
    begin = text[:HEAD].lstrip()
    skipped = min(len(text), HEAD) - len(begin)
    if not begin:  # A text that begins with more white space than that is no line of JSON.
        return len(text) < HEAD
    return begin.startswith(b"{") and text.find(b"\n", skipped) < 0 and len(text) < _FIRST_LINE


def _refuse_json(name: str, text: bytearray) -> None:
    """Refuse plain text whose first line is a JSON object, and text that begins as an array of JSON objects.

    Raises:
        ConfigError: it is JSON.
    """
    begin = bytes(text).lstrip()
    what, suffix = "", ""
    try:
        if begin.startswith(b"{"):
            json.loads(begin.partition(b"\n")[0])
            what, suffix = "its first line is a JSON object", ".jsonl"
        elif re.match(rb"\[\s*\{", begin):
            json.JSONDecoder().raw_decode(begin[begin.index(b"{") :].decode(errors="replace"))
            what, suffix = "it begins as a JSON array of objects does", ".json"
    except (ValueError, RecursionError):
        return
    if what:
        packed = name[len(name) - len(compression(name)) :]
        raise ConfigError(
            f"{name}: {what}, and a file with this suffix would be one document of plain text: rename it to end in "
            f"{suffix}{packed}, or leave it out with --glob"
        )


def _read_documents(content: Content, separator: bytes, place: Place, start: int, stop: int | None) -> Iterator[Chunk]:
    """Yield the documents of a text file that have a separator between them. Of an uncompressed file these are the
    documents that begin at bytes `start` to `stop` - 1. A long document comes in parts, each a chunk of its own."""
    name = f"{content.name} from byte {start:,}" if start else content.name
    number = place.records + 1 if place.offset else 1
    cut = bool(start) and not place.offset
    at, plain = place.offset or start, not compression(content.name)
    rest, consumed, documents, size = bytearray(), 0, [], 0
    # This is set while a document is open of which a part was yielded.
    split_key: bytes | None = None

    def chunk(records: list[bytes], continues: bool = False, unfinished: bool = False) -> Chunk:
        where = offset if plain and not unfinished else 0
        return Chunk(
            name, "document", number, records, consumed - start, split_key, continues, unfinished, offset=where
        )

    offset = at
    for block, consumed in _text_blocks(content, max(0, at - len(separator)) if cut else at):
        rest += block
        begin = 0
        while (end := rest.find(separator, begin)) >= 0:
            document, begin = bytes(rest[begin:end]), end + len(separator)
            offset = consumed - (len(rest) - begin)
            if cut:  # This document began in the part before.
                if offset >= start:
                    cut = False
            elif split_key is not None:
                yield chunk([document], continues=True)
                number, split_key = number + 1, None
            else:
                documents.append(document)
                size += len(document)
            if documents and (size >= CHUNK_BYTES or len(documents) >= CHUNK_RECORDS):
                yield chunk(documents)
                number, documents, size = number + len(documents), [], 0
            if stop is not None and not cut and offset >= stop:
                if documents:
                    yield chunk(documents)
                return
        del rest[:begin]
        if len(rest) >= CHUNK_BYTES + len(separator):
            if documents:
                yield chunk(documents)
                number, documents, size = number + len(documents), [], 0
            limit = len(rest) - len(separator) + 1  # The rest may be the beginning of a separator.
            part = rest.rfind(b"\n", 0, limit) + 1 or _character_boundary(rest[:limit])
            if not cut:
                continues = split_key is not None
                split_key = split_key or bytes(rest[:_HASHED_BYTES])
                yield chunk([bytes(rest[:part])], continues, unfinished=True)
            del rest[:part]
    offset = consumed
    if cut:
        return
    if split_key is not None:
        yield chunk([bytes(rest)], continues=True)
        return
    if rest:
        documents.append(bytes(rest))
    if documents:
        yield chunk(documents)


def contains(content: Content, wanted: bytes) -> bool:
    """Whether a file contains these bytes."""
    rest = b""
    for block, _ in blocks(content):
        if wanted in (rest := rest + block):
            return True
        rest = rest[len(rest) - len(wanted) + 1 :] if len(wanted) > 1 else b""
    return False


def _character_boundary(data: bytes | bytearray) -> int:
    """Return the last position that does not cut a UTF-8 character."""
    for position in range(len(data) - 1, max(len(data) - 4, 0), -1):
        if data[position] & 0xC0 != 0x80:
            return position
    return len(data)
