"""`sagetrain prepare` reads every kind of source to the same tokens."""

import os
import subprocess
import sys
import time
from pathlib import Path

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

from prepare_inputs import TEXTS, documents, make_texts, prepare, quiet, write_jsonl
from sagetrain.config import ConfigError
from sagetrain.corpus import encode
from sagetrain.corpus.files import CHUNK_BYTES
from sagetrain.corpus.request import TextRequest
from sagetrain.corpus.sources import Corpus


def as_jsonl(folder):
    return write_jsonl(folder / "a.jsonl", TEXTS)


def as_jsonl_with_blank_lines_and_a_byte_order_mark(folder):
    lines = write_jsonl(folder / "a.jsonl", TEXTS).read_bytes().rstrip(b"\n").split(b"\n")
    (folder / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\r\n\n".join(lines))
    return folder / "a.jsonl"


def as_parquet(folder):
    table = pyarrow.table({"n": range(len(TEXTS)), "text": TEXTS})
    pyarrow.parquet.write_table(table, folder / "A.PARQUET", row_group_size=70)
    return folder / "A.PARQUET"


def as_text_folder(folder):
    for number, text in enumerate(TEXTS):
        path = folder / "texts" / f"part{number // 100}" / f"{number:03}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    (folder / "texts" / ".hidden").write_bytes(b"\xff")
    return folder / "texts"


def as_saved_dataset(folder):
    datasets.Dataset.from_dict({"text": TEXTS, "n": list(range(len(TEXTS)))}).save_to_disk(folder / "saved")
    return folder / "saved"


def as_saved_dataset_dict(folder):
    train = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict(train=train, test=train.select([0])).save_to_disk(folder / "saved")
    return folder / "saved"


def as_two_shards_beside_a_readme(folder):
    shards = folder / "shards"
    shards.mkdir()
    write_jsonl(shards / "0.jsonl", TEXTS[:120])
    write_jsonl(shards / "1.jsonl", TEXTS[120:])
    (shards / "README.md").write_text("not data")
    return shards


def as_shards_in_capitals_beside_a_readme(folder):
    shards = as_two_shards_beside_a_readme(folder)
    (shards / "1.jsonl").rename(shards / "1.NDJSON")
    return shards


@pytest.mark.parametrize(
    "write",
    [as_jsonl, as_jsonl_with_blank_lines_and_a_byte_order_mark, as_parquet, as_text_folder, as_saved_dataset,
     as_saved_dataset_dict, as_two_shards_beside_a_readme, as_shards_in_capitals_beside_a_readme],
)  # fmt: skip
def test_every_kind_of_source_gives_the_same_tokens(tmp_path, model, tokenizer, write):
    result = quiet([str(write(tmp_path))], tmp_path / "out" / "train", tokenizer=model)
    expected = [[*tokenizer.encode(text), tokenizer.eos_id] for text in TEXTS]
    assert documents(tmp_path / "out" / "train") == expected
    counts = result.counts["train"]
    assert counts.documents == len(TEXTS)
    assert counts.tokens == sum(map(len, expected))
    assert counts.bytes == sum(len(text.encode()) for text in TEXTS)
    assert counts.empty_documents == 0
    assert result.tokenizer.read_bytes() == model.read_bytes()


def test_hub_dataset_is_streamed(tmp_path, model, tokenizer, monkeypatch):
    """A local file takes the hub's place. The name, configuration and split reach the library as given."""
    path = as_jsonl(tmp_path)
    asked = []

    def load_dataset(name, config, split, streaming, original=datasets.load_dataset):
        asked.append((name, config, split, streaming))
        return original("json", data_files=str(path), split="train", streaming=True)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_exists", lambda self, name, repo_type: True)
    quiet(["owner/name"], tmp_path / "x", tokenizer=model, dataset_config="en", dataset_split="validation")
    assert asked == [("owner/name", "en", "validation", True)]
    assert len(documents(tmp_path / "x")) == len(TEXTS)
    with pytest.raises(ConfigError, match=r"owner/name: no key 'body'; the keys are: id, text"):
        quiet(["owner/name"], tmp_path / "y", tokenizer=model, text_key="body")


def test_hub_is_asked_once_for_a_dataset_that_is_not_there(tmp_path, model, monkeypatch):
    def unreachable(self, name, repo_type):
        raise ValueError("Name or service not known")

    # This machine may be told to ask nobody (HF_HUB_OFFLINE).
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    # The library on its own tries again and again for 25 s.
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it is tried again"))

    for answer, message in (
        (lambda self, name, repo_type: False, "no/such: no such file or folder here, and .* has no dataset"),
        (unreachable, "no/such: no such file or folder here, .* cannot be asked .*: Name or service not known. Mend"),
    ):
        monkeypatch.setattr(huggingface_hub.HfApi, "repo_exists", answer)
        with pytest.raises(ConfigError, match=message):
            quiet(["no/such"], tmp_path / "new/x", tokenizer=model)
        assert not (tmp_path / "new").exists()


def test_hub_dataset_that_cannot_be_reached(tmp_path, model):
    script = (
        "import sys; from sagetrain.corpus.prepare import prepare; from sagetrain.corpus.request import Request\n"
        "prepare(Request(['no/such'], output=sys.argv[1], tokenizer=sys.argv[2]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "x", model],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        "ConfigError: no/such: no such file or folder here, and the Hugging Face dataset cannot be read" in run.stderr
    )


def test_code_in_a_folder_is_read_not_run(tmp_path, model, tokenizer):
    folder = tmp_path / "owner_dataset"
    folder.mkdir()
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    (folder / "owner_dataset.py").write_text(code)
    quiet([str(folder)], tmp_path / "x", tokenizer=model)
    assert documents(tmp_path / "x") == [[*tokenizer.encode(code), tokenizer.eos_id]]
    assert not (tmp_path / "ran").exists()


def test_glob_and_order_of_sources(tmp_path, model, tokenizer):
    for name in ("b.md", "a.md", "c.txt", "sub/d.md"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    single = tmp_path / "first.txt"
    single.write_text("first")
    quiet([str(single), str(tmp_path / "in")], tmp_path / "x", tokenizer=model, glob="**/*.md")
    texts = [tokenizer.decode(document[:-1]) for document in documents(tmp_path / "x")]
    assert texts == ["first", "a.md", "b.md", "sub/d.md"]


@pytest.mark.parametrize("newlines", [True, False])
def test_a_large_text_file_is_one_document(tmp_path, model, tokenizer, monkeypatch, newlines):
    monkeypatch.setattr(encode, "ALONE_SECONDS", 0.0)
    text = "\n".join(make_texts(9000)) if newlines else "é" * (CHUNK_BYTES + 12345)
    assert len(text.encode()) > 2 * CHUNK_BYTES
    (tmp_path / "book.txt").write_bytes(text.encode())
    (tmp_path / "small.txt").write_text("end")
    result = quiet(
        [str(tmp_path / "book.txt"), str(tmp_path / "small.txt")], tmp_path / "x", tokenizer=model, num_workers=2
    )
    book, small = documents(tmp_path / "x")
    assert tokenizer.decode(book[:-1]) == text
    assert book.count(tokenizer.eos_id) == 1
    assert tokenizer.decode(small[:-1]) == "end"
    assert result.counts["train"].bytes == len(text.encode()) + 3
    if newlines:
        assert book[:-1] == tokenizer.encode(text)


@pytest.mark.parametrize("extra", [0, 1])
def test_text_file_whose_size_is_a_multiple_of_the_parts(tmp_path, model, tokenizer, extra):
    text = "a line of 16 ab\n" * (2 * CHUNK_BYTES // 16) + "x" * extra
    (tmp_path / "a.txt").write_text(text)
    quiet([str(tmp_path / "a.txt")], tmp_path / "x", tokenizer=model)
    (document,) = documents(tmp_path / "x")
    assert tokenizer.decode(document[:-1]) == text


def test_empty_documents_are_left_out_and_counted(tmp_path, model):
    texts = ["one", "", None, " \n\t ", "\u3000"]
    said = []
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    result = prepare([str(path)], tmp_path / "x", tokenizer=model, say=said.append)
    assert result.counts["train"].documents == 1
    assert result.counts["train"].empty_documents == 4
    assert said[-2].endswith(" tokens, 1 document") and said[-1] == "left out 4 empty documents"
    (tmp_path / "only.txt").write_text("\n\n")
    with pytest.raises(ConfigError, match="no document with text"):
        quiet([str(tmp_path / "only.txt")], tmp_path / "y", tokenizer=model)
    assert not list(tmp_path.glob("y*"))


def test_standard_library(tmp_path):
    result = quiet(["python-stdlib"], tmp_path / "train", vocab_size=600, valid_fraction=0.05, tokenizer_sample=10**5)
    assert result.vocab_size == 600
    assert result.counts["train"].documents + result.counts["valid"].documents > 300
    assert result.counts["train"].tokens > 2_000_000
    again = quiet(["python-stdlib"], tmp_path / "train", vocab_size=600, valid_fraction=0.05, tokenizer_sample=10**5)
    assert again.already_there
    assert again.counts == result.counts


def test_docstrings_hold_no_values_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGETRAIN_SECRET", "hunter2hunter2")
    text = "".join(text for chunk in Corpus(TextRequest(["python-stdlib"])).chunks() for text in chunk.records)
    assert "class ArgumentParser(" in text and "builtins.print\n\n" in text and text.count("def test_") < 100
    assert "hunter2" not in text
    assert str(Path.home()) not in text


def test_wrong_parquet_columns(tmp_path, model):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "text": [3]}), path)
    with pytest.raises(ConfigError, match=r"a\.parquet: no key 'content'; the keys are: body, text"):
        quiet([str(path)], tmp_path / "x", tokenizer=model, text_key="content")
    with pytest.raises(ConfigError, match=r"a\.parquet, row 1: 'text' holds int, not text"):
        quiet([str(path)], tmp_path / "x", tokenizer=model)


