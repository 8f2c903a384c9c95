"""`prepare` meets bad lines and files, bad arguments and a full disk. It gives one clear error and leaves nothing
over."""

import gzip
import json
import os
import re
import resource
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import zstandard

from prepare_inputs import documents, make_texts, prepare, quiet, write_jsonl
from sagetrain.config import ConfigError
from sagetrain.corpus import encode
from sagetrain.corpus.files import CHUNK_BYTES
from sagetrain.corpus.kinds import alike
from sagetrain.corpus.records import Chats
from sagetrain.corpus.request import TextRequest
from sagetrain.corpus.sources import Corpus
from sagetrain.data.tokenizer import Tokenizer
from sagetrain.interop.importing import import_folder


def lines(*records: bytes) -> bytes:
    return b"\n".join(records) + b"\n"


GOOD = b'{"text": "fine"}'
BAD_FILES = {
    "key.jsonl": (lines(GOOD, b'{"body": "x", "title": "y"}'), r"line 2: no key 'text'; .* body, title\. .*--text-key"),
    "nested.json": (b'{"data": [{"text": "x"}]}', r"line 1: no key 'text'; .*under 'data': jq -c '.*\"data\"\]\[\]'"),
    "chat.jsonl": (b'{"messages": [{"role": "user"}]}', "If 'messages' is a chat: --chat-field messages, with"),
    "python.jsonl": (lines(b"{'text': 'x'}"), "line 1: not valid JSON: .*use json.dumps"),
    "several.jsonl": (lines(b'{"text": "a"}{"text": "b"}'), "line 1: not valid JSON: Extra.*several objects"),
    "mac.csv": (b"text\ra\rb\r", r"1: .*tr '\\r' '\\n'"),
    "bare.csv": (b"id,text\n1,one\n2,a\rb\n", r"bare\.csv, .* 3: .*; if it stands in a text, .*QUOTE_ALL"),
    "pair.psv": (b"text|n\na|1|2\n", "row 1: it has 3 cells, and the first line has 2"),
    "spaces.csv": (b"id,text \n1,x\n", "no key 'text'; the keys are: id, 'text '. Choose"),
    "wide.csv": (",".join(f"c{n}" for n in range(9000)).encode(), "the keys are: c0, .*, c39 and 8,960 more. Choose"),
    "nokeys.jsonl": (lines(b"{}"), "line 1: no key 'text'; the keys are: none"),
    "syntax.jsonl": (lines(GOOD, GOOD, b'{"text": "x"'), "line 3: not valid JSON: "),
    "pretty.json": (b'{\n"text": "x"}', r"line 1: not valid JSON.*one object over several lines.*jq -c"),
    "list.jsonl": (lines(b'["x"]'), "element 1: holds str, not a JSON object"),
    "log.jsonl": (lines(b"[INFO] begun", GOOD), "line 1: not valid JSON"),
    "later.jsonl": (lines(GOOD, b'["x"]'), "line 2: holds list, not a JSON object$"),
    "twice.csv": (b"text,n,text\na,1,b\n", "2 columns have the name 'text', .* rename all but one"),
    "number.jsonl": (lines(GOOD, b'{"text": 5}'), "line 2: 'text' holds int, not text"),
    "latin.jsonl": (lines(GOOD, b'{"text": "caf\xe9"}'), r"line 2: not UTF-8 \(byte 0xe9\); convert the file: iconv"),
    "surrogate.jsonl": (lines(b'{"text": "\\ud800"}'), "line 1: not valid Unicode: a lone surrogate"),
    "page.jsonl": (lines(GOOD, b"<html>"), "line 2: not valid JSON: .*; it is a web page"),
    "late.jsonl": (lines(*[GOOD] * 6000, b"oops"), "line 6,001: not valid JSON"),
    "latin.txt": (b"caf\xe9 and more", r"latin\.txt: not UTF-8 \(byte 0xe9\); if it is .* --glob; else convert"),
    "not.jsonl.gz": (GOOD, r"cannot read .*not\.jsonl\.gz: Not a gzipped file"),
    "cut.jsonl.gz": (gzip.compress(lines(*[GOOD] * 50))[:-12], r"cannot read .*cut\.jsonl\.gz: Compressed file ended"),
    "wrong.jsonl.gz": (
        gzip.compress(os.urandom(500))[:200] + b"\xff" * 80 + gzip.compress(os.urandom(500))[280:],
        r"cannot read .*wrong\.jsonl\.gz: ",
    ),
    "not.jsonl.zst": (GOOD, r"cannot read .*not\.jsonl\.zst: "),
    # The program zstd writes checksums, unlike zstandard.compress.
    "cut.jsonl.zst": (zstandard.ZstdCompressor(write_checksum=True).compress(lines(*[GOOD] * 50))[:-8],
                      r"cannot read .*cut\.jsonl\.zst: Compressed file.*; it begins as such a file does"),
    "bad.parquet": (b"PAR1 no", r"cannot read .*bad\.parquet: .*; copy it again"),
    "empty.parquet": (b"", r"cannot read .*empty\.parquet: .*; copy it again"),
    "json.parquet": (GOOD, r"cannot read .*json\.parquet: .*; name it by what it is"),
    "arrow.parquet": (b"ARROW1\0\0", r"arrow\.parquet: is a table of another kind \(Arrow"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other"),
    [("a.jsonl", "a.jsonl.gz"), ("a.txt", "a.txt.xz"), ("a.jsonl.zst", "a.jsonl.bz2"), ("a.parquet", "a.jsonl"),
     ("a.tar", "a.tgz"), ("a.zip", "a/b.csv"), ("a.JSONL", "a.jsonl.GZ")],
)  # fmt: skip
def test_a_file_beside_its_packed_copy_is_not_read_twice(tmp_path, one, other):
    """A table beside itself in another format, and an archive beside its files, are not read twice either. Other texts
    under such names are read."""
    assert [*alike([one, "b.jsonl", other])] == [(one, other)]
    if one == "a.jsonl":
        (tmp_path / one).write_bytes(GOOD)
        (tmp_path / other).write_bytes(gzip.compress(GOOD))
        with tarfile.open(tmp_path.with_suffix(".tar"), "w") as tar:
            tar.add(tmp_path, "")
        for sources in ([tmp_path], [tmp_path / one, tmp_path / other], [tmp_path.with_suffix(".tar")]):
            with pytest.raises(ConfigError, match=r"a\.jsonl and .*a\.jsonl\.gz begin with the same texts, .*--glob"):
                Corpus(TextRequest([*map(str, sources)]))
        (tmp_path / other).write_bytes(gzip.compress(b'{"text": "else"}'))
        assert len(Corpus(TextRequest([str(tmp_path)])).inputs) == 2
        with pytest.raises(ConfigError, match="is named twice"):
            Corpus(TextRequest([str(tmp_path), str(tmp_path / one)], glob="*.jsonl"))


def test_splits_that_nobody_trains_on_are_said(tmp_path):
    """A dataset's folder is as published: data/train-*.parquet beside data/test-*.parquet."""

    def said(*names):
        folder = tmp_path / str(len(names))
        folder.mkdir()
        for name in names:
            (folder / name).write_bytes(GOOD)
        return "".join(Corpus(TextRequest([str(folder)])).notes)

    assert "train-1.jsonl" not in said("train-0.jsonl", "train-1.jsonl", "contest.jsonl")
    found = said("train-0.jsonl", "test-0.jsonl")
    assert "test-0.jsonl and what else is called test or validation (1 of 2 files) is read with the rest" in found
    assert not said("test-0.jsonl")


def test_files_of_other_names_are_all_read():
    names = ["a.jsonl", "b/a.jsonl", "a.c", "a.h", "a.md", "a.md.txt", "d.tar", "dd/c.csv", "a.2.jsonl", "a.1.jsonl.gz"]
    assert not [*alike(names)]


def test_long_text_that_becomes_one_document_is_said(tmp_path):
    (tmp_path / "long.txt").write_text("a line\n" * 150_000)
    (note,) = Corpus(TextRequest([str(tmp_path / "long.txt")])).notes
    assert "long.txt: plain text of more than 1 MB that becomes one document; --split-on" in note
    assert not Corpus(TextRequest([str(tmp_path / "long.txt")], split_on="\\n")).notes


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_files_are_named_with_the_place(tmp_path, model, name):
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as raised:
        quiet([str(tmp_path / name)], tmp_path / "x", tokenizer=model)
    assert name in str(raised.value)
    assert not list(tmp_path.glob("x*"))


def test_an_unwritable_output_is_found_before_the_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr("sagetrain.corpus.prepare.train_tokenizer", lambda *args: pytest.fail("has begun"))
    (tmp_path / "text.txt").write_text("a text")
    output = tmp_path / "text.txt/train"
    with pytest.raises(ConfigError, match=rf"cannot write {output}: .* choose another place"):
        quiet([str(tmp_path / "text.txt")], output, vocab_size=300)


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.parquet", "a.txt", "a.csv.gz", "a.tar", "tokenizer.model", "tokenizer.json", "annex.txt"]
)
def test_a_pointer_in_place_of_a_file_is_named(tmp_path, model, name):
    """A dataset, or a model, was cloned without Git LFS, or without the content that git-annex keeps."""
    told = "Git LFS, not the file: run `git lfs pull`"
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    if name == "annex.txt":
        told = "git-annex, not the file: run `git annex get`"
        (tmp_path / name).write_text("/annex/objects/SHA256E-s3--0.txt\n")
    write_jsonl(tmp_path / "good.jsonl", ["text"])
    tokenizer = tmp_path / name if "tokenizer" in name else model
    source = tmp_path / ("good.jsonl" if "tokenizer" in name else name)
    with pytest.raises(ConfigError, match=rf"/{name}\b.* is a pointer of {told}"):
        quiet([str(source)], tmp_path / "x", tokenizer=tokenizer)


