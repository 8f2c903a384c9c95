"""The order of samples depends on the seed alone, any place is reached in O(1), and documents keep their places."""

import random
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from forked import until
from sagetrain.config import ConfigError
from sagetrain.config.schema import DataSource
from sagetrain.corpus.token_writer import TokenFileWriter
from sagetrain.data import token_files, verify
from sagetrain.data.loader import Loader, SampleStream
from sagetrain.data.token_files import source_names
from streams import stream_of

EOS = 0
S = 16


def write(path: Path, num_tokens: int, seed: int = 0, provenance: dict | None = None) -> DataSource:
    """Write documents of 1 to 60 tokens. The ids tell the place of a token (mod 60000), and EOS ends every document."""
    rng = random.Random(seed)
    tokens = np.arange(num_tokens) % 60000 + 1
    position = -1
    while position < num_tokens - 1:
        position = min(position + rng.choice([1, 2, 5, 20, 60]), num_tokens - 1)
        tokens[position] = EOS
    ends = np.flatnonzero(tokens == EOS)
    writer = TokenFileWriter(path).begin(61000)
    writer.add(tokens, np.diff(ends, prepend=-1))
    writer.finish()
    writer.publish(provenance or {})
    return DataSource(path=str(path))


@pytest.fixture
def source(tmp_path) -> DataSource:
    return write(tmp_path / "a", 5000)


@pytest.fixture
def stream(source) -> SampleStream:
    return stream_of([source], S, seed=7)


@pytest.fixture
def mixed(tmp_path) -> SampleStream:
    sources = [write(tmp_path / f"s{n}", size, n) for n, size in enumerate((3000, 900, 150))]
    return stream_of(
        [DataSource(path=one.path, weight=w) for one, w in zip(sources, (0.5, 0.3, 0.2), strict=True)], S, seed=3
    )


# -- mix ---------------------------------------------------------------------------------------------------------------


def test_stream_follows_the_mix(mixed):
    drawn = np.bincount([mixed.locate(i)[0] for i in range(10_000)])
    assert drawn.tolist() == [5000, 3000, 2000]
    start = 12345  # The stretch may be aligned or not.
    part = np.bincount([mixed.locate(i)[0] for i in range(start, start + 100)])
    assert np.abs(part - [50, 30, 20]).max() <= 2


def test_files_of_a_pattern_are_one_source(tmp_path):
    """An epoch has every window of each file once, so each file counts by its size. A file that is too short is left
    out."""
    sizes = {"web-1": 700, "web-2": 5, "web-3": 400, "web-4": 1700}
    for seed, (name, size) in enumerate(sizes.items()):
        write(tmp_path / name, size, seed)
    (tmp_path / "web-5.bin.partial").write_bytes(b"")
    stream = stream_of([DataSource(path=str(tmp_path / "web-*"))], S, seed=1)
    parts = [stream_of([DataSource(path=str(tmp_path / name))], S, 0) for name in sizes if name != "web-2"]
    assert stream.num_windows == sum(part.num_windows for part in parts)
    assert stream.num_tokens == sum(sizes.values())

    def windows(stream: SampleStream) -> list[tuple]:
        samples = [stream.sample(i) for i in range(stream.num_windows)]
        return [(sample.tokens.tobytes(), *sample.document_starts) for sample in samples]

    assert sorted(windows(stream)) == sorted(window for part in parts for window in windows(part))
    fingerprint = stream.fingerprint
    write(tmp_path / "web-6", 100)
    assert stream_of([DataSource(path=str(tmp_path / "web-*"))], S, seed=1).fingerprint != fingerprint
    with pytest.raises(ConfigError, match=r"none-\*: no .*none-\*\.idx; `sagetrain prepare`"):
        stream_of([DataSource(path=str(tmp_path / "none-*"))], S, 0)
    with pytest.raises(ConfigError, match=r"web-\[2\] has 5 tokens, too few for one sequence"):
        stream_of([DataSource(path=str(tmp_path / "web-[2]"))], S, 0)


