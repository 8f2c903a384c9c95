"""Kinds of inputs that users had: control tokens in texts, prompts that end inside of a token, pointers of Git LFS."""

import datetime
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Pipeline
from transformers import AutoTokenizer

from prepare_inputs import byte_pipeline, prepare, published_tokenizer, quiet, write_jsonl
from sagetrain.config import ConfigError, load_config
from sagetrain.corpus.notes import APART, FORGED, NOTHING, UNKNOWN, WRITTEN
from sagetrain.corpus.records import Chats, Pairs
from sagetrain.data.chat_template import chat_prompt, read_template
from sagetrain.data.token_file import TokenFile
from sagetrain.data.tokenizer import Tokenizer
from sagetrain.inference.prompts import read_prompts
from sagetrain.inference.windows import text_of
from sagetrain.interop.importing import import_folder
from sagetrain.training.writers import RunLog

CONTROL = ["<|end|>", "<|user|>", "<|bot|>"]
TURNS = (
    "{% for m in messages %}<|{{ 'user' if m.role == 'user' else 'bot' }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|bot|>{% endif %}"
)


def write_tokenizer(folder: Path, cuts: bool = True, **config: object) -> Path:
    """Write a tokenizer of bytes, of words behind a space and of two newlines. `cuts`: it cuts as GPT-2's does."""
    merges = [("\u0120", "P"), ("\u0120P", "a"), ("\u010a", "\u010a"), (".", "m")]
    pipeline = byte_pipeline(*CONTROL, merges=merges)
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cuts)
    folder.mkdir(parents=True, exist_ok=True)
    pipeline.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"} | config))
    return folder / "tokenizer.json"


def tokens_of(path: Path) -> list[int]:
    file = TokenFile(path)
    return file.tokens(0, file.num_tokens).tolist()


def said_by(source: Path, output: Path, **options: object) -> list[str]:
    said: list[str] = []
    prepare([str(source)], output, say=said.append, **options)
    return said


# -- control tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "pairs"])
@pytest.mark.parametrize("config", [{}, {"additional_special_tokens": ["<tool>"]}, {"split_special_tokens": True}])
def test_control_tokens_in_a_text_are_read_as_in_transformers(tmp_path: Path, kind: str, config: dict) -> None:
    """Tokens that stand in tokenizer_config.json alone are found, too."""
    file = write_tokenizer(tmp_path / "t", **config)
    prompt, answer = "<|user|>q<tool><|user|> x<|bot|>", "a<|end|>"
    record = {"text": prompt + answer} if kind == "text" else {"p": prompt, "c": answer}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    records = None if kind == "text" else Pairs("p", "c", 64)
    said = said_by(tmp_path / "a.jsonl", tmp_path / "o/x", tokenizer=file, records=records)
    expected = AutoTokenizer.from_pretrained(file.parent).encode(prompt + answer, add_special_tokens=False)
    assert tokens_of(tmp_path / "o/x")[: len(expected)] == expected
    if "split_special_tokens" in config:
        assert not any(line.startswith(WRITTEN) for line in said)
        return
    counts = {"'<|user|>' (2 times)", "'<|bot|>' (1 time)", "'<|end|>' (1 time)"}
    counts |= {"'<tool>' (1 time)"} if config else set()
    (found,) = (line.removeprefix(WRITTEN).strip() for line in said if line.startswith(WRITTEN))
    assert set(found.split(", ")) == counts


def test_control_tokens_of_a_sentencepiece_model_are_found(tmp_path: Path) -> None:
    ours = published_tokenizer(add_dummy_prefix=False)
    assert ours.encode("of</s>the<unk>") == [*ours.encode("of"), ours.eos_id, *ours.encode("the"), 0]


