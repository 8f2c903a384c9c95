"""The parts of a record that a chat template gets, the tokens of a chat that count, and the notes about the rest."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer as Pipeline
from transformers import AutoTokenizer

from prepare_inputs import byte_pipeline, documents, prepare, quiet
from sagetrain.config import ConfigError
from sagetrain.corpus.notes import Notes
from sagetrain.corpus.records import Chats
from sagetrain.data.chat_template import rendered, settled_template
from sagetrain.data.tokenizer import Tokenizer

datasets.disable_progress_bars()
TEMPLATE = (
    "{% if tools %}<|sys|>{{ tools | tojson }}<|eot|>{% endif %}{% for d in documents or [] %}<|doc|>{{ d.title }}: {{ "
    "d.text }}<|eot|>{% endfor %}{% for m in messages %}<|{{ m.role }}|>{% if m.reasoning_content %}({{ "
    "m.reasoning_content }}){% endif %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}CALL {{ c.function.name "
    "}} {{ c.function.arguments | tojson }}{% endfor %}<|eot|>{% endfor %}{% if add_generation_prompt "
    "%}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% if m.tail %}{% generation %}{{ m.tail }}{% endgeneration %}{% endif %}{% generation %}"
    "<|eot|>{% endgeneration %}{% else %}{{ m.content }}<|eot|>{% endif %}{% endfor %}"
)
ASK = {"role": "user", "content": "go"}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of a city"}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of bytes and control tokens, and with TEMPLATE."""
    folder = tmp_path_factory.mktemp("bytes")
    control = ["<|end|>", "<|user|>", "<|assistant|>", "<|sys|>", "<|tool|>", "<|eot|>", "<|doc|>"]
    byte_pipeline(*control).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def theirs(folder: Path):
    return AutoTokenizer.from_pretrained(folder)


def call(name: str, arguments: object) -> dict:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}


def shown(record: dict, template: str = TEMPLATE, notes: Notes | None = None, **options: str) -> str:
    """Return the text of a record, with guillemets around the parts that count."""
    parts = Chats("messages", 99, template, **options).parts(record, {}, Notes() if notes is None else notes)
    return "".join(f"«{text}»" if counts else text for text, counts in parts).replace("»«", "")


def texts(path: Path, folder: Path) -> list[str]:
    """Return the documents of a token file as text, without padding."""
    pipeline = Pipeline.from_file(str(folder / "tokenizer.json"))
    found = (pipeline.decode(each, skip_special_tokens=False) for each in documents(path))
    return sorted(text for each in found if (text := each.replace("<|end|>", "")))


# -- tables ------------------------------------------------------------------------------------------------------------

CHATS = [
    {"messages": [ASK, call("weather", {"city": "Rome", "days": [1, 2]})], "tools": TOOLS},
    {"messages": [ASK, call("convert", {"amount": 3, "to": {"unit": "m"}}), {"role": "tool", "content": "ok"}]},
    {"messages": [ASK, {"role": "assistant", "content": "It is null."}]},
]
REAL_NULL = {"messages": [ASK, call("weather", {"city": None})], "tools": TOOLS}


def as_json_lines(path: Path, chats: list[dict]) -> None:
    path.with_suffix(".jsonl").write_text("".join(json.dumps(each) + "\n" for each in chats))


def as_table(path: Path, chats: list[dict]) -> None:
    pa.parquet.write_table(pa.Table.from_pylist(chats), path.with_suffix(".parquet"))


def as_json_columns(path: Path, chats: list[dict]) -> None:
    rows = [{key: json.dumps(value) for key, value in each.items()} for each in chats]
    pa.parquet.write_table(pa.Table.from_pylist(rows), path.with_suffix(".parquet"))


def as_lists_of_json(path: Path, chats: list[dict]) -> None:
    rows = [{key: [json.dumps(item) for item in value] for key, value in each.items()} for each in chats]
    pa.parquet.write_table(pa.Table.from_pylist(rows), path.with_suffix(".parquet"))


