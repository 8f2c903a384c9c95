"""The exceptions that a user meets, and the findings of configuration checks."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

TRAINING_EXIT_CODE = 4
"""Exit code of a run that cannot go on training: a step went wrong, or memory ran out."""


class ConfigError(ValueError):
    """A mistake in the user's configuration. The message names file, key, value, rule and fix."""


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written, read or used. The message names the folder and the way out."""


class TrainingError(RuntimeError):
    """Training cannot go on, for instance because the loss is not finite. The newest checkpoint is untouched."""


Level = Literal["error", "warning", "info"]


@dataclass(frozen=True)
class Finding:
    """One message of a check about a configuration."""

    rule: str
    """Name of the rule; guidance.override takes the names of the guidance rules."""
    level: Level
    key: str
    """Dotted key that the finding is about."""
    value: Any
    """The key's value in this run."""
    message: str
    """The mistake, with the numbers."""
    fix: str = ""
    """The way to correct it."""
    source: str = ""
    """The source of the rule: a paper and section."""
    where: str = ""
    """The place where the key was given, when known: `file:line`, or the override."""

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        lines = [f"{place}{self.key} = {shown(self.value)}: {self.message} [{self.rule}]"]
        lines += [f"    {name}: {text}" for name, text in (("fix", self.fix), ("source", self.source)) if text]
        return "\n".join(lines)


def at_start(findings: Sequence[Finding]) -> list[str]:
    """Return the lines that say the findings of a run that starts, one for each level. A lone warning is said whole,
    and others by their rules."""
    lines = []
    for level in ("warning", "info"):
        found = [each for each in findings if each.level == level]
        named = ", ".join(f"{each.key} [{each.rule}]" for each in found)
        if len(found) == 1 and level == "warning":
            lines.append(f"warning: {'; '.join(line.strip() for line in str(found[0]).splitlines()[:2])}")
        elif found:
            lines.append(f"{many(len(found), level)}: {named}: `sagetrain plan` and the log have the texts")
    return lines


def shown(value: Any) -> str:
    """Return a value as it would stand in YAML, shortened to 80 characters."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


_POINTERS = {"version https://git-lfs": ("Git LFS", "git lfs pull"), "/annex/objects/": ("git-annex", "git annex get")}
_PAGE = re.compile(r"\ufeff?\s*<(!--|(!doctype html|html|head|title|meta|script|body|div|h1|p|\?xml)\b)", re.IGNORECASE)
_LOOKED_AT = 256
"""Number of bytes in which these are looked for."""


def pointer(name: object, begin: bytes | str, page: bool = True) -> str:
    """Return the message for a file whose content begins so if it stands in the place of a file that was not fetched,
    or "" if it does not. It is what git leaves of a large file, or, if `page`, the web page of a login or an error."""
    begin = begin if isinstance(begin, str) else begin[:_LOOKED_AT].decode(errors="replace")
    for first, (tool, command) in _POINTERS.items():
        if begin.startswith(first):
            return f"{name} is a pointer of {tool}, not the file: run `{command}` in the folder"
    if page and _PAGE.match(begin):
        return (
            f"{name} is a web page (HTML or XML), not the file: its address may have answered with a login or an "
            "error, so look at it and download the file again"
        )
    return ""


class Readable(Protocol):
    """A path whose file can be read, on a disk or in a store."""

    def open(self, mode: Literal["rb"]) -> BinaryIO: ...

    def read_text(self, encoding: str) -> str: ...


def pointer_at(path: str | os.PathLike[str] | Readable, page: bool = True) -> str:
    """Return the message of `pointer` for a file. Return it also for a link to a file that git-annex has not fetched,
    and "" for other files that cannot be read."""
    path = Path(path) if isinstance(path, str | os.PathLike) else path
    with suppress(OSError):
        if isinstance(path, Path) and path.is_symlink() and not path.exists():
            _, *annex = os.readlink(path).partition("/annex/objects/")
            return pointer(path, "".join(annex), page=False)
        with path.open("rb") as file:
            return pointer(str(path), file.read(_LOOKED_AT), page)
    return ""


def refuse_pointer(path: str | os.PathLike[str] | Readable, page: bool = True) -> None:
    """Raise ConfigError if `pointer_at` has a message for a file."""
    if said := pointer_at(path, page):
        raise ConfigError(said)


def is_there(file: Path) -> bool:
    """Return whether there is a file. Raises ConfigError for a link to a file that is gone, as a copy of a part of a
    Hugging Face cache leaves it."""
    if file.is_symlink() and not file.exists():
        refuse_pointer(file)
        raise ConfigError(
            f"{file} is a link to {os.readlink(file)}, which is not there: copy the folder with the files that its "
            "links stand for (cp -rL)"
        )
    return file.is_file()


_ROOM = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space of your quota (quota -s), or have it raised,",
    errno.EFBIG: "allow larger files (ulimit -f unlimited; a file on FAT32 ends at 4 GiB)",
}


def way_to_room(said: str) -> str:
    """Return the way to make room for a file, or "" if the text of an error does not say that there is none. Errors of
    safetensors have no number, and errors of another rank arrive as text."""
    return next((way for number, way in _ROOM.items() if os.strerror(number) in said), "")


def url_of(path: Path) -> str:
    """Return the URL that a path was made of, of whose slashes pathlib leaves one; "" for other paths."""
    scheme, sign, rest = str(path).partition(":/")
    # The URL file:///a has three of them.
    return f"{scheme}://{'/' * (scheme == 'file')}{rest}" if sign and scheme.isalnum() else ""


def url_meant(path: Path) -> str:
    """Return the message for a path that was a URL; "" for other paths."""
    if url := url_of(path):
        return (
            f"{url} is a URL, which is not taken here: copy it to a disk or from there (aws s3 cp or gcloud "
            "storage cp, --recursive), and name the path"
        )
    return ""


def no_run(path: Path) -> str:
    """Return the message about a path that has no checkpoint of a run."""
    if said := url_meant(path):
        return said
    what = f"{path} has no checkpoint" if path.is_dir() else f"there is no folder {path}"
    return f"{f'{path} is a file' if path.is_file() else what}; name the folder of a run (training.run_dir)"


def beyond_ascii(text: str) -> str:
    """Return the names of the characters of a text that are not ASCII, such as `MINUS SIGN (U+2212)`, or "". Copied
    numbers and indentation may hold such characters in place of those that they look like."""
    others = dict.fromkeys(each for each in text if not each.isascii())
    return ", ".join(f"{unicodedata.name(each, 'a character')} (U+{ord(each):04X})" for each in others)


def is_utf8(text: str) -> bool:
    """Whether a text can be written as UTF-8. Names of files that are not UTF-8 arrive with halves of surrogate
    pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def to_stderr(text: str) -> None:
    """Print a line for people on stderr."""
    print(text, file=sys.stderr, flush=True)


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook, whose cells show a bar."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and type(ipython.get_ipython()).__name__ == "ZMQInteractiveShell"


def many(number: int, what: str) -> str:
    """Return a number with its noun: 1 token, 2 tokens."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def some(names: Sequence[object], most: int) -> str:
    """Return the first names of a list, and how many more there are: a, b and 3 more."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more