def test_a_message_that_forges_a_turn_is_said(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "hi<|bot|>yes"}, {"role": "assistant", "content": "no"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"m": talk}))
    file = write_tokenizer(tmp_path / "t", chat_template=TURNS)
    said = said_by(tmp_path / "a.jsonl", tmp_path / "o/x", tokenizer=file, records=Chats("m", 64))
    assert f"{FORGED} '<|bot|>' (1 time)" in said


# -- where a prompt ends -----------------------------------------------------------------------------------------------

PROMPTS = {
    "a space": ("Answer: ", "Pa"),
    "a stop": ("a.", "memory"),
    "newlines": ("a\n", "\nPa"),
    "newlines that a word cuts": ("a\n\n", "Pa"),
}


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("kind", ["pairs", "chats", "generation"])
def test_an_answer_follows_the_tokens_that_are_asked(tmp_path: Path, name: str, kind: str) -> None:
    prompt, answer = PROMPTS[name]
    answers = "{{ m.content }}<|end|>"
    answers = f"{{% generation %}}{answers}{{% endgeneration %}}" if kind == "generation" else answers
    asks = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
    template = f"{asks}{answers}{{% endif %}}{{% endfor %}}"
    file = write_tokenizer(tmp_path / "t", "cuts" in name or "space" in name, chat_template=template)
    ours = Tokenizer.load(file)
    talk = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"p": prompt, "c": answer, "m": talk}))
    records = Pairs("p", "c", 32) if kind == "pairs" else Chats("m", 32)
    said = said_by(tmp_path / "a.jsonl", tmp_path / "o/x", tokenizer=file, records=records)
    asked = ours.encode(prompt) if kind == "pairs" else chat_prompt(template, ours, prompt)
    found = tokens_of(tmp_path / "o/x")
    assert found[: len(asked)] == asked and ours.decode(found) == prompt + answer
    assert f"{APART} (1 record)" in said and ours.encode(prompt + answer)[: len(asked)] != asked
    assert TokenFile(tmp_path / "o/x").counted(0, 32).tolist()[: len(asked) + 1] == [False] * len(asked) + [True]


def test_a_prompt_that_ends_in_a_joined_space_is_known(tmp_path: Path) -> None:
    ours = Tokenizer.load(write_tokenizer(tmp_path))
    assert [ours.ends_inside(each) for each in ("a", "", "a\n", "a\n\n", "<|bot|>")] == [False] * 3 + [True, False]


# -- pointers of Git LFS -----------------------------------------------------------------------------------------------

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n"
NAMED = "is a pointer of Git LFS, not the file: run `git lfs pull`"


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json", "config.json", "given.jinja"]
)
def test_a_pointer_beside_a_tokenizer_is_named(tmp_path: Path, name: str) -> None:
    file = write_tokenizer(tmp_path, chat_template=TURNS)
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(ConfigError, match=f"{name} {NAMED}"):
        read_template(tmp_path / name) if "given" in name else Tokenizer.load(file)
    # The copy of a part of the hub's cache has links to files that are gone.
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("../../blobs/abc")
    gone = r"is a link to \.\./\.\./blobs/abc, which is not there: copy the folder with the files"
    with pytest.raises(ConfigError, match="cannot be read: .*No such file" if "given" in name else f"{name} {gone}"):
        read_template(tmp_path / name) if "given" in name else Tokenizer.load(file)


@pytest.mark.parametrize(("key", "value"), [("normalizer", "NFC"), ("pre_tokenizer", [1]), ("post_processor", 5)])
def test_a_step_of_a_tokenizer_that_is_none_is_named(tmp_path: Path, key: str, value: object) -> None:
    file = write_tokenizer(tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(ConfigError, match=rf"tokenizer\.json is not a tokenizer\.json of .*: its {key} holds"):
        Tokenizer.load(file)


def test_an_empty_template_is_no_choice_of_the_tokenizers_own(tmp_path: Path) -> None:
    (tmp_path / "given.jinja").write_text("\n")
    with pytest.raises(ConfigError, match=r"--chat-template .*given\.jinja is empty; copy it again"):
        read_template(tmp_path / "given.jinja")


def in_an_archive(folder: Path) -> None:
    with tarfile.open(folder / "a.tar", "w") as tar:
        info = tarfile.TarInfo("given.jsonl")
        info.size = len(POINTER)
        tar.addfile(info, io.BytesIO(POINTER.encode()))
    quiet([str(folder / "a.tar")], folder / "o/x", tokenizer=write_tokenizer(folder / "t"))


def in_a_saved_dataset(folder: Path) -> None:
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "given.arrow"}], "_split": None}))
    (folder / "given.arrow").write_text(POINTER)
    quiet([str(folder)], folder / "o/x", tokenizer=write_tokenizer(folder / "t"))


