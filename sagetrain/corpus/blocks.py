"""Read the bytes of files and of members of archives. The suffix of the name says how they are compressed."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import zstandard

from sagetrain.config.errors import ConfigError
from sagetrain.corpus.kinds import HEAD, compression, named_otherwise

BLOCK = 1 << 18
"""Number of bytes that are read at once."""
_LEAST, _MOST = 1 << 6, 1 << 12
"""The fewest and the most bytes that a zstd frame is given at once."""
DAMAGED = (
    EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError, tarfile.TarError, zipfile.BadZipFile, OSError
)  # fmt: skip
"""The exceptions that damaged or truncated files raise. gzip.BadGzipFile is an OSError."""


@dataclass(frozen=True)
class Content:
    """The bytes of a file, or of a member of an archive."""

    name: str
    """The path, for messages. Its suffix says how the content is compressed."""
    raw: Callable[[], IO[bytes]]
    """Open the content. The caller closes the file that is returned."""
    read: Callable[[IO[bytes]], int] = lambda raw: raw.tell()
    """Return how many bytes of the file on disk have been read, given the file that `raw` opened."""
    seekable: bool = False
    """Whether reading can begin at any byte."""


def on_disk(path: Path) -> Content:
    """Build the content of a file on disk."""
    return Content(str(path), lambda: open(path, "rb", buffering=0), seekable=not compression(path))


@contextmanager
def opened(content: Content, start: int = 0) -> Iterator[tuple[io.BufferedReader, Callable[[], int]]]:
    """Open a content at byte `start` (of an uncompressed file). Yields a file of the decompressed bytes, and a function
    that returns how many bytes of the file on disk have been read. Raises ConfigError if the content cannot be read."""
    try:
        with content.raw() as raw:
            if start:
                raw.seek(start)
            yield io.BufferedReader(_decompressed(content.name, raw), BLOCK), lambda: content.read(raw)
    except DAMAGED as error:
        raise ConfigError(f"cannot read {content.name}: {error}{otherwise(content)}") from error


def otherwise(content: Content) -> str:
    """Say that a content which cannot be read is something else than its name says. Return "" if nothing shows it."""
    with suppress(*DAMAGED), content.raw() as raw:
        return named_otherwise(content.name, raw.read(HEAD))
    return ""


def head(content: Content) -> bytes:
    """Return the first HEAD decompressed bytes of a content. Raises ConfigError if it cannot be read."""
    with opened(content) as (file, _):
        return file.read(HEAD)


def _decompressed(name: str, raw: IO[bytes]) -> Any:
    match compression(name):
        case ".gz":
            return gzip.GzipFile(fileobj=raw)
        case ".bz2":
            return _Streams(raw, bz2.BZ2Decompressor)
        case ".xz":
            return _Streams(raw, lzma.LZMADecompressor)
        case ".zst":
            return _Streams(raw, _ZstdFrame)
        case _:
            return raw


class _Streams(io.RawIOBase):
    """A file of all compressed streams of a file, one after the other. The last one has to be complete. Bytes of zero
    may stand between and after streams, as xz and tapes pad.

    Python's own readers of bzip2 and xz end without a word where no other stream begins, and leave out what comes after
    padding. zstandard's ends without a word where a frame is cut short. `begin` makes the decompressor of a stream."""

    def __init__(self, raw: IO[bytes], begin: Callable[[], Any]) -> None:
        self._blocks, self._rest = _blocks_of_streams(raw, begin), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        done = 0
        while done < len(buffer):
            if not self._rest:
                if (block := next(self._blocks, None)) is None:
                    break
                self._rest = memoryview(block)  # What is left of a large block is not copied.
            size = min(len(buffer) - done, len(self._rest))
            buffer[done : done + size], self._rest = self._rest[:size], self._rest[size:]
            done += size
        return done


def _blocks_of_streams(raw: IO[bytes], begin: Callable[[], Any]) -> Iterator[bytes]:
    stream = begin()
    while data := raw.read(BLOCK):
        while data := data if stream else data.lstrip(b"\0"):
            stream = stream or begin()
            yield stream.decompress(data, BLOCK)
            while not (stream.eof or stream.needs_input):
                yield stream.decompress(b"", BLOCK)
            data, stream = (stream.unused_data, None) if stream.eof else (b"", stream)
    if stream:
        raise EOFError("Compressed file ended before the end-of-stream marker was reached (cut short?)")


class _ZstdFrame:
    """A zstd frame, with the interface of bz2.BZ2Decompressor. zstandard decompresses whatever it is given, and a few
    bytes may be 128 KiB of one letter. So the frame is given as much as it made about a block of before."""

    def __init__(self) -> None:
        self._frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        self._size, self._left = _LEAST, memoryview(b"")

    @property
    def eof(self) -> bool:
        """Whether the frame has ended."""
        return bool(self._frame.eof)

    @property
    def needs_input(self) -> bool:
        """Whether everything that was given is decompressed."""
        return not self._left

    @property
    def unused_data(self) -> bytes:
        """The bytes behind the end of the frame."""
        return bytes(self._frame.unused_data) + bytes(self._left)

    def decompress(self, data: bytes, most: int) -> bytes:
        """Return what the next bytes of the data hold. The rest of the data is kept for the next call, which has
        none."""
        self._left = memoryview(data) if data else self._left
        part, self._left = self._left[: self._size], self._left[self._size :]
        block = self._frame.decompress(part)
        self._size = max(_LEAST, self._size // 4) if len(block) > 2 * most else min(2 * self._size, _MOST)
        return block
