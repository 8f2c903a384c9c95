"""Hugging Face tokenizers, and token files without a tokenizer, from preparing to exporting."""

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AutoTokenizer

from prepare_inputs import SAMPLE, prepare, published_pipeline, published_tokenizer
from runs import finish, write_config
from sagetrain.__main__ import main
from sagetrain.config import ConfigError
from sagetrain.data.token_file import TokenFile
from sagetrain.data.tokenizer import Tokenizer
from sagetrain.inference.load import load_run
from sagetrain.interop.tokenizer_files import tokenizer_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as published: a byte-level tokenizer of 600 tokens, and files that put a bos before every text."""
    folder = tmp_path_factory.mktemp("published")
    pipeline = published_pipeline()
    pipeline.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    pipeline.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": {"__type": "AddedToken", "content": "<|end|>", "special": True},
        "chat_template": "{{ messages }}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder / "tokenizer.json")


@settings(max_examples=200)
@given(text=st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from("\u2581 \n\t\0")))
def test_round_trip_of_any_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(1 < token < tokenizer.vocab_size == 600 for token in ids)


def test_ids_are_those_of_transformers(folder: Path, tokenizer: Tokenizer) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (theirs.bos_token_id, theirs.eos_token_id) == (0, 1)
    for text in (SAMPLE, "a <|end|> b", "日本語 🎉", ""):
        assert tokenizer.encode(text) == theirs(text, add_special_tokens=False).input_ids
    assert tokenizer.decode([0, *tokenizer.encode("a"), 1]) == "a"


def test_a_tokenizer_travels_as_two_files(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """transformers reads them. Earlier versions wrote one file, which is the same tokenizer."""
    tokenizer.write(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs(SAMPLE).input_ids == AutoTokenizer.from_pretrained(folder)(SAMPLE).input_ids
    one = json.dumps({**json.loads(tokenizer.model), "tokenizer_config": tokenizer.config}, ensure_ascii=False).encode()
    (tmp_path / "before").mkdir()
    (tmp_path / "before/tokenizer.json").write_bytes(one)
    for copy in (tmp_path / "tokenizer.json", tmp_path / "before/tokenizer.json"):
        found = Tokenizer.load(copy)
        assert (found.sha256, found.eos_id, found.bos_id) == (tokenizer.sha256, 1, 0)
        assert found.sha256 == hashlib.sha256(one).hexdigest() and found.chat_template == tokenizer.chat_template


def placed(text: str) -> processors.PostProcessor:
    """Return a post-processor that places control tokens around a text."""
    return processors.TemplateProcessing(single=text, special_tokens=[("<|begin|>", 0), ("<|end|>", 1)])


BYTES = processors.ByteLevel(trim_offsets=False)
PREFIXES = {
    "Llama 3": (processors.Sequence([BYTES, placed("<|begin|> $A")]), [0]),
    "another order": (processors.Sequence([placed("<|begin|> <|end|> $A <|end|>"), BYTES]), [0, 1]),
    "BERT": (processors.BertProcessing(("<|end|>", 1), ("<|begin|>", 0)), [0]),
    "behind alone": (placed("$A <|end|>"), []),
    "Qwen": (BYTES, []),
    "GPT-NeoX": (processors.ByteLevel(trim_offsets=True), []),
    "none": (None, []),
}


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("name", PREFIXES)
def test_a_prefix_is_what_stands_before_a_text(folder: Path, name: str, says: bool, tmp_path: Path) -> None:
    """Beside a tokenizer.json nothing else decides. transformers decides by it alone as well: its tokens of a text
    begin with the same prefix."""
    tree = json.loads((folder / "tokenizer.json").read_bytes())
    post, expected = PREFIXES[name]
    tree["post_processor"] = post and json.loads(post.__getstate__())
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"add_bos_token": says}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours, theirs = Tokenizer.load(tmp_path / "tokenizer.json"), AutoTokenizer.from_pretrained(tmp_path)
    ids = theirs("def add").input_ids
    assert ours.prefix == expected == ids[: len(expected)] and ids[len(expected)] == ours.encode("def add")[0]
    assert Tokenizer(ours.model).prefix == expected
    # GPT-NeoX takes spaces from the ends of spans. They count with their part all the same.
    ids, counts, _ = ours.encode_parts([("def a():", False), ("\n    pass  ", True)], control=True)
    assert ours.decode([token for token, each in zip(ids, counts, strict=True) if each]) == "\n    pass  "


# The values are the content of tokenizer_config.json beside a SentencePiece model, and whether a bos comes before a
# text.
SAID = {
    "nothing": ({}, False),
    "true": ({"add_bos_token": True}, True),
    "false": ({"add_bos_token": False, "tokenizer_class": "LlamaTokenizer"}, False),
    "Llama, true": ({"add_bos_token": True, "tokenizer_class": "LlamaTokenizer"}, True),
    "another class": ({"tokenizer_class": "PreTrainedTokenizerFast"}, False),
    "Llama": ({"tokenizer_class": "LlamaTokenizer"}, True),
}


@pytest.mark.parametrize("name", SAID)
def test_a_file_beside_a_sentencepiece_model_decides_on_a_bos(name: str, tmp_path: Path) -> None:
    published, (config, expected) = published_tokenizer(), SAID[name]
    (tmp_path / "tokenizer.model").write_bytes(published.model)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer.load(tmp_path / "tokenizer.model")
    assert ours.prefix == [ours.bos_id] * expected and ours.encode("get one") == published.encode("get one")
    if name != "Llama":  # transformers 5 forgets the default that it documents.
        assert (AutoTokenizer.from_pretrained(tmp_path)("x").input_ids[0] == ours.bos_id) == expected
    # A copy keeps the bos and has the same identity, so all data that was prepared with it fits.
    (tmp_path / "copy").mkdir()
    ours.write(tmp_path / "copy")
    copy = Tokenizer.load(tmp_path / "copy/tokenizer.model")
    assert (copy.prefix, copy.sha256, copy.model) == (ours.prefix, published.sha256, ours.model)
    for file, content in tokenizer_files(ours, 128).items():
        (tmp_path / "copy" / file).write_bytes(content)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "copy")
    assert theirs("get one").input_ids == [*ours.prefix, *ours.encode("get one")]
    assert Tokenizer.load(tmp_path / "copy/tokenizer.json").prefix == ours.prefix


def test_our_own_sentencepiece_models_put_nothing_before_a_text(model: Path) -> None:
    ours = Tokenizer.load(model)
    assert (ours.prefix, ours.model) == ([], model.read_bytes())


def test_mistakes_are_named(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes((folder / "tokenizer.json").read_bytes())
    with pytest.raises(ConfigError, match=r"no end-of-sentence token, .* tokenizer_config.json .* \{\"eos_token\": "):
        Tokenizer.load(file)
    with pytest.raises(ConfigError, match=rf"is a folder; name {file}$"):
        Tokenizer.load(tmp_path)
    for content, message in (
        ('{"a": 1}', "is not a tokenizer.json of the tok"),
        ('{"model": "BPE"}', "is not a tokenizer.json of the tok"),
        ("{x", r"tokenizer\.json is not valid JSON"),
    ):
        file.write_text(content)
        with pytest.raises(ConfigError, match=message):
            Tokenizer.load(file)


def command(capsys, *words: object) -> tuple[int, str, str]:
    """Run a command in this process and return its exit code, its output and its errors."""
    code = main([*map(str, words)])
    return code, *capsys.readouterr()


def test_from_text_to_an_exported_folder(folder: Path, tokenizer: Tokenizer, tmp_path: Path, capsys) -> None:
    data = tmp_path / "data"
    sources, quiet = [str(Path(json.__file__).parent)], {"glob": "*.py", "say": lambda text: None}
    prepare(sources, data / "train", tokenizer=folder / "tokenizer.json", valid_fraction=0.3, num_workers=2, **quiet)
    assert sorted(path.name for path in data.iterdir() if "token" in path.name) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    ids = TokenFile(data / "train").tokens(0, TokenFile(data / "train").num_tokens).tolist()
    first = ids[: ids.index(tokenizer.eos_id)]
    assert tokenizer.decode(first) in {path.read_text() for path in Path(json.__file__).parent.glob("*.py")}
    with pytest.raises(ConfigError, match=r"tokenizer\.json exists and would be replaced by another tokenizer"):
        prepare(sources, data / "more", vocab_size=400, **quiet)

    sections = {"training": {"total_tokens": 1280}, "lr_schedule": {"warmup_tokens": 256}}
    config = write_config(tmp_path / "run.yaml", data, tmp_path / "run", **sections)
    finish("sagetrain", config)
    code, said, errors = command(capsys, "generate", tmp_path / "run", "def ", "--max-tokens", 5)
    assert said.startswith("def ") and code == 0, errors
    assert "bits per byte" in command(capsys, "eval", tmp_path / "run")[1]
    code, _, errors = command(capsys, "export", tmp_path / "run", tmp_path / "out")
    assert (code, errors) == (0, "")
    before, after = (AutoTokenizer.from_pretrained(each) for each in (folder, tmp_path / "out"))
    assert after(SAMPLE).input_ids == before(SAMPLE).input_ids and after.chat_template == before.chat_template
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == 1


def test_token_files_from_elsewhere_need_a_vocabulary_size(corpus: Path, tmp_path: Path, capsys) -> None:
    for name in ("train", "valid"):
        for end in (".bin", ".idx"):
            (tmp_path / f"{name}{end}").write_bytes((corpus / f"{name}{end}").read_bytes())
    sections = {"training": {"total_tokens": 1280}, "lr_schedule": {"warmup_tokens": 256}}
    config = write_config(tmp_path / "run.yaml", tmp_path, tmp_path / "run", **sections)
    code, _, errors = command(capsys, "train", config)
    assert code == 2 and "give model.vocab_size instead" in errors
    sections["model"] = {"vocab_size": 512}
    config = write_config(tmp_path / "run.yaml", tmp_path, tmp_path / "run", **sections)
    finish("sagetrain", config)
    finish("sagetrain", config)  # The run continues.
    found = json.loads(command(capsys, "eval", tmp_path / "run", "--json")[1])["all"]
    assert math.isfinite(found["loss"]) and found["bits_per_byte"] is None
    code, _, errors = command(capsys, "generate", tmp_path / "run", "def ")
    assert code == 2 and "into the run's folder" in errors
    code, _, errors = command(capsys, "export", tmp_path / "run", tmp_path / "out")
    assert code == 0 and "no tokenizer: the run was trained without one" in errors
    (tmp_path / "run/tokenizer.model").write_bytes((corpus / "tokenizer.model").read_bytes())
    assert command(capsys, "generate", tmp_path / "run", "def ")[1].startswith("def ")
    assert load_run(tmp_path / "run", print).vocab_size == 512


def _in_added_tokens(tree: dict) -> None:
    tree["added_tokens"][1]["id"] = 90_000


def _in_a_template(tree: dict) -> None:
    tree["post_processor"]["special_tokens"]["<|begin|>"]["ids"] = [90_000]


def _in_steps(tree: dict) -> None:
    roberta = {"type": "RobertaProcessing", "sep": ["<|end|>", 1], "cls": ["<|begin|>", 90_000]}
    roberta |= {"trim_offsets": True, "add_prefix_space": False}
    tree["post_processor"] = {"type": "Sequence", "processors": [roberta]}


@pytest.mark.parametrize("edit", [_in_added_tokens, _in_a_template, _in_steps])
def test_ids_beyond_the_vocabulary_are_refused(folder: Path, tmp_path: Path, edit: Callable[[dict], None]) -> None:
    tree = json.loads((folder / "tokenizer.json").read_text())
    edit(tree)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    (tmp_path / "tokenizer_config.json").write_bytes((folder / "tokenizer_config.json").read_bytes())
    said = (
        r"json: (added_tokens|post_processor) gives '<\|(begin|end)\|>' the id 90000, but ids end at 599: write the id"
    )
    with pytest.raises(ConfigError, match=said):
        Tokenizer.load(tmp_path / "tokenizer.json")
