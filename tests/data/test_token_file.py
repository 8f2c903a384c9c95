"""Token files have Megatron-LM's exact format, are written as a stream, and damage to them is noticed."""

import fcntl
import os
import re
import resource
import struct
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed import run_distributed
from process_memory import peak_of, return_what_is_freed
from sagetrain.config import ConfigError
from sagetrain.corpus.token_writer import TokenFileWriter
from sagetrain.data.token_file import TokenFile, read_provenance, token_dtype

DOCUMENTS = [[5, 6, 7], [1], [2, 3, 4, 5], [9, 9]]


def write(path, documents, vocab_size=100, provenance=None) -> TokenFile:
    writer = TokenFileWriter(path).begin(vocab_size)
    for document in documents:
        writer.add(np.array(document), np.array([len(document)]))
    writer.finish()
    writer.publish({"sha256": writer.sha256, "vocab_size": vocab_size} if provenance is None else provenance)
    return TokenFile(path)


def read_as_megatron_does(path):
    """Read the published layout without any of our code."""
    data = (path.parent / (path.name + ".idx")).read_bytes()
    assert data[:9] == b"MMIDIDX\x00\x00"
    version, code, sequences, entries = struct.unpack("<QBQQ", data[9:34])
    assert version == 1
    dtype = {4: np.int32, 8: np.uint16}[code]
    lengths = np.frombuffer(data, np.int32, sequences, 34)
    pointers = np.frombuffer(data, np.int64, sequences, 34 + 4 * sequences)
    documents = np.frombuffer(data, np.int64, entries, 34 + 12 * sequences)
    assert len(data) == 34 + 12 * sequences + 8 * entries
    tokens = (path.parent / (path.name + ".bin")).read_bytes()
    rows = [np.frombuffer(tokens, dtype, n, p).tolist() for n, p in zip(lengths, pointers, strict=True)]
    return rows, documents.tolist()


def test_the_span_of_documents_is_estimated_from_a_thousand(tmp_path):
    file = write(tmp_path / "a", DOCUMENTS)  # The documents have 3, 1, 4 and 2 tokens.
    assert file.document_span(10) == (9 + 1 + 16 + 4) / 10  # No token lies after the only sequence.
    assert file.document_span(4) == (9 + 1 + 16) / 8
    assert file.document_span(3) == (9 + 1 + 4 + 4 + 1) / 9
    even = write(tmp_path / "b", [[1] * 5, [2] * 3] * 5000)
    assert even.document_span(8) == (25 + 9) / 8
    halves = write(tmp_path / "c", [*[[1] * 8] * 2000, *[[2] * 4] * 4000])
    assert halves.document_span(8) == (8 + 4) / 2


@pytest.mark.parametrize(("vocab_size", "dtype"), [(100, "uint16"), (65499, "uint16"), (65500, "int32")])
def test_megatron_layout(tmp_path, vocab_size, dtype):
    documents = [*DOCUMENTS, [vocab_size - 1, 0]]
    file = write(tmp_path / "a.b", documents, vocab_size)
    rows, index = read_as_megatron_does(tmp_path / "a.b")
    assert rows == documents
    assert index == list(range(len(documents) + 1))
    assert file.dtype == token_dtype(vocab_size) == np.dtype(dtype)
    assert file.tokens(0, file.num_tokens).tolist() == list(chain(*documents))
    file.validate(deep=True)


@settings(max_examples=60)
@given(st.data())
def test_round_trip(tmp_path_factory, data):
    documents = data.draw(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=30))
    file = write(tmp_path_factory.mktemp("t") / "x", documents)
    stream = list(chain(*documents))
    start = data.draw(st.integers(0, len(stream) - 1))
    stop = data.draw(st.integers(start + 1, len(stream)))
    assert file.tokens(start, stop).tolist() == stream[start:stop]
    starts = np.cumsum([0, *map(len, documents)])[:-1]
    assert file.document_starts(start, stop) == [s for s in starts if start < s < stop]
    assert [file.document_start(number) for number in range(file.num_documents)] == starts.tolist()


def test_documents_may_be_added_in_pieces(tmp_path):
    writer = TokenFileWriter(tmp_path / "x").begin(100)
    writer.add(np.array([1, 2, 3, 4]), np.array([1, 3]))
    writer.add(np.array([5, 6]), np.array([1, 1]), continues=True)
    writer.add(np.array([7]), np.array([1]), continues=True)
    writer.add(np.array([8]), np.array([1]))
    writer.add(np.array([], dtype=int), np.array([], dtype=int))
    writer.finish()
    writer.publish({})
    assert read_as_megatron_does(tmp_path / "x")[0] == [[1], [2, 3, 4, 5], [6, 7], [8]]
    assert writer.num_documents == 4
    assert writer.num_tokens == 8


