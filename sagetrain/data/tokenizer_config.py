"""The files beside a tokenizer, as transformers finds them: further tokens, names of special tokens and chat templates.

transformers reads tokenizer_config.json. special_tokens_map.json and added_tokens.json count if that has no
added_tokens_decoder. Templates in files of their own have priority over those of tokenizer_config.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from sagetrain.config.errors import ConfigError, is_there, refuse_pointer

CONFIG, SPECIAL_TOKENS, ADDED_TOKENS = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
BESIDE = (
    *(CONFIG, SPECIAL_TOKENS, ADDED_TOKENS),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates"),
)
"""Files that change what a tokenizer beside them means."""
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_END = "<|endoftext|>"
_OF_CLASS = {
    "GPT2Tokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END},
    "GPTNeoXTokenizer": {"bos_token": _END, "eos_token": _END, "unk_token": _END, "pad_token": "<|padding|>"},
    "Qwen2Tokenizer": {"eos_token": _END, "unk_token": _END, "pad_token": _END},
}
"""The special tokens that classes of transformers have where no file says otherwise."""
OF_LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
"""The special tokens of LlamaTokenizer, which count if the tokenizer has tokens with these texts."""
_OF_MODEL = {
    "gpt2": "GPT2Tokenizer",
    "gpt_neox": "GPTNeoXTokenizer",
    "cohere": "CohereTokenizer",
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "Qwen2Tokenizer"),
}
"""The classes of tokenizers that transformers takes by the model_type of config.json, where no file names a class."""
OVERRULED = {
    "qwen2": "Qwen2Tokenizer",
    **dict.fromkeys(("mistral", "mistral3", "ministral", "mixtral", "olmo2", "olmo3", "phi3", "granite", "glm4"), ""),
}
"""The classes that transformers 5 takes by the model_type of config.json for a tokenizer.json, whatever class the files
name. Without a class, the file is taken as it is."""
# The latter key was used until version 5 of transformers.
_EXTRA = ("extra_special_tokens", "additional_special_tokens")
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_DECODER, _TEMPLATE = "added_tokens_decoder", "chat_template"
_VERSIONS = "fast_tokenizer_files"


@dataclass(frozen=True)
class Stated:
    """A token that one of the files states."""

    token: AddedToken
    source: str
    """The file, and the key in the file."""
    number: int | None = None
    """The token's id, if the file gives one."""


@dataclass
class Beside:
    """The contents of the files beside a tokenizer."""

    config: dict[str, Any] = field(default_factory=dict)
    """The content of tokenizer_config.json."""
    of_class: str = ""
    """The class of the tokenizer, without Fast at its end. It is empty if no file says it."""
    class_said: str = ""
    """The file and the key that say the class, and the class as it stands there."""
    overruled: str | None = None
    """The class that transformers 5 takes for a tokenizer.json in place of `of_class`, because of the model_type of
    config.json. It is empty if transformers takes the file as it is."""
    numbered: list[Stated] = field(default_factory=list)
    """Tokens with ids, in the order of the ids."""
    legacy: bool = False
    """This is true if the ids are from added_tokens.json, which does not say how tokens are found in a text."""
    named: dict[str, Stated] = field(default_factory=dict)
    """Special tokens by name: "eos_token"."""
    more: list[Stated] = field(default_factory=list)
    """Special tokens without a name."""
    unread: list[Stated] = field(default_factory=list)
    """Tokens in files that transformers does not read, because there is an added_tokens_decoder."""
    templates: dict[str, str] = field(default_factory=dict)
    """Chat templates by name: "default", "tool_use"."""
    notes: list[str] = field(default_factory=list)
    """Sentences about files that contradict each other, and which of them counts."""


