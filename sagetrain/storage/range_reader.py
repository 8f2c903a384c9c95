"""Files in a store that are read range by range, and copies of folders."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from sagetrain.storage.url_path import UrlPath, store_at

_LEAST, _BLOCK = 1 << 20, 16 << 20
"""The fewest bytes of a request, which waits some 30 ms for its answer, and those of one that reads a whole file."""


class RangeReader:
    """A reader of one file. It keeps the block that it has read last, because small ranges mostly follow one another.
    Raises FileNotFoundError if there is no such file."""

    def __init__(self, path: UrlPath) -> None:
        self._path, self._store = path, store_at(path.parent)
        self._begin, self._block = 0, b""
        try:
            self.size = self._store.sizes(path.name)[path.name]
        except KeyError as error:
            raise FileNotFoundError(f"{path}: no such file") from error

    def read(self, begin: int, out: memoryview) -> int:
        """Fill the first bytes of `out` with those of the file from `begin` on, and return how many these are; 0 at the
        end of the file."""
        if not self._begin <= begin < self._begin + len(self._block):
            stop = min(begin + max(len(out), _LEAST), self.size)
            self._begin, self._block = begin, self._store.read(self._path.name, begin, stop) if begin < stop else b""
        found = memoryview(self._block)[begin - self._begin :][: len(out)]
        out[: len(found)] = found
        return len(found)

    def blocks(self) -> Iterator[bytes]:
        """Yield the content of the file, block by block."""
        for begin in range(0, self.size, _BLOCK):
            yield self._store.read(self._path.name, begin, min(begin + _BLOCK, self.size))

    def close(self) -> None:
        """Give back the memory of the block."""
        self._block = b""


def sha256_in_store(path: UrlPath) -> str:
    """Return the SHA-256 of a file in hexadecimal. All of it is read."""
    digest = hashlib.sha256()
    for block in RangeReader(path).blocks():
        digest.update(block)
    return digest.hexdigest()


def fetch(folder: UrlPath, target: Path) -> None:
    """Copy the files of a folder in a store, without its own folders, into a new folder on a disk."""
    target.mkdir(parents=True)
    for name in store_at(folder).names():
        if "/" not in name:
            with (target / name).open("wb") as file:
                file.writelines(RangeReader(folder / name).blocks())


def send_folder(folder: Path, target: UrlPath, last: str) -> None:
    """Copy the files of a folder on a disk, without its own folders, to a folder in a store. The file `last` is copied
    at the end. Raises OSError."""
    store = store_at(target)
    store.discard_unfinished()
    for path in sorted(folder.iterdir(), key=lambda each: (each.name == last, each.name)):
        store.write(path.name, _blocks_of(path), path.stat().st_size)


def _blocks_of(path: Path) -> Iterator[memoryview]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            yield memoryview(block)
