"""Prompts with completions, and chats: the tokens that count, and the errors in bad records."""

import json
import shutil
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer as Pipeline
from tokenizers import models, pre_tokenizers, processors
from transformers import AutoTokenizer

from prepare_inputs import TEXTS, documents, prepare, published_tokenizer, quiet
from sagetrain.config import ConfigError
from sagetrain.config.rules.prepared import prepared, text_prefixes
from sagetrain.config.schema import DataConfig
from sagetrain.corpus import encode, files
from sagetrain.corpus.notes import Notes
from sagetrain.corpus.records import Chats, Pairs, records_of
from sagetrain.data.chat_template import Message, answer_ends, rendered
from sagetrain.data.token_file import TokenFile
from sagetrain.data.tokenizer import Tokenizer

WORDS = ["<end>", "<bot>", "<you>", "<stop>", "what", "is", "two", "plus", "it", "four", "five", "thanks", "six"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{{ bos_token }}{%- for m in messages %}\n    {%- if m['role'] == 'assistant' %}\n"
    "<|im_start|>assistant\n{% generation %}{{ m['content'] | trim }}<|im_end|>{% endgeneration %}\n"
    "    {%- else %}\n<|im_start|>{{ m['role'] }}\n{{ m['content'] | tojson }}<|im_end|>\n    {%- endif %}\n"
    "{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = [
    {"role": "system", "content": "short <answers> é"},
    {"role": "user", "content": "what is it"},
    {"role": "assistant", "content": "two <|im_end|>?"},
    {"role": "user", "content": "thanks"},
    {"role": "assistant", "content": "four"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of whole words, whose template names the speaker before each message."""
    folder = tmp_path_factory.mktemp("words")
    pipeline = Pipeline(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<end>"))
    pipeline.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    pipeline.add_special_tokens(WORDS[:4])
    pipeline.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ '<bot> ' if m.role == 'assistant' else '<you> ' }}{{ m.content }} <stop> "
        "{% endfor %}{% if add_generation_prompt %}<bot> {% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def write(path: Path, *records: object) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def counted(path: Path) -> list[list[int]]:
    """Return the tokens that count, document by document."""
    file = TokenFile(path)
    file.validate(deep=True)
    mask, start, found = file.counted(0, file.num_tokens), 0, []
    for document in documents(path):
        found.append([token for token, counts in zip(document, mask[start:], strict=False) if counts])
        start += len(document)
    return found


def ids(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.split()]


def test_pairs_by_hand(tmp_path: Path, folder: Path) -> None:
    pairs = [("what is two", " four"), ("it is", " six five"), ("thanks", " it is")]
    source = write(tmp_path / "a.jsonl", *({"ask": ask, "say": say, "id": 1} for ask, say in pairs))
    done = quiet([source], tmp_path / "out", tokenizer=folder / "tokenizer.json", records=Pairs("ask", "say", 8))
    # The longest record comes first. The second does not fit beside it, and the third does not fit beside either.
    assert documents(tmp_path / "out") == [
        ids("what is two four <end> <end> <end> <end>"),
        ids("it is six five <end> <end> <end> <end>"),
        ids("thanks it is <end> <end> <end> <end> <end>"),
        ids("<end>"),
    ]
    assert counted(tmp_path / "out") == [ids("four <end>"), ids("six five <end>"), ids("it is <end>"), []]
    counts = done.counts["train"]
    assert (counts.documents, counts.tokens, counts.counted_tokens, counts.padding_tokens) == (3, 24, 8, 10)
    recorded = json.loads((tmp_path / "out.json").read_text())
    assert recorded["seq_length"] == 8 and recorded["counted_tokens"] == 8
    again = quiet([source], tmp_path / "out", tokenizer=folder / "tokenizer.json", records=Pairs("ask", "say", 8))
    assert again.already_there
    with pytest.raises(ConfigError, match="was prepared from other inputs or settings"):
        quiet([source], tmp_path / "out", tokenizer=folder / "tokenizer.json", records=Pairs("ask", "say", 16))


def test_chats_by_hand(tmp_path: Path, folder: Path) -> None:
    """The tokenizer's own template is used. Special tokens in the template become those tokens, and they end the
    turn."""
    talk = [
        {"role": "user", "content": "what is two plus two"},
        {"role": "assistant", "content": "four"},
        {"role": "user", "content": "thanks"},
        {"role": "assistant", "content": "six"},
    ]
    source = write(tmp_path / "a.jsonl", {"messages": talk}, {"messages": talk[2:]})
    quiet([source], tmp_path / "out", tokenizer=folder / "tokenizer.json", records=Chats("messages", 20))
    first = ids("<you> what is two plus two <stop> <bot> four <stop> <you> thanks <stop> <bot> six <stop>")
    second = ids("<you> thanks <stop> <bot> six <stop>")
    assert documents(tmp_path / "out") == [first + 4 * ids("<end>"), second + 14 * ids("<end>"), ids("<end>")]
    assert counted(tmp_path / "out") == [ids("four <stop> six <stop>"), ids("six <stop>"), []]
    recorded = json.loads((tmp_path / "out.json").read_text())["chat_template"]
    assert recorded == (folder / "chat_template.jinja").read_text()


def test_a_record_without_a_template_begins_as_a_text_does(tmp_path: Path, folder: Path) -> None:
    """The tokenizer's prefix comes first and does not count. A template writes a prefix of its own."""
    tokenizer, tree = tmp_path / "tokenizer.json", json.loads((folder / "tokenizer.json").read_text())
    begin = processors.TemplateProcessing(single="<you> <bot> $A", special_tokens=[("<you>", 2), ("<bot>", 1)])
    tokenizer.write_text(json.dumps(tree | {"post_processor": json.loads(begin.__getstate__())}))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(folder / name, tmp_path / name)
    talk = [{"role": "user", "content": "what"}, {"role": "assistant", "content": "two"}]
    rows = [{"p": "what is", "c": " two", "m": talk}, {"p": "", "c": "six", "m": talk}]
    source, said = write(tmp_path / "a.jsonl", *rows), []
    prepare([source], tmp_path / "pairs/x", tokenizer=tokenizer, records=Pairs("p", "c", 10), say=said.append)
    assert documents(tmp_path / "pairs/x")[:2] == [ids("<you> <bot> what is two <end>"), ids("<you> <bot> six <end>")]
    assert counted(tmp_path / "pairs/x")[:2] == [ids("two <end>"), ids("six <end>")]
    assert "each record begins with tokens 2, 1, which the tokenizer puts before a text" in said
    quiet([source], tmp_path / "chats/x", tokenizer=tokenizer, records=Chats("m", 16))
    assert documents(tmp_path / "chats/x")[0] == ids("<you> what <stop> <bot> two <stop>")
    files = [{"path": str(tmp_path / name / "x")} for name in ("pairs", "chats")]
    data = DataConfig.model_validate({"train": files, "seq_length": 10, "micro_batch_size": 1})
    assert text_prefixes(prepared(data)) == {files[0]["path"]: [2, 1]}


def test_long_records_are_cut_and_ones_without_answer_left_out(tmp_path: Path, folder: Path) -> None:
    records = [
        {"p": "what is it", "c": " four five six two plus it"},  # With the end token the record has 10 tokens.
        {"p": "what is two plus two plus", "c": " six"},
        {"p": "what", "c": " is it"},
    ]
    said: list[str] = []
    source = write(tmp_path / "a.jsonl", *records)
    tokenizer = folder / "tokenizer.json"
    prepare([source], tmp_path / "out", tokenizer=tokenizer, records=Pairs("p", "c", 6), say=said.append)
    assert counted(tmp_path / "out") == [ids("four five six"), ids("is it <end>"), []]
    assert "cut 1 record after 6 tokens (--seq-length)" in said
    assert "left out 1 record in which nothing of the first 6 tokens (--seq-length) counts" in said
    with pytest.raises(ConfigError, match=r"no document with text.*1 record in which nothing of the first 3 tokens"):
        quiet(
            [write(tmp_path / "b.jsonl", records[0])], tmp_path / "b", tokenizer=tokenizer, records=Pairs("p", "c", 3)
        )
    assert not list(tmp_path.glob("b.[!j]*"))


def test_short_records_fill_the_sequences(tmp_path: Path, folder: Path) -> None:
    """Records are placed first fit, the longest first. With many short ones there is almost no padding, and none is
    cut."""
    rng = np.random.default_rng(0)
    records = [{"p": "what", "c": " it" * int(rng.integers(1, 12))} for _ in range(300)]
    done = quiet(
        [write(tmp_path / "a.jsonl", *records)], tmp_path / "out", tokenizer=folder / "tokenizer.json",
        records=Pairs("p", "c", 32),
    )  # fmt: skip
    counts = done.counts["train"]
    assert counts.documents == 300 and counts.cut_records == counts.too_long_records == 0
    assert counts.tokens % 32 == 0 and counts.padding_tokens < 0.02 * counts.tokens
    lengths = sorted(len(each["c"].split()) + 1 for each in records)
    assert sorted(len(each) for each in counted(tmp_path / "out") if each) == lengths


def test_the_same_records_from_every_kind_of_input(tmp_path: Path, folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(encode, "ALONE_SECONDS", 0.0)
    monkeypatch.setattr(files, "CHUNK_RECORDS", 512)
    talks = [[{"role": "user", "content": f"what {n}"}, {"role": "assistant", "content": "it " * (n % 9 + 1)}]
             for n in range(700)]  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.table({"id": [1] * 700, "talk": talks}), tmp_path / "rows.parquet")
    # A table has every field in every row.
    odd = [[{**message, "tool_calls": None} for message in talk] for talk in talks]
    datasets.Dataset.from_dict({"talk": odd, "id": [1] * 700}).save_to_disk(tmp_path / "saved")
    write(tmp_path / "lines.jsonl", *({"talk": talk} for talk in talks))
    found = []
    for number, (name, workers) in enumerate(
        [("lines.jsonl", 1), ("lines.jsonl", 2), ("rows.parquet", 1), ("saved", 1)]
    ):
        out = tmp_path / str(number) / "out"
        quiet([str(tmp_path / name)], out, tokenizer=folder / "tokenizer.json", records=Chats("talk", 64),
              num_workers=workers)  # fmt: skip
        found.append([out.with_suffix(suffix).read_bytes() for suffix in (".bin", ".idx", ".mask")])
    assert all(each == found[0] for each in found)


# -- templates ---------------------------------------------------------------------------------------------------------


def test_generation_tags_count_as_in_transformers(tmp_path: Path, folder: Path) -> None:
    """The rendered text also equals that of transformers, character for character."""
    theirs = AutoTokenizer.from_pretrained(folder, bos_token="<you>")
    ours = Chats("m", 99, MARKED).parts({"m": TALK}, {"bos_token": "<you>"}, Notes())
    given = {"chat_template": MARKED, "return_dict": True, "return_assistant_tokens_mask": True}
    rendered = theirs.apply_chat_template(TALK, chat_template=MARKED, tokenize=False)
    assert "".join(text for text, _ in ours) == rendered
    assert [text for text, counts in ours if counts] == ["two <|im_end|>?<|im_end|>", "four<|im_end|>"]
    encoded = theirs.apply_chat_template(TALK, **given)
    found = Tokenizer.load(folder / "tokenizer.json").encode_parts(ours)
    assert found == (list(encoded["input_ids"]), [bool(each) for each in encoded["assistant_masks"]], 0)
    assert sum(found.counted) == 3


def test_json_in_a_template_is_spelled_as_in_transformers(folder: Path) -> None:
    asked = ["", "ensure_ascii=True", "separators=(',', ':')", "sort_keys=True", "indent=1"]
    template = "".join(f"{{{{ messages[0] | tojson({each}) }}}}" for each in asked)
    talk = [{"role": "user", "content": "<é> & 'x'"}, {"role": "assistant", "content": "yes"}]
    template += "{% generation %}{{ messages[1].content }}{% endgeneration %}"
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(talk, chat_template=template, tokenize=False)
    assert "".join(text for text, _ in Chats("m", 99, template).parts({"m": talk}, {}, Notes())) == theirs


def test_what_counts_without_tags() -> None:
    parts = Chats("m", 99, CHATML).parts({"m": TALK}, {}, Notes())
    assert [text for text, counts in parts if counts] == ["two <|im_end|>?<|im_end|>\n", "four<|im_end|>\n"]
    assert parts[-2][0].endswith("thanks<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("template", [
    # Templates of reasoning models do this: earlier answers lose a part once the chat goes on.
    CHATML.replace("{{ m.content }}", "{{ m.content if loop.last else m.content[:2] }}"),
    CHATML.replace("<|im_end|>\n{% endfor %}", "{{ '' if loop.last else '<|im_end|>' }}\n{% endfor %}"),
    CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\nhm{% endif %}"),
    "{{ messages | length }}" + CHATML,
])  # fmt: skip
def test_a_template_whose_prefixes_do_not_agree_is_refused(template: str) -> None:
    with pytest.raises(ValueError, match=r"message 3( differently when the chat goes on|, so that).*--chat-template"):
        Chats("m", 99, template).parts({"m": TALK}, {}, Notes())


def test_a_template_runs_in_a_sandbox() -> None:
    for attack in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ raise_exception('no ' ~ 'tools') }}"):
        with pytest.raises(ValueError, match="the chat template refuses"):
            Chats("m", 99, attack + CHATML).parts({"m": TALK}, {}, Notes())


