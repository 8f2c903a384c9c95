"""Token files in a store: what is kept of them on this host, and how it gets there.

A source whose path is a URL has a folder below `cache_folder` (config/sections/data.py). The index, the record, the
mask and the tokenizer are fetched whole. The .bin has its full size there, but no content at first. A block of it is
fetched when a token of it is read, compared with its hash in the record, and stays. So a host fetches each block once,
and the file is read as if it had always been there.

    train.idx, train.json, train.mask, tokenizer.model   as in the store
    train.bin        holes where no block was fetched yet
    train.bin.have   one byte a block: 1 once it is on the disk
    train.bin.url    where the file is; locked by those who read it, and as old as the last of them
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from sagetrain.config.errors import ConfigError
from sagetrain.config.schema import (
    TOKENIZER_JSON,
    TOKENIZER_NAME,
    DataConfig,
    cache_folder,
    cached_path,
    is_url,
)
from sagetrain.storage.range_reader import RangeReader
from sagetrain.storage.url_path import UrlPath, store_at

BLOCKS = "blocks"
"""The key of a record that has the hashes of a .bin by block."""
BLOCK = 8 << 20
"""The bytes of a block."""
_BESIDE = (TOKENIZER_NAME, TOKENIZER_JSON, "tokenizer_config.json")


class BlockHashes:
    """The SHA-256 of each block of a file that is written as a stream."""

    def __init__(self) -> None:
        self._digest, self._room, self._done = hashlib.sha256(), BLOCK, list[str]()

    def update(self, data: bytes) -> None:
        """Add the next bytes of the file."""
        rest = memoryview(data)
        while rest:
            part, rest = rest[: self._room], rest[self._room :]
            self._digest.update(part)
            self._room -= len(part)
            if not self._room:
                self._done.append(self._digest.hexdigest())
                self._digest, self._room = hashlib.sha256(), BLOCK

    def record(self) -> dict[str, Any]:
        """Return the value of BLOCKS in the file's record."""
        last = [self._digest.hexdigest()] if self._room < BLOCK else []
        return {"bytes": BLOCK, "sha256": [*self._done, *last]}