def as_maps(path: Path, chats: list[dict]) -> None:
    """Write arguments of one type in a map, as tables hold keys that differ."""
    function = pa.struct({"name": pa.string(), "arguments": pa.map_(pa.string(), pa.string())})
    message = pa.struct({"role": pa.string(), "content": pa.string(),
                         "tool_calls": pa.list_(pa.struct({"function": function}))})  # fmt: skip
    rows = [each["messages"] for each in json.loads(json.dumps(chats))]
    for each in (calls for row in rows for message in row for calls in message.get("tool_calls") or []):
        each["function"]["arguments"] = [*each["function"]["arguments"].items()]
    table = pa.table({"messages": pa.array(rows, pa.list_(message)), "tools": [json.dumps(TOOLS) for _ in chats]})
    pa.parquet.write_table(table, path.with_suffix(".parquet"))


def of_datasets(path: Path, chats: list[dict]) -> datasets.Dataset:
    as_json_lines(path.with_name("for-datasets"), chats)
    source = str(path.with_name("for-datasets.jsonl"))
    return datasets.load_dataset("json", data_files=source, split="train", cache_dir=str(path.with_name("cache")))


def as_parquet_of_datasets(path: Path, chats: list[dict]) -> None:
    of_datasets(path, chats).to_parquet(path.with_suffix(".parquet"))


def as_saved_dataset(path: Path, chats: list[dict]) -> None:
    of_datasets(path, chats).save_to_disk(path)


FORMS: list[Callable[[Path, list[dict]], None]] = [
    as_json_lines, as_table, as_json_columns, as_lists_of_json, as_parquet_of_datasets, as_saved_dataset,
]  # fmt: skip


def prepared(folder: Path, tmp_path: Path, write: Callable[[Path, list[dict]], None], chats: list[dict]) -> list[str]:
    write(tmp_path / "chats", chats)
    (source,) = tmp_path.glob("chats*")
    quiet([str(source)], tmp_path / "out/x", tokenizer=folder / "tokenizer.json", records=Chats("messages", 256))
    return texts(tmp_path / "out/x", folder)


@pytest.mark.parametrize("write", FORMS)
def test_a_chat_is_the_same_from_every_kind_of_table(folder: Path, tmp_path: Path, theirs, write) -> None:
    """The text is what transformers renders of the record, with its tools, and without the fields that the table
    adds."""
    expected = [theirs.apply_chat_template(each["messages"], tools=each.get("tools"), tokenize=False) for each in CHATS]
    assert prepared(folder, tmp_path, write, CHATS) == sorted(expected)


@pytest.mark.parametrize("write", [as_json_lines, as_json_columns, as_parquet_of_datasets, as_saved_dataset, as_maps])
def test_a_null_that_a_record_holds_is_kept(folder: Path, tmp_path: Path, theirs, write) -> None:
    if write in (as_parquet_of_datasets, as_saved_dataset):  # These writers make columns of JSON.
        chats = [REAL_NULL, {"messages": [ASK, call("weather", {"city": 3})], "tools": TOOLS}]
    else:
        chats = [REAL_NULL, {"messages": [ASK, call("weather", {"town": "Rome"})], "tools": TOOLS}]
    expected = [theirs.apply_chat_template(each["messages"], tools=TOOLS, tokenize=False) for each in chats]
    found = prepared(folder, tmp_path, write, chats)
    assert found == sorted(expected)
    assert sum('{"city": null}' in each for each in found) == 1