def read_beside(folder: Path) -> Beside:
    """Read the files of a folder that complete its tokenizer. Raises ConfigError if a file is not valid; the message
    names file, key and rule."""
    config, mapped, added = (keys_in(folder / name) for name in (CONFIG, SPECIAL_TOKENS, ADDED_TOKENS))
    if others := [name for name in config.get(_VERSIONS) or [] if name != "tokenizer.json"]:
        raise ConfigError(
            f"{folder / CONFIG}: {_VERSIONS} names {', '.join(map(str, others))}, and transformers takes one of these "
            f"by its own version: rename the file that is meant to tokenizer.json, and delete {_VERSIONS}"
        )
    found = Beside(config, *_class(folder, config))
    has_decoder = config.get(_DECODER) is not None
    _read_named(found, folder, mapped, has_decoder)
    found.more = _extra(folder / CONFIG, config, _EXTRA)
    if not has_decoder:
        found.more += _extra(folder / SPECIAL_TOKENS, mapped, _EXTRA[:1])
        if isinstance(config.get(_EXTRA[0]), dict) or not {*_EXTRA} & config.keys():
            found.more += _extra(folder / SPECIAL_TOKENS, mapped, _EXTRA[1:])
    special = {each.token.content for each in [*found.named.values(), *found.more]}
    legacy = [
        Stated(
            AddedToken(text, special=text in special, normalized=text not in special),
            str(folder / ADDED_TOKENS),
            _number(number, f"{folder / ADDED_TOKENS}: {text!r}"),
        )
        for text, number in added.items()
    ]
    if has_decoder:
        where = f"{folder / CONFIG} ({_DECODER})"
        if not isinstance(config[_DECODER], dict):
            raise ConfigError(f"{where} holds {type(config[_DECODER]).__name__}, not tokens by their ids")
        found.numbered = [
            Stated(_token(value, f"{where}: {number}", False), where, _number(number, where))
            for number, value in config[_DECODER].items()
        ]
        found.unread += legacy + _extra(folder / SPECIAL_TOKENS, mapped, _EXTRA)
    else:
        found.numbered, found.legacy = legacy, True
    found.numbered.sort(key=lambda each: each.number or 0)
    found.templates = _templates(folder, config, found.notes)
    return found


def _read_named(found: Beside, folder: Path, mapped: dict[str, Any], has_decoder: bool) -> None:
    """Find the special tokens that have names. If both files give a name, transformers takes special_tokens_map.json,
    unless tokenizer_config.json has an added_tokens_decoder."""
    trees = [(folder / CONFIG, found.config), (folder / SPECIAL_TOKENS, mapped)]
    for file, tree in trees if has_decoder else reversed(trees):
        given = {key: value for key, value in tree.items() if key in _NAMES or _own_name(key, value)}
        for key in ("extra_special_tokens", "model_specific_special_tokens"):
            if isinstance(extra := tree.get(key), dict):
                given |= extra
        for name, value in given.items():
            if value is None or value == "":
                continue
            stated = Stated(_token(value, f"{file}: {name}", True), f"{file} ({name})")
            if has_decoder and tree is mapped and name not in found.named:
                found.unread.append(stated)
            taken = found.named.setdefault(name, stated)
            if taken.token.content != stated.token.content:
                found.notes.append(
                    f"{taken.source} is {taken.token.content!r}, {stated.source} is {stated.token.content!r}: the "
                    "former is taken, as transformers does"
                )
    by_class = _OF_CLASS.get(found.of_class, {}) if found.overruled in (None, found.of_class) else {}
    for name, text in by_class.items():
        if name not in found.config and name not in mapped:
            token = AddedToken(text, special=True, normalized=False)
            found.named.setdefault(name, Stated(token, found.class_said))
    order = {name: number for number, name in enumerate(_NAMES)}
    found.named = dict(sorted(found.named.items(), key=lambda item: order.get(item[0], len(order))))


def _class(folder: Path, config: dict[str, Any]) -> tuple[str, str, str | None]:
    """Return the class of the tokenizer and what says it, from the first place that transformers looks at, and the
    class that it takes for a tokenizer.json instead."""
    refuse_pointer(folder / "config.json")
    is_there(folder / "config.json")
    try:
        model = keys_in(folder / "config.json")
    except ConfigError:  # It may belong to something else.
        model = {}
    model_type = str(model.get("model_type"))
    overruled = OVERRULED.get(model_type)
    for file, tree in ((CONFIG, config), ("config.json", model)):
        if named := tree.get("tokenizer_class"):
            of_class, said = str(named).removesuffix("Fast"), f"{folder / file} (tokenizer_class {named})"
            if overruled and overruled != of_class:
                said = f"{folder / 'config.json'} (tokenizer_class {overruled} by model_type {model_type}, not {named})"
            return of_class, said, overruled
    by_model = _OF_MODEL.get(model_type, "")
    return by_model, f"{folder / 'config.json'} (tokenizer_class {by_model} by model_type {model_type})", overruled


