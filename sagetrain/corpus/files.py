"""Readers of files: JSON lines, JSON arrays, tables, plain text. Each yields chunks of consecutive records."""

from __future__ import annotations

import codecs
import csv
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from sagetrain.config.arguments import spelled
from sagetrain.config.errors import ConfigError
from sagetrain.corpus.blocks import Content, blocks, lines
from sagetrain.corpus.chunk import HASHED_BYTES, Broken, Chunk, Place, no_such_key, root_of
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


def check_columns(origin: object, names: Sequence[str], wanted: Wanted, nested: bool = True) -> None:
    """Check that the columns to read are among the names of a table's columns, each once. `nested`: the column a may
    hold the field a.b. Raises ConfigError if a column is missing, or several columns have the name of one that is
    read."""
    for column in wanted.columns:
        if not (root_of(column, names) if nested else column in names):
            option = wanted.options.get(column, spelled("text_key"))
            raise ConfigError(f"{origin}: {no_such_key(column, names, option)}")
    for column in (*wanted.columns, *wanted.optional):
        if names.count(column) > 1:
            raise ConfigError(
                f"{origin}: {names.count(column)} columns have the name {column!r}, and nobody can tell which of them "
                "is meant; rename all but one"
            )


def read(content: Content, wanted: Wanted, place: Place, start: int = 0, stop: int | None = None) -> Chunks:
    """Yield the chunks of a file that is neither an archive nor Parquet. Records before `place`, up to which the input
    has been read already, may come again.

    Args:
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
        case _:
            return _read_text(content, wanted.separator, place, start, stop)


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
                f"a crash?): take them out (tr -d '\\000'), or leave it out with {spelled('glob')}"
            )
        yield block, consumed


# -- lines and arrays --------------------------------------------------------------------------------------------------

_Read = tuple[Any, int, int, int]
"""A record, its size, how many bytes of the file had been read, and the byte after the record where reading can begin.
The byte is 0 if reading cannot begin there."""


def _chunks(name: str, unit: str, records: Iterable[_Read], first: int = 1, unread: tuple[str, ...] = ()) -> Chunks:
    """Gather records into chunks. `first` is the number of the first one."""
    size, gathered = 0, []
    consumed = offset = 0
    for record, length, consumed, offset in records:
        gathered.append(record)
        size += length
        if size >= CHUNK_BYTES or len(gathered) >= CHUNK_RECORDS:
            yield Chunk(name, unit, first, gathered, consumed, offset=offset, unread=unread)
            first, size, gathered = first + len(gathered), 0, []
    if gathered:
        yield Chunk(name, unit, first, gathered, consumed, offset=offset, unread=unread)


def _begun(content: Content, place: Place, start: int) -> tuple[str, int]:
    """Return the name of a part of a file, and the number of the first record that is read of it."""
    name = f"{content.name} from byte {start:,}" if start else content.name
    return name, place.records + 1 if place.offset else 1


def _read_lines(
    content: Content, place: Place, start: int, stop: int | None, given: Iterable[tuple[bytes, int]] | None = None
) -> Chunks:
    """Yield chunks of whole lines. Of an uncompressed file these are the lines that begin at bytes `start` to `stop` -
    1. `given` are blocks that the caller has read while it looked at the beginning of the file."""
    plain = not compression(content.name)

    def found() -> Iterator[_Read]:
        at = place.offset or start
        # A part begins at the first line that begins in it, after the end of the line that its first byte is in.
        cut = bool(start) and not place.offset
        for line, consumed, rest in lines(given or _text_blocks(content, at - cut)):
            if plain and stop is not None and at >= stop:
                return
            at = consumed - rest if plain else 0
            if not cut:
                yield line, len(line), consumed - start, at
            cut = False

    name, number = _begun(content, place, start)
    return _chunks(name, "line", found(), number)


def is_array(head: bytes) -> bool:
    """Whether JSON with this beginning is an array."""
    return head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _read_json(content: Content, place: Place, start: int, stop: int | None) -> Chunks:
    if start or place.offset:
        return _read_lines(content, place, start, stop)
    blocks = _text_blocks(content)
    first = next((each for each in blocks if each[0].strip()), (b"", 0))
    together = chain([first], blocks)
    if is_array(first[0]):
        return _chunks(content.name, "element", _elements(content.name, together))
    return _read_lines(content, place, start, stop, together)


def _is_cut(text: str, error: ValueError | RecursionError) -> bool:
    """Whether a text may be no JSON only because its end is missing."""
    return getattr(error, "pos", 0) >= len(text) - _CUT or str(error).startswith("Unterminated string")


def _elements(name: str, blocks: Iterator[tuple[bytes, int]]) -> Iterator[_Read]:
    """Yield the elements of a JSON array as bytes. The file is read block by block, so that only a chunk of them has to
    be in memory."""
    decoder, characters = json.JSONDecoder(parse_int=float), codecs.getincrementaldecoder("utf-8")()
    text, at, number, consumed, ended = "", 0, 0, 0, False

    def error(what: str) -> ConfigError:
        return ConfigError(f"{name}, after element {number:,} of its JSON array: {what}")

    def more(size: int) -> None:
        """Read until `size` characters follow the place, or until the end."""
        nonlocal text, at, consumed, ended
        parts, there = [text[at:]], len(text) - at
        while there < size and not ended:
            block, consumed = next(blocks, (b"", consumed))
            ended = not block
            try:
                parts.append(characters.decode(block, ended))
            except UnicodeDecodeError as no_text:
                raise error(f"not UTF-8 (byte {no_text.object[no_text.start]:#04x})") from no_text
            there += len(parts[-1])
        text, at = "".join(parts), 0

    def following() -> str:
        """Return the next character that is not white space, and go there. Return "" at the end."""
        nonlocal at
        while True:
            at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
            if at < len(text) or ended:
                return text[at : at + 1]
            more(1)

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
            more(2 * (len(text) - at))
        element, at, number = text[at:end], end, number + 1
        yield element.encode(), len(element), consumed, 0
        found = following()
        if found not in (",", "]"):
            expected = f", or ] is expected there, not {found!r}" if found else "the array does not end (cut short?)"
            raise error(expected)
        at += 1
        following()
    if following():
        raise error("text follows the end of the array")


# -- tables ------------------------------------------------------------------------------------------------------------


def _read_table(content: Content, wanted: Wanted) -> Chunks:
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

    def found() -> Iterator[_Read]:
        for row in rows:
            if len(row) == len(names):
                cells = [row[place] for place in places]
                record = dict(zip(read, cells, strict=True)) if wanted.fields else cells[0]
                yield record, sum(map(len, cells)), progress[0], 0
            else:
                yield Broken(f"it has {len(row)} cells, and the first line has {len(names)}"), 0, progress[0], 0

    yield from _chunks(content.name, "row", found(), unread=unread)


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


def _read_text(content: Content, separator: bytes, place: Place, start: int, stop: int | None) -> Chunks:
    """Yield the documents of a text file that have a separator between them, or the whole file if the separator is
    empty. Of an uncompressed file these are the documents that begin at bytes `start` to `stop` - 1.

    A long document comes in parts, each a chunk of its own, that end with a newline where there is one. In the
    tokenizers that `sagetrain prepare` trains, newlines are tokens of their own, so the parts have the same tokens as
    the whole. Other tokenizers may have a token that spans the cut.
    """
    name, number = _begun(content, place, start)
    cut = bool(start) and not place.offset
    at, resumes = place.offset or start, bool(separator) and not compression(content.name)
    rest, consumed, documents, size = bytearray(), 0, [], 0
    # This is set while a document is open of which a part was yielded.
    split_key: bytes | None = None
    unit = "document" if separator else "file"

    def chunk(records: list[bytes], continues: bool = False, unfinished: bool = False) -> Chunk:
        where = offset if resumes and not unfinished else 0
        return Chunk(name, unit, number, records, consumed - start, split_key, continues, unfinished, offset=where)

    offset = at
    for block, consumed in _text_blocks(content, max(0, at - len(separator)) if cut else at):
        if not separator and not rest and split_key is None:
            _refuse_json(content.name, block)
        rest += block
        begin = 0
        while separator and (end := rest.find(separator, begin)) >= 0:
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
            # The rest may be the beginning of a separator.
            limit = len(rest) - max(len(separator) - 1, 0)
            part = rest.rfind(b"\n", 0, limit) + 1 or _character_boundary(rest[:limit])
            if not cut:
                continues = split_key is not None
                split_key = split_key or bytes(rest[:HASHED_BYTES])
                yield chunk([bytes(rest[:part])], continues, unfinished=True)
            del rest[:part]
    offset = consumed
    if cut:
        return
    if split_key is not None:
        yield chunk([bytes(rest)], continues=True)
        return
    if rest or not separator:
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
