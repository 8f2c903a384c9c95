"""A tokenizer as transformers makes it of its file and of the files beside it: a tokenizer file that has all tokens,
and the content of one tokenizer_config.json, with special tokens and chat templates. A tokenizer travels as these two
files, to the folders of token files and of runs.

Earlier versions wrote one file. It had the configuration under a key of tokenizer.json, or in a field of its own at the
end of a SentencePiece model. Such copies are read.
"""

from __future__ import annotations

import hashlib
import json
import re
from codecs import BOM_UTF8
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from sagetrain.config.errors import ConfigError, some
from sagetrain.data.tokenizer_config import CONFIG, OF_LLAMA, Beside, Stated, read_beside

TOKENIZER_CONFIG = "tokenizer_config"
"""The key under which copies of tokenizer.json by earlier versions hold what lay beside the published file."""
SPLIT_SPECIAL = "split_special_tokens"
"""The key of tokenizer_config.json with which transformers reads control tokens in a text as their characters."""
CONVERT = "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
"""The call of transformers that writes a tokenizer.json from other files of a tokenizer."""
_ADD_BOS = b"\xc2\x0c\x0dadd_bos_token"
_BEGIN = re.compile(rb'\xc2\x0c[\x80-\xff]*[\0-\x7f](?=\{"beside_sentencepiece": )')
"""The ends of copies of SentencePiece models by earlier versions: field 200, with a word or with JSON."""
# These classes add bos by their documentation, although transformers 5 does not.
_LLAMA = ("LlamaTokenizer", "CodeLlamaTokenizer")
# With these classes, transformers leaves tokenizer.json as it is.
_GENERIC = ("", "PreTrainedTokenizer", "TokenizersBackend")
# With these classes, transformers 5 puts together its own steps of this kind before the merges of a tokenizer.json.
_STEPS = {
    "GPT2Tokenizer RobertaTokenizer BartTokenizer WhisperTokenizer": {"ByteLevel"},
    "GPTNeoXTokenizer": {"NFC", "ByteLevel"},
    "Qwen2Tokenizer Qwen3_5Tokenizer": {"NFC", "Split", "ByteLevel"},
    "CohereTokenizer": {"NFC", "Digits", "ByteLevel"},
    " ".join(_LLAMA): {"Metaspace"},
    "T5Tokenizer XLMRobertaTokenizer CamembertTokenizer": {"Precompiled", "WhitespaceSplit", "Metaspace"},
}
_REBUILT = {of_class: steps for classes, steps in _STEPS.items() for of_class in classes.split()}
_AS_BEFORE = "the latter is taken, as versions up to 4 did"
_BY_CLASS = "the class PreTrainedTokenizerFast makes transformers 5 do so, too"
BY_CALL = "PreTrainedTokenizerFast.from_pretrained(FOLDER) does so in transformers 5, too, and AutoTokenizer does not"
_OF_BERT = {
    "do_lower_case": ("lowercase", True),
    "strip_accents": ("strip_accents", None),
    "tokenize_chinese_chars": ("handle_chinese_chars", True),
}
"""The keys of tokenizer_config.json for BERT's normalizer, with its own name and the default of each."""
_NAMED = 8  # A message names this many tokens.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # These are SentencePiece's types of pieces.


def is_json(model: bytes) -> bool:
    """Whether a file is a tokenizer.json, and not a SentencePiece model. It may begin with a byte order mark."""
    return model.removeprefix(BOM_UTF8).lstrip()[:1] == b"{"


def sha256_of(model: bytes, config: Mapping[str, Any] | None) -> str:
    """Return a hash that identifies a tokenizer, from its file and its configuration. For a SentencePiece model it does
    not depend on the bos before texts or on chat templates, so that token files fit whatever lies beside it. For a
    tokenizer.json it is the hash of the copy that earlier versions wrote."""
    if config is not None and is_json(model):
        model = json.dumps(json.loads(model) | {TOKENIZER_CONFIG: config}, ensure_ascii=False).encode()
    return hashlib.sha256(model).hexdigest()


def parted(model: bytes) -> tuple[bytes, dict[str, Any] | None]:
    """Split the copy of an earlier version into a tokenizer file and its configuration, which is None for other
    files."""
    if is_json(model):
        # A published file may be of tens of MB, and is read once more below.
        tree = json.loads(model) if f'"{TOKENIZER_CONFIG}"'.encode() in model else {}
        config = tree.pop(TOKENIZER_CONFIG, None)
        return (model if config is None else json.dumps(tree, ensure_ascii=False).encode()), config
    if model.endswith(_ADD_BOS):
        return model.removesuffix(_ADD_BOS), {"add_bos_token": True}
    found = [*_BEGIN.finditer(model)]
    if not found:
        return model, None
    return model[: found[-1].start()], json.loads(model[found[-1].end() :])["beside_sentencepiece"]


