"""The folders of copies in memory (in_memory.py): what is in one, how it gets there, and who may remove it."""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import shutil
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from sagetrain.checkpoint.in_store import header_of
from sagetrain.parallel.digest import ROW, digest_by

ROOT = Path("/dev/shm")
Header = dict[str, Any]
_HEADER = "copy.json"
_PART = 4 << 20  # bytes that are received at once


class CopyFolder:
    """A folder for one copy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def header(self) -> Header | None:
        """Return what copy.json says; None: there is no whole copy."""
        with suppress(OSError, ValueError):
            return dict(json.loads((self.folder / _HEADER).read_text()))
        return None

    def whole(self, threads: int) -> bool:
        """Whether the files have the hashes that copy.json names."""
        header = self.header()
        with suppress(OSError, ValueError):
            return header is not None and all(self.hash(name, threads) == is_ for name, is_ in header["hashes"].items())
        return False

    def hash(self, name: str, threads: int) -> int:
        """Return the hash of a file."""
        return int(digest_by(threads, torch.from_numpy(np.memmap(self.folder / name, np.uint8, "c"))))

    def clear(self) -> None:
        """Begin another copy."""
        (self.folder / _HEADER).unlink(missing_ok=True)

    def publish(self, header: Header) -> None:
        """Make the files a whole copy."""
        beside = self.folder / f"{_HEADER}.tmp"
        beside.write_text(json.dumps(header))
        os.replace(beside, self.folder / _HEADER)

    def allocate(self, sizes: Mapping[str, int]) -> None:
        """Make files of these bytes, for which there is memory from then on. Files that are there keep their content.
        Raises OSError if there is not as much memory."""
        self.folder.mkdir(exist_ok=True)
        for name, size in sizes.items():
            with (self.folder / name).open("ab") as file:
                file.truncate(size)
                os.posix_fallocate(file.fileno(), 0, size)


def bytes_of(tensors: Mapping[str, int]) -> int:
    """Return the bytes of a file with vectors of these numbers of values, up to a whole row of the hash."""
    header, size = header_of(tensors)
    return -(-(len(header) + size) // ROW) * ROW


def mapped(path: Path, tensors: Mapping[str, int]) -> tuple[Tensor, dict[str, Tensor]]:
    """Map a file that `allocate` has made. Return its bytes, and the vectors of these numbers of values in it."""
    header, _ = header_of(tensors)
    with path.open("r+b") as file:
        memory = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
    memory[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    views, end = {}, len(header)
    memory[end + 4 * sum(tensors.values()) :] = 0
    for name in sorted(tensors):
        begin, end = end, end + 4 * tensors[name]
        views[name] = memory[begin:end].view(torch.float32)
    return memory, views


def send(stream: socket.socket, slot: CopyFolder, header: Header) -> None:
    """Send a whole copy."""
    stream.sendall(json.dumps(header).encode() + b"\n")
    for name in header["sizes"]:
        with (slot.folder / name).open("rb") as file:
            stream.sendfile(file)


def receive(reader: IO[bytes], header: Header, slot: CopyFolder) -> None:
    """Write a copy that arrives into a folder. Raises OSError or ValueError if it does not arrive as a whole."""
    slot.clear()
    slot.folder.mkdir(exist_ok=True)
    for name, size in header["sizes"].items():
        path, left = slot.folder / Path(name).name, size
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.truncate(size)
            while left:
                if not (part := reader.read(min(left, _PART))):
                    raise ConnectionResetError("the copy was broken off")
                left -= file.write(part)
    slot.publish(header)


def locked(folder: Path) -> IO[str]:
    """Make the folder of a run and lock it for as long as this process lives. Remove those of runs that have ended."""
    for other in folder.parent.glob(f"{folder.name.rpartition('-')[0]}-*"):
        if other != folder:
            remove_if_left(other)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = (folder / ".lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def folder_of(run: str) -> Path:
    """Return the folder of all copies of a run on this host."""
    return ROOT / f"sagetrain-{os.getuid()}-{run}"


def bytes_left() -> int:
    """Return the bytes that copies on this host take already."""
    return sum(file.stat().st_blocks * 512 for file in ROOT.glob(f"sagetrain-{os.getuid()}-*/*/*"))


def remove_if_left(folder: Path) -> None:
    """Remove a folder of copies that no process uses."""
    with suppress(OSError), (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