def test_proportional_weights_pass_over_all_text_equally_often(tmp_path):
    sources = [write(tmp_path / f"s{n}", size, n) for n, size in enumerate((4801, 161, 1601))]
    proportional = [DataSource(path=source.path, weight="proportional") for source in sources]
    stream = stream_of(proportional, S, seed=3)
    assert stream.num_windows == 300 + 10 + 100
    drawn = [stream.locate(i) for i in range(stream.num_windows)]
    assert len(set(drawn)) == stream.num_windows


def test_more_small_sources_than_files_may_be_open(tmp_path):
    """The sources are more files than a process may have open when it starts. They are found by their places."""
    count = 300
    for number in range(count):
        write(tmp_path / f"{number:04}", 2 * S + 1, number)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 256), hard))
    try:
        sources = [DataSource(path=str(tmp_path / f"{number:04}")) for number in range(count)]
        stream = stream_of(sources, S, seed=0)
        assert sorted(stream.locate(i)[0] for i in range(count)) == list(range(count))
        assert len({stream.sample(i).tokens.tobytes() for i in range(count)}) > 1
        assert stream_of([DataSource(path=str(tmp_path / "*"))], S, seed=0).num_windows == 2 * count
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_files_than_a_process_may_open(source, monkeypatch):
    monkeypatch.setattr(resource, "prlimit", lambda process, what: (300, 400))
    with pytest.raises(ConfigError, match=r"the 1 token files .* a process may have 400 here \(ulimit -Hn\)"):
        stream_of([source], S, 0)


def test_open_files_are_allowed_here_and_to_the_process_above() -> None:
    """torchrun's agent is such a process above, and holds the store of its ranks."""
    child = (
        "import os, resource; from sagetrain.data.open_files import allow_connections\n"
        "for process in (0, os.getppid()):\n"
        "    allow_connections(1_000, process)\n"
        "    print(resource.prlimit(process, resource.RLIMIT_NOFILE)[0])\n"
    )
    above = (
        "import resource, subprocess, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))\n"
        "subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 4096))\n"
        "sys.exit(subprocess.run([sys.executable, '-c', sys.argv[1].replace('1_000', '2_000')]).returncode)\n"
    )
    run = subprocess.run([sys.executable, "-c", above, child], capture_output=True, text=True)
    assert all(3_512 <= int(limit) < 3_600 for limit in run.stdout.split()) and len(run.stdout.split()) == 2
    assert run.returncode == 1 and "a process may have 4,096 here (ulimit -Hn)" in run.stderr
    assert "the connections of 2,000 ranks take 6,5" in run.stderr


# -- order -------------------------------------------------------------------------------------------------------------


