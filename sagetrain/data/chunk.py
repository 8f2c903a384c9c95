"""What a reader hands to a worker: consecutive records of one input, and where they come from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from sagetrain.config.errors import ConfigError

T = TypeVar("T")
_ARRAY = " (a JSON array? a file of this suffix has one object per line: rename it to end in .json)"


@dataclass(frozen=True)
class Place:
    """How far a corpus has been read."""

    input: int = 0
    """The input in hand; those before it have been read."""
    records: int = 0
    """Its records that have been read."""
    offset: int = 0
    """The byte after them where reading can begin there; 0: reading begins at the input's beginning and leaves them
    out, which costs far less than turning them into tokens."""


@dataclass(frozen=True)
class Broken:
    """A record that cannot be one."""

    why: str


@dataclass
class Chunk:
    """Consecutive records of one input, as the reader hands them to a worker."""

    origin: str
    """File or dataset, for messages."""
    unit: str
    """What a record is: "line" or "element" (a JSON object), "row" (its text), "file" or "document" (its bytes, or
    a part of them)."""
    first: int
    """Number of the first record, from 1."""
    records: list[Any]
    """bytes, but for rows str, None, Broken or something wrong, or a dict where Corpus was asked for fields."""
    consumed: int = 0
    """Bytes of the input that had been read when the chunk was complete."""
    split_key: bytes | None = None
    """Beginning of the file whose part this is; decides its side of a train/valid split."""
    continues: bool = False
    """The first record is the rest of the document that the chunk before left unfinished."""
    unfinished: bool = False
    """The document of the last record goes on in the next chunk."""
    offset: int = 0
    """As in Place, where the chunk ends."""
    after: Place | None = None
    """What has been read with this chunk; None inside of a document."""
    unread: tuple[str, ...] = ()
    """Columns of a table that the rows are without, because nobody asked for them."""
    before: int = 0
    """Records of the input before those of this file: the input is an archive."""
    input: str = ""
    """The name of the input."""

    def texts(self, text_key: str, skip_bad: bool = False) -> Iterator[str | ConfigError | None]:
        """The records' texts in order; None stands for an empty document.

        A line or row without text in it is a ConfigError that names file and record: raised, or with `skip_bad` given
        in the text's place.
        """
        return self._each(lambda record, number: self._text(record, number, text_key), skip_bad)

    def values(self, parse: Callable[[dict[str, Any]], T], skip_bad: bool = False) -> Iterator[T | ConfigError]:
        """What `parse` makes of the fields of each record; errors as of `texts`, also for its ValueError."""
        way_out = "" if skip_bad else "; mend the record, or leave such ones out with --skip-bad-lines"

        def value(record: Any, number: int) -> T:
            if isinstance(record, bytes):
                record = self._object(self._decode(record, number), number)
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
                continue  # a blank line is no document
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
            raise self.error(number, f"{text_key!r} holds {type(record).__name__}, not text")
        try:
            record.encode()
        except UnicodeEncodeError as error:
            raise self.error(number, f"not valid Unicode: a lone surrogate at character {error.start}") from error
        # A part of a longer document counts even if it is blank.
        blank = not record or record.isspace()
        return None if blank and not (self.continues or self.unfinished) else record

    def error(self, number: int, what: str) -> ConfigError:
        """A mistake in record `number`."""
        return ConfigError(f"{self.origin}{'' if self.unit == 'file' else f', {self.unit} {number:,}'}: {what}")

    def _decode(self, record: bytes, number: int) -> str:
        try:
            return record.decode("utf-8")
        except UnicodeDecodeError as error:
            hint = "; if it is no text file, choose the files with --glob" if self.unit == "file" else ""
            raise self.error(number, f"not UTF-8 (byte {record[error.start]:#04x}){hint}") from error

    def _text_of(self, line: str, number: int, text_key: str) -> Any:
        value = self._object(line, number)
        if text_key not in value:
            raise self.error(number, no_such_key(text_key, value) + _lists_in(value))
        return value[text_key]

    def _object(self, line: str, number: int) -> dict[str, Any]:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            hint = _hint(line, error) if number == 1 and self.unit == "line" else ""
            raise self.error(number, f"not valid JSON: {error}{hint}") from error
        if not isinstance(value, dict):
            array = isinstance(value, list) and self.unit == "line" and number == 1
            raise self.error(number, f"holds {type(value).__name__}, not a JSON object{_ARRAY if array else ''}")
        return value


def _hint(line: str, error: ValueError | RecursionError) -> str:
    """Say what the first line of a file may be that is no JSON object."""
    if line[:1] != "{":
        return _ARRAY if line[:1] == "[" else ""
    if str(error).startswith("Extra data"):
        return " (several objects on one line? write each on a line of its own: jq -c . FILE)"
    if getattr(error, "pos", 0) >= len(line.rstrip()):
        return " (one object over several lines? write each on one line: jq -c . FILE)"
    return " (written by Python's print? quotation marks of JSON are double: use json.dumps)" if "'" in line[:2] else ""


def _lists_in(value: Mapping[str, Any]) -> str:
    """Say where a file's one object has its records, if it seems to have them."""
    lists = (key for key, each in value.items() if isinstance(each, list) and each and isinstance(each[0], dict))
    return next((f". If its records are those under {key!r}: jq -c '.[\"{key}\"][]' FILE" for key in lists), "")


def no_such_key(key: str, keys: Iterable[str], option: str = "--text-key") -> str:
    """Message for a missing key, which `option` names."""
    return f"no key {key!r}; the keys are: {', '.join(keys) or 'none'}. Choose one with {option}"
