"""`prepare` writes the same files with any number of workers, and nothing half-done looks done."""

import hashlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest

import sagetrain
from distributed import run_distributed
from prepare_inputs import TEXTS, documents, make_texts, prepare, published_tokenizer, quiet, write_jsonl
from process_memory import peak_of, return_what_is_freed
from sagetrain.config import ConfigError
from sagetrain.corpus import encode, files, token_writer
from sagetrain.corpus.chunk import Chunk, Place
from sagetrain.corpus.counts import Tally
from sagetrain.corpus.encode import Encoded
from sagetrain.corpus.files import CHUNK_BYTES
from sagetrain.corpus.progress import Progress
from sagetrain.corpus.request import TextRequest
from sagetrain.corpus.sources import Corpus
from sagetrain.corpus.tokenizer_training import train_tokenizer
from sagetrain.data import token_file


def digest(folder: Path, *names: str) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


# -- workers, splits, tokenizers ---------------------------------------------------------------------------------------


def test_the_files_do_not_depend_on_the_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "ALONE_SECONDS", 0.0)
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(12000) + ["", "last"])
    assert path.stat().st_size > 4 * CHUNK_BYTES
    names = ["train.bin", "train.idx", "valid.bin", "valid.idx", "tokenizer.model", "train.json", "valid.json"]
    found = []
    for workers in (1, 3):
        folder = tmp_path / str(workers)
        quiet([str(path)], folder / "train", vocab_size=350, valid_fraction=0.1, num_workers=workers)
        found.append(digest(folder, *names))
    assert found[0] == found[1]


def test_split_goes_by_the_document(tmp_path, model, tokenizer):
    texts = {"a": TEXTS, "b": random.Random(1).sample(TEXTS, len(TEXTS))}
    for run in "ab":
        path = write_jsonl(tmp_path / f"{run}.jsonl", texts[run])
        quiet([str(path)], tmp_path / run / "train", tokenizer=model, valid_fraction=0.2)
    sides = {}
    for run in "ab":
        train, valid = (
            {tokenizer.decode(document[:-1]) for document in documents(tmp_path / run / side)}
            for side in ("train", "valid")
        )
        assert train | valid == set(TEXTS)
        assert not train & valid
        assert 30 < len(valid) < 90
        sides[run] = valid
    assert sides["a"] == sides["b"]


@pytest.mark.parametrize("change", ["nothing", "more text", "train deleted"])
def test_held_out_documents_do_not_get_into_train(tmp_path, model, change):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    out = tmp_path / "d" / "train"
    quiet([str(path)], out, tokenizer=model, valid_fraction=0.2)
    if change == "more text":
        write_jsonl(path, TEXTS + ["new"])
    elif change == "train deleted":
        for suffix in (".bin", ".idx", ".json"):
            token_file.token_path(out, suffix).unlink()
    overwrite = change != "train deleted"
    before = {file: file.read_bytes() for file in out.parent.iterdir()}
    message = r"d/valid\.idx was .*same inputs.* --valid-fraction \(it was 0\.2\) .*, or delete .*d/valid"
    with pytest.raises(ConfigError, match=message):
        quiet([str(path)], out, overwrite=overwrite)
    assert {file: file.read_bytes() for file in out.parent.iterdir()} == before
    quiet([str(path)], out, valid_fraction=0.2, overwrite=True)
    for suffix in (".bin", ".idx", ".json"):
        token_file.token_path(out.with_name("valid"), suffix).unlink()
    assert quiet([str(path)], out, overwrite=True).counts["train"].documents >= len(TEXTS)


def test_a_valid_file_of_other_documents_stays(tmp_path, model):
    train, valid = write_jsonl(tmp_path / "a.jsonl", TEXTS[:200]), write_jsonl(tmp_path / "b.jsonl", TEXTS[200:])
    quiet([str(valid)], tmp_path / "d" / "valid", tokenizer=model)
    for _ in range(2):
        quiet([str(train)], tmp_path / "d" / "train", overwrite=True)
    quiet([str(valid)], tmp_path / "d" / "valid", overwrite=True)
    assert len(documents(tmp_path / "d" / "valid")) == len(TEXTS) - 200


