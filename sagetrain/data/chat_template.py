"""Chat templates. They are Jinja templates, which are rendered in jinja2's sandbox with the functions that transformers
offers them."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from sagetrain.config.arguments import spelled
from sagetrain.config.errors import ConfigError, refuse_pointer
from sagetrain.data.tokenizer import Tokenizer

# No record may hold a NUL character, so these marks cannot occur in one.
_BEGIN, _END = "\0generation\0", "\0endgeneration\0"
CountedText = tuple[str, bool]
"""A piece of text, and whether it counts in the loss."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""The keys under which messages hold their reasoning. transformers gives a template the first two of them, whichever
the message has."""


def read_template(file: Path | None) -> str:
    """Return the text of the --chat-template file, or "" without one. Raises ConfigError if the file cannot be read, or
    is empty."""
    if not file:
        return ""
    try:
        refuse_pointer(file)
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{spelled('template')} {file} cannot be read: {error}") from error
    if not text.strip():
        raise ConfigError(
            f"{spelled('template')} {file} is empty; copy it again, or leave it out for the tokenizer's own"
        )
    return text


def settled_template(given: str, tokenizer: Tokenizer) -> str:
    """Return the chat template that was given, or else the tokenizer's. Raises ConfigError if there is no template, or
    it is not a valid one."""
    template = given or tokenizer.chat_template
    if not template and (names := [*tokenizer.chat_templates]):
        raise ConfigError(
            f"the tokenizer has chat templates of these names alone: {', '.join(names)}, none is the default: write "
            f"the one that is meant to a file and name that with {spelled('template')}"
        )
    if not template:
        raise ConfigError(
            f"the tokenizer has no chat template (in chat_template.jinja or tokenizer_config.json beside its "
            f"{tokenizer.file_name}): name a Jinja file with {spelled('template')}"
        )
    try:
        _compiled(template)
    except jinja2.TemplateSyntaxError as error:
        source = spelled("template") if given else f"beside {tokenizer.file_name}"
        raise ConfigError(f"the chat template ({source}), line {error.lineno}: no valid Jinja: {error}") from error
    except (RecursionError, SyntaxError, MemoryError) as error:
        raise ConfigError(f"the chat template is nested too deeply ({error})") from error
    return template


def chat_prompt(template: str, tokenizer: Tokenizer, message: str) -> list[int]:
    """Return the token ids of a chat with a single message of the user, up to the beginning of the answer. They include
    everything that the template writes, such as bos. Raises ConfigError if the template refuses the message, or does
    not read it."""
    asked = Message({"role": "user", "content": message})
    try:
        text = rendered(template, [asked], tokenizer.special_tokens, True)
        if "content" in asked.unread:
            raise ValueError(
                "the chat template does not read the message of a user, so that every message would have the same "
                f"answer; name the Jinja file of a chat template with {spelled('template')}"
            )
        return _encoded(text, tokenizer)
    except ValueError as error:
        raise ConfigError(f"{spelled('chat')}: {error}") from error


def answer_ends(template: str, tokenizer: Tokenizer) -> list[int]:
    """Return the first control token that a chat template puts behind an answer, as a list. The list is empty if there
    is none."""
    question, answer = "What is 6 times 7?", "It is 42, of course."
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    try:
        _, found, behind = rendered(template, messages, tokenizer.special_tokens, False).rpartition(answer)
    except ValueError:  # The template takes no answers.
        return []
    return [token for token in _encoded(behind, tokenizer) if found and tokenizer.is_control(token)][:1]


def _encoded(text: str, tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode("".join(piece for piece, _ in generated(text)))


def generated(text: str) -> list[CountedText]:
    """Split a rendered text into pieces. Each comes with True if it was inside of {% generation %}."""
    pieces = re.split(f"({_BEGIN}|{_END})", text)
    depths = accumulate((1 if mark == _BEGIN else -1 for mark in pieces[1::2]), initial=0)
    return [(piece, depth > 0) for depth, piece in zip(depths, pieces[::2], strict=True)]


@functools.cache
def reads_its_blocks(template: str) -> bool:
    """Return whether a template may read what a {% generation %} block writes: where the block stands in a macro, or in
    a block that sets a variable or is filtered. The marks of the block may change what is made of it there."""
    kinds = (nodes.AssignBlock, nodes.FilterBlock, nodes.Macro, nodes.CallBlock)
    outer = _environment().parse(template).find_all(kinds)
    return any(data.data == _BEGIN for node in outer for data in node.find_all(nodes.TemplateData))


@functools.cache
def variables(template: str) -> frozenset[str]:
    """Return the names of the variables that a template reads, such as messages and tools."""
    return frozenset(meta.find_undeclared_variables(_environment().parse(template)))


class Message(dict[str, Any]):
    """A message that remembers which of its keys a template has read."""

    def __init__(self, message: Mapping[str, Any]):
        """Copy a message, and give its reasoning the names that templates have for it, as transformers does."""
        reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
        named = {} if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
        super().__init__(named or message)
        self._own, self._read = set(message), set[str]()

    @property
    def unread(self) -> set[str]:
        """The keys that hold something and that no template has read."""
        read = self._read | set(_REASONING if self._read.intersection(_REASONING) else ())
        return {key for key in self._own - read if super(Message, self).__getitem__(key) not in ("", [], {})}

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._read.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Work like dict.get, and remember the key."""
        self._read.add(key)
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        self._read |= self._own
        return super().__iter__()

    def __repr__(self) -> str:
        """Work like dict.__repr__, and remember all keys."""
        self._read |= self._own
        return super().__repr__()

    def items(self) -> Any:
        """Work like dict.items, and remember all keys."""
        self._read |= self._own
        return super().items()

    def values(self) -> Any:
        """Work like dict.values, and remember all keys."""
        self._read |= self._own
        return super().values()