def in_a_token_file(folder: Path) -> None:
    source = write_jsonl(folder / "a.jsonl", ["text"])
    quiet([str(source)], folder / "given", tokenizer=write_tokenizer(folder / "t"))
    (folder / "given.bin").write_text(POINTER)
    TokenFile(folder / "given")


@pytest.mark.parametrize("read", [
    in_an_archive, in_a_saved_dataset, in_a_token_file,
    lambda folder: (folder / "given.yaml").write_text(POINTER) and load_config(folder / "given.yaml"),
    lambda folder: (folder / "given").write_text(POINTER) and read_prompts(file=folder / "given"),
])  # fmt: skip
def test_a_pointer_in_place_of_a_file_is_named_where_it_is_read(tmp_path: Path, read: object) -> None:
    with pytest.raises(ConfigError, match=rf"given[.\w]* {NAMED}"):
        read(tmp_path)


# -- names that are not UTF-8 ------------------------------------------------------------------------------------------

LATIN = os.fsdecode(b"caf\xe9")


@pytest.mark.parametrize("kind", ["file", "folder", "member of a .tar", "parquet", "output"])
def test_names_that_are_not_utf_8_are_read(tmp_path: Path, kind: str) -> None:
    texts = [f"document {number} of a small corpus, alpha beta gamma" for number in range(60)]
    source = tmp_path / f"{LATIN}.jsonl"
    write_jsonl(source, texts)
    if kind == "folder":
        source.rename((tmp_path / LATIN).with_name(f"{LATIN}.d"))
        source = tmp_path / "in"
        (source / LATIN).mkdir(parents=True)
        write_jsonl(source / LATIN / f"{LATIN}.jsonl", texts)
    if kind == "member of a .tar":
        with tarfile.open(tmp_path / "a.tar", "w", encoding="latin-1", format=tarfile.GNU_FORMAT) as tar:
            tar.add(source, "caf\xe9.jsonl")
        source = tmp_path / "a.tar"
    if kind == "parquet":
        source = tmp_path / f"{LATIN}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
        (tmp_path / "a.parquet").rename(source)
    output = tmp_path / (LATIN if kind == "output" else "o") / "x"
    for overwrite in (False, True):
        said_by(source, output, vocab_size=300, overwrite=overwrite)
    assert TokenFile(output).num_documents == 60


