"""Token files: all documents of a corpus as one stream of token ids, in the Megatron-LM indexed format.

`NAME.bin` holds the ids of all documents end to end (uint16 for vocabularies below 65500, else int32). `NAME.idx`
holds, little endian: the magic MMIDIDX\\0\\0 (9 bytes), version 1 (uint64), the code of the id type (uint8), the number
of sequences (uint64), the length of the document index (uint64), the sequence lengths (int32), the byte offset of every
sequence in the .bin (int64), and the document index (int64: first sequence of every document, then their count).
Megatron-LM reads these files, and files that Megatron-LM's preprocessing wrote are read here. `sagetrain prepare` adds
`NAME.json`: the sources of the tokens, the tokenizer's hash, and a checksum.

If not all tokens count in the loss (fine-tuning), `NAME.mask` says which do: one byte per token, 1 or 0.
"""

from __future__ import annotations

import hashlib
import os
import platform
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from sagetrain.config.errors import ConfigError, pointer_at, url_meant
from sagetrain.data.provenance import read_provenance as read_provenance
from sagetrain.data.remote_blocks import RemoteBlocks, is_remote

MAGIC = b"MMIDIDX\x00\x00"
# The fields are magic, version, id type, sequences, and entries of the document index.
HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}
_BLOCK = 1 << 20  # Elements that are handled at once where the whole would not fit into memory.
# Elements of a block, and number of blocks, of the samples of data that are checked at every start.
_SAMPLE, SAMPLES = 1 << 11, 1 << 14
_SMALL_INDEX = 1 << 16  # This is a size in bytes.
_SPAN_SEQUENCES = 1 << 10  # TokenFile.document_span looks at this many sequences.


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the type of the stored ids, by Megatron-LM's rule."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


def token_path(path: str | os.PathLike[str], suffix: str) -> Path:
    """Return `path` plus `suffix` (.bin, .idx, .mask, .json). The name itself may hold dots."""
    return Path(f"{os.fspath(path)}{suffix}")