def completed(model: bytes, file: Path) -> tuple[bytes, dict[str, Any], list[str]]:
    """Complete the content of a tokenizer file by what lies beside it, unless the file is the copy of an earlier
    version. Return the content, the configuration, and sentences about what the other files add. Raises ConfigError if
    they contradict the tokenizer."""
    model, config = parted(model)
    if config is not None:
        return model, config, []
    beside = read_beside(file.parent)
    return (_with_json if is_json(model) else _with_sentencepiece)(model, beside, file)


def _with_json(model: bytes, beside: Beside, file: Path) -> tuple[bytes, dict[str, Any], list[str]]:
    tree: dict[str, Any] = json.loads(model)
    published = _settings(tree)
    for key in ("normalizer", "pre_tokenizer", "post_processor"):
        if not isinstance(tree.get(key) or {}, dict):
            raise ValueError(f"a tokenizer.json of the tokenizers package: its {key} holds {type(tree[key]).__name__}")
    if beside.overruled is not None:
        beside.of_class = beside.overruled
    notes = [*beside.notes, *_prefix_space(tree, beside, file), *_bert_steps(tree, beside, file)]
    notes += _other_steps(tree, beside, file)
    if "model" not in tree:
        raise ValueError(
            "a tokenizer.json of the tokenizers package: it has no key model, as vocab.json, tekken.json and "
            f"tokenizer_config.json have none; {CONVERT} writes a tokenizer.json"
        )
    try:
        added = {entry["id"]: _added(entry) for entry in tree.get("added_tokens") or []}
        vocabulary = tree["model"]["vocab"]
        if isinstance(vocabulary, list):  # This is a list of pieces with scores, in the order of ids.
            vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
        last = max(vocabulary.values()) + len({each.content for each in added.values()} - vocabulary.keys())
        special = [each for each in _special_ids(tree) if each[2] > last]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"a tokenizer.json of the tokenizers package ({error!r})") from error
    if tree["model"].get("dropout"):
        notes.append(
            f"{file} leaves out merges by chance (model.dropout {tree['model']['dropout']}): all merges are taken "
            "here, so that a text has the same tokens at every call"
        )
        tree["model"]["dropout"] = None
    numbers = vocabulary | {each.content: number for number, each in added.items()}
    if beside.of_class in _LLAMA and "ByteLevel" not in _kinds(_steps(tree)):
        for name, text in OF_LLAMA.items():
            if text in numbers and name not in beside.config:
                token = AddedToken(text, special=True, normalized=False)
                beside.named.setdefault(name, Stated(token, beside.class_said))
    if missing := [each for each in _additions(beside, added.values()) if each.token.content]:
        try:
            pipeline = tokenizers.Tokenizer.from_str(json.dumps(tree))
        except Exception as error:
            raise ValueError(f"a tokenizer.json of the tokenizers package ({error})") from error
        known = numbers
        pipeline.add_tokens([each.token for each in missing])
        tree["added_tokens"] = json.loads(pipeline.to_str())["added_tokens"]
        numbers = pipeline.get_vocab(with_added_tokens=True)
        notes += _said(missing, known, numbers, file)
        last = max(numbers.values())
    _check_numbers(beside, numbers, file)
    for key, text, number in special:
        if number > last:
            raise ConfigError(
                f"{file}: {key} gives {text!r} the id {number}, but ids end at {last}: write the id that the token has "
                "in the vocabulary, or copy the file again from where it was published"
            )
    notes += _left_out(beside, numbers)
    model = model if _settings(tree) == published else json.dumps(tree, ensure_ascii=False).encode()
    return model, _config(beside, ("bos_token", "eos_token", "unk_token", "pad_token")), notes


def _settings(tree: dict[str, Any]) -> str:
    """Return what a tokenizer.json says apart from its vocabulary and merges."""
    model = tree.get("model")
    return json.dumps([{**tree, "model": None}, model.get("dropout") if isinstance(model, dict) else model])


