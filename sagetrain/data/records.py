"""Records of fine-tuning: prompts with their completions, and chats. Both become text of which a part counts.

A chat is what a tokenizer's chat template makes of its messages: a Jinja template, rendered in jinja2's sandbox with
what Hugging Face transformers gives such templates. What the assistant says counts in the loss, up to and including
what ends its turn. Where the template has {% generation %} blocks, these are it. Else the chat is rendered up to each
turn of the assistant, before and after it; a template that writes the beginning of a chat otherwise when it goes on (as
some do that drop earlier reasoning) is an error.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sagetrain.config.errors import ConfigError
from sagetrain.data.chunk import no_such_key
from sagetrain.data.tokenizer import Tokenizer
from sagetrain.data.tokenizer_copy import named_templates

ROLES = ("system", "developer", "user", "assistant", "tool")
_BEGIN, _END = "\0generation\0", "\0endgeneration\0"  # no message may hold a NUL

Part = tuple[str, bool]
"""Text, and whether it counts in the loss."""


@dataclass(frozen=True)
class Pairs:
    """Records with a prompt and its completion, each a field of text. The end-of-text token follows and counts."""

    prompt_field: str
    completion_field: str
    seq_length: int
    """Tokens of the sequences that records are put into whole."""
    templated: ClassVar[bool] = False
    """Whether a template wrote the text, with control tokens in it and all that ends it."""

    @property
    def fields(self) -> tuple[str, ...]:
        """Of a record, those that are read."""
        return self.prompt_field, self.completion_field

    @property
    def request(self) -> dict[str, Any]:
        """What decides on the result, for NAME.json."""
        return asdict(self)

    def parts(self, record: Mapping[str, Any], special_tokens: Mapping[str, str]) -> list[Part]:
        """The record's text. ValueError says what is wrong with it."""
        prompt, completion = (_value(record, name) for name in self.fields)
        for name, text in ((self.prompt_field, prompt), (self.completion_field, completion)):
            if not isinstance(text, str):
                raise ValueError(f"{name!r} holds {type(text).__name__}, not text")
        if not completion.strip():
            raise ValueError(f"{self.completion_field!r} is empty: nothing in this record would count in the loss")
        return [(prompt, False), (completion, True)]


@dataclass(frozen=True)
class Chats:
    """Records with a list of messages, {"role": ..., "content": ...}; what the template writes ends the record."""

    field: str
    seq_length: int
    """As of Pairs."""
    template: str = ""
    """A Jinja chat template; of `settled` records there is one."""
    tool_template: str = ""
    """The template of records that have tools, where it is another."""
    templated: ClassVar[bool] = True

    @property
    def fields(self) -> tuple[str, ...]:
        """As of Pairs."""
        return (self.field,)

    @property
    def named_templates(self) -> str | list[dict[str, str]]:
        """The template, or the templates by name, as tokenizer_config.json writes them under chat_template."""
        tools = {"tool_use": self.tool_template} if self.tool_template else {}
        return named_templates({"default": self.template, **tools})

    @property
    def request(self) -> dict[str, Any]:
        """As of Pairs."""
        template = sha256(self.template.encode()).hexdigest()
        return {"field": self.field, "template_sha256": template, "seq_length": self.seq_length}

    def parts(self, record: Mapping[str, Any], special_tokens: Mapping[str, str]) -> list[Part]:
        """As of Pairs. special_tokens: what templates call bos_token, eos_token."""
        messages = _messages(_value(record, self.field))

        def render(count: int, prompt: bool = False) -> str:
            return _rendered(self.template, messages[:count], special_tokens, prompt)

        whole = render(len(messages))
        if _BEGIN in whole:
            pieces = re.split(f"({_BEGIN}|{_END})", whole)
            parts = [(text, mark == _BEGIN) for mark, text in zip(["", *pieces[1::2]], pieces[::2], strict=True)]
        else:
            parts = self._by_prefixes(messages, whole, render)
        parts = [(text, counts) for text, counts in parts if text]
        if not any(counts and text.strip() for text, counts in parts):
            raise ValueError("the chat template leaves nothing of what the assistant says")
        return parts

    def _by_prefixes(self, messages: Sequence[Mapping[str, Any]], whole: str, render: Any) -> list[Part]:
        parts, done = [], ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before, after = render(number, True), render(number + 1)
            if not (before.startswith(done) and after.startswith(before) and whole.startswith(after)):
                raise ValueError(
                    f"the chat template writes what comes before the end of message {number + 1} otherwise in the "
                    "whole chat than in the chat up to there, so that nobody can tell what the assistant says: put "
                    "{% generation %} and {% endgeneration %} around that in a copy of the template, and name it with "
                    "--chat-template"
                )
            parts += [(before[len(done) :], False), (after[len(before) :], True)]
            done = after
        return [*parts, (whole[len(done) :], False)]


Records = Pairs | Chats