def test_a_column_of_json_that_holds_none(tmp_path: Path, folder: Path) -> None:
    broken = pa.ExtensionArray.from_storage(pa.json_(), pa.array(["[1", "[]"]))
    pa.parquet.write_table(pa.table({"messages": broken}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a\.parquet, rows 1 to 2: a column of JSON holds what is none"):
        quiet([str(tmp_path / "a.parquet")], tmp_path / "x", tokenizer=folder / "tokenizer.json",
              records=Chats("messages", 64))  # fmt: skip


# -- what a template is given ------------------------------------------------------------------------------------------

ANSWER = {"role": "assistant", "content": "Yes."}
GIVEN: dict[str, dict] = {
    "tools": {"messages": [ASK, ANSWER], "tools": TOOLS},
    "no tools": {"messages": [ASK, ANSWER], "tools": []},
    "documents": {"messages": [ASK, ANSWER], "documents": [{"title": "a", "text": "b"}]},
    "reasoning": {"messages": [ASK, {"reasoning": "hm", **ANSWER}]},
    "thinking": {"messages": [ASK, {"thinking": "hm", **ANSWER}]},
    "nulls": {"messages": [{**ASK, "tool_calls": None}, {**ANSWER, "reasoning_content": None}], "tools": None},
    "arguments as text": {"messages": [ASK, call("weather", '{"city": "Rome"}')]},
    "content that is JSON": {"messages": [ASK, {**ANSWER, "content": '{"a": null}'}]},
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_template_is_given_what_transformers_gives_it(name: str, theirs) -> None:
    record = GIVEN[name]
    more = {key: record.get(key) for key in ("tools", "documents")}
    expected = theirs.apply_chat_template(record["messages"], tokenize=False, **more)
    assert shown(record).replace("«", "").replace("»", "") == expected


def test_a_text_may_be_written_as_a_part() -> None:
    parts = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in (ASK, ANSWER)]
    assert shown({"messages": parts}) == shown({"messages": [ASK, ANSWER]})


ALL = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|eot|>{% endfor %}"


@pytest.mark.parametrize(("loop", "said"), [
    ("messages[:-1]", "writes message 1, of the user, only with the answer behind it, so that it would count"),
    ("messages if messages|length % 2 == 0 else messages[:-1]", "writes message 1, of the user, only with"),
    ("messages if messages|length != 4 else messages[:3]", "does not write message 4, of the assistant, where"),
])  # fmt: skip
def test_a_template_that_leaves_out_the_last_message_is_refused(loop: str, said: str) -> None:
    """The text of a user, or an answer without text, would count in the loss."""
    record = {"messages": [ASK, ANSWER, {**ASK, "content": "what?"}, ANSWER]}
    assert shown(record, ALL).count("«Yes.") == 0 and shown(record, ALL).count("«<assistant>Yes.<|eot|>»") == 2
    for own in ("", "<system>go on<|eot|>"):
        with pytest.raises(ValueError, match=said):
            shown(record, own + ALL.replace("in messages", f"in ({loop})"))
    # A template may write a text in another way, here in capitals, and is taken.
    other = ALL.replace("m.content", "(m.content | upper)")
    assert "<user>GO<|eot|>«<assistant>YES.<|eot|>»" in shown(record, other)


def test_an_answer_before_every_question() -> None:
    """The template of a published model looks at its first message. Nothing stands before the first answer, so it must
    not fail."""
    template = "{% if messages[0].role == 'system' %}!{% endif %}" + TEMPLATE
    record = {"messages": [ANSWER, ASK, ANSWER]}
    with pytest.raises(ValueError, match=r"message 1 is the assistant's, and .*: give the message the weight 0"):
        shown(record, template)
    record["messages"][0] = {**ANSWER, "weight": 0}
    assert shown(record, template) == "<|assistant|>Yes.<|eot|><|user|>go<|eot|><|assistant|>«Yes.<|eot|>»"


def test_variables_of_a_template(theirs) -> None:
    template = TEMPLATE.replace("{% if tools %}", "{% if short %}<|sys|>short<|eot|>{% endif %}{% if tools %}")
    record = {"messages": [ASK, ANSWER], "chat_template_kwargs": {"short": True}}
    expected = theirs.apply_chat_template(record["messages"], chat_template=template, tokenize=False, short=True)
    assert shown(record, template).replace("«", "").replace("»", "") == expected
    assert shown({**record, "chat_template_kwargs": '{"short": true}'}, template) == shown(record, template)


def test_a_template_for_tools_is_for_records_with_tools() -> None:
    record = {"messages": [ASK, ANSWER], "schemas": json.dumps(TOOLS)}
    options = {"tool_template": "tools! " + TEMPLATE, "tools_field": "schemas"}
    assert shown(record, "none " + TEMPLATE, **options).startswith("tools! <|sys|>[{")
    assert shown({**record, "schemas": None}, "none " + TEMPLATE, **options).startswith("none <|user|>go")
    assert {"schemas", "documents"} <= {*Chats("messages", 8, tools_field="schemas").optional_fields}


@pytest.mark.parametrize("nothing", ["", " ", "null", "[]", [], None])
def test_an_empty_cell_of_a_table_is_none(nothing: object) -> None:
    """An empty cell gives the template no list without tools, and does not choose the template for chats with tools.
    Published templates ask `tools is not none` and `'tool_calls' in message`."""
    template = (
        "{% if tools is not none or documents is not none %}some{% endif %}{% for m in messages %}"
        "{% if 'tool_calls' in m %}calls{% endif %}{{ m.content }}{% endfor %}"
    )
    record = {"messages": [ASK, {**ANSWER, "tool_calls": nothing}]}
    record |= dict.fromkeys(("tools", "documents", "chat_template_kwargs"), nothing)
    assert shown(record, template, tool_template="tools! " + template) == "go«Yes.»"


@pytest.mark.parametrize(("more", "message"), [
    ({"messages": [{"from": "human", "value": "go"}]}, "role None, .*; its keys are ShareGPT's: .* gpt to assistant"),
    (
        {"messages": [ASK, {"role": "ipython", "content": "3"}, ANSWER]},
        "the role 'ipython', which is .*; ipython is tool here",
    ),
    ({"messages": [{**ASK, "content": [{"type": "image_url"}]}, ANSWER]}, r"1: content .* no text \(image_url\)"),
    (
        {"messages": [{**ASK, "content": [{"type": "text", "text": "a"}] * 2}, ANSWER]},
        "1: content holds list of 2 parts",
    ),
    ({"messages": [ASK, {"role": "tool", "content": {"t": 3}}, ANSWER]}, "2: content holds dict, .*JSON text"),
    ({"tools": "weather"}, "'tools' holds text that is no JSON; a chat's tools are a list of JSON objects"),
    ({"tools": {"weather": {}}}, "'tools' holds dict; a chat's tools are a list"),
    ({"tools": ["weather"]}, "'tools' holds list whose item 1 is str; a chat's tools are a list of JSON objects"),
    ({"documents": "[1]"}, "'documents' holds list whose item 1 is int; a chat's documents"),
    ({"messages": []}, "a chat is a list of messages, .*, not list without items"),
    ({"messages": [ASK, None, ANSWER]}, "not list whose item 2 is NoneType"),
    ({"messages": [["go", "Yes."]]}, "not list whose item 1 is list"),
    ({"messages": {"role": ["user"], "content": ["go"]}}, r"not dict of lists \(as the datasets library"),
    ({"messages": [{**ASK, "role": "User"}, ANSWER]}, "the role 'User', .*; User is user here"),
    ({"messages": [{"role": "user", "value": "go"}, ANSWER]}, "NoneType, not text; its other keys are: value"),
    ({"messages": [ASK, {"role": "assistant", "refusal": "No."}]}, "not text; its other keys are: refusal"),
    (
        {"messages": [ASK, {**ANSWER, "content": "", "function_call": {"name": "a"}}]},
        "message 2 holds function_call, .* write it as tool_calls",
    ),
    ({"messages": [ASK, {**ANSWER, "tool_calls": {"name": "a"}}]}, "message 2: tool_calls holds dict; "),
    ({"messages": [ASK, {**ANSWER, "tool_calls": [None]}]}, "tool_calls holds list whose item 1 is NoneType"),
    ({"chat_template_kwargs": "x"}, "'chat_template_kwargs' holds text that is no JSON; variables"),
    ({"chat_template_kwargs": {"messages": []}}, "'chat_template_kwargs' has a key 'messages', which the chat"),
    ({"documents": [{"text": "a\0"}]}, "hold a NUL character"),
    ({"messages": [ASK, call("a", "\0")]}, "message 2 holds a NUL"),
    ({"messages": str([ASK, ANSWER])}, r"not text that is no JSON \(Python's notation, .* json\.dumps"),
    ({"messages": "go"}, "a chat is a list of messages, .*, not text that is no JSON"),
])  # fmt: skip
def test_what_a_template_cannot_be_given_is_named(more: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shown({"messages": [ASK, ANSWER], **more})


def test_what_is_set_in_a_block_is_not_known_behind_it(theirs) -> None:
    template = (
        "{% set a = 'x' %}{% for m in messages %}{% generation %}{% set a = 'y' %}{{ m.content }}{{ a }}"
        "{% endgeneration %}{{ a }}{% endfor %}"
    )
    expected = theirs.apply_chat_template([ASK, ANSWER], chat_template=template, tokenize=False)
    assert shown({"messages": [ASK, ANSWER]}, template).replace("«", "").replace("»", "") == expected == "goyxYes.yx"


def test_blocks_in_blocks_and_in_variables() -> None:
    """The marks of a block must not change what the template makes of its text."""
    block = "{% generation %}{{ m.content }}{% endgeneration %}"
    chat = {"messages": [ASK, ANSWER]}
    nested = f"{{% generation %}}({block})<|eot|>{{% endgeneration %}}"
    assert shown(chat, f"{{% for m in messages[1:] %}}go{nested}{{% endfor %}}") == "go«(Yes.)<|eot|>»"
    kept = "{% for m in messages[1:] %}go{% set a %}" + block + "{% endset %}"
    assert shown(chat, kept + "{{ a }}{% endfor %}") == "go«Yes.»"
    for changed in ("{{ a }}{{ a | length }}", "{{ a if a != 'Yes.' else '' }}", "{{ a[:2] }}"):
        with pytest.raises(ValueError, match=r"changes what a \{% generation %\} block wrote .*: put"):
            shown(chat, f"{kept}{changed}{{% endfor %}}")


RECURSIVE = "{% macro more(n) %}{{ more(n + 1) }}{% endmacro %}"


def test_a_template_that_never_ends_is_an_error(folder: Path) -> None:
    with pytest.raises(ValueError, match="makes a text for which there is not enough memory"):
        shown({"messages": [ASK, ANSWER]}, "{{ 'a' * 10 ** 15 }}")
    with pytest.raises(ValueError, match="the chat template never ends: a macro of it calls itself"):
        rendered(RECURSIVE + "{{ more(0) }}", [ASK], {}, False)
    with pytest.raises(ValueError, match="the chat template never ends"):
        shown({"messages": [ASK, ANSWER]}, RECURSIVE + "{{ more(0) }}")
    loops = "{% for a in messages %}" * 30 + "{% endfor %}" * 30
    for deep in ("{{ " + "(" * 4000 + "1" + ")" * 4000 + " }}", loops):
        with pytest.raises(ConfigError, match="the chat template is nested too deeply"):
            settled_template(deep, Tokenizer.load(folder / "tokenizer.json"))


def test_records_that_are_nested_without_end(tmp_path: Path, folder: Path) -> None:
    deep = '{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}\n"
    (tmp_path / "a.jsonl").write_text(deep)
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 1: not valid JSON: .*recursion"):
        quiet([str(tmp_path / "a.jsonl")], tmp_path / "x", tokenizer=folder / "tokenizer.json",
              records=Chats("messages", 64))  # fmt: skip


# -- what counts -------------------------------------------------------------------------------------------------------

SAID: dict[str, tuple[dict, bool]] = {
    "weight 0": ({"weight": 0}, False),
    "weight 0.0": ({"weight": 0.0}, False),
    "weight 1": ({"weight": 1}, True),
    "null": ({"weight": None}, True),
    "train false": ({"train": False}, False),
    "train true": ({"train": True}, True),
    "loss false": ({"loss": False}, False),
    "training false": ({"training": False}, False),
    "trainable false": ({"trainable": False}, False),
    "loss_weight 0": ({"loss_weight": 0}, False),
    "loss_scale 0.0": ({"loss_scale": 0.0}, False),
    "loss_mask 0": ({"loss_mask": 0}, False),
    "masked true": ({"masked": True}, False),
    "masked false": ({"masked": False}, True),
    "both": ({"train": False, "weight": 0}, False),
    "both ways": ({"train": False, "masked": True}, False),
}


@pytest.mark.parametrize("template", [TEMPLATE, MARKED])
@pytest.mark.parametrize("name", SAID)
def test_a_message_says_whether_it_counts(name: str, template: str) -> None:
    said, counts = SAID[name]
    record = {"messages": [ASK, {**ANSWER, "content": "A", "tail": "T", **said}, ASK, {**ANSWER, "content": "B"}]}
    first = "A" + "T" * (template == MARKED) + "<|eot|>"
    assert shown(record, template) == (
        f"<|user|>go<|eot|><|assistant|>{f'«{first}»' if counts else first}<|user|>go<|eot|><|assistant|>«B<|eot|>»"
    )


@pytest.mark.parametrize(("said", "message"), [
    ({"weight": 0.5}, "message 2: weight is 0.5, neither 0 nor 1"),
    ({"weight": 2}, "message 2: weight is 2, neither 0 nor 1"),
    ({"train": "no"}, "message 2: train is 'no', neither 0 nor 1"),
    ({"train": True, "weight": 0}, "message 2: weight and train contradict each other"),
    ({"train": True, "masked": True}, "message 2: train and masked contradict each other"),
    ({"content": " "}, "message 2, of the assistant, is empty: nothing of it would count"),
    ({"weight": 0}, r"no message of the assistant counts \(weight, train, training, trainable, loss, "),
])  # fmt: skip
def test_weights_that_mean_nothing(said: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shown({"messages": [ASK, {**ANSWER, **said}]})


def test_an_answer_that_does_not_count_may_be_empty() -> None:
    chat = [ASK, {**ANSWER, "content": "", "weight": 0}, ASK, ANSWER]
    assert shown({"messages": chat}).startswith(
        "<|user|>go<|eot|><|assistant|><|eot|><|user|>go<|eot|><|assistant|>«Yes."
    )


def test_an_answer_that_begins_otherwise_than_it_is_asked_for() -> None:
    """Templates of reasoning models ask with <think>, and leave out the reasoning of answers."""
    template = TEMPLATE.replace("<|assistant|>{% endif %}", "<|assistant|><think>{% endif %}")
    with pytest.raises(
        ValueError, match=r"begins an answer with '<think>' .*, and writes 'Yes\..* in message 2, .* put"
    ):
        shown({"messages": [ASK, ANSWER]}, template)


def test_answers_that_do_not_count_may_change_later() -> None:
    """Templates that drop earlier reasoning write such answers in another way later. With generation blocks the number
    of blocks must stay."""
    template = TEMPLATE.replace("{% if m.reasoning_content %}", "{% if m.reasoning_content and loop.last %}")
    thought = {**ANSWER, "reasoning_content": "hm"}
    talk = [ASK, thought, ASK, thought]
    with pytest.raises(ValueError, match="message 2 differently when the chat goes on"):
        shown({"messages": talk}, template)
    kept = shown({"messages": [ASK, {**thought, "weight": 0}, ASK, thought]}, template)
    assert kept.endswith("<|assistant|>Yes.<|eot|><|user|>go<|eot|><|assistant|>«(hm)Yes.<|eot|>»")
    template = MARKED.replace("{% if m.tail %}", "{% if m.tail and loop.last %}")
    kept = shown({"messages": [ASK, {**ANSWER, "tail": "T", "weight": 0}, ASK, {**ANSWER, "tail": "T"}]}, template)
    assert kept == "<|user|>go<|eot|><|assistant|>Yes.<|eot|><|user|>go<|eot|><|assistant|>«Yes.T<|eot|>»"
    fewer = "{% if messages | length < 4 %}{% generation %}a{% endgeneration %}{% generation %}b{% endgeneration %}"
    fewer += "{% endif %}"
    with pytest.raises(ValueError, match=r"writes fewer .* blocks when a chat goes on"):
        shown({"messages": [ASK, {**ANSWER, "weight": 0}, ASK, ANSWER]}, fewer + "{% generation %}c{% endgeneration %}")


# -- what is said ------------------------------------------------------------------------------------------------------


def said_of(folder: Path, tmp_path: Path, chats: list[dict], template: str = "") -> list[str]:
    tmp_path.mkdir(exist_ok=True)
    as_json_lines(tmp_path / "chats", chats)
    said: list[str] = []
    prepare([str(tmp_path / "chats.jsonl")], tmp_path / "x", tokenizer=folder / "tokenizer.json", say=said.append,
            records=Chats("messages", 256, template))  # fmt: skip
    return said[2:]


def test_what_is_left_out_of_records_is_said(folder: Path, tmp_path: Path) -> None:
    chats = [
        {"messages": [{**ASK, "name": "Ann", "weight": 1}, ANSWER], "id": 1, "source": "web"},
        {"messages": [ASK, call("weather", {"city": None})], "id": 2, "tools": TOOLS},
        {"messages": [{**ASK, "is_error": False, "name": ""}, ANSWER], "tools": [{"name": "a", "strict": None}]},
    ]
    assert said_of(folder, tmp_path / "a", chats[:1] + [{"messages": [ASK, ANSWER], "id": 3}]) == [
        "messages of others than the assistant say that they count, but answers alone do: (1 record)",
        "not read of the records: id (2 records), source (1 record)",
        "the chat template does not read these keys, so that what records hold there is left out: name of messages "
        "(1 record)",
    ]
    plain = "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '-' }}<|eot|>{% endfor %}"
    plain += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    unread, unwritten, nulls = said_of(folder, tmp_path / "b", chats[1:2], plain)
    assert nulls.startswith("tool calls or tools hold null, which is kept as the JSON has it")
    assert unwritten.endswith("is left out: tool_calls of messages (1 record), tools (1 record)")
    assert unread == "not read of the records: id (1 record)"
    *_, nans = said_of(folder, tmp_path / "n", [{"messages": [ASK, call("weather", {"city": float("nan")})]}], plain)
    assert nans == nulls
    unwritten, nulls = said_of(folder, tmp_path / "d", chats[2:])
    assert nulls.startswith("tool calls or tools hold null")
    assert unwritten.endswith("is left out: is_error of messages (1 record)")  # An empty name is none.
    whole = "{% for m in messages %}{% generation %}{{ m | tojson }}<|eot|>{% endgeneration %}{% endfor %}"
    assert said_of(folder, tmp_path / "c", [{"messages": [{**ASK, "name": "Ann"}, ANSWER]}], whole) == []


def test_arguments_that_a_template_quotes_are_said(folder: Path, tmp_path: Path) -> None:
    """OpenAI's format has arguments as JSON text. Some templates write that text as it is, others quote it."""
    chats = [
        {"messages": [ASK, call("weather", arguments)]} for arguments in ('{"city": "Rome"}', {"city": "Rome"}, "Rome")
    ]
    (said,) = said_of(folder, tmp_path / "a", chats)
    assert re.search(r"arguments of tool calls as a quoted text, .* give objects .*: \(1 record\)", said)
    as_it_is = TEMPLATE.replace("c.function.arguments | tojson", "c.function.arguments")
    assert as_it_is != TEMPLATE and said_of(folder, tmp_path / "b", chats[:1], as_it_is) == []


def test_a_date_that_a_template_writes_is_said(folder: Path, tmp_path: Path, theirs) -> None:
    """Llama 3.1 and 3.2 write the current date unless date_string is given. One chat has one date."""
    template = "{% if not date_string %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{{ date_string }}"
    template += TEMPLATE
    record = {"messages": [ASK, ANSWER]}
    notes = Notes()
    expected = theirs.apply_chat_template(record["messages"], chat_template=template, tokenize=False)
    assert shown(record, template, notes).replace("«", "").replace("»", "") == expected
    assert [note.partition(" on which")[0] for note, _ in +notes] == ["the chat template writes the date of the day"]
    fixed = {**record, "chat_template_kwargs": {"date_string": "26 Jul 2024"}}
    assert shown(fixed, template, notes := Notes()).startswith("26 Jul 2024<|user|>") and not +notes
    by_microseconds = template.replace("%d %b %Y", "%f")
    assert "«Yes.<|eot|>»" in shown(record, by_microseconds)


def test_columns_that_nobody_reads_are_said(folder: Path, tmp_path: Path) -> None:
    rows = [{"id": 1, "messages": [ASK, ANSWER], "score": 0.5}] * 3
    as_table(tmp_path / "a", rows)
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    for number, source in enumerate(("a.parquet", "saved")):
        said: list[str] = []
        prepare([str(tmp_path / source)], tmp_path / f"{number}/x", tokenizer=folder / "tokenizer.json",
                records=Chats("messages", 256), say=said.append)  # fmt: skip
        assert said[2:] == ["not read of the records: id (3 records), score (3 records)"]


ENDS: dict[str, tuple[str, bool]] = {
    "a control token": ("{{ m.content }}<|eot|>", True),
    "and a newline": ("{{ m.content }}<|eot|>\n", True),
    "eos": ("{{ m.content }}{{ eos_token }}", True),
    "the next role": ("{{ m.content }}", False),
    "text": ("{{ m.content }}</s>\n", False),
    "the last turn alone": ("{{ m.content }}{{ '<|eot|>' if loop.last and messages | length > 3 else '' }}", False),
    "a control token before it": ("<|doc|>{{ m.content }}", False),
}


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("name", ENDS)
def test_answers_that_end_with_the_next_role_are_said(folder: Path, tmp_path: Path, name: str, marked: bool) -> None:
    turn, ends = ENDS[name]
    if marked:
        block = f"{{% generation %}}{turn}{{% endgeneration %}}"
        turn = f"{{% if m.role == 'assistant' %}}{block}{{% else %}}{turn}{{% endif %}}"
    elif "loop.last" in turn:
        return
    template = f"{{% for m in messages %}}<|{{{{ m.role }}}}|>{turn}{{% endfor %}}"
    template += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    said = said_of(folder, tmp_path, [{"messages": [ASK, ANSWER, ASK, ANSWER]}], template)
    assert [line.startswith("answers that count end with no control token") for line in said] == [True] * (not ends)


def test_what_is_said_survives_an_interruption(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sagetrain.corpus import files, journal

    monkeypatch.setattr(files, "CHUNK_RECORDS", 2)
    monkeypatch.setattr(journal, "SECONDS", 0.0)
    as_json_lines(tmp_path / "chats", [{"messages": [ASK, ANSWER], "id": 1}] * 5 + [{"messages": 1}])
    said: list[str] = []
    options = {"tokenizer": folder / "tokenizer.json", "records": Chats("messages", 256), "say": said.append}
    with pytest.raises(ConfigError, match="line 6: a chat is a list of messages"):
        prepare([str(tmp_path / "chats.jsonl")], tmp_path / "x", **options)
    prepare([str(tmp_path / "chats.jsonl")], tmp_path / "x", skip_bad_lines=True, **options)
    assert any("going on after" in line for line in said)
    assert "not read of the records: id (5 records)" in said