def _prefix_space(tree: dict[str, Any], beside: Beside, file: Path) -> list[str]:
    """Let the pipeline put a space before a text if tokenizer_config.json says so and transformers does it, which is
    with tokenizers of bytes. Return sentences about this, and about a space that the pipeline adds and transformers
    leaves out."""
    asked, of_class = beside.config.get("add_prefix_space"), beside.of_class
    parts = _steps(tree)
    before_all = any(part.get("type") == "Prepend" or part.get("prepend_scheme") == "always" for part in parts)
    puts = before_all or any(part.get("prepend_scheme") == "first" for part in parts)
    if of_class in _LLAMA and asked is not False and before_all:
        return [*_first_space(beside, file), *_space_in_chats(beside, file)]
    if of_class in _LLAMA and asked is not False and not puts and "ByteLevel" not in _kinds(parts):
        return [
            f"{beside.class_said}: with this class transformers 5 puts a space before a text, and {file.name} does "
            f"not: {_AS_BEFORE}; {_BY_CLASS}"
        ]
    if not isinstance(asked, bool) or of_class in _GENERIC:
        return []
    says = f"{file.parent / CONFIG} says add_prefix_space {str(asked).lower()}"
    other = [part for part in parts if part.get("type") == "ByteLevel" and part.get("add_prefix_space", True) != asked]
    if of_class in _LLAMA:  # With this class, transformers leaves a tokenizer of bytes as it is.
        other = []
    for part in other:
        part["add_prefix_space"] = asked
    if other:
        return [f"{says}, {file.name} the contrary: the former is taken, as transformers does"]
    if puts and not asked:
        return [f"{says}, {file.name} puts a space before a text: the latter is taken; transformers does the former"]
    return []


def _bert_steps(tree: dict[str, Any], beside: Beside, file: Path) -> list[str]:
    """Let the normalizer of BERT do what tokenizer_config.json says, or what is the default of BERT's class, as
    transformers does. Return sentences about what changes."""
    found = []
    for step in _steps(tree) if beside.of_class == "BertTokenizer" else ():
        for key, (name, default) in _OF_BERT.items() if step.get("type") == "BertNormalizer" else ():
            asked = beside.config.get(key, default)
            if step.get(name) != asked:
                found.append(f"{key} {json.dumps(asked)}")
                step[name] = asked
    says = f"{beside.class_said}: transformers has {', '.join(found)} by this class and {CONFIG}"
    return [f"{says}, {file.name} something else: the former is taken"] if found else []