@pytest.mark.parametrize("name", ["train.json", "train.bin", "train.mask", "valid.json"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_of_something_else_is_not_replaced(tmp_path, model, name, overwrite):
    """A source may be named like the record of the token file, and the tokens of other programs like its .bin."""
    (tmp_path / name).write_text('[{"text": "a text"}, {"text": "another text"}]')
    before = (tmp_path / name).read_bytes()
    source = tmp_path / name if name.endswith(".json") else write_jsonl(tmp_path / "a.jsonl", ["a text"])
    options = {"valid_fraction": 0.5} if name.startswith("valid") else {}
    with pytest.raises(ConfigError, match=f"{tmp_path / name} is no part of a token file, .* and would be replaced"):
        quiet([str(source)], tmp_path / "train", tokenizer=model, overwrite=overwrite, **options)
    assert (tmp_path / name).read_bytes() == before


def test_a_file_of_something_else_is_not_read_to_be_told(tmp_path, model):
    """The texts of a corpus may be larger than memory."""
    (tmp_path / "train.json").write_text(json.dumps([{"text": 1000 * "a text "}] * 2000))
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="is no part of a token file"):
            quiet([str(tmp_path / "train.json")], tmp_path / "train", tokenizer=model)
        assert tracemalloc.get_traced_memory()[1] < 5 << 20
    finally:
        tracemalloc.stop()


def test_what_prepare_has_written_into_a_source_is_no_text(tmp_path, model):
    """The second call has the same inputs as the first one, also if that was interrupted."""
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path / "in/a.jsonl", ["a text"])
    for unfinished in (False, True):
        quiet([str(tmp_path / "in")], tmp_path / "in/train", vocab_size=265)
        if not unfinished:
            (tmp_path / "in/train.idx").rename(tmp_path / "in/train.idx.partial")
    said: list[str] = []
    prepare([str(tmp_path / "in")], tmp_path / "in/train", vocab_size=265, say=said.append)
    assert said == [f"{tmp_path}/in/train: already prepared from the same inputs"]
    prepare([str(tmp_path / "in")], tmp_path / "x", tokenizer=model, say=said.append)
    assert said[1] == f"{tmp_path}/in: passing over what `sagetrain prepare` has written there ({tmp_path}/in/train)"
    assert len(documents(tmp_path / "x")) == 1
    (tmp_path / "in/a.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"in holds what .* has written: name a token file, .*in/train\)"):
        quiet([str(tmp_path / "in")], tmp_path / "y", tokenizer=model)


def test_a_split_with_nothing_on_one_side(tmp_path, model):
    path = write_jsonl(tmp_path / "a.jsonl", ["only one"])
    with pytest.raises(ConfigError, match=r"no document with text went into this file.* the source was "):
        quiet([str(path)], tmp_path / "train", tokenizer=model, valid_fraction=0.5)
    few = write_jsonl(tmp_path / "b.jsonl", [*TEXTS[:3], "", None])
    for fraction, said in ((0.001, "none: use 0.65 or more"), (0.99, "all: use 0.79 or less")):
        with pytest.raises(ConfigError, match=rf"b\.jsonl: --valid-fraction {fraction} of 3 documents took {said}"):
            quiet([str(few)], tmp_path / "new/train", vocab_size=10**6, valid_fraction=fraction)
    assert not list(tmp_path.glob("*.bin")) + list(tmp_path.glob("*.idx")) + list(tmp_path.glob("*.partial"))