class TokenFile:
    """Read access to a token file. It can be shared between threads, and memory does not grow with what has been read.

    The index is memory-mapped, unless it is small. Tokens are read with pread instead of a map, for two reasons: pages
    of a map would count as this process's memory, and a file that is truncated under a map ends the process without a
    message.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Open NAME.bin and NAME.idx. Raises ConfigError if one is missing, or their sizes and headers do not agree."""
        self.path = os.fspath(path)
        self._provenance: dict[str, Any] | None = None
        idx, bin_ = token_path(path, ".idx"), token_path(path, ".bin")
        for file in (idx, bin_):
            if not file.is_file():
                hint = " (give the path without .bin/.idx)" if self.path.endswith((".bin", ".idx")) else ""
                here = "" if file.is_absolute() else f" (looked for from {Path.cwd()}, the current folder)"
                raise ConfigError(
                    f"token file {self.path}: {file} does not exist{hint}{here}; `sagetrain prepare` makes it"
                )
        with open(idx, "rb") as opened:
            header = opened.read(HEADER.size)
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise self._damaged("the .idx does not begin with a Megatron-LM index header")
        _, version, code, sequences, entries = HEADER.unpack(header)
        if version != 1 or code not in _DTYPES:
            raise self._damaged(f"index version {version} with id type {code} is not supported")
        expected = HEADER.size + 12 * sequences + 8 * entries
        if idx.stat().st_size != expected:
            raise self._damaged(f"the .idx has {idx.stat().st_size:,} bytes where its header says {expected:,}")
        if sequences == 0 or entries < 2:
            raise self._damaged("it holds no documents")
        self.dtype = np.dtype(_DTYPES[code])
        self._header = header
        small = expected <= _SMALL_INDEX  # A map costs a page, a place among the system's maps and an open file.
        index = np.fromfile(idx, np.uint8) if small else np.memmap(idx, mode="r", dtype=np.uint8).view(np.ndarray)
        lengths_end, offsets_end = HEADER.size + 4 * sequences, HEADER.size + 12 * sequences
        self._lengths = index[HEADER.size : lengths_end].view("<i4")
        self._offsets = index[lengths_end:offsets_end].view("<i8")
        self._documents = index[offsets_end:].view("<i8")
        size = bin_.stat().st_size
        end = int(self._offsets[-1]) + int(self._lengths[-1]) * self.dtype.itemsize
        if size != end:
            raise self._damaged(f"the .bin has {size:,} bytes where the index says {end:,}")
        if self._offsets[0] != 0 or self._documents[0] != 0 or self._documents[-1] != sequences:
            raise self._damaged("the index does not cover the whole .bin")
        self.num_tokens = size // self.dtype.itemsize
        self.num_documents = entries - 1
        self._fd, self._mask_fd = os.open(bin_, os.O_RDONLY), self._open_mask()
        self._blocks = RemoteBlocks(self.path, self.provenance()) if is_remote(self.path) else None

    def _open_mask(self) -> int | None:
        mask = token_path(self.path, ".mask")
        if not mask.is_file():
            if "mask_sha256" in self.provenance():
                raise self._damaged(f"{mask}, which says what counts in the loss, does not exist")
            return None
        if (size := mask.stat().st_size) != self.num_tokens:
            raise self._damaged(
                f"{mask} has {size:,} bytes and the .bin {self.num_tokens:,} tokens, of which each has one byte there "
                "(without that file all tokens would count in the loss)"
            )
        return os.open(mask, os.O_RDONLY)

    def __del__(self) -> None:
        for fd in (getattr(self, "_fd", None), getattr(self, "_mask_fd", None)):
            if fd is not None:
                os.close(fd)

    @property
    def masked(self) -> bool:
        """Whether there is a NAME.mask."""
        return self._mask_fd is not None

    @property
    def remote(self) -> bool:
        """Whether the tokens come from a store, and are here only once they have been read."""
        return self._blocks is not None

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Return ids `start` to `stop` of the stream, int64 [stop - start]."""
        data = self._read(self._fd, ".bin", start, stop, self.dtype.itemsize)
        return np.frombuffer(data, self.dtype.newbyteorder("<")).astype(np.int64)

    def counted(self, start: int, stop: int) -> np.ndarray | None:
        """Return whether ids `start` to `stop` count in the loss, bool [stop - start]. Return None if all ids of the
        file do."""
        if self._mask_fd is None:
            return None
        mask = np.frombuffer(self._read(self._mask_fd, ".mask", start, stop, 1), np.uint8)
        if mask.max(initial=0) > 1:
            where = start + int(np.flatnonzero(mask > 1)[0])
            raise self._damaged(f"byte {where:,} of the .mask is {mask[where - start]}, not 0 or 1")
        return mask.astype(bool)

    def _read(self, fd: int, suffix: str, start: int, stop: int, itemsize: int) -> bytes:
        size = (stop - start) * itemsize
        if self._blocks is not None and fd == self._fd:
            self._blocks.ensure(start * itemsize, stop * itemsize)
        data = os.pread(fd, size, start * itemsize)
        while 0 < len(data) < size:  # A read may be interrupted.
            more = os.pread(fd, size - len(data), start * itemsize + len(data))
            if not more:
                break
            data += more
        if len(data) != size:
            raise self._damaged(f"the {suffix} ends before token {stop:,}")
        return data

    def document_start(self, document: int) -> int:
        """Return the position of a document's first token in the stream."""
        sequence = self._documents[document]
        if sequence == len(self._offsets):  # Megatron-LM may write empty documents at the end.
            return self.num_tokens
        return int(self._offsets[sequence]) // self.dtype.itemsize

    def document_starts(self, start: int, stop: int) -> list[int]:
        """Return the positions p with start < p < stop at which a document begins, found by binary search."""
        documents = range(self.num_documents)
        try:
            first = bisect_right(documents, start, key=self.document_start)
            last = bisect_left(documents, stop, lo=first, key=self.document_start)
            begins = np.unique(self._offsets[self._documents[first:last]] // self.dtype.itemsize)
        except IndexError as error:
            raise self._damaged("a document begins behind the last sequence") from error
        found: list[int] = begins.tolist()
        return found

    def document_span(self, seq_length: int) -> float:
        """Return the sum of the squared lengths of the documents inside sequences of `seq_length` tokens, divided by
        the number of tokens. This is twice the mean number of keys that a token sees. At most 1,024 sequences are
        looked at, spread over the file."""
        windows = max(1, (self.num_tokens - 1) // seq_length)
        starts = range(0, windows * seq_length, -(-windows // _SPAN_SEQUENCES) * seq_length)
        squares = 0
        for start in starts:
            stop = start + seq_length
            squares += sum((b - a) ** 2 for a, b in pairwise([start, *self.document_starts(start, stop), stop]))
        return squares / (len(starts) * seq_length)

    def provenance(self) -> dict[str, Any]:
        """Return the record that `sagetrain prepare` made beside the file, or an empty dict for files from elsewhere.
        The record is read once."""
        if self._provenance is None:
            self._provenance = read_provenance(self.path)
        return self._provenance

    def identity(self) -> str:
        """Return a hash that identifies the file and is quick to compute: of the header, and of the first and last
        blocks of index, tokens and mask.

        Checkpoints name the order of their samples by it. `content` also reads what lies between the blocks.
        """
        return self.content(2)

    def content(self, blocks: int = SAMPLES, each: Callable[..., Iterable[bytes]] = map) -> str:
        """Return a hash of samples of the file.

        It covers the header, and blocks of 2^11 elements of the tokens, of the mask and of each part of the index,
        spread evenly from beginning to end: `blocks` of each part, at least two. A part with no more than that is
        covered as a whole. Another file changes the hash, and so do other tokens where a block lies. `each` works like
        `map`, maybe in threads.
        """
        digest = hashlib.sha256(self._header + struct.pack("<Q", self.num_tokens))
        for part in each(lambda sample: hashlib.sha256(sample()).digest(), self._samples(blocks)):
            digest.update(part)
        return digest.hexdigest()

    def _samples(self, count: int) -> Iterator[Callable[[], bytes]]:
        for start, stop in _spread(self.num_tokens, count):
            yield partial(self._read, self._fd, ".bin", start, stop, self.dtype.itemsize)
            if self._mask_fd is not None:
                yield partial(self._read, self._mask_fd, ".mask", start, stop, 1)
        for part in (self._lengths, self._documents):
            for start, stop in _spread(len(part), count):
                yield part[start:stop].tobytes

    def validate(
        self,
        deep: bool = False,
        vocab_size: int | None = None,
        progress: Callable[[int], None] = lambda tokens: None,
        blocks: int | None = None,
    ) -> None:
        """Check that the index is consistent. Raises ConfigError if the file is damaged.

        Args:
            deep: also read every token. Ids must be in the vocabulary, and the checksum must be the recorded one.
                Tokens of a store are checked when they are read.
            vocab_size: size of the vocabulary; default: the recorded one.
            progress: gets the number of tokens read since its last call.
            blocks: check this many blocks of 2^11 (at least two) of each part of the index, as `content` does. Default:
                all.
        """
        itemsize, sequences = self.dtype.itemsize, len(self._lengths)
        for start, stop in _spread(sequences, blocks) if blocks else _ranges(sequences, _BLOCK):
            lengths = self._lengths[start:stop].astype(np.int64)
            offsets = self._offsets[start : stop + 1]
            if lengths.min() < 0:
                raise self._damaged(f"sequence {start + int(lengths.argmin()):,} has a negative length")
            wrong = np.flatnonzero(np.diff(offsets) != lengths[: len(offsets) - 1] * itemsize)
            if len(wrong):
                raise self._damaged(f"sequence {start + int(wrong[0]):,} does not end where the next one begins")
        entries = len(self._documents)
        for start, stop in _spread(entries, blocks) if blocks else _ranges(entries, _BLOCK):
            documents = self._documents[start : stop + 1]
            if documents.min() < 0 or (np.diff(documents) < 0).any():
                raise self._damaged("the document index is not in order")
        if not deep or self.remote:
            return
        recorded = self.provenance()
        vocab_size = vocab_size or recorded.get("vocab_size")
        digest, mask_digest, some = hashlib.sha256(), hashlib.sha256(), False
        for start, stop in _ranges(self.num_tokens, _BLOCK):
            block = self.tokens(start, stop)
            digest.update(block.astype(self.dtype.newbyteorder("<")).tobytes())
            if vocab_size and (block.min() < 0 or block.max() >= vocab_size):
                where = start + int(np.flatnonzero((block < 0) | (block >= vocab_size))[0])
                raise self._damaged(f"token {where:,} is outside of the vocabulary of {vocab_size:,}")
            if self.masked:
                counted = self.counted(start, stop)
                assert counted is not None
                mask_digest.update(counted.tobytes())
                some |= bool(counted.any())
            progress(len(block))
        if recorded.get("sha256") not in (None, digest.hexdigest()):
            raise self._damaged("the .bin does not have the checksum that was recorded when it was written")
        if self.masked and not some:
            raise self._damaged("by its .mask no token counts in the loss")
        if self.masked and recorded.get("mask_sha256") not in (None, mask_digest.hexdigest()):
            raise self._damaged("the .mask does not have the checksum that was recorded when it was written")

    def _damaged(self, what: str) -> ConfigError:
        what = f"token file {self.path}: {what}; the file is damaged or incomplete: prepare it again"
        return ConfigError(
            "".join(pointer_at(token_path(self.path, each)) for each in (".idx", ".bin", ".mask")) or what
        )


def _spread(size: int, count: int) -> list[tuple[int, int]]:
    """Return `count` ranges of _SAMPLE elements, spread evenly over `size` from beginning to end, or ranges of all of
    it if it has no more."""
    if size <= count * _SAMPLE:
        return [*_ranges(size, _SAMPLE)]
    starts = ((size - _SAMPLE) * i // (count - 1) for i in range(count))
    return [(start, start + _SAMPLE) for start in starts]


def _ranges(size: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield consecutive ranges of `length` elements that cover `size`. The last one may be shorter."""
    return ((start, min(start + length, size)) for start in range(0, size, length))


def write_atomic(path: Path, data: bytes) -> None:
    """Write a small file so that it is either complete or as it was before. An OSError names the file, and leaves
    nothing behind."""
    temporary = Path(f"{path}.{platform.node()}-{os.getpid()}.partial")  # Another host may write the same file.
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        error.filename, error.filename2 = str(path), None
        raise


def check_writable(path: Path) -> None:
    """Check, before the result has been computed, that a file can be made there. Raises ConfigError if it cannot."""
    if said := url_meant(path):
        raise ConfigError(said)
    there = next(folder for folder in path.absolute().parents if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write {path}: {there} is no folder that can be written to; choose another place")
