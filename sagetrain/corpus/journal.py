"""The progress of an unfinished `sagetrain prepare`, on the disk. The next call with the same request continues from
it.

The token files only grow at their ends, so a place in the text and the lengths of the files are all that has to be
recorded. Nothing is copied when the work is done. The files are the same bytes as those of a call that was never
interrupted.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from sagetrain.config.arguments import spelled
from sagetrain.config.errors import ConfigError
from sagetrain.config.load import differences
from sagetrain.corpus.chunk import Place
from sagetrain.corpus.token_writer import writing
from sagetrain.data.token_file import token_path, write_atomic

SECONDS = 10.0
"""Seconds between two records. At most this much work is done twice."""
_WORDS = {
    "inputs": "the number of input files",
    "inputs_sha256": "the inputs (a file was added, left out or changed since)",
    "records": "what it takes of the records (an older version left out tools, documents and weights)",
    "tokenizer": "the tokenizer",
    "control_tokens": "how it reads control tokens in a text (an older version of prepare read their characters)",
    "prefix": "what the tokenizer puts before a text (an older version of prepare did not)",
}


@dataclass
class Unfinished:
    """The state of the work when a record was made."""

    request: dict[str, Any]
    """The request, as the finished token file records it."""
    tokenizer_sha256: str
    place: Place
    """The place up to which the text is in the files."""
    progress: int
    """The position of the progress bar."""
    counts: dict[str, dict[str, int]]
    """The fields of counts.Counts, by "train" and "valid"."""
    written: dict[str, dict[str, Any]]
    """The results of TokenFileWriter.written, by "train" and "valid"."""
    first_bad: str | None
    notes: list[tuple[str, str, int]] = field(default_factory=list)
    """Notes about records (notes.py)."""


def of_one_whole(theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether two requests are the same, apart from the part of the text."""
    return not differences(theirs, ours).keys() - {"shard"}


def in_words(differ: list[str]) -> str:
    """Return the keys as the command line calls them, for a message."""
    return " and ".join(_WORDS.get(key, f"--{key.replace('_', '-')}") for key in differ)


def recorded_tokenizers(folder: Path, request: dict[str, Any]) -> list[str]:
    """Return the SHA-256 of the tokenizers that unfinished calls with this request have recorded, for any part of the
    text."""
    found = []
    for path in folder.glob("*.json.partial"):
        # Another host may have finished its part. A damaged record is reported where it is continued.
        with suppress(FileNotFoundError, ValueError):
            content = json.loads(path.read_text())
            if of_one_whole(content["request"], request):
                found.append(content["tokenizer_sha256"])
    return found


class Journal:
    """The record of one output: NAME.json.partial, and beside it the tokenizer if it was trained for this output."""

    def __init__(self, output: Path):
        self._output = output
        self._path = token_path(output, ".json.partial")
        self._tokenizer = token_path(output, ".tokenizer.partial")
        self._due = time.monotonic() + SECONDS
        self.exists = self._path.exists()

    @property
    def due(self) -> bool:
        """Whether the last record, or the beginning of this call, is long enough ago for a new record."""
        return time.monotonic() >= self._due

    def read(self, request: dict[str, Any], overwrite: bool) -> Unfinished | None:
        """Return the state that an earlier call for the same request has recorded, or None if there was none. With
        `overwrite`, the record of another request is discarded. Raises ConfigError if a call with another request is
        unfinished, or the record is damaged."""
        try:
            content = json.loads(self._path.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as error:
            raise self.damaged(f"{self._path} is not valid JSON") from error
        unfinished = Unfinished(**content | {"place": Place(**content["place"])})
        theirs = unfinished.request
        differ = [*differences(theirs, request)]
        if not unfinished.counts["train"]["bad_lines"] and "skip_bad_lines" in differ:
            # No bad line has been met so far, so the work is right with either setting.
            differ.remove("skip_bad_lines")
        if not differ:
            return unfinished
        if not overwrite:
            raise ConfigError(
                f"an unfinished call left {self._path}, and this one differs from it in {in_words(differ)}: repeat "
                "that one to go on with it, choose another output (-o), or discard what it did with "
                f"{spelled('overwrite')}"
            )
        self.discard()
        return None

    def tokenizer(self, unfinished: Unfinished) -> bytes:
        """Return the tokenizer that the unfinished call had trained. Raises ConfigError if it has changed."""
        with suppress(FileNotFoundError):
            model = self._tokenizer.read_bytes()
            if sha256(model).hexdigest() == unfinished.tokenizer_sha256:
                return model
        raise self.damaged(f"{self._tokenizer} is no longer what an unfinished call had written")

    def write(self, unfinished: Unfinished, trained: bytes | None) -> None:
        """Record the state of the work, and the tokenizer if it was trained for this output."""
        if trained and not self.exists:
            with writing(self._tokenizer):
                write_atomic(self._tokenizer, trained)
        with writing(self._path):
            write_atomic(self._path, (json.dumps(asdict(unfinished), indent=2) + "\n").encode())
        self.exists = True
        self._due = time.monotonic() + SECONDS

    def discard(self) -> None:
        """Delete the record, because the work is finished or not wanted."""
        for path in (self._path, self._tokenizer):
            path.unlink(missing_ok=True)
        self.exists = False

    def damaged(self, what: str) -> ConfigError:
        """Return the error for a record that cannot be continued."""
        return ConfigError(f"{what}: delete {self._output}.*.partial to start over")