def rendered(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, str],
    prompt: bool,
    more: Mapping[str, Any] | None = None,
    marked: bool = True,
) -> str:
    """Render a chat as text. Raises ValueError if the template refuses the chat.

    Args:
        special_tokens: texts of control tokens by name, such as "eos_token".
        prompt: also write the beginning of the assistant's next turn.
        more: tools, documents and whatever else the template knows, by name.
        marked: write the marks that `generated` reads around {% generation %} blocks.
    """
    given = {"messages": messages, "add_generation_prompt": prompt}
    known = {"strftime_now": Clock(), **(more or {})}
    try:
        return _compiled(template, marked).render(
            {"tools": None, "documents": None, **special_tokens, **known, **given}
        )
    except RecursionError as error:
        raise ValueError("the chat template never ends: a macro of it calls itself again and again") from error
    except MemoryError as error:
        raise ValueError("the chat template makes a text for which there is not enough memory") from error
    except (
        jinja2.TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise ValueError(f"the chat template refuses {len(messages)} of its messages: {error}") from error


@functools.cache
def _compiled(template: str, marked: bool = True) -> jinja2.Template:
    return _environment(marked).from_string(template)


@functools.cache
def _environment(marked: bool = True) -> jinja2.Environment:
    block = _Generation if marked else _UnmarkedGeneration
    more = [block, loopcontrols]
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=more, undefined=_Nothing
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse}
    return environment


_in_vain: set[str] = set()


class _Nothing(jinja2.Undefined):
    """A value that a template looks up in vain. It is written as nothing, and its name is remembered."""

    def __str__(self) -> str:
        """Return no text. An `if` without `else` has no name, and writes nothing on purpose."""
        if self._undefined_name is not None:
            _in_vain.add(str(self._undefined_name))
        return ""

    @property
    def _undefined_message(self) -> str:
        if isinstance(self._undefined_obj, Message):
            return f"a message with the keys {', '.join(self._undefined_obj)} has no {self._undefined_name!r}"
        return super()._undefined_message


@contextmanager
def looked_up_in_vain() -> Iterator[set[str]]:
    """Yield a set that holds, at the end, the names of what templates have looked up in vain and written as nothing."""
    names = set[str]()
    _in_vain.clear()
    yield names
    names |= _in_vain


class _Generation(Extension):
    """The block {% generation %} ... {% endgeneration %}. The text inside is rendered between two marks."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the nodes in place of the block. As in transformers, variables that are set inside are unknown after
        it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in (_BEGIN, _END))
        return [begin, nodes.Scope(body).set_lineno(line), end]


class _UnmarkedGeneration(_Generation):
    """The block, rendered without the marks."""

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the nodes in place of the block."""
        return super().parse(parser)[1:-1]


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write plain JSON, as the filter of transformers does. jinja2's own filter escapes <, > and & for web pages."""

    def other(value: Any) -> NoReturn:
        raise TypeError(f"{value!r} of a table is no JSON; give the record its text, such as {str(value)[:40]!r}")

    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=other
    )


def _refuse(message: str) -> NoReturn:
    """Refuse a message. A template calls this where it has no place for something that a message holds."""
    raise jinja2.TemplateError(message)


class Clock:
    """The function strftime_now of a template. The time stands still, so that a chat has one time in all its turns."""

    def __init__(self) -> None:
        self.was_read = False
        self._now = datetime.now()

    def __call__(self, form: str) -> str:
        """Return the date in this form."""
        self.was_read = True
        return self._now.strftime(form)