def records_of(
    prompt_field: str | None,
    completion_field: str | None,
    chat_field: str | None,
    chat_template: Path | None,
    seq_length: int | None,
) -> Records | None:
    """What the options of `sagetrain prepare` describe; None: plain text. ConfigError where they do not agree."""
    if (prompt_field is None) != (completion_field is None):
        raise ConfigError("--prompt-field and --completion-field go together: a record has a prompt and its completion")
    if prompt_field and chat_field:
        raise ConfigError("records are pairs (--prompt-field, --completion-field) or chats (--chat-field), not both")
    if chat_template and not chat_field:
        raise ConfigError(
            f"--chat-template {chat_template} is for chats: name the field of the messages (--chat-field)"
        )
    if not prompt_field and not chat_field:
        if seq_length is not None:
            raise ConfigError(
                "--seq-length is for records (--prompt-field, --chat-field): plain text is cut while training"
            )
        return None
    if seq_length is None or seq_length < 2:
        given = "is missing" if seq_length is None else f"{seq_length} is below 2"
        raise ConfigError(
            f"--seq-length {given}: records are put into sequences whole, so it has to be known; give data.seq_length"
        )
    if prompt_field and completion_field:
        return Pairs(prompt_field, completion_field, seq_length)
    return Chats(chat_field or "", seq_length, read_template(chat_template))


def read_template(file: Path | None) -> str:
    """The text of --chat-template, "" without. ConfigError if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8") if file else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {file} cannot be read: {error}") from error


def settled(records: Records, tokenizer: Tokenizer) -> Records:
    """With the tokenizer's chat template where none was given. ConfigError as of settled_template."""
    if isinstance(records, Pairs):
        return records
    tool_template = "" if records.template else tokenizer.chat_templates.get("tool_use", "")
    if tool_template:
        tool_template = settled_template(tool_template, tokenizer)
    return replace(records, template=settled_template(records.template, tokenizer), tool_template=tool_template)


def settled_template(given: str, tokenizer: Tokenizer) -> str:
    """A chat template, or the tokenizer's where none was given. ConfigError if there is none, or it is no template."""
    template = given or tokenizer.chat_template
    if not template and (names := [*tokenizer.chat_templates]):
        raise ConfigError(
            f"the tokenizer has chat templates of these names alone: {', '.join(names)}, none is the default: write "
            "the one that is meant to a file and name that with --chat-template"
        )
    if not template:
        raise ConfigError(
            f"the tokenizer has no chat template (in chat_template.jinja or tokenizer_config.json beside its "
            f"{tokenizer.file_name}): name a Jinja file with --chat-template"
        )
    try:
        _compiled(template)
    except jinja2.TemplateError as error:
        raise ConfigError(f"the chat template is no Jinja template: {error}") from error
    return template


def chat_prompt(template: str, tokenizer: Tokenizer, message: str) -> list[int]:
    """Token ids of a chat of one message, the user's, and of what begins the answer: all that the template writes, a
    bos too. ConfigError if the template refuses the message."""
    try:
        text = _rendered(template, [{"role": "user", "content": message}], tokenizer.special_tokens, True)
        return _encoded(text, tokenizer)
    except ValueError as error:
        raise ConfigError(f"--chat: {error}") from error


def answer_ends(template: str, tokenizer: Tokenizer) -> list[int]:
    """The control token that a chat template puts behind an answer, the first one; nothing if there is none."""
    question, answer = "What is 6 times 7?", "It is 42, of course."
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    try:
        _, found, behind = _rendered(template, messages, tokenizer.special_tokens, False).rpartition(answer)
    except ValueError:  # it takes no answers
        return []
    return [token for token in _encoded(behind, tokenizer) if found and tokenizer.is_control(token)][:1]


def _encoded(rendered: str, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode_parts([(re.sub(f"{_BEGIN}|{_END}", "", rendered), False)], control=True)[0]


def _value(record: Mapping[str, Any], name: str) -> Any:
    if name not in record:
        raise ValueError(no_such_key(name, record, "--prompt-field, --completion-field or --chat-field"))
    return record[name]


def _messages(value: Any) -> list[dict[str, Any]]:
    """The messages of a chat, checked; fields without a value are left out (tables have them in every row)."""
    if not isinstance(value, list) or not value or not all(isinstance(each, dict) for each in value):
        raise ValueError('a chat is a list of messages, {"role": ..., "content": ...}')
    messages = [{key: each for key, each in message.items() if each is not None} for message in value]
    for number, message in enumerate(messages, 1):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ValueError(f"message {number} has the role {role!r}, which is none of {', '.join(ROLES)}")
        if content is None and role == "assistant" and "tool_calls" in message:
            continue
        if not isinstance(content, str):
            raise ValueError(f"message {number}: content holds {type(content).__name__}, not text")
        if "\0" in content:
            raise ValueError(f"message {number} holds a NUL character")
        if role == "assistant" and not content.strip() and "tool_calls" not in message:
            raise ValueError(f"message {number}, of the assistant, is empty: nothing of it would count in the loss")
    if all(message["role"] != "assistant" for message in messages):
        raise ValueError("no message of the assistant: nothing in this record would count in the loss")
    return messages


# -- chat templates ----------------------------------------------------------------------------------------------------


def _rendered(
    template: str, messages: Sequence[Mapping[str, Any]], special_tokens: Mapping[str, str], prompt: bool
) -> str:
    """prompt: with what begins the assistant's next turn."""
    given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": prompt}
    try:
        return _compiled(template).render(**given, **special_tokens)
    except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"the chat template refuses {len(messages)} of its messages: {error}") from error


@functools.cache
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    return environment.from_string(template)


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: what is inside, between marks."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes in place of the block."""
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (_BEGIN, _END))
        return [begin, *body, end]


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Of a template, as transformers has it: plain JSON, where jinja2's own spells <, > and & for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    """Of a template: it has no place for what a message holds."""
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    """Of a template: the date."""
    return datetime.now().strftime(form)
