"""The unit that a reader hands to a worker: consecutive records of one input, with their place in it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from hashlib import blake2b
from typing import Any, TypeVar

from sagetrain.config.arguments import spelled
from sagetrain.config.errors import ConfigError, pointer, some

T = TypeVar("T")
_Pairs = Callable[[list[tuple[str, Any]]], dict[str, Any]]
"""A function that makes a JSON object of its keys and values."""
SEAM_BYTES = 1 << 13
"""The bytes of the next part of a document, and of the one before, that decide where its tokens are parted."""
HASHED_BYTES = 1 << 16
"""The bytes of a document's beginning that decide its side of a train/valid split."""


def place_of(key: bytes) -> int:
    """Return the place, from 0 to 2^64 - 1, of the document with this beginning. The first ones are held out."""
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big")


@dataclass(frozen=True)
class Place:
    """A place in a corpus: how far it has been read."""

    input: int = 0
    """Index of the input that is being read. Those before it have been read."""
    records: int = 0
    """Number of its records that have been read."""
    offset: int = 0
    """The byte after those records, where reading can begin. 0: reading begins at the beginning of the input and skips
    the records, which costs far less than turning them into tokens."""
    parts: int = 0
    """Number of parts of the next record that have been read, if it is a file that is one document."""


@dataclass(frozen=True)
class Broken:
    """A record that cannot be read, with the reason."""

    why: str


@dataclass
class Chunk:
    """Consecutive records of one input."""

    origin: str
    """File or dataset, for messages."""
    unit: str
    """The kind of the records: "line" or "element" (a JSON object), "row" (its text), "file" or "document" (its bytes,
    or a part of them)."""
    first: int
    """Number of the first record, counted from 1."""
    records: list[Any]
    """The records, as bytes. Rows are str, None, Broken, a value of a wrong type, or a dict where Corpus was asked for
    fields."""
    consumed: int = 0
    """Bytes of the input that had been read when the chunk was complete."""
    split_key: bytes | None = None
    """The beginning of the file that this is a part of. It decides the side of a train/valid split."""
    continues: bool = False
    """Whether the first record continues the document that the chunk before left unfinished."""
    unfinished: bool = False
    """Whether the document of the last record continues in the next chunk."""
    offset: int = 0
    """The byte after the chunk where reading can begin, as in Place."""
    after: Place | None = None
    """The place up to which the corpus has been read with this chunk. None inside of a document that is not a whole
    file."""
    before: bytes = b""
    """The last bytes of the document's part in the chunk before, if the first record continues it."""
    behind: bytes = b""
    """The first bytes of the document's part in the next chunk, if there is one."""
    unread: tuple[str, ...] = ()
    """Columns of the table that were not read, because nobody asked for them."""
    input: str = ""
    """The name of the input."""
    repeated: Counter[str] = field(default_factory=Counter)
    """The numbers of JSON objects, among those read so far, that hold a key twice, by the key. The last one counts."""

    def texts(self, text_key: str, skip_bad: bool = False) -> Iterator[str | ConfigError | None]:
        """Yield the texts of the records in order. None stands for an empty document. With `skip_bad`, the errors of
        bad records come in place of their texts. Raises ConfigError that names file and record if one has no text."""
        return self._each(lambda record, number: self._text(record, number, text_key), skip_bad)

    def values(
        self, parse: Callable[[dict[str, Any]], T], skip_bad: bool = False, keys: Iterable[str] | None = ()
    ) -> Iterator[T | ConfigError]:
        """Yield the result of `parse` for the fields of each record. With `skip_bad`, the errors of bad records come in
        their place. `keys` are those that `parse` reads, for `repeated`; None: all, also of objects inside. Raises
        ConfigError if a record cannot be read, or `parse` raised ValueError."""
        way_out = "" if skip_bad else f"; mend the record, or leave such ones out with {spelled('skip_bad_lines')}"

        def value(record: Any, number: int) -> T:
            if isinstance(record, bytes):
                record = self._object(self._decode(record, number), number, keys)
            try:
                return parse(record)
            except ValueError as error:
                raise self.error(number, f"{error}{way_out}") from error
            except RecursionError as error:
                raise self.error(number, f"it is nested too deeply to be read{way_out}") from error

        return self._each(value, skip_bad)

    def _each(self, parse: Callable[[Any, int], T], skip_bad: bool) -> Iterator[T | ConfigError]:
        for number, record in enumerate(self.records, self.first):
            if self.unit == "line" and not record.strip():
                continue  # A blank line is not a document.
            try:
                if isinstance(record, Broken):
                    raise self.error(number, record.why)
                yield parse(record, number)
            except ConfigError as error:
                if not skip_bad or self.unit == "file" or self.continues or self.unfinished:
                    raise
                yield error

    def _text(self, record: Any, number: int, text_key: str) -> str | None:
        if isinstance(record, bytes):
            record = self._decode(record, number)
            if self.unit in ("line", "element"):
                record = self._text_of(record, number, text_key)
        if record is None:
            return None
        if not isinstance(record, str):
            raise self.error(number, f"{text_key!r} holds {type(record).__name__}, not text{_columns(record)}")
        try:
            record.encode()
        except UnicodeEncodeError as error:
            raise self.error(number, f"not valid Unicode: a lone surrogate at character {error.start}") from error
        # A part of a longer document counts even if it is blank.
        blank = not record or record.isspace()
        return None if blank and not (self.continues or self.unfinished) else record

    def error(self, number: int, what: str) -> ConfigError:
        """Return the error for a mistake in record `number`."""
        return ConfigError(f"{self.origin}{'' if self.unit == 'file' else f', {self.unit} {number:,}'}: {what}")

    def _decode(self, record: bytes, number: int) -> str:
        try:
            return record.decode("utf-8")
        except UnicodeDecodeError as error:
            hint = "; convert the file: iconv -f WINDOWS-1252 -t UTF-8, or from what it is written in"
            hint = (
                f"; if it is no text file, choose the files with {spelled('glob')}; else" + hint[1:]
                if self.unit == "file"
                else hint
            )
            raise self.error(number, f"not UTF-8 (byte {record[error.start]:#04x}){hint}") from error

    def _text_of(self, line: str, number: int, text_key: str) -> Any:
        value = self._object(line, number, (text_key,))
        try:
            return value_at(value, text_key)
        except KeyError as error:
            raise self.error(number, no_such_key(text_key, value) + _lists_in(value)) from error

    def _object(self, line: str, number: int, keys: Iterable[str] | None) -> dict[str, Any]:
        repeated = set[str]()
        try:
            value = loads(line, _object_of(line, keys, repeated))
        except (ValueError, RecursionError) as error:
            hint = _hint(line, error) if number == 1 and self.unit == "line" else ""
            if "\0" in line:
                hint = " (it holds bytes of zero: was writing it cut off by a crash?)"
            elif said := pointer("it", line):
                hint = f"; {said}"
            raise self.error(number, f"not valid JSON: {error}{hint}") from error
        if not isinstance(value, dict):
            raise self.error(number, f"holds {type(value).__name__}, not a JSON object")
        self.repeated.update(repeated)
        return value