def test_files_of_several_sequences_per_document(tmp_path):
    """Megatron-LM may store sentences as sequences. Documents are what we count, empty ones included."""
    lengths, index = [2, 3, 1, 2], [0, 2, 2, 4, 4]
    offsets = [0, 4, 10, 12]
    (tmp_path / "m.bin").write_bytes(np.arange(8, dtype="<u2").tobytes())
    (tmp_path / "m.idx").write_bytes(
        b"MMIDIDX\0\0"
        + struct.pack("<QBQQ", 1, 8, 4, 5)
        + np.array(lengths, "<i4").tobytes()
        + np.array(offsets, "<i8").tobytes()
        + np.array(index, "<i8").tobytes()
    )
    file = TokenFile(tmp_path / "m")
    file.validate(deep=True)
    assert file.document_starts(0, 8) == [5]
    assert file.provenance() == {}


def test_nothing_looks_finished_before_publish(tmp_path):
    writer = TokenFileWriter(tmp_path / "x").begin(100)
    writer.add(np.array([1]), np.array([1]))
    writer.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin.partial", "x.idx.partial"]
    with pytest.raises(ConfigError, match=r"x\.idx does not exist"):
        TokenFile(tmp_path / "x")
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_a_file_published_just_before_the_lock_stays_whole(tmp_path, monkeypatch):
    first = TokenFileWriter(tmp_path / "x").begin(100)
    first.add(np.array([1, 2]), np.array([2]))
    first.finish()
    flock = fcntl.flock

    def publish_and_lock(*args):
        monkeypatch.setattr(fcntl, "flock", flock)
        first.publish({})
        flock(*args)

    monkeypatch.setattr(fcntl, "flock", publish_and_lock)
    second = TokenFileWriter(tmp_path / "x").begin(100)
    assert TokenFile(tmp_path / "x").tokens(0, 2).tolist() == [1, 2]
    second.add(np.array([3]), np.array([1]))
    second.finish()
    second.publish({})
    assert TokenFile(tmp_path / "x").tokens(0, 1).tolist() == [3]


@pytest.mark.parametrize("end", [lambda writer: writer.publish({}), TokenFileWriter.abort], ids=["publish", "abort"])
def test_the_lock_holds_until_the_last_file_has_its_name(tmp_path, monkeypatch, end):
    writer = TokenFileWriter(tmp_path / "x").begin(100)
    writer.add(np.array([1]), np.array([1]))
    writer.finish()
    calls = []
    for call in (os.replace, os.unlink):

        def refused_before(*args, call=call):
            calls.append(args)
            with pytest.raises(ConfigError, match="another process is writing"):
                TokenFileWriter(tmp_path / "x").begin(100)
            call(*args)

        monkeypatch.setattr(os, call.__name__, refused_before)
    end(writer)
    assert len(calls) > 1
    assert not list(tmp_path.glob("*.partial"))


def test_unwritable_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        TokenFileWriter(tmp_path / "file" / "x").begin(100)


def memory_of_writing(path: str) -> list[int]:
    """Return the peak memory of writing one million documents and opening their file, and that of three million."""

    def write(times: int) -> None:
        writer = TokenFileWriter(path).begin(100)
        for _ in range(times):
            writer.add(np.ones(150_000, np.uint16), np.full(50_000, 3))
        writer.finish()
        writer.publish({})
        assert TokenFile(path).num_documents == 50_000 * times

    return_what_is_freed()
    write(1)
    return [peak_of(lambda: write(times)) for times in (20, 60)]  # noqa: B023


def test_writer_and_reader_need_constant_memory(tmp_path):
    """Python objects or an int64 array would take over 16 MB for the index of the other two million."""
    ((small, large),) = run_distributed(memory_of_writing, 1, str(tmp_path / "x"))
    assert large - small < 4 << 20


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path):
    write(tmp_path / "x", DOCUMENTS)
    return tmp_path / "x"


def damage(path, suffix, change):
    file = path.parent / (path.name + suffix)
    data = bytearray(file.read_bytes())
    file.write_bytes(change(data))


def test_every_truncation_of_the_index_is_noticed(path):
    whole = (path.parent / "x.idx").read_bytes()
    for length in range(len(whole)):
        damage(path, ".idx", lambda _, length=length: whole[:length])
        with pytest.raises(ConfigError, match="damaged or incomplete"):
            TokenFile(path)


@pytest.mark.parametrize("change", [lambda d: d[:-1], lambda d: d[:-2], lambda d: d + b"\0\0", lambda d: b""])
def test_a_bin_of_the_wrong_size_is_noticed(path, change):
    damage(path, ".bin", change)
    with pytest.raises(ConfigError, match=r"the \.bin has .* bytes where the index says 20"):
        TokenFile(path)


def flip(position, value):
    def change(data):
        data[position] = value
        return data

    return change