class RemoteBlocks:
    """The blocks of one .bin that are fetched as they are read. Threads and processes may share them. `path` is that of
    the token file on this host, without suffix."""

    def __init__(self, path: str, record: dict[str, Any]) -> None:
        self._mark = Path(f"{path}.bin.url").open()  # noqa: SIM115
        fcntl.flock(self._mark, fcntl.LOCK_SH)
        os.utime(self._mark.fileno())
        self.url = UrlPath(self._mark.read())
        self._hashes, self._size = record[BLOCKS]["sha256"], record[BLOCKS]["bytes"]
        self._bin = os.open(f"{path}.bin", os.O_RDWR)
        self._have = os.open(f"{path}.bin.have", os.O_RDWR)
        self._known = bytearray(len(self._hashes))

    def __del__(self) -> None:
        for name in ("_bin", "_have"):
            if hasattr(self, name):
                os.close(getattr(self, name))

    def ensure(self, begin: int, end: int) -> None:
        """Fetch the blocks that hold bytes [begin, end) and are not here yet. Raises ConfigError if a block cannot be
        fetched, or is damaged."""
        for number in range(begin // self._size, -(-end // self._size)):
            if not self._known[number]:
                if os.pread(self._have, 1, number) != b"\1":
                    self._fetch(number)
                self._known[number] = 1

    def _fetch(self, number: int) -> None:
        begin = number * self._size
        end = min(begin + self._size, os.fstat(self._bin).st_size)
        try:
            data = store_at(self.url.parent).read(self.url.name, begin, end)
        except OSError as error:
            raise ConfigError(f"token file {self.url}: {error}") from error
        if hashlib.sha256(data).hexdigest() != self._hashes[number]:
            raise ConfigError(
                f"token file {self.url}: bytes {begin:,} to {end:,} do not have the hash that is recorded in its "
                ".json: the file is damaged or was replaced; prepare it again"
            )
        try:
            view = memoryview(data)
            while view:
                written = os.pwrite(self._bin, view, begin)
                begin, view = begin + written, view[written:]
            os.fdatasync(self._bin)  # The byte below must not survive a crash that the block does not survive.
            os.pwrite(self._have, b"\1", number)
        except OSError as error:
            raise ConfigError(f"the cache of {self.url} in {cache_folder()}: {error.strerror}; make room") from error


def is_remote(path: str) -> bool:
    """Whether the token file of this path is one of a store."""
    return os.path.exists(f"{path}.bin.url")


def fetch_sources(data: DataConfig) -> None:
    """Bring to this host what must be known of the token files in stores before their tokens are read. A process waits
    for others that do the same. Raises ConfigError if a file is missing or cannot be fetched, or the files would take
    more than data.cache_gb."""
    sources = [source for source in (*data.train, *data.valid) if is_url(source.path)]
    if not sources:
        return
    try:
        with _alone():
            found = [(url, name, sizes) for source in sources for url, name, sizes in _listed(source.path)]
            _make_room(data.cache_gb, {f"{url / name}": sizes for url, name, sizes in found})
            for url, name, sizes in found:
                _fetch_small(url, name, sizes)
    except OSError as error:
        raise ConfigError(f"token files of data: {error}") from error


def _listed(path: str) -> Iterator[tuple[UrlPath, str, dict[str, int]]]:
    """Yield the folder and the name of each token file that a URL means, and the bytes of the files beside it."""
    url = UrlPath(path)
    sizes = {name: size for name, size in store_at(url.parent).sizes().items() if "/" not in name}
    names = [name.removesuffix(".idx") for name in sizes if name.endswith(".idx")]
    names = [name for name in names if fnmatchcase(name, url.name)]
    if not names:
        raise ConfigError(f"token file {path}: no {path}.idx; copy there what `sagetrain prepare` wrote")
    for name in names:
        for suffix in (".bin", ".json"):
            if f"{name}{suffix}" not in sizes:
                raise ConfigError(f"token file {url.parent / name}: no {name}{suffix}; copy it there as well")
        yield url.parent, name, sizes


def _fetch_small(url: UrlPath, name: str, sizes: dict[str, int]) -> None:
    target = Path(cached_path(str(url / name)))
    folder, record = target.parent, (url / f"{name}.json").read_bytes()
    try:
        number = len(json.loads(record)[BLOCKS]["sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"token file {url / name}: its .json has no hashes by block, so its parts cannot be checked: `sagetrain "
            "prepare` writes them now; or copy the file to a disk and name the path"
        ) from error
    there, parts = Path(f"{target}.json"), [each for each in (".idx", ".mask") if f"{name}{each}" in sizes]
    if there.is_file() and there.read_bytes() == record and Path(f"{target}.idx").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    # The index is written last, and goes first: without it there is no token file.
    for suffix in (".idx", ".json", ".mask", ".bin", ".bin.have", ".bin.url"):
        Path(f"{target}{suffix}").unlink(missing_ok=True)
    for beside in _BESIDE:
        if beside in sizes:
            (folder / beside).write_bytes((url / beside).read_bytes())
    for suffix, size in ((".bin", sizes[f"{name}.bin"]), (".bin.have", number)):
        with Path(f"{target}{suffix}").open("wb") as file:
            file.truncate(size)
    Path(f"{target}.bin.url").write_text(str(url / f"{name}.bin"))
    there.write_bytes(record)
    for suffix in reversed(parts):
        part = Path(f"{target}{suffix}.partial")
        with part.open("wb") as file:
            file.writelines(RangeReader(url / f"{name}{suffix}").blocks())
        part.rename(f"{target}{suffix}")


def _make_room(cache_gb: float, wanted: dict[str, dict[str, int]]) -> None:
    """Check that token files fit into the cache, and delete others that nobody reads, the oldest first."""
    suffixes = (".bin", ".idx", ".mask", ".json")
    need = sum(sizes.get(f"{url.rpartition('/')[2]}{end}", 0) for url, sizes in wanted.items() for end in suffixes)
    root = cache_folder()
    if need > cache_gb * 1e9:
        raise ConfigError(
            f"data.cache_gb {cache_gb:g}: the token files in stores take {need / 1e9:,.2f} GB on each host once all of "
            f"them are read; raise it if {root} has the room, name another disk (SAGETRAIN_CACHE), or train on fewer"
        )
    kept = {cached_path(url) for url in wanted}
    others = [mark for mark in root.glob("*/*.bin.url") if str(mark).removesuffix(".bin.url") not in kept]
    for mark in sorted(others, key=lambda path: path.stat().st_mtime):
        used = sum(path.stat().st_blocks * 512 for path in root.glob("*/*"))
        own = sum(Path(f"{path}{end}").stat().st_blocks * 512 for path in kept for end in suffixes
                  if Path(f"{path}{end}").is_file())  # fmt: skip
        if used - own + need <= cache_gb * 1e9:
            break
        with mark.open() as file, suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for suffix in (".idx", ".json", ".mask", ".bin", ".bin.have", ".bin.url"):
                Path(str(mark).removesuffix(".bin.url") + suffix).unlink(missing_ok=True)
    free = shutil.disk_usage(root).free + sum(path.stat().st_blocks * 512 for path in root.glob("*/*"))
    if need > free:
        raise ConfigError(
            f"the token files in stores take {need / 1e9:,.2f} GB, and the disk of {root} has {free / 1e9:,.2f} GB for "
            "them: make room, or name another disk (SAGETRAIN_CACHE)"
        )


@contextmanager
def _alone() -> Iterator[None]:
    root = cache_folder()
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