def test_wrong_saved_datasets(tmp_path, model):
    path = as_saved_dataset_dict(tmp_path)
    with pytest.raises(ConfigError, match=r"no split 'dev'; the splits are: train, test"):
        quiet([str(path)], tmp_path / "x", tokenizer=model, dataset_split="dev")
    with pytest.raises(ConfigError, match="no split 'dev'; it is a single dataset: leave --dataset-split out"):
        quiet([str(path / "test")], tmp_path / "x", tokenizer=model, dataset_split="dev")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match="--dataset-split 'dev': none of the sources is a Hugging Face dataset"):
        quiet([str(tmp_path / "a.txt")], tmp_path / "x", tokenizer=model, dataset_split="dev")
    with pytest.raises(ConfigError, match=r"no key 'body'; the keys are: text"):
        quiet([str(path)], tmp_path / "x", tokenizer=model, text_key="body")
    with pytest.raises(
        ConfigError, match=r"--dataset-config 'en': .*saved/train is saved, and has one alone; leave it out"
    ):
        quiet([str(path / "train")], tmp_path / "x", tokenizer=model, dataset_config="en")
    next((path / "train").glob("*.arrow")).unlink()
    with pytest.raises(ConfigError, match=r"cannot read the saved dataset: .*; copy the folder again, or save it anew"):
        quiet([str(path)], tmp_path / "x", tokenizer=model)
    (path / "train/state.json").write_text("")
    with pytest.raises(ConfigError, match=r"train/state\.json is not valid JSON"):
        quiet([str(path)], tmp_path / "x", tokenizer=model)
    datasets.Dataset.from_dict({"text": []}).save_to_disk(tmp_path / "none")
    with pytest.raises(ConfigError, match="none: a saved dataset without rows"):
        quiet([str(tmp_path / "none")], tmp_path / "x", tokenizer=model)