@pytest.mark.parametrize(
    "begin",
    ["<!DOCTYPE html>\n<html>", "\ufeff\n<HTML lang=en>", "<?xml version='1.0'?>\n<Error>", "<!-- saved -->", "<body>"],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.tar", "a.jsonl.gz", "tokenizer.json"])
def test_a_page_in_place_of_a_file_is_named(tmp_path, model, name, begin):
    """An address has answered with a login, or with an error. Plain text may be a page."""
    (tmp_path / name).write_text(begin + " Log in " * 1000)
    source, tokenizer = (tmp_path / name, model) if "tokenizer" not in name else (__file__, tmp_path / name)
    with pytest.raises(ConfigError, match=rf"/{name}\b.* is a web page \(HTML or XML\), not the file"):
        quiet([str(source)], tmp_path / "x/x", tokenizer=tokenizer)
    (tmp_path / "page.txt").write_text(begin)
    quiet([str(tmp_path / "page.txt")], tmp_path / "page/page", tokenizer=model)


NOT_FETCHED = {
    "a file": ("a.jsonl", lambda link, model: quiet([str(link)], link.parent / "x", tokenizer=model)),
    "a folder": (
        "only/a.txt",
        lambda link, model: quiet([str(link.parent)], link.parent.parent / "x", tokenizer=model),
    ),
    "a tokenizer": ("tokenizer.json", lambda link, _: Tokenizer.load(link)),
    "a model": ("hf/config.json", lambda link, _: import_folder(link.parent, link.parent.parent / "run", report=print)),
}


@pytest.mark.parametrize("name", NOT_FETCHED)
def test_a_link_to_what_git_annex_has_not_fetched_is_named(tmp_path, model, name):
    place, read = NOT_FETCHED[name]
    link = tmp_path / place
    link.parent.mkdir(exist_ok=True)
    link.symlink_to("../.git/annex/objects/Xw/9J/SHA256E-s3--0.jsonl/SHA256E-s3--0.jsonl")
    said = re.escape(f"{link} is a pointer of git-annex, not the file: run `git annex get` in the folder")
    with pytest.raises(ConfigError, match=said):
        read(link, model)


@pytest.mark.parametrize("name", ["syntax.jsonl", "cut.jsonl.gz"])
def test_a_bad_file_is_named_while_a_tokenizer_is_trained_on_it(tmp_path, name):
    """SentencePiece turns an error of its reader into a RuntimeError that contains a stack of lines."""
    content, message = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message) as raised:
        quiet([str(tmp_path / name)], tmp_path / "x", vocab_size=300)
    assert "INTERNAL" not in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "better"),
    [("a.txt", ".jsonl"), ("a.jsonlines", ".jsonl"), ("a.txt.gz", ".jsonl.gz"), ("a.ZST", ".jsonl.ZST")],
)
def test_json_lines_are_no_plain_text(tmp_path, model, name, better):
    pack = {".gz": gzip.compress, ".ZST": zstandard.compress}.get(Path(name).suffix, bytes)
    path = tmp_path / name
    for record in (GOOD, json.dumps({"text": "x" * 2 * CHUNK_BYTES}).encode()):
        path.write_bytes(pack(lines(b"\xef\xbb\xbf", b" ", record, record)))
        message = rf"{re.escape(name)}: its first line is a JSON object.*rename it to end in {re.escape(better)}, or"
        with pytest.raises(ConfigError, match=message):
            quiet([str(path)], tmp_path / "x", tokenizer=model)
        assert not list(tmp_path.glob("x*"))


