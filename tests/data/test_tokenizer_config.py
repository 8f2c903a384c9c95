"""Files beside a tokenizer: tokens, special tokens and chat templates are those that transformers finds."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Pipeline
from tokenizers import models, normalizers, pre_tokenizers
from transformers import AutoTokenizer

from prepare_inputs import byte_pipeline, published_tokenizer, quiet
from sagetrain.config import ConfigError
from sagetrain.data.tokenizer import Tokenizer
from sagetrain.interop.tokenizer_files import tokenizer_files

FILES = {"config": "tokenizer_config.json", "mapped": "special_tokens_map.json", "added": "added_tokens.json"}
FILES["model"] = "config.json"
TEXT = "<|im_start|>user\nHi  <|im_end|>  there, <think> it's <tool>\n <|end|><|im_end|> x<think>"


@pytest.fixture(scope="module")
def plain() -> str:
    """A tokenizer.json of 256 bytes and an end-of-text token."""
    return byte_pipeline("<|end|>").to_str()


def write(folder: Path, plain: str, **files: dict) -> Path:
    """Write the tokenizer.json with these files beside it, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(plain)
    for name, tree in ({"config": {}} | files).items():
        named = {"eos_token": "<|end|>"} | tree if name == "config" else tree
        (folder / FILES[name]).write_text(json.dumps(named))
    return folder / "tokenizer.json"


def exported_to(folder: Path, tokenizer: Tokenizer) -> Any:
    """Write the files of a tokenizer, and return what transformers makes of them."""
    folder.mkdir(exist_ok=True)
    for name, content in tokenizer_files(tokenizer, 128).items():
        (folder / name).write_bytes(content)
    return AutoTokenizer.from_pretrained(folder)


def stated(content: str, special: bool = True, **flags: bool) -> dict:
    """Return a token as save_pretrained of transformers writes it."""
    return {"content": content, "special": special, "lstrip": False, "rstrip": False, "single_word": False} | flags


