"""Paths whose files are in a store: the part of pathlib.Path that reading a checkpoint takes."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

from sagetrain.config.sections.base import is_url
from sagetrain.storage.bucket import PATIENCE
from sagetrain.storage.gs import GS
from sagetrain.storage.local import Local
from sagetrain.storage.s3 import S3
from sagetrain.storage.store import Store


@dataclass(frozen=True, order=True)
class UrlPath:
    """The path of a file or folder in a store."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> UrlPath:
        return UrlPath(f"{self.url.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> UrlPath:
        """The folder of the file or folder."""
        return UrlPath(self.url.rstrip("/").rpartition("/")[0])

    def absolute(self) -> UrlPath:
        """Return the path itself."""
        return self

    def read_bytes(self) -> bytes:
        """Return the content of a file."""
        return store_at(self.parent).read(self.name)

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return the content of a file as text."""
        return self.read_bytes().decode(encoding)

    def open(self, mode: str = "rb") -> io.BytesIO:
        """Open a small file for reading. All of it is read at once."""
        return io.BytesIO(self.read_bytes())

    def is_file(self) -> bool:
        """Whether there is a file of this name."""
        return self.name in store_at(self.parent).sizes(self.name)

    def exists(self) -> bool:
        """Whether there is a file of this name, or a folder with files."""
        return self.is_file() or bool(store_at(self).sizes())


Location = Path | UrlPath
"""A path on a disk or in a store."""


def location(text: str | Path) -> Location:
    """Return the place that a path or a URL names."""
    return UrlPath(text) if isinstance(text, str) and is_url(text) else Path(text)


def checkpoints_of(run_dir: Path | str, run_url: str | None) -> Location:
    """Return the folder of a run's checkpoints, by training.run_dir and training.run_url."""
    return (UrlPath(run_url) if run_url else Path(run_dir)) / "checkpoints"


def store_at(folder: UrlPath, patience: float = PATIENCE) -> Store:
    """Return the store whose root is a folder, which tries a call to a server again for `patience` seconds.
    Raises ValueError if the URL is of another kind. config.rules refuses such URLs."""
    scheme, _, rest = folder.url.partition("://")
    if kind := {"s3": S3, "gs": GS}.get(scheme):
        return kind(rest, patience)
    if scheme == "file":
        return Local(Path(rest))
    raise ValueError(f"{folder}: SageTrain has no store for {scheme}://")