def test_a_key_that_a_message_lacks_is_named() -> None:
    for lookup in ("messages[0].name.first", "messages[0]['name'].first"):
        with pytest.raises(
            ValueError, match=r"refuses 1 of its messages: a message with the keys role, content has no 'name'$"
        ):
            rendered(f"{{{{ {lookup} }}}}", [Message({"role": "user", "content": "x"})], {}, False)


ENDS = {
    "the tokenizer's own": (None, ["<stop>"]),
    "eos": ("{% for m in messages %}{{ m.content }} {{ eos_token }}{% endfor %}", ["<end>"]),
    "behind text": (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %} it\n<stop> <end>{% endfor %}",
        ["<stop>"],
    ),
    "no control token": ("{% for m in messages %}<stop> {{ m.role }} {{ m.content }} it\n{% endfor %}", []),
    "before the next": ("{% for m in messages %}<stop> {{ m.content }}\n{% endfor %}", []),
    "no answers": ("{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}<stop>", []),
    "nothing of them": ("{{ messages[0].content }}<stop>", []),
}


@pytest.mark.parametrize("name", ENDS)
def test_what_ends_an_answer_is_the_control_token_behind_it(folder: Path, name: str) -> None:
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    template, expected = ENDS[name]
    found = answer_ends(template or tokenizer.chat_template, tokenizer)
    assert [WORDS[token] for token in found] == expected


