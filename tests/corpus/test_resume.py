"""`prepare` after an interruption: the same command goes on, and its files are those of a call without interruption."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from forked import until
from prepare_inputs import TEXTS, documents, make_texts, prepare, quiet, write_jsonl
from sagetrain.config import ConfigError
from sagetrain.corpus import files, journal
from sagetrain.corpus.records import Pairs
from sagetrain.corpus.token_writer import TokenFileWriter
from sagetrain.data.token_file import TokenFile
from sagetrain.data.tokenizer import Tokenizer

NAMES = ("train.bin", "train.idx", "train.json", "valid.bin", "valid.idx", "valid.json", "tokenizer.model")


class Killed(BaseException):
    """An exception that none of our code handles."""


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def write_inputs(folder: Path) -> list[str]:
    """Write every kind of input that is read in several chunks, and an empty file."""
    folder.mkdir()
    plain = write_jsonl(folder / "plain.jsonl", TEXTS)
    plain.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes().replace(b"\n", b"\r\n\n").rstrip(b"\n"))
    write_jsonl(folder / "empty.jsonl", [""])
    packed = write_jsonl(folder / "packed.jsonl", make_texts(200, seed=1)).read_bytes()
    (folder / "packed.jsonl.zst").write_bytes(zstandard.compress(packed))
    (folder / "long.txt").write_text("\n".join(make_texts(100, seed=2)))
    with tarfile.open(folder / "texts.tar.gz", "w:gz") as archive:
        for name in ("a.txt", "b.txt"):
            archive.add(folder / "long.txt", name)
    rows = pyarrow.table({"text": make_texts(1500, seed=3)})
    pyarrow.parquet.write_table(rows, folder / "rows.parquet", row_group_size=700)
    datasets.Dataset.from_dict({"text": make_texts(1200, seed=4)}).save_to_disk(folder / "saved")
    names = ("plain.jsonl", "empty.jsonl", "packed.jsonl.zst", "long.txt", "texts.tar.gz", "rows.parquet", "saved")
    return [str(folder / name) for name in names]


def with_bos(model: Path, folder: Path) -> Path:
    """Copy a SentencePiece model, with a file beside it that puts a bos before a text."""
    (folder / "begun").mkdir()
    (folder / "begun/tokenizer_config.json").write_text('{"add_bos_token": true}')
    return Path(shutil.copy(model, folder / "begun/tokenizer.model"))


@pytest.fixture
def small_pieces(monkeypatch) -> None:
    """Make chunks of a few documents, and a record in the journal after each."""
    monkeypatch.setattr(files, "CHUNK_BYTES", 1 << 12)
    monkeypatch.setattr(journal, "SECONDS", 0.0)


@pytest.fixture
def killed_after(monkeypatch) -> Callable[..., bool]:
    """A function that runs `prepare` and kills it at the addition after the n-th. It returns whether there was such an
    addition."""

    def run(count: int, *args: object, **options: object) -> bool:
        left = iter(range(count))
        add = TokenFileWriter.add

        def die(self: TokenFileWriter, *arguments: object, **named: object) -> None:
            if next(left, None) is None:
                raise Killed
            add(self, *arguments, **named)

        with monkeypatch.context() as patch:
            patch.setattr(TokenFileWriter, "add", die)
            try:
                quiet(*args, **options)
            except Killed:
                return True
        return False

    return run


@pytest.mark.parametrize("begun", [False, True])
def test_interrupted_anywhere_it_gives_the_same_files(tmp_path, model, small_pieces, killed_after, begun):
    """begun: a bos stands before each document, in however many chunks the document comes."""
    inputs = write_inputs(tmp_path / "in")
    options = {"tokenizer": with_bos(model, tmp_path) if begun else model, "valid_fraction": 0.2}
    whole = quiet(inputs, tmp_path / "whole/train", **options)
    expected = digests(tmp_path / "whole")
    bos = Tokenizer.load(model).bos_id
    for name in ("train", "valid"):
        assert {(document[:1] == [bos], document.count(bos)) for document in documents(tmp_path / "whole" / name)} == {
            (begun, int(begun))
        }
    assert expected.keys() == {*NAMES} | ({"tokenizer_config.json"} if begun else set())
    out = tmp_path / "out/train"
    places = [None]
    while killed_after(3, inputs, out, **options):
        assert not any((out.parent / name).exists() for name in NAMES)
        places.append(json.loads((out.parent / "train.json.partial").read_text())["place"])
        assert places[-1] != places[-2]
    assert {place["input"] for place in places[1:]} == set(range(7))
    assert any(place["parts"] for place in places[1:])
    assert digests(out.parent) == expected
    assert quiet(inputs, out, **options).counts == whole.counts


def test_a_call_of_a_version_without_bos_is_not_continued(tmp_path, model, small_pieces, killed_after):
    """A finished output of that version is not taken for this version's output either."""
    path, begun, said = write_jsonl(tmp_path / "a.jsonl", TEXTS), with_bos(model, tmp_path), []
    killed_after(3, [str(path)], tmp_path / "cut/train", tokenizer=model)
    with pytest.raises(ConfigError, match=r"differs from it in what the tokenizer puts before a text \(an older"):
        quiet([str(path)], tmp_path / "cut/train", tokenizer=begun)
    without = quiet([str(path)], tmp_path / "out/train", tokenizer=model)
    with pytest.raises(ConfigError, match="exists and was prepared from other inputs or settings"):
        quiet([str(path)], tmp_path / "out/train", tokenizer=begun)
    assert "prefix" not in json.loads((tmp_path / "out/train.json").read_text())["request"]
    more = prepare([str(path)], tmp_path / "out/more", tokenizer=begun, say=said.append)  # The tokenizer is the same.
    assert "each document begins with token 1, which the tokenizer puts before a text" in said
    assert more.counts["train"].tokens == without.counts["train"].tokens + len(TEXTS)
    # The next call without --tokenizer takes the folder's tokenizer, which puts a bos before a text.
    quiet([str(path)], tmp_path / "out/third")
    assert (tmp_path / "out/third.bin").read_bytes() == (tmp_path / "out/more.bin").read_bytes()
    assert json.loads((tmp_path / "out/third.json").read_text())["request"]["prefix"] == [1]


