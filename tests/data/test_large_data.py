"""A start reads a bounded number of samples of very large data, whatever the number of files, and still notices another
file."""

import itertools
import os
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from sagetrain.config.schema import DataSource
from sagetrain.data import token_files
from sagetrain.data.loader import SampleStream
from sagetrain.data.token_file import TokenFile, token_path
from streams import stream_of

TOKENS = 1 << 27  # A file has this many tokens.


def write(path: Path, seed: int, tokens: int = TOKENS, documents: int = 2) -> str:
    """Write a token file that takes no space on the disk, apart from some tokens at its beginning and its end."""
    some = np.random.default_rng(seed).integers(0, 1000, 64, dtype=np.uint16).tobytes()
    with token_path(path, ".bin").open("wb") as file:
        file.write(some)
        file.truncate(2 * tokens)
        file.seek(-len(some), 2)
        file.write(some)
    lengths = np.full(documents, tokens // documents, "<i4")
    lengths[-1] += tokens % documents
    offsets = 2 * np.concatenate([[0], lengths[:-1].cumsum()])
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, documents, documents + 1)
    index = (
        header + lengths.tobytes() + offsets.astype("<i8").tobytes() + np.arange(documents + 1, dtype="<i8").tobytes()
    )
    token_path(path, ".idx").write_bytes(index)
    return str(path)


def opened(folder: Path) -> SampleStream:
    return stream_of([DataSource(path=f"{folder}/*")], 4096, 0)


@pytest.fixture
def few_samples(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all reads, with a limit of 512 blocks a corpus."""
    monkeypatch.setattr(token_files, "SAMPLES", 512)
    sizes: list[int] = []
    read = TokenFile._read

    def noted(file: TokenFile, fd: int, suffix: str, start: int, stop: int, itemsize: int) -> bytes:
        sizes.append(stop - start)
        return read(file, fd, suffix, start, stop, itemsize)

    monkeypatch.setattr(TokenFile, "_read", noted)
    return sizes


def test_more_files_are_not_more_to_read(tmp_path: Path, few_samples: list[int]) -> None:
    reads = []
    for files in (8, 16, 64):
        for number in range(files):
            write(tmp_path / f"{number:02}", number)
        stream = opened(tmp_path)
        few_samples.clear()
        assert list(stream.content()) == [" (samples)"]
        reads.append(len(few_samples))
        assert max(few_samples) == 1 << 11
    assert max(reads) <= 512 + 64 and min(reads) >= 512
    for number in range(64, 512):
        write(tmp_path / f"{number:02}", number, tokens=1 << 20)
    stream = opened(tmp_path)
    few_samples.clear()
    stream.content()
    assert len(few_samples) <= 512 + 4 * 512  # Each file has at least four samples.


def test_another_file_is_other_content(tmp_path: Path, few_samples: list[int]) -> None:
    for number in range(16):
        write(tmp_path / f"{number:02}", number)
    before, place = opened(tmp_path).content(), tmp_path / "07"
    changes = {
        "other tokens of as many": lambda: write(place, 99),
        "fewer tokens": lambda: write(place, 7, TOKENS - 4096),
        "other documents": lambda: write(place, 7, documents=3),
        "a mask": lambda: token_path(place, ".mask").write_bytes(bytes(TOKENS)),
        "another order": lambda: (write(place, 8), write(tmp_path / "08", 7)),
    }
    for what, change in changes.items():
        change()
        assert opened(tmp_path).content() != before, what
        token_path(place, ".mask").unlink(missing_ok=True)
        write(place, 7)
        write(tmp_path / "08", 8)
        assert opened(tmp_path).content() == before, what


def test_little_data_is_read_wholly(tmp_path: Path) -> None:
    """A change of one token among 12 million is noticed, wherever it lies."""
    paths = [tmp_path / f"{number}" for number in range(3)]
    for number, path in enumerate(paths):
        write(path, number, 4_000_000)
    before = opened(tmp_path).content()
    for path, token in zip(paths, (2_048, 3_999_000, 2_000_001), strict=True):
        with token_path(path, ".bin").open("r+b") as file:
            for value in (b"\x07\x00", b"\x00\x00"):
                file.seek(2 * token)
                file.write(value)
                file.flush()
                assert (opened(tmp_path).content() == before) == (value == b"\x00\x00")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_file_of_100_gigabytes(tmp_path: Path) -> None:
    """Opening the file, sampling anywhere and reading on take no work and no memory that grow with the file or the
    place."""
    documents, length = 2_000_000, 25_000  # The file has 5e10 tokens.
    write(tmp_path / "huge", 0, documents * length, documents)
    stream = opened(tmp_path)
    assert stream.num_windows == (documents * length - 1) // 4096

    def most_calls(first: int) -> int:
        """Return the most calls, of functions in Python and in C, that a sample of many takes."""
        most = 0
        for i in range(first, first + 200):
            calls = itertools.count()
            sys.setprofile(lambda *_, calls=calls: next(calls))
            sample = stream.sample(i)
            sys.setprofile(None)
            most = max(most, next(calls))
            _, window = stream.locate(i)
            inside = range(window * 4096 + 1, (window + 1) * 4096)
            assert [window * 4096 + s for s in sample.document_starts] == [p for p in inside if p % length == 0]
        return most

    near, far = most_calls(0), most_calls(10**9)
    assert near / 2 < far < 2 * near
    before = resident_bytes()
    for i in range(20_000):
        stream.sample(10**7 + i)
    # The touched part of the mapped index counts as memory: at most 16 MB of offsets and 16 MB of documents.
    assert resident_bytes() - before < 48e6