@pytest.mark.parametrize(("position", "value", "message"), [
    (0, 0, "does not begin with"), (9, 2, "index version 2"), (17, 7, "id type 7"),
    (18, 3, "bytes where its header says"), (18, 5, "bytes where its header says"),
])  # fmt: skip
def test_a_wrong_header_is_noticed(path, position, value, message):
    damage(path, ".idx", flip(position, value))
    with pytest.raises(ConfigError, match=message):
        TokenFile(path)


@pytest.mark.parametrize(("position", "value", "message"), [
    (34 + 4, 2, "sequence 1 does not end where the next one begins"),
    (34 + 4 + 3, 0x80, "sequence 1 has a negative length"), (34 + 16 + 8, 2, "sequence 0 does not end where"),
    (34 + 48 + 8, 3, "document index is not in order"),
])  # fmt: skip
def test_validate_finds_a_wrong_index(path, position, value, message):
    damage(path, ".idx", flip(position, value))
    with pytest.raises(ConfigError, match=message):
        TokenFile(path).validate()


def test_a_document_behind_the_last_sequence_is_noticed(path):
    damage(path, ".idx", flip(34 + 48 + 8 + 2, 1))
    with pytest.raises(ConfigError, match="a document begins behind the last sequence; the file is damaged"):
        TokenFile(path).document_starts(0, 4)


def test_deep_validation_reads_the_tokens(path):
    damage(path, ".bin", flip(4, 8))  # The bit turns a token into another one of the vocabulary.
    TokenFile(path).validate()
    with pytest.raises(ConfigError, match="checksum"):
        TokenFile(path).validate(deep=True)
    damage(path, ".bin", flip(5, 1))
    with pytest.raises(ConfigError, match="token 2 is outside of the vocabulary of 100"):
        TokenFile(path).validate(deep=True)


def test_a_file_cut_short_after_opening(path):
    file = TokenFile(path)
    damage(path, ".bin", lambda data: data[:8])
    assert file.tokens(0, 4).tolist() == [5, 6, 7, 1]
    with pytest.raises(ConfigError, match=r"the \.bin ends before token 6"):
        file.tokens(2, 6)


def test_missing_files(path):
    with pytest.raises(ConfigError, match=r"x\.bin\.idx does not exist \(give the path without \.bin/\.idx\)"):
        TokenFile(f"{path}.bin")
    (path.parent / "x.bin").unlink()
    with pytest.raises(ConfigError, match=r"x\.bin does not exist; `sagetrain prepare`"):
        TokenFile(path)
    with pytest.raises(ConfigError, match=rf"n\.idx does not exist \(looked for from {re.escape(str(Path.cwd()))},"):
        TokenFile("n")


def test_an_empty_file_is_refused(tmp_path):
    writer = TokenFileWriter(tmp_path / "x").begin(100)
    writer.finish()
    writer.publish({})
    with pytest.raises(ConfigError, match="no documents"):
        TokenFile(tmp_path / "x")


def test_broken_provenance(path):
    damage(path, ".json", lambda data: data[:-5])
    with pytest.raises(ConfigError, match=r"x\.json is not valid JSON"):
        read_provenance(path)


def test_reading_opens_one_descriptor_and_closes_it(path):
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    for _ in range(min(limit, 2000)):
        TokenFile(path).tokens(0, 1)


def test_identity_follows_the_content_not_the_place(tmp_path):
    (tmp_path / "other").mkdir()
    first = write(tmp_path / "x", DOCUMENTS).identity()
    assert write(tmp_path / "other" / "y", DOCUMENTS).identity() == first
    assert write(tmp_path / "x", [*DOCUMENTS[:-1], [9, 8]]).identity() != first
    assert write(tmp_path / "x", [*DOCUMENTS[:-1], [9], [9]]).identity() != first


def test_content_follows_every_part_of_the_file(tmp_path):
    """500,000 tokens in a row change in the middle, far from the places that `identity` reads."""
    documents = [np.full(2_000_000, 1 + number) for number in range(3)]
    file = write(tmp_path / "x", documents)
    identity, known = file.identity(), file.content()
    damage(tmp_path / "x", ".json", lambda _: b"{}")
    assert TokenFile(tmp_path / "x").content() == known
    for first in (1_300_000, 2_700_001):
        with open(tmp_path / "x.bin", "r+b") as tokens:
            before = os.pread(tokens.fileno(), 1_050_000, 2 * first)
            os.pwrite(tokens.fileno(), np.full(525_000, 50, "<u2").tobytes(), 2 * first)
            assert (file.identity(), file.content() == known) == (identity, False)
            os.pwrite(tokens.fileno(), before, 2 * first)
    assert file.content() == known
    assert write(tmp_path / "y", [*documents[:2], documents[2][:-1], documents[2][:1]]).content() != known