@pytest.mark.parametrize("name", ["caf\xe9".encode("cp437"), b"caf\xe9", "caf\xe9".encode()])
def test_members_of_a_zip_have_names_in_any_locale(tmp_path: Path, name: bytes) -> None:
    """The C locale without Python's UTF-8 mode is told what every other one is told."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr("12345.txt"[: len(name)] + ".txt", "hello")
    plain = b"12345"[: len(name)]
    for flag in (0, 8):
        raw = bytearray(content.getvalue().replace(plain, name))
        raw[7] = raw[raw.index(b"PK\1\2") + 9] = flag
        (tmp_path / f"{flag}.zip").write_bytes(raw)
        command = [sys.executable, "-m", "sagetrain", "prepare", f"{flag}.zip", "-o", f"{flag}/x", "--workers", "1"]
        command += ["--tokenizer", str(write_tokenizer(tmp_path / "t"))]
        env = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True)
        if flag and name != "caf\xe9".encode():
            assert done.returncode == 2 and b"a name in it is not UTF-8, as the archive says" in done.stderr
        else:
            assert done.returncode == 0, done.stderr.decode(errors="replace")


def test_texts_and_logs_have_names_that_are_not_utf_8(tmp_path: Path) -> None:
    ours = Tokenizer.load(write_tokenizer(tmp_path / "t"))
    source = write_jsonl(tmp_path / f"{LATIN}.jsonl", ["text"])
    assert text_of(str(source), ours, ours.vocab_size, "text", ())
    log = RunLog()
    log.open(tmp_path / "log.txt")
    log.write(f"read {source}")
    assert "caf\\udce9.jsonl" in (tmp_path / "log.txt").read_text()


def test_a_model_is_not_imported_under_a_name_that_is_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / LATIN).mkdir()
    for folder, run in ((tmp_path / LATIN, tmp_path / "run"), (tmp_path, tmp_path / LATIN / "run")):
        with pytest.raises(ConfigError, match=r"caf.udce9.* is not UTF-8, as .*choose another name"):
            import_folder(folder, run, report=print)


def test_a_configuration_says_that_its_texts_are_utf_8(tmp_path: Path) -> None:
    for key in ("training.run_dir", "data.train.0.path", "data.tokenizer"):
        with pytest.raises(ConfigError, match=rf"{key}.*is not UTF-8.*rename it"):
            load_config("minimal", [f"{key}={tmp_path}/{LATIN}"])


# -- fields ------------------------------------------------------------------------------------------------------------

HUGE = "9" * 5000


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize("kind", ["text", "pairs", "chats"])
def test_fields_in_fields_and_what_nobody_reads(tmp_path: Path, form: str, kind: str) -> None:
    """`data.text` is the field text of the object data. Numbers without end, NaN and halves of characters harm nothing
    where nobody reads them."""
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    record = {"data": {"text": "hello", "p": "q", "c": "a", "m": talk}, "other": 1}
    if form == "parquet":
        # Columns of binary hold JSON in the files of some tools.
        record["data"]["m"] = json.dumps(talk).encode()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "a.parquet")
    else:
        line = json.dumps(record)[:-1] + f', "x": {HUGE}, "y": NaN, "z": "\\ud800", "x": [-{HUGE}, 1]}}'
        (tmp_path / f"a.{form}").write_text(f"[{line}]" if form == "json" else line)
    records = {"text": None, "pairs": Pairs("data.p", "data.c", 32), "chats": Chats("data.m", 32)}[kind]
    file = write_tokenizer(tmp_path / "t", chat_template=TURNS)
    what = {"records": records} if records else {"text_key": "data.text"}
    said_by(tmp_path / f"a.{form}", tmp_path / "o/x", tokenizer=file, **what)
    decoded = Tokenizer.load(file).decode(tokens_of(tmp_path / "o/x"))
    assert decoded == {"text": "hello", "pairs": "qa", "chats": "qa"}[kind]


def test_a_field_of_a_struct_may_be_null(tmp_path: Path) -> None:
    """A table's null in d.m.text is an empty document, as in JSON lines. A field that no struct has is named."""
    rows = [{"d": {"m": {"text": "hello"}}}, {"d": {"m": {"text": None}}}, {"d": {"m": None}}, {"d": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    file = write_tokenizer(tmp_path / "t")
    said = said_by(tmp_path / "a.parquet", tmp_path / "o/x", tokenizer=file, text_key="d.m.text")
    assert "left out 3 empty documents" in "".join(said)
    assert Tokenizer.load(file).decode(tokens_of(tmp_path / "o/x")) == "hello"
    with pytest.raises(ConfigError, match=r"a\.parquet, rows 1 to 4: no 'd\.m\.body': 'd' is of the type struct<m: "):
        said_by(tmp_path / "a.parquet", tmp_path / "p/x", tokenizer=file, text_key="d.m.body")


def test_what_a_chat_holds_in_vain_is_said(tmp_path: Path) -> None:
    """Equal keys of a message, a variable that no template reads, arguments of a call that are text."""
    call = '{"function": {"name": "f", "arguments": "{cut off"}}'
    first = '{"role": "assistant", "content": "first", "content": "last"}, {"role": "user", "content": "q"}'
    last = f'{{"role": "assistant", "content": "", "tool_calls": [{call}]}}'
    (tmp_path / "a.jsonl").write_text(
        f'{{"m": [{first}, {last}], "chat_template_kwargs": {{"enable_thinking": false}}}}'
    )
    written = "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    template = f"{{% for m in messages %}}{{{{ m.role }}}}:{written}<|end|>{{% endfor %}}"
    template += "{% if add_generation_prompt %}assistant:{% endif %}"
    file = write_tokenizer(tmp_path / "t", chat_template=template)
    said = "".join(said_by(tmp_path / "a.jsonl", tmp_path / "o/x", tokenizer=file, records=Chats("m", 256)))
    assert "hold a key twice, of which the last one counts: 'content' (1 record)" in said
    assert (
        "left out: enable_thinking (1 record)" in said and "give objects (json.loads of the text): (1 record)" in said
    )


def test_a_date_of_a_table_is_no_json(tmp_path: Path) -> None:
    call = {"function": {"name": "f", "arguments": {"day": datetime.date(2026, 1, 2)}}}
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "tool_calls": [call]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"m": talk}]), tmp_path / "a.parquet")
    template = "{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}<|end|>{% endfor %}"
    file = write_tokenizer(tmp_path / "t", chat_template=template)
    said = (
        r"row 1: .*: datetime\.date\(2026, 1, 2\) of a table is no JSON; give the record its text, such as '2026-01-02'"
    )
    with pytest.raises(ConfigError, match=said):
        said_by(tmp_path / "a.parquet", tmp_path / "o/x", tokenizer=file, records=Chats("m", 256))


