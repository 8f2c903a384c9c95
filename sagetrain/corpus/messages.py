"""The messages of a chat: what a record may hold in their place, and which of them count in the loss."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
_SWITCHES = ("weight", "train", "training", "trainable", "loss", "loss_weight", "loss_scale", "loss_mask")
"""Keys under which a message says that it counts (1, true) or not (0, false). OpenAI and Mistral write weight, axolotl
train or training, ms-swift loss or loss_scale."""
_INVERTED = "masked"
"""The key under which torchtune says that a message does not count."""
_OTHER_NAMES = {"human": "user", "gpt": "assistant", "model": "assistant", "ipython": "tool", "function": "tool"}


def messages_of(value: Any) -> list[dict[str, Any]]:
    """Return the messages of a chat, checked. A message, or the list of them, may be JSON text, as tables hold it. Keys
    without a value are left out, as in transformers."""
    value = parsed_list(value)
    if not _is_list_of_objects(value) or not value:
        raise ValueError(f'a chat is a list of messages, {{"role": ..., "content": ...}}, not {what(value)}')
    messages = [{key: each for key, each in message.items() if each is not None} for message in value]
    for number, message in enumerate(messages, 1):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ValueError(
                f"message {number} has the role {role!r}, which is none of {', '.join(ROLES)}{_meant(message)}"
            )
        if isinstance(content, list):
            message["content"] = content = _only_text(content, number)
        if "tool_calls" in message:
            message["tool_calls"] = parsed_list(message["tool_calls"])
            if holds_nothing(message["tool_calls"]):
                del message["tool_calls"]
            elif not _is_list_of_objects(message["tool_calls"]):
                raise ValueError(
                    f"message {number}: tool_calls holds {what(message['tool_calls'])}; a message's calls are a list "
                    "of JSON objects"
                )
        if message.get("function_call"):
            raise ValueError(
                f"message {number} holds function_call, in which OpenAI's format had a tool call formerly: write it as "
                'tool_calls, [{"type": "function", "function": {"name": ..., "arguments": ...}}]'
            )
        if holds_nul(message):
            raise ValueError(f"message {number} holds a NUL character")
        if content is None and role == "assistant" and message.get("tool_calls"):
            continue
        if not isinstance(content, str):
            fix = "; write it as JSON text (json.dumps)" if isinstance(content, dict) else ""
            others = [key for key in message if key not in ("role", "content")] if content is None else []
            fix = f"; its other keys are: {', '.join(others)}" if others else fix
            raise ValueError(f"message {number}: content holds {type(content).__name__}, not text{fix}")
    if all(message["role"] != "assistant" for message in messages):
        raise ValueError("no message of the assistant: nothing in this record would count in the loss")
    return messages


def _meant(message: Mapping[str, Any]) -> str:
    """Say how a message with another role, or with none, is written here."""
    if {"from", "value"} <= message.keys():
        return "; its keys are ShareGPT's: rename from and value to role and content, human to user, gpt to assistant"
    role = message.get("role")
    name = role.strip().lower() if isinstance(role, str) else ""
    here = name if name in ROLES else _OTHER_NAMES.get(name)
    return f"; {role} is {here} here" if here else ""


def _only_text(parts: list[Any], number: int) -> str:
    """The text of a content that is written in parts. ValueError if it is not one text."""
    kinds = {str(part.get("type", "text")) if isinstance(part, dict) else type(part).__name__ for part in parts}
    if others := sorted(kinds - {"text", "str"}):
        raise ValueError(f"message {number}: content holds list with parts that are no text ({', '.join(others)})")
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    if len(texts) != 1 or not isinstance(texts[0], str):
        raise ValueError(
            f"message {number}: content holds list of {len(texts)} parts, which templates put together in different "
            "ways: make one text of them"
        )
    return texts[0]


def counted_messages(messages: list[dict[str, Any]]) -> tuple[list[bool | None], bool]:
    """Remove the keys with which the messages of a chat say whether they count in the loss.

    Returns:
        Whether each message of the assistant counts, and None for messages of others. A message counts unless it says
            otherwise. Then, whether a message of others says that it counts.

    Raises:
        ValueError: a message says neither, or an answer that counts is empty, or none counts.
    """
    found: list[bool | None] = []
    others = False
    for number, message in enumerate(messages, 1):
        said = {key: message.pop(key) for key in (*_SWITCHES, _INVERTED) if key in message}
        for key, value in said.items():
            if not isinstance(value, (bool, int, float)) or value not in (0, 1):
                raise ValueError(
                    f"message {number}: {key} is {value!r}, neither 0 nor 1 (false, true): a message counts in the "
                    "loss or it does not"
                )
        counting = {key: bool(value) != (key == _INVERTED) for key, value in said.items()}
        if len({*counting.values()}) > 1:
            raise ValueError(f"message {number}: {' and '.join(said)} contradict each other; leave one of them")
        counts = all(counting.values())
        found.append(counts if message["role"] == "assistant" else None)
        if found[-1] and not (message.get("content") or "").strip() and not message.get("tool_calls"):
            raise ValueError(f"message {number}, of the assistant, is empty: nothing of it would count in the loss")
        others |= bool(said) and counts and message["role"] != "assistant"
    if not any(found):
        raise ValueError(
            f"no message of the assistant counts ({', '.join((*_SWITCHES, _INVERTED))}): nothing in this record would "
            "count in the loss"
        )
    return found, others


def parsed_list(value: Any) -> Any:
    """Return a list, parsed if it is JSON text, with each of its items parsed if that is JSON text."""
    value = parsed(value)
    return [parsed(each) for each in value] if isinstance(value, list) else value


def parsed(value: Any) -> Any:
    """Return a list or an object, parsed if it is JSON text. Return anything else as it is."""
    if not isinstance(value, str):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return value
    return found if isinstance(found, (list, dict)) else value


def holds_nothing(value: Any) -> bool:
    """Return whether a field is empty. Tables write an empty field as null, as an empty list or text, or as JSON."""
    return value is None or value in ([], {}) or (isinstance(value, str) and value.strip() in ("", "null"))


def what(value: Any) -> str:
    """Say what a value is that should be a list of JSON objects, or an object."""
    if isinstance(value, list):
        number = next((number for number, each in enumerate(value, 1) if not isinstance(each, dict)), None)
        return f"list whose item {number} is {type(value[number - 1]).__name__}" if number else "list without items"
    if isinstance(value, dict) and value and all(isinstance(each, list) for each in value.values()):
        return "dict of lists (as the datasets library gives a Sequence of objects; a list of objects is meant)"
    if not isinstance(value, str):
        return type(value).__name__
    if re.match(r"[\[{\s]*'", value):
        return "text that is no JSON (Python's notation, as pandas writes lists into a .csv? use json.dumps)"
    return "text that is no JSON"


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def arguments_as_text(messages: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the arguments of tool calls that are JSON text of an object, whole or not, as OpenAI's format has them."""
    for message in messages:
        for call in message.get("tool_calls", []):
            function = call.get("function", call) if isinstance(call, dict) else None
            text = function.get("arguments") if isinstance(function, dict) else None
            if isinstance(text, str) and text.lstrip().startswith("{"):
                yield text


def texts_in(value: Any) -> Iterator[str]:
    """Yield the texts that a value holds somewhere, apart from the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from texts_in(each)


def holds_null(value: Any) -> bool:
    """Return whether a value is null, or NaN as pandas has it, or holds one somewhere."""
    if isinstance(value, dict):
        return any(map(holds_null, value.values()))
    return any(map(holds_null, value)) if isinstance(value, list) else value is None or value != value


def holds_nul(value: Any) -> bool:
    """Whether a value holds a text with a NUL character somewhere."""
    return any("\0" in text for text in texts_in(value))