def _object_of(line: str, keys: Iterable[str] | None, repeated: set[str]) -> _Pairs | None:
    """Return a function that makes a JSON object in a line of its pairs, and adds those of the keys, or of the parts of
    a.b, that are there twice to `repeated`. Return None if none is. Keys None: all keys."""
    parts = {part for key in keys or () for part in (key, *key.split("."))}
    suspects = {part for part in parts if line.count(f'"{part}"') > 1}

    def look(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            names = Counter(name for name, _ in pairs if keys is None or name in suspects)
            repeated.update(name for name, times in names.items() if times > 1)
        return value

    return look if suspects or keys is None else None


def _hint(line: str, error: ValueError | RecursionError) -> str:
    """Say what the first line of a file may be that is no JSON object."""
    if line[:1] != "{":
        return ""
    if str(error).startswith("Extra data"):
        return " (several objects on one line? write each on a line of its own: jq -c . FILE)"
    if getattr(error, "pos", 0) >= len(line.rstrip()):
        return " (one object over several lines? write each on one line: jq -c . FILE)"
    return " (written by Python's print? quotation marks of JSON are double: use json.dumps)" if "'" in line[:2] else ""


def _columns(value: Any) -> str:
    """Say what a field is that has texts by the numbers of their rows."""
    if isinstance(value, dict) and value and all(map(str.isdigit, value)):
        return " (columns, as pandas writes them? use to_json(orient='records', lines=True))"
    texts = isinstance(value, list) and value and all(isinstance(each, str) for each in value)
    return "; make a record of each of its texts, or one text of them" if texts else ""


def _lists_in(value: Mapping[str, Any]) -> str:
    """Say which field of a record is a chat, or where a file's one object has its records, if it seems to have them."""
    lists = {
        key: each[0] for key, each in value.items() if isinstance(each, list) and each and isinstance(each[0], dict)
    }
    for key, first in lists.items():
        if {"role", "from"} & first.keys():
            return f". If {key!r} is a chat: {spelled('chat_field')} {key}, with {spelled('seq_length')}"
    return next((f". If its records are those under {key!r}: jq -c '.[\"{key}\"][]' FILE" for key in lists), "")


def loads(text: str, pairs: _Pairs | None = None) -> Any:
    """Parse JSON. A number of more digits than Python makes an int of is a Decimal; nobody may read it. `pairs` makes
    an object of its keys and values."""
    try:
        return json.loads(text, object_pairs_hook=pairs)
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError):
            raise
        return json.loads(text, object_pairs_hook=pairs, parse_int=Decimal)


def root_of(key: str, names: Container[str]) -> str | None:
    """Return the name of the field that holds a key: the key itself, or a for a.b. Return None if there is none."""
    parents = (key[:place] for place, letter in enumerate(key) if letter == ".")
    return key if key in names else next((each for each in parents if each in names), None)


def value_at(record: Mapping[str, Any], key: str) -> Any:
    """Return the field of a record with this name, or for a.b the field b of the object in field a. Raises KeyError if
    there is none."""
    root = root_of(key, record)
    if root is None:
        raise KeyError(key)
    inner = record[root]
    if root == key or inner is None:
        return inner
    if not isinstance(inner, Mapping):
        raise KeyError(key)
    return value_at(inner, key[len(root) + 1 :])


_KEYS_SHOWN = 40
"""The number of keys that the message for a missing key names."""


def no_such_key(key: str, keys: Iterable[str], setting: str = "") -> str:
    """Return the message for a missing key, which a setting names; empty: text_key."""
    there = [each if each == each.strip() and each.isprintable() else repr(each) for each in keys]
    named = some(there, _KEYS_SHOWN) or "none"
    return f"no key {key!r}; the keys are: {named}. Choose one with {setting or spelled('text_key')}"