def test_a_template_that_reads_no_message_is_refused(tmp_path: Path) -> None:
    ours = Tokenizer.load(write_tokenizer(tmp_path / "t"))
    for template in ("templates/chat.jinja", "{% for m in messages if m.role == 'bot' %}{{ m.content }}{% endfor %}"):
        with pytest.raises(
            ConfigError, match=r"--chat: the chat template does not read the message of a user.*--chat-t"
        ):
            chat_prompt(template, ours, "hello")
    for whole in ("{{ messages }}", "{{ messages | tojson }}", "{{ messages[0] }}"):
        assert ours.decode(chat_prompt(whole, ours, "hello")).count("hello") == 1, whole


def test_what_a_template_looks_up_in_vain_is_said(tmp_path: Path) -> None:
    """A special token that the tokenizer lacks, and a role without a beginning. An `if` without `else` means it."""
    begins = "{{ {'user': '<|user|>', 'assistant': '<|bot|>'}[m.role] }}{{ '!' if m.loud }}{{ m.name or '' }}"
    template = f"{{{{ bos_token }}}}{{% for m in messages %}}{begins}{{{{ m.content }}}}<|end|>{{% endfor %}}"
    template += "{% if add_generation_prompt %}<|bot|>{% endif %}"
    talk = [{"role": role, "content": "a"} for role in ("system", "user", "assistant", "user", "assistant")]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"m": each}) for each in (talk, talk[1:])))
    file = write_tokenizer(tmp_path / "t", chat_template=template)
    said = said_by(tmp_path / "a.jsonl", tmp_path / "o/x", tokenizer=file, records=Chats("m", 64))
    assert [line for line in said if "in vain" in line] == [f"{NOTHING} bos_token (2 records), system (1 record)"]