def _steps(tree: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a pipeline does with a text before its model, step by step."""
    parts = [tree.get("normalizer") or {}, tree.get("pre_tokenizer") or {}]
    return [each for part in parts for each in part.get("normalizers") or part.get("pretokenizers") or [part] if each]


def _other_steps(tree: dict[str, Any], beside: Beside, file: Path) -> list[str]:
    """Say that transformers 5 cuts a text in another way than tokenizer.json, by the class of the tokenizer. SmolLM2 is
    published like this: its digits are tokens of their own, and GPT-2's are not."""
    differs = cut_otherwise(tree, beside.of_class, file.name)
    way = BY_CALL if beside.overruled else _BY_CLASS
    return [f"{beside.class_said}: with this class {differs}: {_AS_BEFORE}; {way}"] if differs else []


def cut_otherwise(tree: dict[str, Any], of_class: str, name: str = "tokenizer.json") -> str:
    """Say how transformers 5 cuts a text with a class of tokenizers, and how a tokenizer.json does. Return nothing if
    both do the same."""
    theirs, ours = _REBUILT.get(of_class), _kinds(_steps(tree))
    # transformers takes this table of characters from the file.
    if theirs is None or ours == theirs - ({"Precompiled"} - ours):
        return ""
    if of_class in _LLAMA and ("ByteLevel" in ours or ours <= {"Metaspace", "Prepend", "Replace"}):
        return ""  # transformers leaves a tokenizer of bytes as it is, and _prefix_space speaks of spaces.
    return (
        f"transformers 5 cuts a text by {', '.join(sorted(theirs))} for most models, and {name} by "
        f"{', '.join(sorted(ours)) or 'nothing'}"
    )


def _kinds(parts: Iterable[dict[str, Any]]) -> set[str]:
    return {str(part.get("type")) for part in parts}


def _first_space(beside: Beside, file: Path) -> list[str]:
    """Say that transformers 5 puts no space before a text that begins with one, with the classes of Llama. Such a text
    has a token less then than SentencePiece gives it."""
    return [
        f"{beside.class_said}: with this class transformers 5 puts no space before a text that begins with a space, "
        f"and {file.name} does: {_AS_BEFORE}; a run's export does so in transformers 5, too"
    ]


def _space_in_chats(beside: Beside, file: Path) -> list[str]:
    """Say that a tokenizer that puts a space before every text does so behind control tokens, too. transformers 5 does
    not, unless the key legacy is true."""
    if not beside.templates or beside.config.get("legacy"):
        return []
    return [
        f"{file} puts a space before a text also behind a control token, as transformers does if {CONFIG} says legacy "
        f"true; transformers 5 does not here, so that it has other tokens there in chats: {CONVERT} writes a "
        "tokenizer.json with these; name that"
    ]


def _added(entry: Mapping[str, Any]) -> AddedToken:
    return AddedToken(**{key: value for key, value in entry.items() if key != "id"})


def _with_sentencepiece(model: bytes, beside: Beside, file: Path) -> tuple[bytes, dict[str, Any], list[str]]:
    notes = list(beside.notes)
    stated = _additions(beside, ())
    if stated:
        model, said = _with_pieces(model, beside, stated, file)
        notes += said
    if _parsed(model).normalizer_spec.add_dummy_prefix:
        notes += [*(_first_space(beside, file) if beside.of_class in _LLAMA else []), *_space_in_chats(beside, file)]
    bos = beside.config.get("add_bos_token", beside.of_class in _LLAMA)
    return model, ({"add_bos_token": True} if bos else {}) | _config(beside, ()), notes


def _parsed(model: bytes) -> Any:
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    try:
        proto.ParseFromString(model)
    except Exception as error:
        raise ValueError("a SentencePiece model file, nor a tokenizer.json") from error
    return proto


def _with_pieces(model: bytes, beside: Beside, stated: list[Stated], file: Path) -> tuple[bytes, list[str]]:
    """Add the tokens that other files state to a SentencePiece model. Special tokens become control pieces, and others
    are found in any text. The model's bos and eos become those that the files name."""
    proto = _parsed(model)
    numbers = {piece.piece: number for number, piece in enumerate(proto.pieces)}
    known, notes, changed = set(numbers), [], False
    for each in stated:
        text, kind = each.token.content, _CONTROL if each.token.special else _USER_DEFINED
        if each.token.lstrip or each.token.rstrip or each.token.single_word:
            raise ConfigError(
                f"{each.source}: {text!r} takes the spaces around it, or whole words alone (lstrip, rstrip, "
                f"single_word), which a SentencePiece model cannot hold: convert {file.name} with transformers "
                f"({CONVERT}) and name its tokenizer.json"
            )
        place = each.number if each.number is not None else len(proto.pieces)
        if text in numbers:
            piece = proto.pieces[numbers[text]]
            if piece.type == _NORMAL or (piece.type, kind) == (_USER_DEFINED, _CONTROL):
                piece.type, changed = kind, True
        elif place < len(proto.pieces) and (piece := proto.pieces[place]).type in (_CONTROL, _USER_DEFINED):
            notes.append(f"{each.source} names token {place} {text!r}, in the place of {piece.piece!r} of {file.name}")
            numbers[text] = numbers.pop(piece.piece)
            piece.piece, piece.type, changed = text, kind, True
            known.add(text)
        else:
            numbers[text] = len(proto.pieces)
            proto.pieces.add(piece=text, score=0.0, type=kind)
            changed = True
    _check_numbers(beside, numbers, file)
    notes += _said([each for each in stated if each.token.content not in known], known, numbers, file)
    notes += _left_out(beside, numbers)
    spec = proto.trainer_spec
    for name in ("bos", "eos"):
        named = beside.named.get(f"{name}_token")
        theirs = getattr(spec, f"{name}_piece")
        if named and named.token.content != theirs:
            setattr(spec, f"{name}_piece", named.token.content)
            setattr(spec, f"{name}_id", numbers[named.token.content])
            notes.append(f"{named.source} is {named.token.content!r}, not {theirs!r} as {file} has it")
            changed = True
    return (proto.SerializeToString() if changed else model), notes


def _additions(beside: Beside, there: Iterable[AddedToken]) -> list[Stated]:
    """Return the tokens that transformers adds to those of a tokenizer file, in its order. First come tokens with ids
    that are missing there, or that are found differently in a text, then special tokens that are missing there, or that
    are no special tokens there."""
    there = [*there]
    same, texts = {repr(each) for each in there}, {each.content for each in there}
    ordinary = {each.content for each in there if not each.special}
    missing = [
        each
        for each in beside.numbered
        if repr(each.token) not in same and not (beside.legacy and each.token.content in texts)
    ]
    texts |= {each.token.content for each in missing}
    unread = {each.source for each in beside.unread}
    names = [each for each in beside.named.values() if each.source not in unread]
    # A token that is stated several times is added as often. The last one says how it is found.
    missing += [each for each in [*names, *beside.more] if each.token.content not in texts - ordinary]
    named = {each.token.content for each in names}
    return [_special(each) if each.token.content in named else each for each in missing]


def _special(stated: Stated) -> Stated:
    token = stated.token
    flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}
    return Stated(
        AddedToken(token.content, **flags, normalized=token.normalized, special=True), stated.source, stated.number
    )