def test_one_plain_text_file_cannot_be_split(tmp_path, model):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "book.txt").write_text("\n\n".join(TEXTS))
    for source in ("in", "in/book.txt"):
        said = []
        with pytest.raises(ConfigError, match=r"book\.txt: --valid-fraction 0\.2 needs several documents.*\.jsonl"):
            prepare([str(tmp_path / source)], tmp_path / "train", vocab_size=350, valid_fraction=0.2, say=said.append)
        assert said == []  # The error comes before the tokenizer is trained.
    for number in range(9):
        (tmp_path / "in" / f"{number}.txt").write_text(TEXTS[number])
    result = quiet([str(tmp_path / "in")], tmp_path / "train", tokenizer=model, valid_fraction=0.5)
    assert result.counts["train"].documents + result.counts["valid"].documents == 10


@pytest.mark.parametrize("asked", [0.0001, 0.9999])
def test_a_fraction_that_divides_few_whole_files_in_vain(tmp_path, model, asked):
    (tmp_path / "in").mkdir()
    for number in range(6):
        (tmp_path / "in" / f"{number}.txt").write_text(
            "\n".join([TEXTS[number]] * (1 + CHUNK_BYTES // 8 * (number == 5)))[: 2 * CHUNK_BYTES]
        )
    source, said = [str(tmp_path / "in")], []
    with pytest.raises(
        ConfigError, match=rf"0\.txt and 5 other inputs: --valid-fraction {asked} of 6 documents"
    ) as refused:
        prepare(source, tmp_path / "train", vocab_size=350, valid_fraction=asked, say=said.append)
    assert said == []  # The error comes before the tokenizer is trained.
    share, how = re.search(r"use (\S+) or (more|less)$", str(refused.value)).groups()
    result = quiet(source, tmp_path / "train", tokenizer=model, valid_fraction=float(share))
    assert result.counts["train" if how == "less" else "valid"].documents >= 1


def test_second_file_takes_the_tokenizer_of_its_folder(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    first = quiet([str(path)], tmp_path / "d" / "train", vocab_size=350)
    second = quiet([str(path)], tmp_path / "d" / "more", num_workers=1)
    assert second.vocab_size == 350
    assert documents(second.train) == documents(first.train)
    with pytest.raises(ConfigError, match="holds more, prepared with another tokenizer"):
        quiet([str(path)], tmp_path / "d" / "train", vocab_size=340, overwrite=True)


@pytest.mark.parametrize("how", ["trained", "given"])
def test_a_tokenizer_in_use_is_replaced_only_when_asked(tmp_path, model, how):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    out, file = tmp_path / "d" / "train", tmp_path / "d" / "tokenizer.model"
    first = train_tokenizer(TEXTS, 340)
    file.parent.mkdir()
    file.write_bytes(first)  # The token file of this tokenizer has gone, but a checkpoint may still name the tokenizer.
    options = {"vocab_size": 350} if how == "trained" else {"tokenizer": model}
    message = r"d/tokenizer\.model exists and would be replaced.*-o\), keep it with --tokenizer .*d/tokenizer\.model .*"
    said = []
    with pytest.raises(ConfigError, match=message + "--overwrite"):
        prepare([str(path)], out, say=said.append, **options)
    assert said == []
    assert [each.name for each in out.parent.iterdir()] == ["tokenizer.model"]
    assert file.read_bytes() == first
    (tmp_path / "copy.model").write_bytes(first)
    quiet([str(path)], out, tokenizer=tmp_path / "copy.model")  # The same content replaces nothing.
    assert file.read_bytes() == first
    quiet([str(path)], out, overwrite=True, **options)
    assert file.read_bytes() != first


def test_a_published_tokenizer_stays_as_it_is_in_its_folder(tmp_path):
    """The files of another tokenizer in the output's folder would change this one."""
    (tmp_path / "a.txt").write_text("a text")
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    for folder in (mine, theirs):
        folder.mkdir()
        (folder / "tokenizer.model").write_bytes(published_tokenizer().model)
        (folder / "chat_template.jinja").write_text("{{ messages }}")
    quiet([str(tmp_path / "a.txt")], mine / "train", tokenizer=mine / "tokenizer.model")
    assert {each.name for each in mine.iterdir()} == {"tokenizer.model", "chat_template.jinja", *names_of("train")}
    for options in ({"tokenizer": mine / "tokenizer.model"}, {"vocab_size": 300}):
        with pytest.raises(ConfigError, match=r"holds chat_template\.jinja, which is of another tokenizer"):
            quiet([str(tmp_path / "a.txt")], theirs / "train", **options)


def names_of(name):
    return {f"{name}{end}" for end in (".bin", ".idx", ".json")}


def test_a_call_cut_short_after_its_tokenizer_starts_over(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    first = quiet([str(path)], tmp_path / "d" / "train", vocab_size=350, valid_fraction=0.2)
    token_file.token_path(first.train, ".idx").unlink()
    again = quiet([str(path)], tmp_path / "d" / "train", vocab_size=350, valid_fraction=0.2)
    assert not again.already_there
    assert again.counts == first.counts


def test_tokenizer_sample_takes_from_every_file(tmp_path):
    for number in range(4):
        write_jsonl(tmp_path / f"{number}.jsonl", [f"{'abcd'[number]} " * 300_000])
    corpus = Corpus(TextRequest([str(tmp_path)]))
    sample = list(corpus.sample(4 * CHUNK_BYTES))
    assert {text[0] for text in sample} == set("abcd")
    assert sum(map(len, sample)) == 4 * CHUNK_BYTES
    assert sum(map(len, corpus.sample(100))) == 100
    assert list(corpus.sample(4 * CHUNK_BYTES)) == sample


def memory_of(root: str, model: str) -> list[int]:
    """Return the peak memory of preparing the small and the large file of a folder, after another file."""
    return_what_is_freed()
    return [
        peak_of(lambda: quiet([f"{root}/{size}.jsonl"], f"{root}/{size}", tokenizer=model))  # noqa: B023
        for size in ("warm", "small", "large")
    ][1:]


def test_memory_does_not_grow_with_the_corpus(tmp_path, model):
    lines = write_jsonl(tmp_path / "x.jsonl", make_texts(4000)).read_text()
    for name, times in (("warm", 1), ("small", 2), ("large", 20)):
        (tmp_path / f"{name}.jsonl").write_text(lines * times)
    ((small, large),) = run_distributed(memory_of, 1, str(tmp_path), str(model))
    assert large - small < 10_000 << 10  # The corpora differ by 16 MB.
    assert (tmp_path / "large.bin").stat().st_size == 10 * (tmp_path / "small.bin").stat().st_size


def test_progress_in_a_log_is_whole_lines(tmp_path, capsys, monkeypatch):
    """A bar that is drawn over itself would be one line of a log, and a short call has no time to report."""
    clock = itertools.count(step=3)
    corpus = SimpleNamespace(size=500, inputs=[SimpleNamespace(name="a", size=500)])

    def shown() -> str:
        with Progress(corpus, Place(), 0) as progress:
            for each in range(1, 6):
                progress.update(Encoded(Chunk("a", "line", 1, [], 100 * each, input="a"), {}, Tally({})))
        return capsys.readouterr().err

    assert shown() == ""
    monkeypatch.setattr("tqdm.std.time", lambda: float(next(clock)))
    assert re.fullmatch(r"(tokenizing: .+\n){2,}", shown())


def test_a_path_is_the_same_input_however_it_is_written(tmp_path, model, monkeypatch):
    (tmp_path / "work").mkdir()
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS[:20])
    monkeypatch.chdir(tmp_path / "work")
    quiet([str(path)], tmp_path / "x", tokenizer=model)
    assert quiet(["../a.jsonl"], tmp_path / "x", tokenizer=model).already_there


def test_the_smallest_vocabulary(tmp_path):
    (tmp_path / "a.txt").write_text("aaaa")
    assert quiet([str(tmp_path / "a.txt")], tmp_path / "x", vocab_size=260).vocab_size == 260


def test_prepare_needs_no_torch():
    code = "import sys, sagetrain.corpus.prepare; sys.exit('torch' in sys.modules or 'datasets' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# -- interruptions -----------------------------------------------------------------------------------------------------


def test_a_failure_at_any_rename_leaves_whole_files_or_none(tmp_path, model, monkeypatch):
    """Older files of another corpus are replaced, with two outputs. This is the worst case for half-replaced files."""
    old = write_jsonl(tmp_path / "old.jsonl", TEXTS[:100])
    new = write_jsonl(tmp_path / "new.jsonl", TEXTS)
    out = tmp_path / "out" / "train"
    options = {"tokenizer": model, "valid_fraction": 0.2}
    replace = os.replace
    for failing in range(12):
        quiet([str(old)], out, overwrite=True, **options)
        calls = iter(range(100))

        def broken(source, target, calls=calls, failing=failing):
            if next(calls) == failing:
                raise KeyboardInterrupt
            replace(source, target)

        monkeypatch.setattr(os, "replace", broken)
        try:
            quiet([str(new)], out, overwrite=True, **options)
        except KeyboardInterrupt:
            for side in ("train", "valid"):
                if token_file.token_path(out.with_name(side), ".idx").exists():
                    documents(out.with_name(side))  # `documents` validates the files deeply.
        else:
            break
        finally:
            monkeypatch.setattr(os, "replace", replace)
        quiet([str(new)], out, overwrite=True, **options)
        assert len(documents(out)) + len(documents(out.with_name("valid"))) == len(TEXTS)
    # The renames are those of .bin, .json and .idx for two outputs. The tokenizer is there already.
    assert failing == 6


def test_repeating_a_call(tmp_path, model):
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    first = quiet([str(path)], tmp_path / "x", tokenizer=model)
    before = (tmp_path / "x.idx").stat().st_mtime_ns
    second = quiet([str(path)], tmp_path / "x", tokenizer=model, num_workers=2)
    assert second.already_there
    assert not first.already_there
    assert second.counts == first.counts
    assert (tmp_path / "x.idx").stat().st_mtime_ns == before
    write_jsonl(path, TEXTS[:10])
    with pytest.raises(ConfigError, match=r"x exists and was prepared from other inputs or settings"):
        quiet([str(path)], tmp_path / "x", tokenizer=model)
    assert quiet([str(path)], tmp_path / "x", tokenizer=model, overwrite=True).counts["train"].documents == 10


def test_an_error_in_a_worker_arrives_whole(tmp_path, model, monkeypatch):
    """It spells settings as the caller of the worker does."""
    monkeypatch.setattr(encode, "ALONE_SECONDS", 0.0)
    monkeypatch.setattr(files, "CHUNK_BYTES", 1 << 12)
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(300))
    path.write_text(path.read_text() + '{"other": 1}\n')
    said = r"a\.jsonl, line 301: no key 'text'; the keys are: other\. Choose one with"
    with pytest.raises(ConfigError, match=f"{said} text_key$"):
        sagetrain.prepare(sagetrain.Request(path, output=tmp_path / "x", tokenizer=model, num_workers=2))
    with pytest.raises(ConfigError, match=f"{said} --text-key$"):
        quiet([str(path)], tmp_path / "x", tokenizer=model)
    assert not list(tmp_path.glob("x*"))


def test_a_worker_that_dies(tmp_path, model, monkeypatch):
    monkeypatch.setattr(encode, "ALONE_SECONDS", 0.0)
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(12000))

    def kill_workers(chunk_texts):
        for child in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split():
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                os.kill(int(child), signal.SIGKILL)

    monkeypatch.setattr(token_writer.TokenFileWriter, "add", lambda self, *args: kill_workers(args))
    with pytest.raises(ConfigError, match=r"a worker process ended unexpectedly \(exit code -9; out of memory\?\)"):
        quiet([str(path)], tmp_path / "x", tokenizer=model, num_workers=2)
    assert not list(tmp_path.glob("x*"))
