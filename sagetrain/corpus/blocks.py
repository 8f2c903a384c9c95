"""Read the bytes of files and of members of archives, as blocks and as lines. The suffix of the name says how they are
compressed."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sagetrain.config.errors import ConfigError
from sagetrain.corpus.kinds import HEAD, compression, named_otherwise

_BLOCK = 1 << 18
_LEAST, _MOST = 1 << 6, 1 << 12
"""The fewest and the most bytes that a zstd frame is given at once."""
DAMAGED = (EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, OSError)
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


def on_disk(path: Path) -> Content:
    """Build the content of a file on disk."""
    return Content(str(path), lambda: open(path, "rb"))


@contextmanager
def opened(content: Content, start: int = 0) -> Iterator[tuple[IO[bytes], Callable[[], int]]]:
    """Open a content at byte `start` (of an uncompressed file). Yields a file of the decompressed bytes, and a function
    that returns how many bytes of the file on disk have been read. Raises ConfigError if the content cannot be read."""
    try:
        with content.raw() as raw:
            if start:
                raw.seek(start)
            yield _decompressed(content.name, raw), lambda: content.read(raw)
    except DAMAGED as error:
        raise ConfigError(f"cannot read {content.name}: {error}{otherwise(content)}") from error


def otherwise(content: Content) -> str:
    """Say that a content which cannot be read is something else than its name says. Return "" if nothing shows it."""
    with suppress(*DAMAGED), content.raw() as raw:
        return named_otherwise(content.name, raw.read(HEAD))
    return ""


def blocks(content: Content, start: int = 0) -> Iterator[tuple[bytes, int]]:
    """Yield decompressed blocks, from byte `start` on (of an uncompressed file), each with the bytes of the file on
    disk that have been read so far. Raises ConfigError if the content cannot be read."""
    with opened(content, start) as (file, read):
        first = start == 0
        while block := file.read(_BLOCK):
            if first:
                block, first = block.removeprefix(b"\xef\xbb\xbf"), False  # A byte order mark is not text.
            yield block, read()


def head(content: Content, size: int) -> bytes:
    """Return the first `size` decompressed bytes of a content. Raises ConfigError if it cannot be read."""
    with opened(content) as (file, _):
        return file.read(size)


def _decompressed(name: str, raw: IO[bytes]) -> Any:
    match compression(name):
        case ".gz":
            return gzip.GzipFile(fileobj=raw)
        case ".bz2":
            return io.BufferedReader(_Streams(raw, bz2.BZ2Decompressor), _BLOCK)
        case ".xz":
            return io.BufferedReader(_Streams(raw, lzma.LZMADecompressor), _BLOCK)
        case ".zst":
            return io.BufferedReader(_Streams(raw, _ZstdFrame), _BLOCK)
        case _:
            return raw


class _Streams(io.RawIOBase):
    """A file of all compressed streams of a file, one after the other. The last one has to be complete. Bytes of zero
    may stand between and after streams, as xz and tapes pad. Python's own readers of bzip2 and xz end without a word
    where no other stream begins, and leave out what comes after padding. `begin` makes the decompressor of a stream."""

    def __init__(self, raw: IO[bytes], begin: Callable[[], Any]) -> None:
        self._blocks, self._rest = _blocks_of_streams(raw, begin), memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = memoryview(block)  # What is left of a large block is not copied.
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def _blocks_of_streams(raw: IO[bytes], begin: Callable[[], Any]) -> Iterator[bytes]:
    stream = begin()
    while data := raw.read(_BLOCK):
        while data := data if stream else data.lstrip(b"\0"):
            stream = stream or begin()
            yield stream.decompress(data, _BLOCK)
            while not (stream.eof or stream.needs_input):
                yield stream.decompress(b"", _BLOCK)
            data, stream = (stream.unused_data, None) if stream.eof else (b"", stream)
    if stream:
        raise EOFError("Compressed file ended before the end-of-stream marker was reached (cut short?)")


class _ZstdFrame:
    """A zstd frame, with the interface of bz2.BZ2Decompressor. zstandard decompresses whatever it is given, and a few
    bytes may be 128 KiB of one letter. So the frame is given as much as it made about a block of before."""

    def __init__(self) -> None:
        import zstandard

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
        """Return what the next part of the data holds, about `most` bytes. The rest of the data is kept for the next
        call, which has none."""
        import zstandard

        self._left = memoryview(data) if data else self._left
        part, self._left = self._left[: self._size], self._left[self._size :]
        try:
            block: bytes = self._frame.decompress(part)
        except zstandard.ZstdError as error:
            raise OSError(str(error)) from error
        self._size = max(_LEAST, self._size // 4) if len(block) > 2 * most else min(2 * self._size, _MOST)
        return block


def lines(blocks: Iterable[tuple[bytes, int]]) -> Iterator[tuple[bytes, int, int]]:
    """Yield each line, how many bytes of the file had been read, and how many bytes of the last block follow the
    line."""
    parts: list[bytes] = []
    consumed = 0
    for block, consumed in blocks:
        begin, *others = block.split(b"\n")
        parts.append(begin)
        rest = len(block) - len(begin)
        for line in others:
            rest -= 1
            yield b"".join(parts), consumed, rest
            parts = [line]
            rest -= len(line)
    if any(parts):
        yield b"".join(parts), consumed, 0
