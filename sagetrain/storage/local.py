"""A folder that is written as a bucket is: files appear whole under their names. fsspec's own file:// writes in place,
so that a kill would leave half a file."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sagetrain.storage.store import Store

_UNFINISHED = ".partial"
_PLACE = ("step", "tokens")
"""The keys that every row of a run's files has."""


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_rows(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """Read the rows of a metrics.jsonl or events.jsonl, or of its last bytes alone. Return none if there is no file.
    The file may be growing, or may have been cut short, so incomplete rows are skipped."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        if last_bytes is not None:
            file.seek(max(0, path.stat().st_size - last_bytes))
        lines = file.read().decode(errors="replace").splitlines()
    rows = []
    for line in lines:
        with suppress(ValueError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict) and all(isinstance(row.get(key), int) for key in _PLACE)]


class Local(Store):
    """A store in a folder. The folder is made by the first file."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, name: str, data: bytes, *, absent: bool = False) -> None:
        with self._beside(name, [memoryview(data)]) as written:
            if absent:
                os.link(written, self._root / name)  # A link does not replace a file.
            else:
                os.replace(written, self._root / name)

    def swap(self, name: str, data: bytes, tag: str) -> None:
        folder = os.open(self._root, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            if self.tagged(name)[1] != tag:
                raise FileExistsError(f"{self._root / name}: another writer has replaced it")
            self.put(name, data)
        finally:
            os.close(folder)

    def tagged(self, name: str) -> tuple[bytes, str]:
        data = self.read(name)
        return data, hashlib.sha256(data).hexdigest()

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with (self._root / name).open("rb") as file:
            file.seek(start)
            found = file.read() if stop is None else file.read(max(stop - start, 0))
        if stop is not None and len(found) < stop - start:
            raise OSError(f"{self._root / name} ends at {start + len(found)}, before {stop}")
        return found

    def sizes(self, prefix: str = "") -> dict[str, int]:
        found = {}
        for folder, _, names in os.walk(self._root / prefix.rpartition("/")[0]):
            for each in names:
                path = Path(folder, each)
                name = str(path.relative_to(self._root))
                if name.startswith(prefix) and not name.endswith(_UNFINISHED):
                    with suppress(FileNotFoundError):
                        found[name] = path.stat().st_size
        return dict(sorted(found.items()))

    def delete(self, names: Iterable[str]) -> None:
        for path in [self._root / name for name in names]:
            path.unlink(missing_ok=True)
            with suppress(OSError):  # The folder has other files.
                path.parent.rmdir()

    def discard_unfinished(self) -> None:
        self.delete(str(path.relative_to(self._root)) for path in self._root.rglob(f"*{_UNFINISHED}"))

    def write(self, name: str, blocks: Iterable[memoryview], size: int) -> None:
        with self._beside(name, blocks) as written:
            os.replace(written, self._root / name)

    @contextmanager
    def _beside(self, name: str, blocks: Iterable[memoryview]) -> Iterator[Path]:
        """Write blocks durably to a file beside `name`, which is gone at the end."""
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}{_UNFINISHED}")
        try:
            with beside.open("wb") as file:
                for block in blocks:
                    file.write(block)
                file.flush()
                os.fsync(file.fileno())
            yield beside
            sync(path.parent)
        finally:
            beside.unlink(missing_ok=True)
