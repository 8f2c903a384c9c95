"""How far an unfinished `sagetrain prepare` has come, on the disk: the next call with the same request goes on there.

The token files grow at their ends alone, so a place in the text and the lengths of the files say everything. Nothing is
copied when the work is done, and the files are the same bytes as of a call that was never interrupted.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from sagetrain.config.errors import ConfigError
from sagetrain.data.chunk import Place
from sagetrain.data.token_file import token_path, write_atomic, writing

SECONDS = 10.0
"""Between two records; at most this much work is done twice."""
_WORDS = {
    "inputs": "the number of input files",
    "inputs_sha256": "the inputs (a file was added, left out or changed since)",
    "records": "what it takes of the records (an older version left out tools, documents and weights)",
    "tokenizer": "the tokenizer",
    "prefix": "what the tokenizer puts before a text (an older version of prepare did not)",
}


@dataclass
class Unfinished:
    """What had been done when a record was made."""

    request: dict[str, Any]
    """What was asked for, as the finished token file names it."""
    tokenizer_sha256: str
    place: Place
    """Up to here the text is in the files."""
    progress: int
    """Where the progress bar stood."""
    counts: dict[str, dict[str, int]]
    """By "train" and "valid"; fields of counts.Counts."""
    written: dict[str, dict[str, Any]]
    """Likewise, what TokenFileWriter.written gave."""
    first_bad: str | None
    notes: list[tuple[str, str, int]] = field(default_factory=list)
    """What is to be said of records (records.py)."""


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Keys of two requests that are not the same."""
    return [key for key in theirs | ours if theirs.get(key) != ours.get(key)]


def of_one_whole(theirs: dict[str, Any], ours: dict[str, Any]) -> bool:
    """Whether two requests are the same, but for the part of the text."""
    return not {*differences(theirs, ours)} - {"shard"}


def in_words(differ: list[str]) -> str:
    """Those, as their options are called."""
    return " and ".join(_WORDS.get(key, f"--{key.replace('_', '-')}") for key in differ)


def recorded_tokenizers(folder: Path, request: dict[str, Any]) -> list[str]:
    """SHA-256 of the tokenizers that unfinished calls with this request, for any part of the text, have recorded."""
    found = []
    for path in folder.glob("*.json.partial"):
        with suppress(FileNotFoundError, ValueError):  # another host has finished its part; damaged: its own matter
            content = json.loads(path.read_text())
            if of_one_whole(content["request"], request):
                found.append(content["tokenizer_sha256"])
    return found


class Journal:
    """The record of an output: NAME.json.partial, and beside it the tokenizer if it was trained for this output."""

    def __init__(self, output: Path):
        self._output = output
        self._path = token_path(output, ".json.partial")
        self._tokenizer = token_path(output, ".tokenizer.partial")
        self._due = time.monotonic() + SECONDS
        self.exists = self._path.exists()

    @property
    def due(self) -> bool:
        """Whether the last record, or the beginning of this call, is long enough ago."""
        return time.monotonic() >= self._due

    def read(self, request: dict[str, Any], overwrite: bool) -> Unfinished | None:
        """What an earlier call for the same request has done; None if there was none.

        ConfigError if one with another request did something; `overwrite` discards that.
        """
        try:
            content = json.loads(self._path.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as error:
            raise self.damaged(f"{self._path} is not valid JSON") from error
        unfinished = Unfinished(**content | {"place": Place(**content["place"])})
        theirs = unfinished.request
        differ = differences(theirs, request)
        if not unfinished.counts["train"]["bad_lines"] and "skip_bad_lines" in differ:
            differ.remove("skip_bad_lines")  # none has been met so far: what was done is right either way
        if not differ:
            return unfinished
        if not overwrite:
            raise ConfigError(
                f"an unfinished call left {self._path}, and this one differs from it in {in_words(differ)}: repeat "
                "that one to go on with it, choose another output (-o), or discard what it did with --overwrite"
            )
        self.discard()
        return None

    def tokenizer(self, unfinished: Unfinished) -> bytes:
        """The tokenizer that the unfinished call had trained."""
        with suppress(FileNotFoundError):
            model = self._tokenizer.read_bytes()
            if sha256(model).hexdigest() == unfinished.tokenizer_sha256:
                return model
        raise self.damaged(f"{self._tokenizer} is no longer what an unfinished call had written")

    def write(self, unfinished: Unfinished, trained: bytes | None) -> None:
        """Record what is done, and the tokenizer if it was trained for this output."""
        if trained and not self.exists:
            with writing(self._tokenizer):
                write_atomic(self._tokenizer, trained)
        with writing(self._path):
            write_atomic(self._path, (json.dumps(asdict(unfinished), indent=2) + "\n").encode())
        self.exists = True
        self._due = time.monotonic() + SECONDS

    def discard(self) -> None:
        """Forget what was recorded: it is finished, or not wanted."""
        for path in (self._path, self._tokenizer):
            path.unlink(missing_ok=True)
        self.exists = False

    def damaged(self, what: str) -> ConfigError:
        """A record that cannot be gone on from."""
        return ConfigError(f"{what}: delete {self._output}.*.partial to start over")