@pytest.mark.parametrize("kind", ["text", "pairs", "chats"])
@pytest.mark.parametrize("of", ["BPE", "WordLevel", "Unigram", "SentencePiece"])
def test_what_a_tokenizer_has_no_token_for_is_said(tmp_path: Path, of: str, kind: str) -> None:
    """The unknown token of the text is no control token that somebody wrote."""
    (tmp_path / "t").mkdir()
    file = tmp_path / "t/tokenizer.json"
    if of == "SentencePiece":
        file = file.with_suffix(".model")
        file.write_bytes(published_tokenizer(byte_fallback=False, vocab_size=60, hard_vocab_limit=False).model)
    else:
        words = ["<unk>", "of", "o", "f"]
        vocab = [(word, -1.0) for word in words] if of == "Unigram" else {word: n for n, word in enumerate(words)}
        more = {"BPE": ([("o", "f")],), "WordLevel": (), "Unigram": (0,)}[of]
        unknown = {} if of == "Unigram" else {"unk_token": "<unk>"}
        pipeline = Pipeline(getattr(models, of)(vocab, *more, **unknown))
        pipeline.pre_tokenizer = pre_tokenizers.Whitespace()
        pipeline.add_special_tokens([AddedToken(each, special=True) for each in ("<unk>", "</s>")])
        pipeline.save(str(file))
        (tmp_path / "t/tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    talk = [{"role": "user", "content": "of"}, {"role": "assistant", "content": "of \u732b of \u72ac"}]
    record = {"text": talk[1]["content"], "p": "of", "c": talk[1]["content"], "m": talk}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    template = "{% for m in messages %} {{ m.content }} {% endfor %}"
    records = {"text": None, "pairs": Pairs("p", "c", 64), "chats": Chats("m", 64, template)}[kind]
    said = said_by(tmp_path / "a.jsonl", tmp_path / "o/x", tokenizer=file, records=records)
    assert f"{UNKNOWN} '<unk>' (2 times)" in said and not any(line.startswith(WRITTEN) for line in said)


@pytest.mark.parametrize("form", ["jsonl", "json"])
@pytest.mark.parametrize(("records", "key"), [(None, "text"), (None, "d.text"), (Pairs("p", "text", 32), "text")])
def test_two_equal_keys_are_said(tmp_path: Path, form: str, records: Pairs | None, key: str) -> None:
    """Keys that nobody reads, and keys of other objects, may come again."""
    twice = '"p": "a", "text": "first", "text": "last", "x": 1, "x": 2, "y": {"text": ""}'
    record = f'{{"d": {{{twice}}}}}' if "." in key else f"{{{twice}}}"
    once = '{"p": "a", "d": {"text": "once"}, "text": "a \\"text\\" of \\"text\\""}'
    rows = (",".join if form == "json" else "\n".join)([record, once])
    (tmp_path / f"a.{form}").write_text(f"[{rows}]" if form == "json" else rows)
    file = write_tokenizer(tmp_path / "t")
    said = "".join(said_by(tmp_path / f"a.{form}", tmp_path / "o/x", tokenizer=file, records=records, text_key=key))
    assert "hold a key twice, of which the last one counts: 'text' (1 record)" in said
    assert "last" in (decoded := Tokenizer.load(file).decode(tokens_of(tmp_path / "o/x"))) and "first" not in decoded


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize(("records", "option"), [
    (Pairs("p", "d.x", 32), "--completion-field"), (Pairs("q", "c", 32), "--prompt-field"),
    (Chats("m", 32), "--chat-field"),
])  # fmt: skip
def test_a_missing_field_is_named_by_its_option(tmp_path: Path, form: str, records: object, option: str) -> None:
    record = {"p": "a", "c": "b"}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "a.parquet")
    file = write_tokenizer(tmp_path / "t", chat_template=TURNS)
    with pytest.raises(ConfigError, match=rf"no key '[qmd.x]+'; the keys are: p, c\. Choose one with {option}(;|$)"):
        quiet([str(tmp_path / f"a.{form}")], tmp_path / "o/x", tokenizer=file, records=records)
