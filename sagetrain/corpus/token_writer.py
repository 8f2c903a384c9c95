"""Writing of token files as a stream."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from sagetrain.config.errors import ConfigError
from sagetrain.data.remote_blocks import BLOCKS, BlockHashes
from sagetrain.data.token_file import CODES, HEADER, MAGIC, token_dtype, token_path, write_atomic

_BLOCK = 1 << 20
"""Bytes of a buffer, and documents of the index that are handled at once."""
_LONGEST = np.iinfo(np.int32).max


class TokenFileWriter:
    """A writer of a token file as a stream, after `begin`. Memory does not grow with the file.

    Everything goes to NAME.bin.partial, NAME.idx.partial and, if there is a mask, NAME.mask.partial. `finish` completes
    them and `publish` renames them, the .idx last. Whatever happens before, nothing looks like a finished file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Lock the output, so that no other process writes there. Raises ConfigError if another process does. This
        method and all others also raise it if nothing can be written, for instance because the disk is full."""
        self.path = Path(path)
        self.dtype: np.dtype
        self.num_tokens = 0
        self.num_documents = 0
        self._open_length = 0  # This is the length of the last document so far; more of it may follow.
        self._hash, self._mask_hash = hashlib.sha256(), hashlib.sha256()
        self._block_hashes = BlockHashes()
        self.sha256 = self.mask_sha256 = ""
        self._bin: BinaryIO
        self._mask: BinaryIO | None = None
        # The lock is on the file that is renamed or removed last. Until then nobody else opens either of them.
        folder = self.path.absolute().parent
        self._new_folders = [each for each in (folder, *folder.parents) if not each.exists()]
        self._idx = _open_locked(token_path(path, ".idx.partial"))
        self._files = [(self._idx, ".idx")]

    def begin(self, vocab_size: int, written: dict[str, Any] | None = None, masked: bool = False) -> TokenFileWriter:
        """Open the files, empty or after what an earlier writer had written.

        Args:
            vocab_size: size of the vocabulary; it decides the type of the ids.
            written: the result of the earlier writer's `written`. Raises ConfigError if the files do not begin with it.
            masked: write a mask as well.
        """
        self.dtype = token_dtype(vocab_size)
        with writing(token_path(self.path, ".bin.partial")):
            self._bin = _open(token_path(self.path, ".bin.partial"))
            self._files.insert(0, (self._bin, ".bin"))
            if masked:
                self._mask = _open(token_path(self.path, ".mask.partial"))
                self._files.insert(1, (self._mask, ".mask"))
        if written:
            self._go_on(written)
        self._bin.truncate(self._bin.seek(self.num_tokens * self.dtype.itemsize))
        if self._mask:
            self._mask.truncate(self._mask.seek(self.num_tokens))
        # The header is written at the very end. Until then the file has no magic.
        self._idx.write(bytes(HEADER.size))
        self._idx.truncate(self._idx.seek(HEADER.size + 4 * self.num_documents))
        return self

    def _go_on(self, written: dict[str, Any]) -> None:
        streams = [(self._bin, self._hash, self.dtype.itemsize, written["sha256"])]
        if self._mask:
            streams.append((self._mask, self._mask_hash, 1, written["mask_sha256"]))
        whole = os.fstat(self._idx.fileno()).st_size >= HEADER.size + 4 * written["documents"]
        for file, digest, itemsize, recorded in streams:
            left = written["tokens"] * itemsize
            while block := file.read(min(left, 4 * _BLOCK)):
                digest.update(block)
                if file is self._bin:
                    self._block_hashes.update(block)
                left -= len(block)
            whole = whole and not left and digest.hexdigest() == recorded
        if not whole:
            for file, _ in self._files:
                file.close()
            raise ConfigError(
                f"{self.path}.bin.partial and what lies beside it no longer hold what an unfinished call wrote: delete "
                f"{self.path}.*.partial to start over"
            )
        self.num_tokens, self.num_documents = written["tokens"], written["documents"]
        self._open_length = written.get("open", 0)  # An older version closed its last document.

    def add(
        self, tokens: np.ndarray, lengths: np.ndarray, continues: bool = False, counted: np.ndarray | None = None
    ) -> None:
        """Append documents. Raises ConfigError if one is too long, or nothing can be written.

        Args:
            tokens: the ids of the documents end to end.
            lengths: their lengths, all at least 1.
            continues: whether the first one is the rest of the document that was added last.
            counted: bool: which tokens count in the loss, if the file has a mask.
        """
        if len(lengths) == 0:
            return
        assert int(lengths.sum()) == len(tokens) and int(lengths.min()) > 0
        data = np.ascontiguousarray(tokens, dtype=self.dtype).tobytes()
        with writing(token_path(self.path, ".bin")):
            self._bin.write(data)
        self._hash.update(data)
        self._block_hashes.update(data)
        if self._mask:
            assert counted is not None and len(counted) == len(tokens)
            mask = counted.astype(np.uint8).tobytes()
            with writing(token_path(self.path, ".mask")):
                self._mask.write(mask)
            self._mask_hash.update(mask)
        self.num_tokens += len(tokens)
        lengths = lengths.astype(np.int64)
        if continues:
            lengths[0] += self._open_length
        elif self._open_length:
            lengths = np.concatenate([[self._open_length], lengths])
        if lengths.max() > _LONGEST:
            raise ConfigError(f"{self.path}: a document of more than {_LONGEST:,} tokens; split it into several")
        with writing(token_path(self.path, ".idx")):
            self._idx.write(lengths[:-1].astype("<i4").tobytes())
        self.num_documents += len(lengths) - 1
        self._open_length = int(lengths[-1])

    def written(self) -> dict[str, Any]:
        """Bring everything that was added to the disk, and return what another writer needs to continue."""
        self._to_disk()
        mask = {"mask_sha256": self._mask_hash.hexdigest()} if self._mask else {}
        ended = {"tokens": self.num_tokens, "documents": self.num_documents, "open": self._open_length}
        return {**ended, "sha256": self._hash.hexdigest(), **mask}

    def finish(self) -> None:
        """Complete the partial files and bring them to the disk."""
        with writing(token_path(self.path, ".idx")):
            if self._open_length:
                self._idx.write(struct.pack("<i", self._open_length))
                self.num_documents += 1
                self._open_length = 0
            self._write_index()
        self._to_disk()
        self.sha256, self.mask_sha256 = self._hash.hexdigest(), self._mask_hash.hexdigest()

    def _to_disk(self) -> None:
        for file, suffix in self._files:
            with writing(token_path(self.path, suffix)):
                file.flush()
                os.fsync(file.fileno())

    def _write_index(self) -> None:
        self._idx.flush()
        offset = 0
        for start in range(0, self.num_documents, _BLOCK):
            count = min(_BLOCK, self.num_documents - start)
            data = os.pread(self._idx.fileno(), 4 * count, HEADER.size + 4 * start)
            ends = offset + np.cumsum(np.frombuffer(data, "<i4"), dtype=np.int64) * self.dtype.itemsize
            self._idx.write(np.concatenate([[offset], ends[:-1]]).astype("<i8").tobytes())
            offset = int(ends[-1])
        for start in range(0, self.num_documents + 1, _BLOCK):
            self._idx.write(np.arange(start, min(start + _BLOCK, self.num_documents + 1), dtype="<i8").tobytes())
        self._idx.seek(0)
        self._idx.write(HEADER.pack(MAGIC, 1, CODES[self.dtype], self.num_documents, self.num_documents + 1))

    def publish(self, provenance: dict[str, Any]) -> None:
        """Rename the finished files to their names, and write `provenance` as NAME.json with the hashes of the .bin by
        block. Older files are replaced."""
        provenance = {**provenance, BLOCKS: self._block_hashes.record()}
        for suffix in (".idx", ".mask"):
            with suppress(FileNotFoundError):
                os.unlink(token_path(self.path, suffix))
        for _, suffix in self._files[:-1]:
            os.replace(token_path(self.path, f"{suffix}.partial"), token_path(self.path, suffix))
        with writing(token_path(self.path, ".json")):
            write_atomic(token_path(self.path, ".json"), (json.dumps(provenance, indent=2) + "\n").encode())
        os.replace(token_path(self.path, ".idx.partial"), token_path(self.path, ".idx"))
        for file, _ in self._files:
            file.close()

    def abort(self, keep: bool = False) -> None:
        """Close the partial files, and remove them unless they hold something and are to be kept. Folders that were
        made for them are removed if they are empty."""
        for file, suffix in self._files:
            if not file.closed:
                with suppress(FileNotFoundError):
                    if not (keep and os.fstat(file.fileno()).st_size):
                        os.unlink(token_path(self.path, f"{suffix}.partial"))
                with suppress(OSError):  # A full disk does not take what is still buffered.
                    file.close()
        for folder in self._new_folders:
            with suppress(OSError):
                folder.rmdir()


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold a lock on the folder, and wait for other processes that hold it. On a filesystem without such locks,
    everyone enters."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError while `path` is written into a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; free space there, or choose another output (-o)"
        ) from error


def _open(path: Path) -> BinaryIO:
    return open(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b", buffering=_BLOCK)


_TRIES = 1000
"""The number of times that a folder may be gone when a file is opened in it. In some places no folder can be made, as
in /proc."""


def _open_locked(path: Path) -> BinaryIO:
    """Open a file for reading and writing, unless another process has opened it with this function."""
    gone = 0
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = _open(path)
        except OSError as error:
            gone += isinstance(error, FileNotFoundError)
            if 0 < gone < _TRIES:
                continue  # The folder that another writer had made was removed with the file.
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise ConfigError(f"another process is writing {path}: wait for it, or choose another output") from error
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        # Between opening and locking, the file's writer has published or removed it. It is not ours to write.
        file.close()