def _own_name(key: str, value: Any) -> bool:
    """Whether a key is a model's own name for a token, such as image_token. add_bos_token is a switch."""
    return key.endswith("_token") and (isinstance(value, str) or (isinstance(value, dict) and "content" in value))


def _extra(file: Path, tree: dict[str, Any], keys: Sequence[str]) -> list[Stated]:
    """Return the special tokens without a name, from the first of these keys that lists some. Tokens in an object have
    names."""
    for key in keys:
        values = tree.get(key)
        if values and not isinstance(values, dict):
            if not isinstance(values, list):
                raise ConfigError(f"{file}: {key} holds {type(values).__name__}, not a list of tokens")
            return [Stated(_token(value, f"{file}: {key}", True), f"{file} ({key})") for value in values]
    return []


def _token(value: Any, where: str, special: bool) -> AddedToken:
    """Return the token that a file writes as its text, or as an object with its text and how it is found in a text.
    `special` is the default if the object does not say it."""
    if isinstance(value, str) and special:
        return AddedToken(value, special=True)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise ConfigError(f'{where}: {value!r} is no token; write its text, or {{"content": "its text"}}')
    flags = {key: value[key] for key in _FLAGS if value.get(key) is not None}
    if wrong := [key for key, flag in flags.items() if not isinstance(flag, bool)]:
        raise ConfigError(f"{where}: {wrong[0]} is {flags[wrong[0]]!r}; it is true or false")
    return AddedToken(value["content"], **{"special": special} | flags)


def _number(value: Any, where: str) -> int:
    try:
        return int(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{where}: the id {value!r} is no number") from error


def _templates(folder: Path, config: dict[str, Any], notes: list[str]) -> dict[str, str]:
    """Return the chat templates from the first place that has some, in the order of transformers. chat_template.json,
    which only its processors read, comes last."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    in_files = {name: _text(file) for name, file in files.items() if is_there(file)}
    legacy = folder / "chat_template.json"
    places = {
        " and ".join(str(files[name]) for name in in_files): in_files,
        f"{folder / CONFIG} ({_TEMPLATE})": _named_templates(config.get(_TEMPLATE), folder / CONFIG),
        str(legacy): _named_templates(keys_in(legacy).get(_TEMPLATE), legacy),
    }
    found = [(place, templates) for place, templates in places.items() if templates]
    for place, templates in found[1:]:
        if templates != found[0][1]:
            notes.append(
                f"the chat templates of {found[0][0]} and of {place} differ: the former are taken, as transformers does"
            )
    return found[0][1] if found else {}


def _named_templates(value: Any, file: Path) -> dict[str, str]:
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        value = {each.get("name"): each.get("template") for each in value}
    elif isinstance(value, str):
        value = {"default": value}
    value = {} if value is None else value
    if not isinstance(value, dict) or not all(isinstance(each, str) for pair in value.items() for each in pair):
        raise ConfigError(
            f'{file}: {_TEMPLATE} is no Jinja template, and no list of {{"name": "default", "template": ...}}'
        )
    return {name: template for name, template in value.items() if template}


def keys_in(file: Path) -> dict[str, Any]:
    """Return the keys of a JSON file of a published folder, or an empty dict if the file does not exist. Raises
    ConfigError if it holds none, or cannot be read."""
    refuse_pointer(file)
    if not is_there(file):
        return {}
    try:
        tree = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}; let this user read it, or copy it again") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON ({error}); copy it again from where it was published") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{file} holds {type(tree).__name__}, not keys; copy it again from where it was published")
    return tree


def _text(file: Path) -> str:
    refuse_pointer(file)
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8 ({error.reason}); convert it") from error