START, END = ("<|im_start|>", "<|im_end|>")
BOTH = {"257": stated(START, normalized=False), "258": stated(END, normalized=False)}
# These files lie beside a tokenizer.json that lacks their tokens.
CASES: dict[str, dict[str, dict]] = {
    "decoder": {"config": {"added_tokens_decoder": BOTH}},
    "some are no control tokens": {
        "config": {"added_tokens_decoder": BOTH | {"259": stated("<think>", special=False, normalized=True)}}
    },
    "spaces beside them": {
        "config": {"added_tokens_decoder": {"257": stated(START, rstrip=True), "258": stated(END, lstrip=True)}}
    },
    "whole words": {"config": {"added_tokens_decoder": {"257": stated("<think>", single_word=True)}}},
    "found otherwise than tokenizer.json says": {
        "config": {"added_tokens_decoder": {"256": stated("<|end|>", rstrip=True)}}
    },
    "a list": {"config": {"additional_special_tokens": [START, END]}},
    "a list of objects": {
        "config": {"extra_special_tokens": [{"__type": "AddedToken"} | stated(END, lstrip=True), START]}
    },
    "a model's own names": {"config": {"extra_special_tokens": {"think_token": "<think>"}, "tool_token": "<tool>"}},
    "names": {"config": {"bos_token": START, "eos_token": END, "pad_token": "<tool>"}},
    "names with flags": {"config": {"eos_token": {"__type": "AddedToken"} | stated(END, lstrip=True)}},
    "the map": {"mapped": {"eos_token": stated(END), "bos_token": START, "additional_special_tokens": ["<tool>"]}},
    "the map before the configuration": {"config": {"bos_token": "<think>"}, "mapped": {"bos_token": START}},
    "the decoder before the map": {
        "config": {"added_tokens_decoder": BOTH, "bos_token": START},
        "mapped": {"bos_token": END, "pad_token": "<tool>"},
    },
    "added tokens": {"added": {START: 257, END: 258}},
    "added tokens that the map names": {"added": {START: 257, END: 258}, "mapped": {"eos_token": END}},
    "all of them": {
        "config": {"additional_special_tokens": ["<tool>"]},
        "mapped": {"eos_token": END},
        "added": {END: 257, START: 258},
    },
    "a model's own names by version 5": {"config": {"model_specific_special_tokens": {"think_token": "<think>"}}},
    "the class by the model": {"model": {"model_type": "qwen3"}},
    "the class by the model's key": {"model": {"model_type": "llama", "tokenizer_class": "GPT2Tokenizer"}},
    "GPT-NeoX's own": {"config": {"tokenizer_class": "GPTNeoXTokenizerFast"}},
    "GPT-2's own": {"config": {"tokenizer_class": "GPT2Tokenizer"}},
    "Qwen2's own": {"config": {"tokenizer_class": "Qwen2TokenizerFast", "unk_token": None}},
    "a name of an ordinary token": {"config": {"tokenizer_class": "Qwen2Tokenizer", "pad_token": "<|end|>"}},
    "an own name of an ordinary token": {"config": {"tool_token": "<|end|>", "eos_token": END}},
    "an ordinary token among others": {"config": {"additional_special_tokens": ["<|end|>"], "eos_token": END}},
    "the decoder alone of all": {"config": {"added_tokens_decoder": BOTH}, "added": {"<tool>": 259}},
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_transformers(plain: str, name: str, tmp_path: Path) -> None:
    """The tokenizer is loaded from the folder, from our copy of the file alone, and from an export."""
    plain = plain.replace('"special": true', '"special": false') if "ordinary" in name else plain
    file = write(tmp_path / "theirs", plain, **CASES[name])
    theirs, ours = AutoTokenizer.from_pretrained(file.parent), Tokenizer.load(file)
    expected = theirs.encode(TEXT, add_special_tokens=False)
    special = {number for number, token in theirs.added_tokens_decoder.items() if token.special}

    def check(found: Tokenizer) -> None:
        assert found.encode(TEXT) == expected
        assert (found.vocab_size, found.eos_id) == (len(theirs), theirs.eos_token_id)
        assert found.bos_id == (-1 if theirs.bos_token_id is None else theirs.bos_token_id)
        assert {token for token in range(found.vocab_size) if found.is_control(token)} == special
        assert found.decode(expected) == theirs.decode(expected, skip_special_tokens=True)

    check(ours)
    copy = tmp_path / "copy/tokenizer.json"
    copy.parent.mkdir()
    ours.write(copy.parent)
    check(Tokenizer.load(copy))
    exported = exported_to(copy.parent, ours)
    assert exported.encode(TEXT, add_special_tokens=False) == expected and len(exported) == len(theirs)
    assert (exported.eos_token_id, exported.bos_token_id) == (theirs.eos_token_id, theirs.bos_token_id)


@pytest.mark.parametrize("of_class", ["GPT2TokenizerFast", "PreTrainedTokenizerFast", "LlamaTokenizerFast"])
def test_a_space_before_texts_is_put_where_transformers_puts_it(plain: str, of_class: str, tmp_path: Path) -> None:
    config = {"add_prefix_space": True, "tokenizer_class": of_class, "bos_token": "<|end|>", "unk_token": "<|end|>"}
    file = write(tmp_path / "theirs", plain, config=config)
    theirs, ours = AutoTokenizer.from_pretrained(file.parent), Tokenizer.load(file)
    assert ours.encode("Hi there") == theirs.encode("Hi there", add_special_tokens=False)
    assert bool(ours.notes) == (of_class == "GPT2TokenizerFast") == (ours.decode(ours.encode("Hi"))[0] == " ")
    exported = exported_to(file.parent, ours)
    assert exported.encode("Hi there") == ours.encode("Hi there") == Tokenizer.load(file).encode("Hi there")


def merging(plain: str, **model: object) -> str:
    """Return a tokenizer.json in which each digit is cut from the others before its one merge, 1 and 2, is tried."""
    tree = json.loads(plain)
    tree["model"] |= {"vocab": tree["model"]["vocab"] | {"12": 257}, "merges": [["1", "2"]], **model}
    tree["pre_tokenizer"] = {
        "type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, tree["pre_tokenizer"]]
    }  # fmt: skip
    return json.dumps(tree)


@pytest.mark.parametrize(
    "of_class", ["GPT2Tokenizer", "GPT2TokenizerFast", "Qwen2Tokenizer", "PreTrainedTokenizerFast"]
)
def test_classes_that_cut_a_text_otherwise_are_said(plain: str, of_class: str, tmp_path: Path) -> None:
    """SmolLM2 is published with digits of their own and the class of GPT-2."""
    config = {"tokenizer_class": of_class, "bos_token": "<|end|>", "unk_token": "<|end|>", "pad_token": "<|end|>"}
    file = write(tmp_path / "theirs", merging(plain), config=config)
    theirs, ours = AutoTokenizer.from_pretrained(file.parent), Tokenizer.load(file)
    same = ours.encode("a12") == theirs.encode("a12", add_special_tokens=False)
    assert len(ours.encode("a12")) == 3 and same == (of_class in ("Qwen2Tokenizer", "PreTrainedTokenizerFast"))
    assert [f"(tokenizer_class {of_class}): with this class transformers 5 cuts" in note for note in ours.notes] == [
        True
    ] * (of_class != "PreTrainedTokenizerFast")
    assert exported_to(file.parent, ours).encode("a12") == ours.encode("a12")


@pytest.mark.parametrize("said", [{}, {"do_lower_case": False}, {"strip_accents": False}])
@pytest.mark.parametrize("lowercase", [True, False])
def test_berts_normalizer_does_what_its_class_does(lowercase: bool, said: dict, tmp_path: Path) -> None:
    vocabulary = {text: number for number, text in enumerate(["[UNK]", "[SEP]", "the", "The", "a", "\u00e4", "\u00c4"])}
    pipeline = Pipeline(models.WordPiece(vocabulary, unk_token="[UNK]"))
    pipeline.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    config = {"tokenizer_class": "BertTokenizer", "eos_token": "[SEP]", **said}
    ours = Tokenizer.load(file := write(tmp_path, pipeline.to_str(), config=config))
    theirs = AutoTokenizer.from_pretrained(tmp_path).encode("The \u00c4", add_special_tokens=False)
    assert ours.encode("The \u00c4") == theirs
    changes = pipeline.encode("The \u00c4").ids != theirs
    assert any("json something else: the former is taken" in note for note in ours.notes) == changes, file


@pytest.mark.parametrize("of_class", ["GPTNeoXTokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize("model_type", ["olmo2", "qwen2"])
def test_some_models_overrule_the_class_that_is_named(
    plain: str, model_type: str, of_class: str, tmp_path: Path
) -> None:
    """transformers 5 takes the file of OLMo 2's models as it is. For Qwen 2's models it takes their class, whatever is
    named, so that accents are composed."""
    named = {"tokenizer_class": of_class, **dict.fromkeys(("bos_token", "unk_token", "pad_token"), "<|end|>")}
    named = named if model_type == "qwen2" else {"tokenizer_class": of_class}
    file = write(tmp_path / "theirs", plain, config=named, model={"model_type": model_type})
    theirs, ours = AutoTokenizer.from_pretrained(file.parent), Tokenizer.load(file)
    same = ours.encode("e\u0301") == theirs.encode("e\u0301", add_special_tokens=False)
    assert same == (not ours.notes) == (model_type == "olmo2") and ours.vocab_size == len(theirs) == 257
    by_call = "PreTrainedTokenizerFast.from_pretrained(FOLDER) does so"
    assert all("with this class transformers 5 cuts" in note and by_call in note for note in ours.notes)


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
@pytest.mark.parametrize("step", [None, {"type": "Digits", "individual_digits": True}])
def test_what_the_class_of_llama_does_is_said(plain: str, step: dict | None, model_type: str, tmp_path: Path) -> None:
    """transformers 5 puts the class's own steps in the place of the file's, except with models of Mistral's type. The
    class's special tokens are those that no file names."""
    tree = json.loads(plain) | {"pre_tokenizer": step, "decoder": None}
    tree["model"]["vocab"] |= {"\u2581": 257, "<s>": 258, "12": 259}
    tree["model"]["merges"] = [["1", "2"]]
    config = {"tokenizer_class": "LlamaTokenizerFast", "unk_token": "<|end|>"}
    file = write(tmp_path, json.dumps(tree), config=config, model={"model_type": model_type})
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(file)
    same = ours.encode("12") == theirs.encode("12", add_special_tokens=False)
    assert ours.bos_id == (258 if theirs.bos_token_id is not None else -1)
    assert same == (model_type == "mistral") == (theirs.bos_token_id is None)
    said = [note for note in ours.notes if "json (tokenizer_class LlamaTokenizerFast): with this class" in note]
    kinds = [] if same else ["puts a space before a text"] + (["cuts a text by Metaspace"] if step else [])
    assert [kind in note for kind, note in zip(kinds, said, strict=True)] == [True] * len(kinds)


@pytest.mark.parametrize("of_class", ["T5Tokenizer", "XLMRobertaTokenizerFast", "CodeLlamaTokenizer"])
def test_what_classes_of_sentencepiece_do_is_said(of_class: str, tmp_path: Path) -> None:
    pieces = [["<unk>", 0.0], ["\u2581", -1.0], ["a", -1.0], ["<s>", 0.0], ["</s>", 0.0], ["<pad>", 0.0], ["  ", -2.0]]
    tree = {"model": {"type": "Unigram", "unk_id": 0, "vocab": pieces}, "added_tokens": []}
    file = write(tmp_path, json.dumps(tree), config={"tokenizer_class": of_class, "eos_token": "</s>"})
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(file)
    assert ours.encode("a  a") != theirs.encode("a  a", add_special_tokens=False)
    assert any(f"(tokenizer_class {of_class}): with this class transformers 5" in note for note in ours.notes)


def test_merges_are_not_left_out_by_chance(plain: str, tmp_path: Path) -> None:
    file = write(tmp_path, merging(plain, dropout=1.0).replace("true}, {", "false}, {"))
    (said,) = (ours := Tokenizer.load(file)).notes
    assert "leaves out merges by chance (model.dropout 1.0)" in said and ours.encode("12") == [257]


def test_a_space_that_only_the_pipeline_adds_is_said(tmp_path: Path) -> None:
    tree = json.loads(tokenizer_files(published_tokenizer(), 128)["tokenizer.json"])
    tree["normalizer"] = {"type": "Prepend", "prepend": "\u2581"}
    config = {"add_prefix_space": False, "tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(json.dumps(tree))
    (said,) = Tokenizer.load(tmp_path / "tokenizer.json").notes
    assert "add_prefix_space false, tokenizer.json puts a space before a text: the latter is taken" in said


def test_what_is_added_and_what_is_left_out_is_said(plain: str, tmp_path: Path) -> None:
    said = Tokenizer.load(write(tmp_path / "a", plain, **CASES["decoder"])).notes
    assert (
        len(said) == 1 and "adds tokens that tokenizer.json lacks: '<|im_start|>' (257), '<|im_end|>' (258)" in said[0]
    )
    said = Tokenizer.load(write(tmp_path / "c", plain, config={"tokenizer_class": "GPT2Tokenizer"})).notes
    assert any(line.endswith("lacks: '<|endoftext|>' (257)") for line in said), said
    said = Tokenizer.load(write(tmp_path / "b", plain, **CASES["found otherwise than tokenizer.json says"])).notes
    assert (
        len(said) == 1
        and "otherwise than tokenizer.json how these tokens are found in a text: '<|end|>' (256)" in said[0]
    )
    said = Tokenizer.load(write(tmp_path / "c", plain, **CASES["the decoder alone of all"])).notes
    assert "added_tokens.json has '<tool>', left out: transformers does not read it" in said[1]
    said = Tokenizer.load(write(tmp_path / "d", plain, **CASES["the map before the configuration"])).notes
    assert "(bos_token) is '<|im_start|>'" in said[0] and "is '<think>': the former is taken" in said[0]
    assert Tokenizer.load(write(tmp_path / "e", plain)).notes == []


CONTRADICTIONS: dict[str, tuple[dict[str, dict], str]] = {
    "an id of another token": (
        {"added": {START: 256}},
        "json gives '<.im_start.>' the id 256; .*json it is 257, where 256 is '<.end.>'",
    ),
    "an id behind a gap": (
        {"config": {"added_tokens_decoder": {"300": stated(START)}}},
        "'<.im_start.>' the id 300; in .* it is 257: they",
    ),
    "another id": (
        {"config": {"added_tokens_decoder": {"255": stated("<|end|>")}}},
        r"gives '<\|end\|>' the id 255; in .* it is 256, where 255 is ",
    ),
    "two files": (
        {"config": {"added_tokens_decoder": BOTH}, "added": {START: 259}},
        "added_tokens.json gives '<.im_start.>' the id 259",
    ),
    "no token": ({"config": {"eos_token": 5}}, r"tokenizer_config.json: eos_token: 5 is no token; write its text"),
    "no text": ({"config": {"added_tokens_decoder": {"257": "x"}}}, r"\(added_tokens_decoder\): 257: 'x' is no token"),
    "no flag": (
        {"config": {"added_tokens_decoder": {"257": stated(START, lstrip="no")}}},
        "257: lstrip is 'no'; it is true or false",
    ),
    "no list": ({"config": {"additional_special_tokens": "x"}}, "additional_special_tokens holds str, not a list"),
    "no ids": ({"config": {"added_tokens_decoder": [START]}}, r"\(added_tokens_decoder\) holds list, not tokens by"),
    "no id": ({"added": {START: "first"}}, "'<.im_start.>': the id 'first' is no number"),
    "versions": (
        {"config": {"fast_tokenizer_files": ["tokenizer.4.0.0.json", "tokenizer.json"]}},
        "fast_tokenizer_files names tokenizer.4.0.0.json, .* rename",
    ),
    "no template": ({"config": {"chat_template": 7}}, "tokenizer_config.json: chat_template is no Jinja template"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradictions_are_named(plain: str, name: str, tmp_path: Path) -> None:
    files, message = CONTRADICTIONS[name]
    with pytest.raises(ConfigError, match=message):
        Tokenizer.load(write(tmp_path, plain, **files))


OTHER_FORMATS: dict[str, tuple[str, bytes, str]] = {
    "tiktoken": (
        "tokenizer.model",
        b"IQ== 0\nIg== 1\nIGFuZA== 2\n",
        "is a file of tiktoken, .* name the tokenizer.json",
    ),
    "vocabulary": ("vocab.json", b'{"a": 0}', r"has no key model, as vocab.json.*; AutoTokenizer.from_pretrained\(FOL"),
    "Mistral's": ("tekken.json", b'{"config": {}, "vocab": []}', "is not a tokenizer.json .* it has no key model"),
    "folder": (".", b"", "is a folder; it has vocab.json and no tokenizer.json, which AutoTokenizer.* writes"),
}


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_files_of_other_formats_are_named(name: str, tmp_path: Path) -> None:
    file, content, message = OTHER_FORMATS[name]
    for path, text in ((tmp_path / file, content), (tmp_path / "vocab.json", b'{"a": 0}')):
        if path != tmp_path:
            path.write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        Tokenizer.load(tmp_path / file)


def test_a_byte_order_mark_is_no_part_of_a_tokenizer(plain: str, tmp_path: Path) -> None:
    file = write(tmp_path, plain)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert Tokenizer.load(file).encode("Hi") == Tokenizer.load(write(tmp_path / "b", plain)).encode("Hi")


# -- SentencePiece -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pieces() -> Tokenizer:
    """A SentencePiece model of 400 tokens without a space before every text, which transformers would leave out."""
    return published_tokenizer(add_dummy_prefix=False)


def beside_pieces(folder: Path, pieces: Tokenizer, config: dict, added: dict | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(pieces.model)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if added:
        (folder / "added_tokens.json").write_text(json.dumps(added))
    return folder / "tokenizer.model"


def test_a_sentencepiece_model_gets_tokens_and_templates(pieces: Tokenizer, tmp_path: Path) -> None:
    tokens = {"400": stated(START), "401": stated(END), "402": stated("<think>", special=False)}
    template = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{{ pad_token }}{% endfor %}"
    config = {"added_tokens_decoder": tokens, "eos_token": END, "pad_token": "<unk>", "chat_template": template}
    file = beside_pieces(tmp_path / "theirs", pieces, config)
    theirs, ours = AutoTokenizer.from_pretrained(file.parent), Tokenizer.load(file)
    text = "<|im_start|>the model<|im_end|>\n <think>of 12<think><|im_end|>"
    copy = tmp_path / "copy/tokenizer.model"
    copy.parent.mkdir()
    ours.write(copy.parent)
    for each in (ours, Tokenizer.load(copy)):
        assert each.encode(text) == theirs.encode(text, add_special_tokens=False)
        assert (each.vocab_size, each.eos_id, each.bos_id) == (403, 401, pieces.bos_id)
        assert each.is_control(400) and each.is_control(401) and not each.is_control(402)
        assert each.chat_template == template and each.special_tokens["pad_token"] == "<unk>"
        assert each.decode(each.encode(text)) == "the model\n <think>of 12<think>"
    assert [END in note for note in ours.notes] == [True, True] and "eos_token" in ours.notes[1]
    exported = exported_to(copy.parent, ours)
    assert exported.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    talk = [{"role": "user", "content": "the model"}]
    assert exported.apply_chat_template(talk, tokenize=False) == theirs.apply_chat_template(talk, tokenize=False)


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
def test_a_space_behind_control_tokens_is_said(name: str, legacy: bool, tmp_path: Path) -> None:
    """transformers asks the key legacy, which neither SentencePiece nor the tokenizers package knows."""
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": legacy, "chat_template": "{{ messages }}"}
    file = beside_pieces(tmp_path, published_tokenizer(), config | {"eos_token": "</s>"})
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    if name == "tokenizer.json":  # Files of before version 5 are like this.
        tree = json.loads(theirs.backend_tokenizer.to_str()) | {"pre_tokenizer": None}
        steps = [{"type": "Prepend", "prepend": "\u2581"}]
        steps += [{"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}]
        file = tmp_path / name
        file.write_text(json.dumps(tree | {"normalizer": {"type": "Sequence", "normalizers": steps}}))
        theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.load(file)
    found = ours.encode("</s>the model")
    same = found == theirs.encode("</s>the model", add_special_tokens=False)
    assert same == legacy == (not any("before a text also behind a control token" in note for note in ours.notes))
    assert ours.encode(" the model") != theirs.encode(" the model", add_special_tokens=False)
    assert sum("no space before a text that begins with a space" in note for note in ours.notes) == 1


def test_a_template_and_a_bos_do_not_change_the_identity(pieces: Tokenizer, tmp_path: Path) -> None:
    """Data that was prepared with the bare SentencePiece model still fits."""
    file = beside_pieces(tmp_path, pieces, {"chat_template": "{{ messages }}", "add_bos_token": True})
    ours = Tokenizer.load(file)
    assert (ours.sha256, ours.prefix, ours.notes) == (pieces.sha256, [ours.bos_id], [])
    # Copies of older versions end like this, in a field of SentencePiece's format.
    content = b'{"beside_sentencepiece": {"add_bos_token": true, "chat_template": "' + b"x" * 200 + b'"}}'
    for end in (b"\x0dadd_bos_token", bytes([len(content) & 127 | 128, len(content) >> 7]) + content):
        copy = Tokenizer(pieces.model + b"\xc2\x0c" + end)
        assert (copy.prefix, copy.sha256, copy.model) == ([ours.bos_id], pieces.sha256, pieces.model)
    assert copy.chat_template == "x" * 200
    (tmp_path / "a.txt").write_text("the model")
    for name, given in (("a", file), ("b", tmp_path / "out/tokenizer.model"), ("c", tmp_path / "bare/tokenizer.model")):
        given.parent.mkdir(exist_ok=True)
        if name == "c":
            given.write_bytes(pieces.model)
        quiet([str(tmp_path / "a.txt")], tmp_path / "out" / name, tokenizer=given)
        assert Tokenizer.load(tmp_path / "out/tokenizer.model").chat_template == "{{ messages }}"


def test_a_free_place_of_a_sentencepiece_model_gets_its_token(tmp_path: Path) -> None:
    pieces = published_tokenizer(add_dummy_prefix=False, control_symbols=["<unused0>"], vocab_size=401)
    number = next(each for each in range(401) if pieces._codec._processor.id_to_piece(each) == "<unused0>")
    file = beside_pieces(tmp_path, pieces, {"added_tokens_decoder": {str(number): stated(END)}})
    ours, theirs = Tokenizer.load(file), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.encode(END) == theirs.encode(END, add_special_tokens=False) == [number]
    assert f"names token {number} '<|im_end|>', in the place of '<unused0>'" in ours.notes[0]


@pytest.mark.parametrize(("config", "added", "message"), [
    (
        {"added_tokens_decoder": {"400": stated(END, rstrip=True)}},
        None,
        r"'<\|im_end\|>' takes the spaces around it.*save_pretr",
    ),
    ({}, {END: 500}, r"gives '<\|im_end\|>' the id 500; in .*tokenizer\.model it is 400: they"),
    (
        {"added_tokens_decoder": {"300": stated(END)}},
        None,
        r"the id 300; in .*tokenizer\.model it is 400, where 300 is ",
    ),
])  # fmt: skip
def test_what_a_sentencepiece_model_cannot_hold_is_named(
    pieces: Tokenizer, config: dict, added: dict | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        Tokenizer.load(beside_pieces(tmp_path, pieces, config, added))


# -- templates ---------------------------------------------------------------------------------------------------------

NAMED = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
TEMPLATES: dict[str, dict[str, object]] = {
    "tokenizer_config.json": {"tokenizer_config.json": {"chat_template": "A"}},
    "a list": {"tokenizer_config.json": {"chat_template": NAMED}},
    "an object": {"tokenizer_config.json": {"chat_template": {"default": "A", "tool_use": "B"}}},
    "jinja": {"chat_template.jinja": "A"},
    "jinja before json": {"chat_template.jinja": "A", "tokenizer_config.json": {"chat_template": NAMED[1:]}},
    "a folder": {"chat_template.jinja": "A", "additional_chat_templates/tool_use.jinja": "B"},
    "lines of another system": {"chat_template.jinja": "A\r\nB"},
}


def write_all(folder: Path, plain: str, files: dict[str, object]) -> Path:
    write(folder, plain)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        if isinstance(content, dict):
            content = json.dumps({"eos_token": "<|end|>"} | content)
        (folder / name).write_bytes(str(content).encode())
    return folder / "tokenizer.json"


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_those_of_transformers(plain: str, name: str, tmp_path: Path) -> None:
    file = write_all(tmp_path, plain, TEMPLATES[name])
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.load(file)
    assert ours.chat_template == theirs.get_chat_template()
    with_tools = ours.chat_templates.get("tool_use", ours.chat_template)
    assert with_tools == theirs.get_chat_template(tools=[{}])
    assert len(ours.notes) == (name == "jinja before json")
    exported = exported_to(tmp_path / "out", ours)
    assert exported.get_chat_template(tools=[{}]) == with_tools
    assert exported.get_chat_template() == ours.chat_template


def test_a_processors_template_is_read_if_there_is_no_other(plain: str, tmp_path: Path) -> None:
    file = write_all(tmp_path, plain, {"chat_template.json": {"chat_template": "A"}})
    assert Tokenizer.load(file).chat_template == "A"
    write_all(tmp_path, plain, {"tokenizer_config.json": {"chat_template": "B"}})
    assert Tokenizer.load(file).chat_template == AutoTokenizer.from_pretrained(tmp_path).get_chat_template() == "B"
    (note,) = Tokenizer.load(file).notes
    assert "chat_template.json differ" in note
