"""Bytes of files, decompressed by their names, as blocks and as lines."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from sagetrain.config.errors import ConfigError

_BLOCK = 1 << 18


def ends(path: str | Path, *suffixes: str) -> bool:
    """Whether a name ends so, in whatever case."""
    return str(path).lower().endswith(suffixes)


def blocks(path: Path, start: int = 0) -> Iterator[tuple[bytes, int]]:
    """Decompressed blocks of a file, and how many bytes of it had been read. ConfigError if it cannot be read.

    `start`: byte of an uncompressed file to begin at.
    """
    try:
        with open(path, "rb") as raw:
            raw.seek(start)
            if ends(path, ".gz"):
                file = gzip.GzipFile(fileobj=raw)
                found: Iterable[bytes] = iter(lambda: file.read(_BLOCK), b"")
            elif ends(path, ".zst"):
                found = _zstd_blocks(path, raw)
            else:
                found = iter(lambda: raw.read(_BLOCK), b"")
            first = start == 0
            for block in found:
                if first and block:
                    block, first = block.removeprefix(b"\xef\xbb\xbf"), False  # a byte order mark is not text
                yield block, raw.tell()
    except (EOFError, zlib.error, OSError) as error:  # gzip.BadGzipFile is an OSError
        raise ConfigError(f"cannot read {path}: {error}") from error


def _zstd_blocks(path: Path, raw: io.BufferedReader) -> Iterator[bytes]:
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    frame = None
    while data := raw.read(_BLOCK):
        while data:
            frame = frame or decompressor.decompressobj()
            try:
                yield frame.decompress(data)
            except zstandard.ZstdError as error:
                raise ConfigError(f"cannot read {path}: {error}") from error
            data = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None:
        raise ConfigError(f"cannot read {path}: it ends in the middle of a zstd frame (cut short?)")


def lines(blocks: Iterable[tuple[bytes, int]]) -> Iterator[tuple[bytes, int, int]]:
    """Lines, how many bytes of the file had been read, and how many of the last block come after the line."""
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
