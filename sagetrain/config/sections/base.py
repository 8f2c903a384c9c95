"""The base class and the field types that all sections have in common."""

from __future__ import annotations

import os
import re
import unicodedata
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from sagetrain.config.errors import ConfigError


class Section(BaseModel):
    """The base of all sections. Sections are immutable, refuse unknown keys and convert nothing in silence: "1" and
    true are no numbers. The docstrings of their fields become the key reference."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


_LONGEST = 4000
"""The bytes of the longest path. Linux takes 4,095, and a run adds the names of its files."""
Name = Annotated[str, Field(min_length=1)]


def _path(text: str) -> str:
    """Return a path with the home folder in place of "~", because no shell has replaced it. Raises ValueError for
    what no file system takes as a path, or only by mistake."""
    if "://" in text:
        raise ValueError(
            "is a URL, which this key does not take: copy it to a disk (training.run_url and data.train take one)"
        )
    if lines := {"\n", "\r", "\0"} & {*text}:
        raise ValueError(f"holds {', '.join(map(repr, sorted(lines)))}: write the path in one line, without | or >")
    if text != text.strip() or any(unicodedata.category(each) in ("Cc", "Cf") for each in text):
        raise ValueError("has a blank at an end, or a character that nobody sees: type the path anew")
    if any(len(os.fsencode(part)) > 255 for part in text.split("/")):
        raise ValueError("has a name of more than 255 bytes, which file systems do not take: shorten it")
    if len(os.fsencode(path := os.path.expanduser(text))) > _LONGEST:
        raise ValueError(f"has more than {_LONGEST:,} bytes, which is no path: shorten it")
    if path.startswith("~"):
        raise ValueError("begins with ~, and no user has this name: write the path in full, or begin it with ./")
    return path


LocalPath = Annotated[Name, AfterValidator(_path)]
"""The path of a file or folder."""
PACKAGES = {"s3": "s3fs", "gs": "gcsfs"}
"""The package that reaches buckets of each kind. The extra that brings it has the name of the kind."""
_BUCKET = r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]|gs://[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]"
_URL = re.compile(rf"({_BUCKET}|file://)(/[A-Za-z0-9._=+-]+)*/?")


def _url(text: str) -> str:
    """Return the URL of a folder in a store without a slash at its end. Raises ValueError for other texts."""
    if not _URL.fullmatch(text) or {".", ".."} & {*text.split("/")} or text == "file://":
        raise ValueError(
            "is none of s3://BUCKET/FOLDER, gs://BUCKET/FOLDER and file:///FOLDER, with letters, digits and . _ = + - "
            "in names. Other stores are not tried: mount them and name the path"
        )
    return text.rstrip("/")


def store_url(text: str) -> str:
    """Return the URL of a folder in a store that a command was given. Raises ConfigError for other URLs."""
    try:
        return _url(text)
    except ValueError as error:
        raise ConfigError(f"{text} {error}") from error


StoreUrl = Annotated[Name, AfterValidator(_url)]
"""The URL of a folder in a store (storage/)."""


def is_url(text: str) -> bool:
    """Whether a path is a URL."""
    return "://" in text


def _path_or_url(text: str) -> str:
    """Return a path as `_path` does, or the URL of a token file, whose last part may be a pattern."""
    if not is_url(text):
        return _path(text)
    folder, _, name = text.rpartition("/")
    if not re.fullmatch(r"[A-Za-z0-9._=+*?-]+", name) or not is_url(folder):
        raise ValueError("is no URL of a token file: write s3://BUCKET/FOLDER/NAME (or gs://), without .bin and .idx")
    return f"{_url(folder)}/{name}"


FolderOrUrl = Annotated[Name, AfterValidator(lambda text: _url(text) if is_url(text) else _path(text))]
"""The path of a folder, or its URL in a store."""
PathOrUrl = Annotated[Name, AfterValidator(_path_or_url)]
"""The path of a token file, or its URL in a store."""
Fraction = Annotated[float, Field(ge=0, lt=1)]