def test_interrupted_records_keep_their_sequences_and_masks(tmp_path, model, small_pieces, killed_after):
    """Records are put into sequences chunk by chunk. A later part of a file does not begin at the file's first
    record."""
    text = "".join(json.dumps({"prompt": t[:20], "completion": t}) + "\n" for t in make_texts(150))
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "b.jsonl.zst").write_bytes(zstandard.compress(text.encode()))
    inputs = [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl.zst")]
    options = {"tokenizer": model, "records": Pairs("prompt", "completion", seq_length=400), "valid_fraction": 0.2}
    for shard in (None, "2/3"):
        whole, out = tmp_path / f"whole{bool(shard)}", tmp_path / f"out{bool(shard)}"
        quiet(inputs, whole / "train", shard=shard, **options)
        assert sum(file.suffix == ".mask" for file in whole.iterdir()) == 2
        assert killed_after(5, inputs, out / "train", shard=shard, **options)
        partial = next(out.glob("train*.mask.partial"))
        mask = partial.read_bytes()
        partial.write_bytes(bytes([1]) + mask[1:])
        with pytest.raises(ConfigError, match="no longer hold what an unfinished call wrote"):
            quiet(inputs, out / "train", shard=shard, **options)
        partial.write_bytes(mask)
        times = 0
        while killed_after(3, inputs, out / "train", shard=shard, **options):
            times += 1
        assert times > 1
        assert digests(out) == digests(whole)


def test_nothing_is_done_twice(tmp_path, model, small_pieces, killed_after, monkeypatch):
    inputs = write_inputs(tmp_path / "in")
    killed_after(40, inputs, tmp_path / "out/train", tokenizer=model)
    before = json.loads((tmp_path / "out/train.json.partial").read_text())["counts"]["train"]["tokens"]
    added = []
    add = TokenFileWriter.add
    monkeypatch.setattr(TokenFileWriter, "add", lambda self, *args: [added.append(len(args[0])), add(self, *args)])
    total = quiet(inputs, tmp_path / "out/train", tokenizer=model).counts["train"].tokens
    assert before > 0 and sum(added) == total - before


def test_a_tokenizer_is_trained_once(tmp_path, small_pieces, killed_after, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    quiet([str(path)], tmp_path / "whole/train", vocab_size=350)
    killed_after(0, [str(path)], tmp_path / "out/train", vocab_size=350)
    monkeypatch.setattr("sagetrain.corpus.prepare.train_tokenizer", None)
    quiet([str(path)], tmp_path / "out/train", vocab_size=350)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


@pytest.mark.parametrize(("change", "message"), [
    ({"text_key": "id"}, "in --text-key: repeat that one"), ({"valid_fraction": 0.1}, "in --valid-fraction:"),
    ({"tokenizer": "other"}, "in the tokenizer:"),
    ({"input": "grown"}, r"in the inputs \(a file was added, left out or changed since\):"),
])  # fmt: skip
def test_a_changed_request_is_refused(tmp_path, model, small_pieces, killed_after, change, message):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    options = {"tokenizer": model}
    killed_after(4, [str(path)], tmp_path / "out/train", **options)
    before = digests(tmp_path / "out")
    if change.pop("input", None):
        write_jsonl(path, [*TEXTS, "more"])
    if "tokenizer" in change:
        other = quiet([str(path)], tmp_path / "other/train", vocab_size=330).tokenizer
        change = {"tokenizer": other}
    message = rf"train\.json\.partial, and this one differs from it {message}.*--overwrite"
    with pytest.raises(ConfigError, match=message):
        quiet([str(path)], tmp_path / "out/train", **options | change)
    assert digests(tmp_path / "out") == before
    if "text_key" not in change:
        quiet([str(path)], tmp_path / "out/train", overwrite=True, **options | change)
        assert not list((tmp_path / "out").glob("*.partial*"))


def test_a_bad_line_late_costs_nothing(tmp_path, model, small_pieces):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    path.write_bytes(path.read_bytes() + b"oops\n")
    said = []
    with pytest.raises(ConfigError, match="line 301: not valid JSON"):
        prepare([str(path)], tmp_path / "out/train", tokenizer=model, say=said.append)
    assert said[-1] == f"{tmp_path}/out/train: unfinished; the same call or command goes on with it"
    result = prepare([str(path)], tmp_path / "out/train", tokenizer=model, skip_bad_lines=True, say=said.append)
    assert any("going on after" in line for line in said)
    assert (result.counts["train"].documents, result.counts["train"].bad_lines) == (300, 1)
    assert len(documents(result.train)) == 300


@pytest.mark.parametrize("spoil", ["bin", "idx", "json", "tokenizer"])
def test_partial_files_that_changed_are_not_gone_on_with(tmp_path, small_pieces, killed_after, spoil):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    killed_after(4, [str(path)], tmp_path / "out/train", vocab_size=350)
    partial = tmp_path / f"out/train.{spoil}.partial"
    data = bytearray(partial.read_bytes())
    data[10] ^= 1
    partial.write_bytes(data if spoil in ("bin", "tokenizer") else data[:40])
    with pytest.raises(ConfigError, match=r"train\..*partial.*: delete .*/train\.\*\.partial to start over"):
        quiet([str(path)], tmp_path / "out/train", vocab_size=350)
    for file in (tmp_path / "out").glob("train.*.partial"):
        file.unlink()
    assert quiet([str(path)], tmp_path / "out/train", vocab_size=350).counts["train"].documents == 300


@pytest.mark.parametrize("side", ["valid", "train"])
@pytest.mark.parametrize("trained", [False, True])
def test_killed_between_the_last_renames_the_next_call_ends_it(tmp_path, model, monkeypatch, trained, side):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    options = {"valid_fraction": 0.2} | ({"vocab_size": 350} if trained else {"tokenizer": model})
    quiet([str(path)], tmp_path / "whole/train", **options)
    with monkeypatch.context() as patch:
        patch.setattr(TokenFileWriter, "publish", killed_at(side))
        with pytest.raises(Killed):
            quiet([str(path)], tmp_path / "out/train", **options)
    assert (tmp_path / "out/valid.idx").exists() == (side == "train") and not (tmp_path / "out/train.idx").exists()
    quiet([str(path)], tmp_path / "out/train", **options)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def test_killed_twice_between_the_last_renames(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    quiet([str(path)], tmp_path / "whole/train", vocab_size=350)
    replace = os.replace

    def killed_at_last(source: os.PathLike, target: os.PathLike) -> None:
        if str(target).endswith("train.idx"):
            raise Killed
        replace(source, target)

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", killed_at_last)
            with pytest.raises(Killed):
                quiet([str(path)], tmp_path / "out/train", vocab_size=350)
        # The call stops one step earlier here: no published file says which tokenizer it was prepared with.
        (tmp_path / "out/train.json").unlink()
    quiet([str(path)], tmp_path / "out/train", vocab_size=350)
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")


def killed_at(side: str) -> Callable[[TokenFileWriter, dict], None]:
    publish = TokenFileWriter.publish

    def publish_or_die(self: TokenFileWriter, provenance: dict) -> None:
        if self.path.name.startswith(side):
            raise Killed
        publish(self, provenance)

    return publish_or_die


def test_a_real_kill(tmp_path, model, small_pieces):
    """The process waits at its tenth addition."""
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(1000))
    quiet([str(path)], tmp_path / "whole/train", tokenizer=model)
    (tmp_path / "run.py").write_text(
        "import sys, time; from sagetrain.corpus import encode, files, journal; from itertools import count\n"
        "from sagetrain.corpus.prepare import prepare; from sagetrain.corpus.token_writer import TokenFileWriter\n"
        "from sagetrain.corpus.request import Request\n"
        "encode.ALONE_SECONDS, journal.SECONDS, files.CHUNK_BYTES = 0.0, 0.0, 1 << 12\n"
        "add, number = TokenFileWriter.add, count(1)\n"
        "TokenFileWriter.add = lambda *how, **more: add(*how, **more) if next(number) < 10 else time.sleep(3600)\n"
        "if __name__ == '__main__':\n"
        "    prepare(Request([sys.argv[1]], output=sys.argv[2], tokenizer=sys.argv[3], num_workers=2))"
    )
    out = tmp_path / "out/train"
    process = subprocess.Popen(
        [sys.executable, tmp_path / "run.py", path, out, model], start_new_session=True, stderr=subprocess.DEVNULL
    )
    # There are the process itself, two workers, and what Python starts beside those.
    until(
        lambda: len(processes_of_session(process.pid)) >= 4 and (out.parent / "train.json.partial").exists(),
        lambda: process.poll() is None,
    )
    with pytest.raises(ConfigError, match="another process is writing"):
        quiet([str(path)], out, tokenizer=model)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with pytest.raises(ConfigError, match="does not exist"):
        TokenFile(out)
    until(lambda: not processes_of_session(process.pid))  # The workers have ended too.
    said = []
    prepare([str(path)], out, tokenizer=model, say=said.append)
    assert "going on after" in said[0]
    assert digests(out.parent) == digests(tmp_path / "whole")


def processes_of_session(session: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize("change", [{"vocab_size": 350}, {"vocab_size": 360}])
def test_a_call_that_is_running_keeps_what_it_recorded(
    tmp_path, model, killed_after, small_pieces, monkeypatch, change
):
    """A second call with --overwrite is refused before it discards anything."""
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    quiet([str(path)], tmp_path / "whole/train", vocab_size=350)
    killed_after(4, [str(path)], tmp_path / "out/train", vocab_size=350)
    before, add = digests(tmp_path / "out"), TokenFileWriter.add

    def refused(self: TokenFileWriter, *args: object) -> None:
        if not asked:
            asked.append(digests(tmp_path / "out").keys() == before.keys())
            with pytest.raises(ConfigError, match="another process is writing"):
                quiet([str(path)], tmp_path / "out/train", overwrite=True, **change)
            asked.append(digests(tmp_path / "out").keys() == before.keys())
        add(self, *args)

    asked: list[bool] = []
    monkeypatch.setattr(TokenFileWriter, "add", refused)
    quiet([str(path)], tmp_path / "out/train", vocab_size=350)
    assert asked == [True, True]
    assert digests(tmp_path / "out") == digests(tmp_path / "whole")
