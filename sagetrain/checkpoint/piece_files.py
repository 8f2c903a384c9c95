"""The files that hold the pieces of a checkpoint. A process opens each of them once, however many tensors it reads."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from io import FileIO
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sagetrain.config.errors import ConfigError
from sagetrain.data.open_files import allow_open_files
from sagetrain.storage.range_reader import RangeReader
from sagetrain.storage.url_path import Location, UrlPath

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# A process asks for room for this many further files at a time.
_FURTHER = 256
# This many files of a store are open at once: a rank reads weights and moments in turn.
_READERS = 4


class _Stored(NamedTuple):
    """A tensor in a file: its dtype, and the bytes where it begins and ends."""

    dtype: str
    begin: int
    end: int


class PieceFiles:
    """The safetensors files of a folder. Files stay open until `close`, as many as the process may have. Values are
    read and not mapped, because pages that stay mapped would count as this process's memory. Of a folder in a store
    few files are open, because each holds a block in memory."""

    def __init__(self, folder: Location) -> None:
        self._folder, self._room = folder, 0
        self._headers: dict[str, dict[str, _Stored]] = {}
        self._kept: dict[str, FileIO | RangeReader] = {}

    def read(self, file: str, name: str, start: int, out: Tensor) -> None:
        """Fill an fp32 vector on the CPU with the values of a tensor from `start` on. Raises OSError if the file cannot
        be read, and ValueError if the file is no safetensors file, or has no such tensor or too few of its values."""
        opened = self._open(file)
        try:
            stored = self._headers[file].get(name)
            if stored is None or stored.dtype not in _DTYPES:
                raise ValueError(f"{name} is {stored.dtype if stored else 'not in it'}")
            dtype = _DTYPES[stored.dtype]
            begin = stored.begin + start * dtype.itemsize
            if begin + len(out) * dtype.itemsize > stored.end:
                raise ValueError(f"{name} ends before value {start + len(out):,}")
            values = out if dtype == out.dtype else torch.empty(len(out), dtype=dtype)
            filled: Any = values.view(torch.uint8).numpy()
            _read(opened, begin, memoryview(filled))
            if values is not out:
                out.copy_(values)
        finally:
            if file not in self._kept:
                opened.close()

    def close(self) -> None:
        """Close all files. A file that is read again is opened again."""
        for opened in self._kept.values():
            opened.close()
        self._kept.clear()

    def _open(self, file: str) -> FileIO | RangeReader:
        if file in self._kept:
            return self._kept[file]
        opened = self._opened(file)
        try:
            if file not in self._headers:
                self._headers[file] = _header(opened)
        except BaseException:
            opened.close()
            raise
        if isinstance(opened, RangeReader):
            if len(self._kept) == _READERS:
                self._kept.pop(next(iter(self._kept)))
            self._kept[file] = opened
            return opened
        if len(self._kept) == self._room:
            # Where a process may have no more files, further ones are open while they are read.
            with suppress(ConfigError):
                allow_open_files(_FURTHER, "the files of a checkpoint")
                self._room += _FURTHER
        if len(self._kept) < self._room:
            self._kept[file] = opened
        return opened

    def _opened(self, file: str) -> FileIO | RangeReader:
        path = self._folder / file
        return RangeReader(path) if isinstance(path, UrlPath) else FileIO(path)


def _header(opened: FileIO | RangeReader) -> dict[str, _Stored]:
    """Return where a safetensors file has which tensor. Eight bytes say how long the header is, which is JSON."""
    size = opened.size if isinstance(opened, RangeReader) else os.fstat(opened.fileno()).st_size
    length = bytearray(8)
    _read(opened, 0, memoryview(length))
    first = 8 + int.from_bytes(length, "little")
    if first > size:
        raise ValueError("it is no safetensors file, or is cut off")
    text = bytearray(first - 8)
    _read(opened, 8, memoryview(text))
    try:
        # Files have the same names, which take memory once.
        found = {
            sys.intern(name): _Stored(sys.intern(entry["dtype"]), *(first + place for place in entry["data_offsets"]))
            for name, entry in json.loads(text).items()
            if name != "__metadata__"
        }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"its header is not that of safetensors: {error!r}") from error
    if any(not first <= stored.begin <= stored.end <= size for stored in found.values()):
        raise ValueError("it is cut off")
    return found


def _read(opened: FileIO | RangeReader, begin: int, out: memoryview) -> None:
    """Fill `out` with the bytes of a file from `begin` on."""
    while out:
        if isinstance(opened, RangeReader):
            count = opened.read(begin, out)
        else:
            count = os.preadv(opened.fileno(), [out], begin)
        if not count:
            raise ValueError("it is cut off")
        begin, out = begin + count, out[count:]
