"""`prepare --shard`: the parts together are the whole, and hosts that share a folder do not disturb each other."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from prepare_inputs import TEXTS, documents, make_texts, prepare, quiet, write_jsonl
from sagetrain.config import ConfigError
from sagetrain.config.schema import DataSource
from sagetrain.corpus.request import TextRequest
from sagetrain.corpus.sources import Corpus
from sagetrain.corpus.token_writer import TokenFileWriter
from streams import stream_of


def write_inputs(folder: Path) -> list[str]:
    """Write files whose lines are divided among parts, with a byte order mark, blank lines and no end of the last line,
    and files that are not divided."""
    plain = write_jsonl(folder / "plain.jsonl", TEXTS)
    plain.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes().replace(b"\n", b"\r\n\n").rstrip(b"\n"))
    write_jsonl(folder / "other.jsonl", make_texts(150, seed=1))
    packed = write_jsonl(folder / "packed.jsonl", make_texts(100, seed=2))
    (folder / "packed.jsonl.zst").write_bytes(zstandard.compress(packed.read_bytes()))
    pyarrow.parquet.write_table(pyarrow.table({"text": make_texts(100, seed=3)}), folder / "rows.parquet")
    return [str(folder / name) for name in ("plain.jsonl", "packed.jsonl.zst", "other.jsonl", "rows.parquet")]


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_the_parts_together_are_the_whole(tmp_path, model, count):
    inputs = write_inputs(tmp_path)
    options = {"tokenizer": model, "valid_fraction": 0.2}
    whole = quiet(inputs, tmp_path / "whole/train", **options)
    said = []
    for number in range(1, count + 1):
        result = prepare(inputs, tmp_path / "d/train", shard=f"{number}/{count}", say=said.append, **options)
        assert result.train.name == f"train-{number:05}-of-{count:05}"
    assert f"part {count} of {count}; train on all of them by data.train path: {tmp_path}/d/train-*" in said
    for side in ("train", "valid"):
        files = [tmp_path / f"d/{side}-{number:05}-of-{count:05}" for number in range(1, count + 1)]
        assert [document for file in files for document in documents(file)] == documents(tmp_path / f"whole/{side}")
        assert DataSource(path=f"{tmp_path}/d/{side}-*").files == list(map(str, files))
    assert stream_of([DataSource(path=f"{tmp_path}/d/train-*")], 8, 0).num_tokens == whole.counts["train"].tokens
    assert prepare(inputs, tmp_path / "d/train", shard=f"1/{count}", say=said.append, **options).already_there


def stream(monkeypatch: pytest.MonkeyPatch, folder: Path, files: int) -> str:
    """Replace a hub dataset by so many local files, and return its name."""
    paths = [str(write_jsonl(folder / f"{n}.jsonl", TEXTS[n * 60 : (n + 1) * 60])) for n in range(files)]
    load = datasets.load_dataset
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_, **__: load("json", data_files=paths, split="train", streaming=True)
    )
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_exists", lambda self, name, repo_type: True)
    return "owner/name"


@pytest.mark.parametrize("kind", ["saved", "streamed"])
def test_datasets_are_divided_in_their_order(tmp_path, model, monkeypatch, kind):
    """A saved dataset is divided by rows, and a stream by its files (5 here)."""
    name = stream(monkeypatch, tmp_path, 5)
    if kind == "saved":
        name = str(tmp_path / "saved")
        datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(name)
    options = {"tokenizer": model, "valid_fraction": 0.2}
    quiet([name], tmp_path / "whole/train", **options)
    for number in (1, 2, 3):
        quiet([name], tmp_path / "d/train", shard=f"{number}/3", **options)
    for side in ("train", "valid"):
        parts = [tmp_path / f"d/{side}-0000{number}-of-00003" for number in (1, 2, 3)]
        assert all(documents(part) for part in parts)
        assert [document for part in parts for document in documents(part)] == documents(tmp_path / f"whole/{side}")


def test_each_of_several_datasets_is_divided(tmp_path, model):
    """Files beside the datasets are divided by their bytes, as they are without datasets."""
    names = [str(tmp_path / name) for name in ("a", "b")]
    for name, texts in zip(names, (TEXTS, make_texts(100, seed=1)), strict=True):
        datasets.Dataset.from_dict({"text": texts}).save_to_disk(name)
    inputs = [*names, str(write_jsonl(tmp_path / "c.jsonl", make_texts(50, seed=2)))]
    quiet(inputs, tmp_path / "whole/train", tokenizer=model)
    found = []
    for number in (1, 2):
        part = quiet(inputs, tmp_path / "d/train", tokenizer=model, shard=f"{number}/2")
        assert 220 < part.counts["train"].documents < 230
        found += documents(part.train)
    assert sorted(found) == sorted(documents(tmp_path / "whole/train"))


def test_a_stream_of_fewer_files_than_parts(tmp_path, model, monkeypatch):
    said = r"--shard 3/3: owner/name is a stream of 2 files, and a file is read whole: use at most 2 parts, or give "
    with pytest.raises(ConfigError, match=said + "its files as sources"):
        quiet([stream(monkeypatch, tmp_path, 2)], tmp_path / "x", vocab_size=350, shard="3/3")
    assert not list(tmp_path.glob("x*"))


def test_a_wrong_row_of_a_part_is_named(tmp_path, model):
    datasets.Dataset.from_dict({"n": [1, 2, 3, 4]}).save_to_disk(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"a \(part 2 of 2\), row 1: 'n' holds int, not text"):
        quiet([str(tmp_path / "a")], tmp_path / "x", tokenizer=model, text_key="n", shard="2/2")


def test_every_line_is_in_one_part_wherever_it_is_cut(tmp_path):
    lines = [f'{{"text": "{"x" * (n % 5)}{n}"}}' for n in range(40)]
    path = tmp_path / "a.jsonl"
    path.write_text("\ufeff" + "\n".join(lines) + "\n")  # Some editors begin a file with this mark.
    for count in (1, 2, 5, 11, 39, path.stat().st_size // 3):
        parts = [Corpus(TextRequest([str(path)]), (number, count)) for number in range(1, count + 1)]
        read = [record.decode() for part in parts for chunk in part.chunks() for record in chunk.records]
        assert read == lines
        assert sum(part.size for part in parts) == path.stat().st_size


def test_two_hosts_at_once_train_one_tokenizer(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(1500))
    run = (
        "import sys; from sagetrain.corpus.prepare import prepare; from sagetrain.corpus.request import Request\n"
        "prepare(Request([sys.argv[1]], output=sys.argv[2], vocab_size=350, valid_fraction=0.1, shard=sys.argv[3]))"
    )
    command = [sys.executable, "-c", run, path, tmp_path / "d/train"]
    hosts = [subprocess.Popen([*command, f"{number}/2"], stderr=subprocess.PIPE, text=True) for number in (1, 2)]
    for host in hosts:
        _, error = host.communicate()
        assert host.returncode == 0, error
    whole = quiet([str(path)], tmp_path / "whole/train", vocab_size=350, valid_fraction=0.1)
    assert (tmp_path / "d/tokenizer.model").read_bytes() == whole.tokenizer.read_bytes()
    for side in ("train", "valid"):
        parts = [tmp_path / f"d/{side}-0000{number}-of-00002" for number in (1, 2)]
        assert [document for part in parts for document in documents(part)] == documents(tmp_path / f"whole/{side}")
    assert not [name for name in os.listdir(tmp_path / "d") if "partial" in name]
    quiet([str(path)], tmp_path / "later/train", vocab_size=350, shard="1/2")
    # This call finds the tokenizer of the other part.
    quiet([str(path)], tmp_path / "later/train", vocab_size=350, shard="2/2")


def test_a_tokenizer_of_the_same_request_is_taken_over(tmp_path, monkeypatch):
    """Host 1 has written the tokenizer and not yet a token file, or was killed at that point."""
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(300))
    options = {"vocab_size": 350, "valid_fraction": 0.1}

    def killed(self: TokenFileWriter, provenance: dict) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TokenFileWriter, "publish", killed)
        with pytest.raises(KeyboardInterrupt):
            quiet([str(path)], tmp_path / "d/train", shard="1/2", **options)
    assert (tmp_path / "d/tokenizer.model").exists() and not list(tmp_path.glob("d/*.idx"))
    with pytest.raises(ConfigError, match="would be replaced by another tokenizer"):
        quiet([str(path)], tmp_path / "d/train", shard="2/2", **options | {"vocab_size": 360})
    quiet([str(path)], tmp_path / "d/train", shard="2/2", **options)
    quiet([str(path)], tmp_path / "d/train", shard="1/2", **options)
    assert len(list(tmp_path.glob("d/*.idx"))) == 4 and not list(tmp_path.glob("d/*partial*"))


def test_parts_of_another_whole_are_refused(tmp_path, model):
    path, output = write_jsonl(tmp_path / "a.jsonl", TEXTS), tmp_path / "d/train"
    quiet([str(path)], output, tokenizer=model, shard="1/2")
    said = r"d/train-00001-of-00002\.json is of another preparation \({}\), and .*/d/train-\* would read both"
    with pytest.raises(ConfigError, match=said.format("2 parts instead of 3")):
        quiet([str(path)], output, tokenizer=model, shard="2/3")
    with pytest.raises(ConfigError, match=said.format("--valid-fraction")):
        quiet([str(path)], output, tokenizer=model, shard="2/2", valid_fraction=0.1)
    with pytest.raises(ConfigError, match=said.format("the number of input files and .*")):
        quiet([str(path), str(write_jsonl(tmp_path / "b.jsonl", TEXTS))], output, tokenizer=model, shard="2/2")
    # Another name is no part of the same output.
    quiet([str(path)], tmp_path / "d/train-more", tokenizer=model, shard="2/3")
    shutil.copytree(tmp_path / "d", tmp_path / "e")
    copy, notes = write_jsonl(tmp_path / "copy.jsonl", TEXTS), []  # Another host would have such a copy.
    prepare([str(copy)], output, tokenizer=model, shard="2/2", say=notes.append)
    assert notes[0].startswith("train-00001-of-00002 was made from inputs of other names, sizes or times; are they")
    quiet([str(path)], tmp_path / "e/train", tokenizer=model, shard="2/2", valid_fraction=0.1, overwrite=True)
    quiet([str(path)], tmp_path / "e/train", tokenizer=model, shard="1/2", valid_fraction=0.1, overwrite=True)


def test_parts_that_cannot_be(tmp_path, model):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    for shard in ("0/2", "3/2", "2", "a/b", "1/0", "-1/2"):
        with pytest.raises(ConfigError, match=rf"--shard {shard}: give K/N, part K of N"):
            quiet([str(path)], tmp_path / "x", tokenizer=model, shard=shard)
    (tmp_path / "b.txt").write_text("one document")
    with pytest.raises(ConfigError, match=r"--shard 1/2: nothing is left for this part of 1 inputs; .* fewer parts"):
        quiet([str(tmp_path / "b.txt")], tmp_path / "x", tokenizer=model, shard="1/2")
    datasets.Dataset.from_dict({"text": TEXTS[:3]}).save_to_disk(tmp_path / "saved")
    with pytest.raises(ConfigError, match=r"--shard 1/4: .*saved has 3 rows: use at most 3 parts"):
        quiet([str(tmp_path / "saved")], tmp_path / "x", tokenizer=model, shard="1/4")
    path.write_bytes(path.read_bytes() + b"oops\n")
    with pytest.raises(ConfigError, match=r"a\.jsonl from byte [\d,]+, line \d+: not valid JSON"):
        quiet([str(path)], tmp_path / "x", tokenizer=model, shard="2/2")
    assert not list(tmp_path.glob("x*"))