def test_an_epoch_visits_every_window_once(stream, mixed):
    windows = stream.num_windows
    assert windows == (5000 - 1) // S
    epochs = [[stream.locate(e * windows + i)[1] for i in range(windows)] for e in range(3)]
    for order in epochs:
        assert sorted(order) == list(range(windows))
    assert epochs[0] != epochs[1] != epochs[2]
    seen = {0: [], 1: [], 2: []}
    for i in range(5000):
        place, window = mixed.locate(i)
        seen[place].append(window)
    for place, size in enumerate((3000, 900, 150)):
        n = (size - 1) // S
        for epoch in range(len(seen[place]) // n):
            assert sorted(seen[place][epoch * n : (epoch + 1) * n]) == list(range(n))


def test_samples_are_windows_of_the_file(source, stream):
    data = np.fromfile(f"{source.path}.bin", "<u2").astype(np.int64)
    for i in range(50):
        _, window = stream.locate(i)
        sample = stream.sample(i)
        assert (sample.tokens == data[window * S : window * S + S + 1]).all()
        assert sample.document_starts == [p for p in range(1, S) if sample.tokens[p - 1] == EOS]


def test_seed_decides_the_order(source):
    def order(seed):
        stream = stream_of([source], S, seed)
        return [stream.locate(i) for i in range(100)]

    assert order(1) == order(1)
    assert order(1) != order(2)


@pytest.mark.parametrize(
    ("dp_size", "micro_batch_size", "steps"),
    [(1, 1, [24] * 4), (2, 3, [6, 12, 24, 54]), (3, 2, [48, 48]), (4, 4, [16, 32, 48]), (1, 8, [8, 16, 8, 64])],
)
def test_order_does_not_depend_on_the_layout(mixed, dp_size, micro_batch_size, steps):
    """Every layout and every schedule hands out sample i unchanged, and each sample exactly once."""
    loaders = [
        Loader(mixed, dp_rank=rank, dp_size=dp_size, micro_batch_size=micro_batch_size, num_workers=rank % 2)
        for rank in range(dp_size)
    ]
    cursor = 0
    for sequences in steps:
        ids = []
        for loader in loaders:
            for batch in loader.step_batches(cursor, sequences * S):
                ids += batch.sample_ids
                for row, i in enumerate(batch.sample_ids):
                    expected = mixed.sample(i).tokens
                    assert batch.tokens[row].tolist() == expected[:-1].tolist()
                    assert batch.labels[row].tolist() == expected[1:].tolist()
        assert sorted(ids) == list(range(cursor, cursor + sequences))
        cursor += sequences
    for loader in loaders:
        loader.close()


def test_step_of_a_wrong_size(stream):
    loader = Loader(stream, dp_rank=0, dp_size=2, micro_batch_size=3)
    for tokens in (0, 5 * S, 6 * S + 1):
        with pytest.raises(ValueError, match=r"no multiple of micro_batch_size x data_parallel_size x seq_length = 96"):
            loader.step_batches(0, tokens)


@pytest.mark.parametrize(("dp_size", "micro_batch_size"), [(1, 1), (2, 3), (4, 2), (1, 8), (8, 5)])
@pytest.mark.parametrize("count", [1, 3, 24, 104, 10**6])
def test_evaluation_takes_exactly_the_sequences_asked_for(source, dp_size, micro_batch_size, count):
    """The sequences are the same in every layout and for every seed, each counts once, and the ranks take as many
    batches."""

    def loaders(seed, dp_size, micro_batch_size):
        stream = stream_of([source], S, seed)
        return [Loader(stream, dp_rank=r, dp_size=dp_size, micro_batch_size=micro_batch_size) for r in range(dp_size)]

    there = min(count, (5000 - 1) // S)
    (reference,) = loaders(0, 1, 1)
    expected = {i: batch.tokens[0].tolist() for i, batch in enumerate(reference.eval_batches(count))}
    assert len({tuple(tokens) for tokens in expected.values()}) == there

    counted = []
    ranks = [list(loader.eval_batches(count)) for loader in loaders(5, dp_size, micro_batch_size)]
    # The ranks make one pass, rounded up to whole batches.
    assert {len(batches) for batches in ranks} == {-(-there // (dp_size * micro_batch_size))}
    for batch in (batch for batches in ranks for batch in batches):
        assert batch.tokens.shape == (micro_batch_size, S)
        assert [expected[i] for i in batch.sample_ids] == batch.tokens.tolist()
        counted += batch.sample_ids[: batch.weight]
    assert sorted(counted) == list(range(there))
    assert reference.eval_size(count) == there


def test_short_names_of_sources():
    for paths, names in (
        (["data/web/valid", "data/code/valid"], ["web", "code"]),
        (["data/valid", "data/b/valid"], ["valid", "b/valid"]),
        (["/x/a", "/x/b"], ["a", "b"]),
        (["a/b/c/valid", "a/d/valid"], ["b/c", "d"]),
        (["a/valid"], ["valid"]),
        (["a/valid", "a/valid"], ["valid", "valid"]),
    ):
        assert source_names(paths) == names


# -- documents ---------------------------------------------------------------------------------------------------------


def test_lengths_of_documents(stream):
    lengths = stream.document_lengths(50)
    assert lengths == stream.document_lengths(60)[:50]
    for index, row in enumerate(lengths):
        assert sum(row) == S and min(row) > 0
        ends = np.flatnonzero(stream.sample(index).tokens[: S - 1] == EOS) + 1
        assert np.cumsum(row)[:-1].tolist() == ends.tolist()


@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize("positions", [True, False])
def test_documents_in_a_batch(source, attention, positions):
    stream = stream_of([source], S, 0, attention, positions)
    for batch in Loader(stream, dp_rank=0, dp_size=1, micro_batch_size=4).step_batches(0, 200 * S):
        assert batch.tokens.shape == batch.labels.shape == (4, S)
        assert batch.tokens.dtype == batch.labels.dtype == torch.int64
        begins = np.zeros((4, S), bool)
        begins[:, 0] = True
        begins[:, 1:] = batch.tokens[:, :-1].numpy() == EOS
        if attention:
            bounds = [*np.flatnonzero(begins.ravel()).tolist(), 4 * S]
            assert batch.cu_seqlens.dtype == torch.int32
            assert batch.cu_seqlens.tolist()[: len(bounds)] == bounds
            assert set(batch.cu_seqlens.tolist()[len(bounds) :]) <= {4 * S}
            assert len(batch.cu_seqlens) in (16, 32, 64, 128)
            assert np.diff(bounds).max() <= batch.max_seqlen <= S
            assert batch.max_seqlen < 2 * np.diff(bounds).max()
            assert batch.span == np.square(np.diff(bounds)).sum() / (4 * S)
        else:
            assert batch.cu_seqlens is None
            assert batch.max_seqlen is None
            assert batch.span == S
        if positions:
            place, expected = -1, []
            for begin in begins.ravel():
                place = 0 if begin else place + 1
                expected.append(place)
            assert batch.positions.dtype == torch.int64
            assert batch.positions.flatten().tolist() == expected
        else:
            assert batch.positions is None


# -- errors and threads ------------------------------------------------------------------------------------------------


def test_source_errors(tmp_path, source):
    short = write(tmp_path / "short", S)
    with pytest.raises(
        ConfigError,
        match=r"short has 16 tokens, too few for one sequence of data\.seq_length 16 .*; more text, or a shorter",
    ):
        stream_of([source, short], S, 0)
    assert stream_of([write(tmp_path / "enough", S + 1)], S, 0).num_windows == 1
    with pytest.raises(ConfigError, match=r"none\.idx does not exist"):
        stream_of([DataSource(path=str(tmp_path / "none"))], S, 0)
    one = write(tmp_path / "one", 100, provenance={"tokenizer_sha256": "1"})
    two = write(tmp_path / "two", 100, provenance={"tokenizer_sha256": "2"})
    with pytest.raises(ConfigError, match=r"one and .*two were prepared with different tokenizers"):
        stream_of([one, source, two], S, 0)
    stream_of([one, source], S, 0, tokenizer_sha256="1")
    with pytest.raises(
        ConfigError,
        match=r"one was prepared with another tokenizer than data\.tokenizer .*; name its own, or prepare it again",
    ):
        stream_of([source, one], S, 0, tokenizer_sha256="2")
    with pytest.raises(ConfigError, match="outside of the vocabulary of 3"):
        stream_of([source], S, 0, vocab_size=3).sample(0)


def test_fingerprint(tmp_path, source):
    stream = lambda sources, length=S, seed=0: stream_of(sources, length, seed).fingerprint  # noqa: E731
    reference = stream([source])
    (tmp_path / "elsewhere").mkdir()
    assert stream([write(tmp_path / "elsewhere" / "b", 5000)]) == reference
    other = write(tmp_path / "c", 5000, seed=1)
    changed = [
        stream([source], seed=1),
        stream([source], length=S + 1),
        stream([other]),
        stream([source, other]),
        stream([other, source]),
        stream([source, DataSource(path=other.path, weight=2)]),
    ]
    assert len({reference, *changed}) == 1 + len(changed)


def test_content_has_checksums_where_all_files_have_them(tmp_path, source):
    named = [write(tmp_path / name, 100, provenance={"sha256": name}) for name in "xy"]
    first, second, mixed = (stream_of(list(some), S, 0).content() for some in (named, named[::-1], [*named, source]))
    assert list(first) == [" (samples)", " (checksums in .json)"]
    assert list(mixed) == [" (samples)"]
    assert first[" (checksums in .json)"] != second[" (checksums in .json)"]


class Counted:
    """An array that counts the elements that are read from it."""

    def __init__(self, array: np.ndarray):
        self.array, self.read = array, 0

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, part):
        found = self.array[part]
        self.read += np.size(found)
        return found


@pytest.mark.parametrize("provenance", [{}, {"sha256": "as prepare records it"}])
def test_reads_of_an_index_at_the_start_do_not_grow_with_it(tmp_path, monkeypatch, provenance):
    """Every host looks at samples of the index. Only a file that `prepare` did not write is read whole, and only
    once."""
    monkeypatch.setattr(token_files, "SAMPLES", 8)
    monkeypatch.setattr(verify, "DEEP_CHECK_TOKENS", 10)
    for count in (30_000, 60_000):
        writer = TokenFileWriter(tmp_path / "x").begin(100)
        writer.add(np.ones(count, int), np.ones(count, int))
        writer.finish()
        writer.publish(provenance)
        of = stream_of([DataSource(path=str(tmp_path / "x"))], S, 0)
        (file,) = of._files
        for first in (False, True):
            parts = file._lengths, file._offsets, file._documents = [
                Counted(getattr(each, "array", each)) for each in (file._lengths, file._offsets, file._documents)
            ]
            verify.verify({"data.train": of}, deep=first, say=print)
            whole = first and not provenance
            assert parts[1].read == (count if whole else 8 * 2048 + 8 - 1)
            assert parts[0].read == (count if whole else 8 * 2048) + 8 * 2048, "SampleStream.content reads it, too"


def test_a_resume_compares_what_both_sides_know():
    before = {"data.train": "old order", "data.train (samples)": "1", "data.valid (samples)": "1"}
    now = {"data.train": "new", "data.train (samples)": "2", "data.train (checksums in .json)": "3"}
    assert verify.changed({}, now) == []
    assert verify.changed(before, now) == ["data.train (samples): checkpoint 1, this run 2"]
    assert verify.changed(now, {"data.train (checksums in .json)": "4"}) == [
        "data.train (checksums in .json): checkpoint 3, this run 4"
    ]


def running(loader: Loader) -> list[threading.Thread]:
    """Return the threads of a loader that have not ended."""
    return [thread for thread in loader._pool._threads if thread.is_alive()]


def test_threads_do_not_change_the_order(stream, monkeypatch):
    plain = stream.sample
    rng = random.Random(0)

    def slow(index, seed=None):
        time.sleep(rng.choice([0, 0, 0.004]))
        return plain(index, seed)

    monkeypatch.setattr(stream, "sample", slow)
    loader = Loader(stream, dp_rank=1, dp_size=2, micro_batch_size=2, num_workers=4)
    ids = [batch.sample_ids for batch in loader.step_batches(8, 80 * S)]
    assert ids == [[i, i + 1] for i in range(10, 88, 4)]
    loader.close()
    assert running(loader) == []


def test_prefetch_goes_on_into_the_next_step(stream, monkeypatch):
    asked = []
    plain = stream.sample
    monkeypatch.setattr(stream, "sample", lambda index, seed=None: asked.append(index) or plain(index, seed))
    loader = Loader(stream, dp_rank=0, dp_size=1, micro_batch_size=2, num_workers=1)
    list(loader.step_batches(0, 4 * S, next_tokens_per_step=8 * S))
    until(lambda: max(asked) >= 7)
    assert sorted(asked) == list(range(8))  # The loader works two batches ahead.
    assert [batch.sample_ids for batch in loader.step_batches(4, 8 * S)] == [[4, 5], [6, 7], [8, 9], [10, 11]]
    assert sorted(asked) == list(range(12))  # No batch was prepared twice.
    # A step of another size than announced, or a jump, still gets the right samples.
    list(loader.step_batches(12, 2 * S, next_tokens_per_step=8 * S))
    assert [batch.sample_ids for batch in loader.step_batches(101, 4 * S)] == [[101, 102], [103, 104]]
    loader.close()


def test_an_error_in_a_thread_reaches_the_training_thread(stream, monkeypatch):
    plain = stream.sample

    def failing(index, seed=None):
        if index == 9:
            raise ConfigError("token file x: damaged")
        return plain(index, seed)

    monkeypatch.setattr(stream, "sample", failing)
    loader = Loader(stream, dp_rank=0, dp_size=1, micro_batch_size=2, num_workers=2)
    batches = loader.step_batches(0, 20 * S)
    assert [next(batches).sample_ids for _ in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(ConfigError, match="token file x: damaged"):
        next(batches)
    loader.close()
    assert running(loader) == []


def test_closing_in_the_middle_of_a_step(stream):
    loader = Loader(stream, dp_rank=0, dp_size=1, micro_batch_size=2, num_workers=3)
    next(loader.step_batches(0, 200 * S))
    loader.close()
    loader.close()
    assert running(loader) == []