@pytest.mark.parametrize("kind", ["trained", "published"])
def test_marks_of_a_sentencepiece_model(tokenizer: Tokenizer, kind: str) -> None:
    """The tokens are those of the whole text if they begin with those of the prompt. A token counts if any of its
    characters does."""
    ours = tokenizer if kind == "trained" else published_tokenizer()
    for text in [*TEXTS[:40], "a \u2581 東京🙂 "]:
        for cut in (0, 1, len(text) // 2, len(text)):
            found, marks, apart = ours.encode_parts([(text[:cut], False), (text[cut:], True)])
            asked = ours.encode(text[:cut])
            assert found[: len(asked)] == asked and ours.decode(found) == text
            assert apart == (found != ours.encode(text)) == (ours.encode(text)[: len(asked)] != asked)
            assert marks == sorted(marks)
            marked = ours.decode([token for token, mark in zip(found, marks, strict=True) if mark])
            # One of the two tokenizers adds spaces of its own.
            assert marked.replace(" ", "").endswith(text[cut:].replace(" ", ""))
    found, marks, _ = ours.encode_parts([("no</s>", False), ("</s>", True)])
    assert found[-2:] == [ours.eos_id] * 2 and marks[-2:] == [False, True] and not any(marks[:-1])


# -- mistakes ----------------------------------------------------------------------------------------------------------

USER, BOT = {"role": "user", "content": "what"}, {"role": "assistant", "content": "it"}
BAD_PAIRS = {
    "no completion": ({"p": "x"}, r"no key 'c'; the keys are: p\. .*--completion-field"),
    "null": ({"p": "x", "c": None}, "'c' holds NoneType, not text"),
    "empty": ({"p": "x", "c": " \n"}, "'c' is empty: nothing in this record would count"),
    "list": ({"p": ["x"], "c": "y"}, "'p' holds list, not text"),
    "surrogate": ({"p": "x", "c": "\ud800"}, "not valid Unicode: a lone surrogate"),
}
BAD_CHATS = {
    "no chat": ({"text": "x"}, r"no key 'm'; the keys are: text\. .*--chat-field"),
    "role": ({"m": [{"role": "gpt", "content": "x"}]}, "message 1 has the role 'gpt', which is none of system, "),
    "no answer": ({"m": [USER]}, "no message of the assistant"),
    "null answer": ({"m": [USER, {**BOT, "content": None}]}, "message 2: content holds NoneType, not text(?!; its)"),
    "surrogate": ({"m": [USER, {**BOT, "content": "\ud800"}]}, "not valid Unicode: a lone surrogate"),
}
BAD = [
    *((Pairs("p", "c", 8), *case) for case in BAD_PAIRS.values()),
    *((Chats("m", 8), *case) for case in BAD_CHATS.values()),
]


@pytest.mark.parametrize(("records", "bad", "message"), BAD, ids=[*BAD_PAIRS, *(f"chat: {name}" for name in BAD_CHATS)])
def test_bad_records_are_named_with_the_place(tmp_path: Path, folder: Path, records, bad: dict, message: str) -> None:
    good = {"p": "what", "c": "it", "m": [USER, BOT]}
    source, options = write(tmp_path / "a.jsonl", good, bad, good), {"tokenizer": folder / "tokenizer.json"}
    with pytest.raises(ConfigError, match=rf"a\.jsonl, line 2: {message}.*--skip-bad-lines"):
        quiet([source], tmp_path / "out" / "x", records=records, **options)
    assert not (tmp_path / "out").exists()
    done = quiet([source], tmp_path / "out" / "x", records=records, skip_bad_lines=True, **options)
    assert done.counts["train"].bad_lines == 1 and done.counts["train"].documents == 2


def test_a_template_that_drops_the_answer(tmp_path: Path, folder: Path) -> None:
    template = "{% for m in messages %}{% generation %} {% endgeneration %}{{ m.role }}{% endfor %}"
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 1: the chat template leaves nothing of what"):
        quiet(
            [write(tmp_path / "a.jsonl", {"m": [USER, BOT]})], tmp_path / "x", tokenizer=folder / "tokenizer.json",
            records=Chats("m", 8, template),
        )  # fmt: skip


OPTIONS = ("prompt_field", "completion_field", "chat_field", "chat_template", "tools_field", "seq_length")


@pytest.mark.parametrize(("given", "message"), [
    ({"prompt_field": "p", "seq_length": 8}, "--prompt-field and --completion-field go together"),
    ({"completion_field": "p", "seq_length": 8}, "--prompt-field and --completion-field go together"),
    ({"prompt_field": "p", "completion_field": "c", "chat_field": "m", "seq_length": 8}, "not both"),
    ({"prompt_field": "p", "completion_field": "c"}, "--seq-length is missing.*data.seq_length"),
    ({"prompt_field": "p", "completion_field": "p", "seq_length": 8}, "are both 'p': each prompt would be its own"),
    ({"chat_field": "m", "seq_length": 1}, "--seq-length 1 is below 2"),
    ({"seq_length": 8}, "--seq-length is for records"),
    ({"chat_template": Path("t.jinja")}, "--chat-template t.jinja is for chats"),
    ({"chat_field": "m", "seq_length": 8, "chat_template": Path("none.jinja")}, "none.jinja cannot be read"),
])  # fmt: skip
def test_options_that_do_not_agree(given: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        records_of(**{**dict.fromkeys(OPTIONS), **given})


def test_inputs_and_tokenizers_that_records_cannot_be_made_with(tmp_path: Path, folder: Path, model: Path) -> None:
    (tmp_path / "a.txt").write_text("what is it")
    source, tokenizer = write(tmp_path / "a.jsonl", {"m": [USER, BOT]}), folder / "tokenizer.json"
    for sources_, options, message in (
        ([str(tmp_path / "a.txt")], {"tokenizer": tokenizer}, r"a\.txt: plain text has no fields \(m\)"),
        (["python-stdlib"], {"tokenizer": tokenizer}, "python-stdlib: plain text has no fields"),
        ([source], {"tokenizer": model}, "the tokenizer has no chat template.*--chat-template"),
        ([source], {"vocab_size": 300}, "records are for a model that has a tokenizer"),
    ):
        with pytest.raises(ConfigError, match=message):
            quiet(sources_, tmp_path / "out" / "x", records=Chats("m", 8), **options)
    with pytest.raises(ConfigError, match="seq_length 1 is below 2"):
        Chats("m", 1)
    with pytest.raises(ConfigError, match=r"the chat template \(--chat-template\), line 2: no valid Jinja: "):
        quiet([source], tmp_path / "out" / "x", tokenizer=tokenizer, records=Chats("m", 8, "{{ 1 }}\n{% for %}"))
    assert not (tmp_path / "out").exists()