@pytest.mark.parametrize("text", ["{\n  open\n}\n", "{x} and y", '["a"]\n', "12\n", '{"a": 1} is JSON'])
def test_text_that_only_looks_like_json_is_text(tmp_path, model, tokenizer, text):
    (tmp_path / "a.txt").write_text(text)
    quiet([str(tmp_path / "a.txt")], tmp_path / "x", tokenizer=model)
    assert documents(tmp_path / "x") == [[*tokenizer.encode(text), tokenizer.eos_id]]


@pytest.mark.parametrize(("sources", "options", "message"), [
    ([], {}, "no source of text"), (["./none.jsonl"], {}, r"\./none\.jsonl: no such file or folder"),
    (["none.jsonl"], {}, "no such file or folder"), (["none.jsonl"], {"tokenizer": None}, "no such file or folder"),
    (["nothere"], {"tokenizer": None}, "nothere: no such file or folder here"),
    ([""], {}, "a source is an empty text"),
    (["none/*.jsonl"], {}, "no such .* a pattern is expanded by the shell, .*, or give its folder and --glob"),
    (["s3://none/a.jsonl"], {}, "is an address, and files are read from this machine alone; download it first"),
    (["link.txt"], {}, r"link\.txt: is a link to nowhere, which leads to nothing; mend"),
    (["loop"], {}, "loop: is a link to loop, which leads to nothing; mend"),
    (["a.txt"], {"text_key": "body", "records": Chats("m", 32)}, "--text-key 'body' names .* read from --chat-field"),
    (["/dev/null"], {}, "is neither a file nor a folder"),
    (["a.txt"], {"glob": "*.md"}, r"--glob '\*\.md': none of the sources is a folder or an archive"),
    (["."], {"glob": "*.nothing"}, r"no files that match '\*\.nothing'"),
    (["."], {"glob": "/a*"}, "--glob '/a.': .*; write it relative to the folder"), (["empty"], {}, "empty: no files$"),
    (["hidden"], {}, r"hidden: no files \(hidden ones are passed over: hidden/\.git/a\.txt\)"),
    (["a.txt"], {"vocab_size": 500}, "either --tokenizer or --vocab-size"),
    (["a.txt"], {"tokenizer": None}, r"there is no tokenizer\.model in .*give --tokenizer, or --vocab-size"),
    (["a.txt"], {"tokenizer": "a.txt"}, "is not a SentencePiece model"),
    (["a.txt"], {"tokenizer": "none.model"}, r"tokenizer none\.model: No such file"),
    (["a.txt"], {"tokenizer": None, "vocab_size": 10_000}, "10,000 tokens cannot be trained"),
    (["a.txt"], {"tokenizer": None, "vocab_size": 0}, "--vocab-size 0 is below 260 .*: give a larger one"),
    (["a.txt"], {"tokenizer": None, "vocab_size": -5}, "--vocab-size -5 is below 260"),
    (["a.txt"], {"tokenizer": None, "vocab_size": 259}, "--vocab-size 259 is below 260"),
    (["a.txt"], {"vocab_size": 0}, "--vocab-size 0 is below 260"),
    (["a.txt"], {"tokenizer": None, "vocab_size": 32_000_000}, "--vocab-size 32000000 is above 1000000"),
    (["a.txt"], {"output": "out/"}, "output out/ is a folder: name the token file in it, e.g. -o out/train"),
    (["a.txt"], {"output": "empty"}, "output empty is a folder: .* -o empty/train"),
    (["a.txt"], {"output": Path("empty")}, "output empty is a folder: .* -o empty/train"),
    (["a.txt"], {"output": "."}, r"output \. is a folder: .* -o train"),
    (["a.txt"], {"valid_fraction": 1.0}, r"--valid-fraction 1\.0 is not in"),
    (["a.txt"], {"num_workers": 0}, "--workers 0 is not from 1 to 1024"),
    (["a.txt"], {"num_workers": 100_000}, "--workers 100000 is not from 1 to 1024: one for each core is enough"),
    (["a.txt"], {"output": "out/train.bin"}, r"without \.bin/\.idx"),
    (["a.txt"], {"output": "out/valid", "valid_fraction": 0.1}, "held-out file is named valid"),
    (["a.txt"], {"output": "a.txt/train"}, "cannot write"),
    (["a.txt"], {"output": "/proc/none/train"}, r"cannot write /proc/none/train.*: No such file"),
])  # fmt: skip
def test_wrong_arguments(tmp_path, monkeypatch, model, sources, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "hidden/.git").mkdir(parents=True)
    (tmp_path / "hidden/.git/a.txt").write_text("some text")
    (tmp_path / "link.txt").symlink_to("nowhere")
    (tmp_path / "loop").symlink_to("loop")
    arguments = {"tokenizer": model, "output": "out/train", **options}
    if arguments.get("vocab_size") and "tokenizer" not in options:
        arguments["tokenizer"] = model
    with pytest.raises(ConfigError, match=message):
        quiet(sources, arguments.pop("output"), **arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_bad_lines_are_left_out_and_counted_when_asked(tmp_path, model, monkeypatch, workers):
    monkeypatch.setattr(encode, "ALONE_SECONDS", 0.0)
    rows = [name for name, (_, message) in BAD_FILES.items() if "line" in message]
    expected = 0
    for name in rows:
        (tmp_path / name).write_bytes(BAD_FILES[name][0])
        expected += BAD_FILES[name][0].count(GOOD)
    said = []
    options = {"tokenizer": model, "num_workers": workers, "skip_bad_lines": True, "say": said.append}
    result = prepare([str(tmp_path / name) for name in rows], tmp_path / "x", **options)
    assert result.counts["train"].documents == expected == len(documents(tmp_path / "x"))
    bad = result.counts["train"].bad_lines
    assert bad == len(rows) + 1  # pretty.json has two bad lines.
    assert f"left out {bad} bad lines, the first: {tmp_path}/key.jsonl, line 2: no key 'text'" in said[-1]
    with pytest.raises(ConfigError, match="prepared from other inputs or settings"):
        quiet([str(tmp_path / name) for name in rows], tmp_path / "x", tokenizer=model)
    with pytest.raises(ConfigError, match=r"no document with text .* \(1 bad line, the first: .*python\.jsonl, line 1"):
        prepare([str(tmp_path / "python.jsonl")], tmp_path / "y", **options)
    (tmp_path / "mixed.jsonl").write_bytes(lines(GOOD, b"oops", b'{"text": 5}'))
    trained = quiet([str(tmp_path / "mixed.jsonl")], tmp_path / "new/z", vocab_size=264, skip_bad_lines=True)
    assert (trained.counts["train"].documents, trained.counts["train"].bad_lines) == (1, 2)


def test_a_full_disk_names_the_file_and_leaves_nothing(tmp_path, model):
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(6000))
    quiet([str(path)], tmp_path / "whole/x", tokenizer=model, valid_fraction=0.1)
    limits = [2**15, (tmp_path / "whole/x.bin").stat().st_size - 1]
    for limit in limits:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            message = r"cannot write .*new/er/(x|valid)\.(bin|idx): File too large; free space there, or .* \(-o\)"
            with pytest.raises(ConfigError, match=message):
                quiet([str(path)], tmp_path / "new/er/x", tokenizer=model, valid_fraction=0.1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert sorted(each.name for each in tmp_path.iterdir()) == ["a.jsonl", "whole"]


def test_the_command_sees_that_the_output_is_a_folder(tmp_path):
    (tmp_path / "a.txt").write_text("some text")
    command = [sys.executable, "-c", "from sagetrain.__main__ import program; program()", "prepare", tmp_path / "a.txt"]
    run = subprocess.run([*command, "-o", f"{tmp_path}/new/", "--vocab-size", "300"], capture_output=True, text=True)
    assert run.returncode == 2
    assert f"output {tmp_path}/new/ is a folder" in run.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["a.txt"]