def _check_numbers(beside: Beside, numbers: Mapping[str, int], file: Path) -> None:
    """Check that no file gives a token another id than the tokenizer has or would give it. Raises ConfigError if one
    does."""
    for each in [*beside.numbered, *beside.unread]:
        text, found = each.token.content, numbers.get(each.token.content)
        if each.number is not None and found is not None and found != each.number:
            holder = [f", where {each.number} is {other!r}" for other, at in numbers.items() if at == each.number]
            raise ConfigError(
                f"{each.source} gives {text!r} the id {each.number}; in {file} it is {found}{''.join(holder)}: they "
                "belong to different tokenizers, or one of them was edited; copy both again from where they were "
                "published"
            )


def _special_ids(tree: Mapping[str, Any]) -> Iterable[tuple[str, str, int]]:
    """Yield the ids that a tokenizer.json gives its special tokens: the key, the token's text, and the id."""
    for each in tree.get("added_tokens") or []:
        yield "added_tokens", each["content"], each["id"]
    post = tree.get("post_processor") or {}
    for step in post.get("processors") or [post]:
        for each in step.get("special_tokens", {}).values():
            yield from (("post_processor", each["id"], number) for number in each["ids"])
        yield from (("post_processor", *step[key]) for key in ("sep", "cls") if key in step)


def _said(missing: Iterable[Stated], known: Container[str], numbers: Mapping[str, int], file: Path) -> list[str]:
    """Return sentences about tokens that were added, and about those that are now found differently."""
    by_source: dict[tuple[str, bool], dict[str, None]] = {}  # One token may have several names.
    for each in missing:
        text = each.token.content
        by_source.setdefault((each.source, text in known), {})[f"{text!r} ({numbers[text]})"] = None
    return [
        f"{source} says otherwise than {file.name} how these tokens are found in a text: {some([*texts], _NAMED)}"
        if there
        else f"{source} adds tokens that {file.name} lacks: {some([*texts], _NAMED)}"
        for (source, there), texts in by_source.items()
    ]


def _left_out(beside: Beside, numbers: Container[str]) -> list[str]:
    """Drop tokens that stand only in files that transformers does not read. Return sentences about them."""
    lost: dict[str, list[str]] = {}
    for each in beside.unread:
        if each.token.content not in numbers:
            lost.setdefault(each.source, []).append(repr(each.token.content))
            beside.named = {name: named for name, named in beside.named.items() if named.source != each.source}
    return [
        f"{source} has {some(texts, _NAMED)}, left out: transformers does not read it beside added_tokens_decoder"
        for source, texts in lost.items()
    ]


def _config(beside: Beside, names: Iterable[str]) -> dict[str, Any]:
    """Return what travels: the chat templates, and the special tokens with these names or that a template uses."""
    templates = beside.templates
    used = [name for name in beside.named if any(re.search(rf"\b{name}\b", each) for each in templates.values())]
    config: dict[str, Any] = {
        name: beside.named[name].token.content for name in dict.fromkeys([*names, *used]) if name in beside.named
    }
    config |= {SPLIT_SPECIAL: True} if beside.config.get(SPLIT_SPECIAL) is True else {}
    return config | ({"chat_template": named_templates(templates)} if templates else {})


def named_templates(templates: Mapping[str, str]) -> str | list[dict[str, str]]:
    """Return chat templates as tokenizer_config.json writes them: a single default one without its name, or a list."""
    if [*templates] == ["default"]:
        return templates["default"]
    return [{"name": name, "template": text} for name, text in templates.items()]


def kept_templates(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates that `_config` kept, by name."""
    kept = config.get("chat_template")
    if isinstance(kept, list):
        return {each["name"]: each["template"] for each in kept}
    return {"default": kept} if kept else {}
