"""Records of fine-tuning: prompts with their completions, and chats. Both become text of which a part counts in the
loss.

A tokenizer's chat template (chat_template.py) turns the messages of a chat, and the tools and documents of its record,
into text. What the assistant says counts in the loss, up to and including the end of its turn, unless the message says
otherwise ("weight": 0, "train": false). If the template has {% generation %} blocks, the blocks are what counts. If it
has none, the chat is rendered up to each turn of the assistant, before and after the turn. Some templates write the
beginning of a chat differently when the chat goes on, for instance because they drop earlier reasoning. They are an
error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

from sagetrain.config.arguments import check_fields, spelled
from sagetrain.config.errors import ConfigError, pointer
from sagetrain.corpus.chunk import no_such_key, root_of, value_at
from sagetrain.corpus.messages import (
    arguments_as_text,
    counted_messages,
    holds_nothing,
    holds_nul,
    holds_null,
    messages_of,
    parsed,
    parsed_list,
    what,
)
from sagetrain.corpus.notes import DATED, NOTHING, NULLS, OTHERS_COUNT, QUOTED, UNREAD, UNWRITTEN, Notes
from sagetrain.data.chat_template import (
    Clock,
    CountedText,
    Message,
    generated,
    looked_up_in_vain,
    read_template,
    reads_its_blocks,
    rendered,
    settled_template,
    variables,
)
from sagetrain.data.tokenizer import Tokenizer
from sagetrain.data.tokenizer_copy import named_templates

TOOLS, _DOCUMENTS, _MORE = "tools", "documents", "chat_template_kwargs"

_MARK = (
    "put {% generation %} and {% endgeneration %} around what the assistant says in a copy of the template, and name "
    "it with --chat-template"
)

_SHORT = 64  # A message of at most so many characters may say by chance what a template says by itself.


@dataclass(frozen=True)
class Pairs:
    """Records with a prompt and its completion, each a field of text. The end-of-text token follows and counts in the
    loss."""

    prompt_field: str
    completion_field: str
    seq_length: int
    """Length in tokens of the sequences that records are put into whole."""
    templated: ClassVar[bool] = False
    """Whether a template wrote the text, with its control tokens and its end."""
    optional_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that are read where a record has them."""

    def __post_init__(self) -> None:
        """Check the types of all settings, and the length. Raises ConfigError if one is wrong."""
        check_fields(self)
        _checked_length("seq_length", self.seq_length)
        if self.prompt_field == self.completion_field:
            raise ConfigError(
                f"{spelled('prompt_field')} and {spelled('completion_field')} are both {self.prompt_field!r}: each "
                "prompt would be its own completion; name the field of each"
            )

    @property
    def options(self) -> dict[str, str]:
        """The options of the command line that name the fields that every record has."""
        return {self.prompt_field: spelled("prompt_field"), self.completion_field: spelled("completion_field")}

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that every record has."""
        return self.prompt_field, self.completion_field

    @property
    def request(self) -> dict[str, Any]:
        """The settings that decide the result, for NAME.json."""
        return asdict(self)

    def parts(self, record: Mapping[str, Any], special_tokens: Mapping[str, str], notes: Notes) -> list[CountedText]:
        """Return the text of a record in parts. Raises ValueError that says what is wrong with the record.

        Args:
            special_tokens: texts of control tokens, by the names that templates have for them: bos_token, eos_token.
            notes: gets notes about what is left out of the record.
        """
        _note_unread(record, self.fields, notes)
        prompt = _value(record, self.prompt_field, spelled("prompt_field"))
        completion = _value(record, self.completion_field, spelled("completion_field"))
        for name, text in ((self.prompt_field, prompt), (self.completion_field, completion)):
            if not isinstance(text, str):
                chat = (
                    f"; messages of a chat are one list, which {spelled('field')} names"
                    if isinstance(text, list)
                    else ""
                )
                raise ValueError(f"{name!r} holds {type(text).__name__}, not text{chat}")
        if not completion.strip():
            raise ValueError(f"{self.completion_field!r} is empty: nothing in this record would count in the loss")
        return [(prompt, False), (completion, True)]


@dataclass(frozen=True)
class Chats:
    """Records with a list of messages, {"role": ..., "content": ...}. The template writes the end of the record."""

    field: str
    seq_length: int
    """Length in tokens of the sequences that records are put into whole."""
    template: str = ""
    """A Jinja chat template. It is not empty once the records are `settled`."""
    tool_template: str = ""
    """The template for records with tools, if there is another one for them."""
    tools_field: str = TOOLS
    """The field with the tools that a chat may call, a list of JSON schemas."""
    templated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the types of all settings, the length, and the template. Raises ConfigError if one is wrong."""
        check_fields(self)
        _checked_length("seq_length", self.seq_length)
        if said := pointer("Chats: the file of template", self.template):
            raise ConfigError(said)
        if self.template and "{" not in self.template:
            raise ConfigError(
                f"Chats: template {self.template[:80]!r} is no Jinja template: give its text, not its file "
                "(Path(FILE).read_text())"
            )

    @property
    def options(self) -> dict[str, str]:
        """The option of the command line that names the field that every record has."""
        return {self.field: spelled("field")}

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields that every record has."""
        return (self.field,)

    @property
    def optional_fields(self) -> tuple[str, ...]:
        """Fields that are read where a record has them."""
        return self.tools_field, _DOCUMENTS, _MORE

    @property
    def named_templates(self) -> str | list[dict[str, str]]:
        """The template, or the templates by name, as tokenizer_config.json writes them under chat_template."""
        tools = {"tool_use": self.tool_template} if self.tool_template else {}
        return named_templates({"default": self.template, **tools})

    @property
    def request(self) -> dict[str, Any]:
        """The settings that decide the result, for NAME.json."""
        templates = {"template_sha256": self.template, "tool_template_sha256": self.tool_template}
        hashes = {key: sha256(text.encode()).hexdigest() for key, text in templates.items() if text}
        fields = {"field": self.field, "optional_fields": list(self.optional_fields)}
        return {**fields, **hashes, "seq_length": self.seq_length}

    def parts(self, record: Mapping[str, Any], special_tokens: Mapping[str, str], notes: Notes) -> list[CountedText]:
        """Return the text of a record in parts, as Pairs.parts does."""
        _note_unread(record, (*self.fields, *self.optional_fields), notes)
        messages = messages_of(_value(record, self.field, spelled("field")))
        more = self._more(record)
        template = self.tool_template if self.tool_template and more.get(TOOLS) is not None else self.template
        counted, others_count = counted_messages(messages)
        notes[OTHERS_COUNT, ""] += others_count
        if holds_null([more.get(TOOLS, []), *(message.get("tool_calls", []) for message in messages)]):
            notes[NULLS, ""] += 1
        given = [Message(each) for each in messages]
        clock = Clock()

        @cache  # Checks ask for the same texts again.
        def render(count: int, prompt: bool = False, marked: bool = True, other: int | None = None) -> str:
            known = {"strftime_now": clock, **more}
            shown = [_other(each) if number == other else given[number] for number, each in enumerate(messages[:count])]
            return rendered(template, shown, special_tokens, prompt, known, marked)

        with looked_up_in_vain() as names:
            whole = render(len(messages))
        notes.update((NOTHING, name) for name in names)
        notes[DATED, ""] += clock.was_read
        parts = generated(whole)
        if reads_its_blocks(template) and "".join(text for text, _ in parts) != render(len(messages), marked=False):
            raise ValueError(
                "the chat template changes what a {% generation %} block wrote (by a filter or a comparison), so that "
                "nobody can tell what of it is left: put {% generation %} around the text as it is written at last"
            )
        if len(parts) > 1:
            parts = _by_blocks(parts, counted, render)
        else:
            parts = _by_prefixes(whole, messages, counted, render)
        unread = {f"{key} of messages" for message in given for key in message.unread}
        unread |= {key for key, value in more.items() if not holds_nothing(value) and key not in variables(template)}
        for key in unread:
            notes[UNWRITTEN, key] += 1
        if any(json.dumps(text, ensure_ascii=False) in whole for text in arguments_as_text(messages)):
            notes[QUOTED, ""] += 1
        parts = [(text, counts) for text, counts in parts if text]
        if not any(counts and text.strip() for text, counts in parts):
            raise ValueError("the chat template leaves nothing of what the assistant says")
        return parts

    def _more(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a template is given beside the messages: tools, documents, and variables of its own."""
        found = {}
        for name, key in ((TOOLS, self.tools_field), (_DOCUMENTS, _DOCUMENTS)):
            value = parsed_list(record.get(key))
            if holds_nothing(value):
                continue
            if not (isinstance(value, list) and all(isinstance(each, dict) for each in value)):
                raise ValueError(f"{key!r} holds {what(value)}; a chat's {name} are a list of JSON objects")
            found[name] = value
        own = parsed(record.get(_MORE))
        own = {} if holds_nothing(own) else own
        if not isinstance(own, dict):
            raise ValueError(f"{_MORE!r} holds {what(own)}; variables of a chat template are a JSON object")
        if given := sorted({"messages", "add_generation_prompt"} & own.keys()):
            raise ValueError(f"{_MORE!r} has a key {given[-1]!r}, which the chat itself gives: take it out")
        if holds_nul([found, own]):
            raise ValueError(f"{TOOLS}, {_DOCUMENTS} or {_MORE} hold a NUL character")
        return own | found


def _by_blocks(parts: list[CountedText], counted: list[bool | None], render: Callable[..., str]) -> list[CountedText]:
    """Mark what counts in a text with {% generation %} blocks: the blocks of answers that count.

    The blocks are matched to the answers only where some answers do not count. For that, the chat is rendered up to
    each next answer; it then has the blocks of all answers so far.
    """
    if False not in counted:
        return parts
    answers = [number for number, counts in enumerate(counted) if counts is not None]
    blocks = [sum(inside for _, inside in generated(render(number))) for number in answers[1:]]
    blocks.append(sum(inside for _, inside in parts))
    if blocks != sorted(blocks):
        raise ValueError(
            "the chat template writes fewer {% generation %} blocks when a chat goes on, so that nobody can tell which "
            "of them belongs to a message that does not count"
        )
    of_answers = zip(answers, pairwise([0, *blocks]), strict=True)
    counts = iter([counted[answer] for answer, (low, high) in of_answers for _ in range(low, high)])
    return [(text, inside and bool(next(counts))) for text, inside in parts]


def _other(message: Mapping[str, Any]) -> Message:
    """Return a message of the same role that says something else."""
    return Message({key: value for key, value in message.items() if key != "tool_calls"} | {"content": "(other)"})


def _check_written(
    messages: Sequence[Mapping[str, Any]], first: int, number: int, before: str, after: str, render: Callable[..., str]
) -> None:
    """Check that a template has written the messages from `first` on before it begins an answer, and the answer behind
    them. Raises ValueError if it leaves out the last message of a chat, whose text would count with the next answer.

    Args:
        number: the number of the answer, from 0.
        before: the chat up to the answer, without the part that an earlier answer has ended.
        after: the text of the answer.
    """

    def depends(other: int, *how: Any) -> bool:
        """Return whether a text depends on what a message says."""
        try:
            return render(*how, other=other) != render(*how)
        except ValueError:
            return True

    *asked, answer = [(message.get("content") or "").strip() for message in messages[first : number + 1]]
    at = 0
    for earlier, text in enumerate(asked, first):
        # A template may write a text in another way, and then the message is changed to see where the text is.
        if (found := before.find(text, at)) >= 0:
            at = found + len(text)
        sure = found >= 0 and (len(text) > _SHORT or earlier < number - 1)
        if not sure and not depends(earlier, number, True) and depends(earlier, number + 1):
            raise ValueError(
                f"the chat template writes message {earlier + 1}, of the {messages[earlier]['role']}, only with the "
                f"answer behind it, so that it would count in the loss: {_MARK}"
            )
    if not (answer and answer in after) and not depends(number, number + 1):
        raise ValueError(
            f"the chat template does not write message {number + 1}, of the assistant, where a chat ends with it, so "
            f"that nobody can tell what the assistant says: {_MARK}"
        )


def _by_prefixes(
    whole: str, messages: Sequence[Mapping[str, Any]], counted: list[bool | None], render: Callable[..., str]
) -> list[CountedText]:
    """Mark what counts in a text without blocks. For each answer this is the difference between the chat up to the
    answer and the chat before it."""
    parts, done, first = [], "", 0
    for number, counts in enumerate(counted):
        if not counts:
            continue
        try:
            before = render(number, True)
        except ValueError as error:
            if number:
                raise
            raise ValueError(
                f"message 1 is the assistant's, and the chat template writes no chat without messages ({error}): give "
                f"the message the weight 0, or {_MARK}"
            ) from error
        after = render(number + 1)
        if before.startswith(done) and whole.startswith(after) and not after.startswith(before):
            same = [one == other for one, other in zip(before, after, strict=False)]
            cut = [*same, False].index(False)
            raise ValueError(
                f"the chat template begins an answer with {before[cut:][:40]!r} (add_generation_prompt), and writes "
                f"{after[cut:][:40]!r} there in message {number + 1}, so that nobody can tell where the assistant "
                f"begins: {_MARK}"
            )
        if not (before.startswith(done) and after.startswith(before) and whole.startswith(after)):
            raise ValueError(
                f"the chat template writes the text up to the end of message {number + 1} differently when the chat "
                f"goes on, so that nobody can tell what the assistant says: {_MARK}"
            )
        asked, answer = before[len(done) :], after[len(before) :]
        _check_written(messages, first, number, asked, answer, render)
        parts += [(asked, False), (answer, True)]
        done, first = after, number + 1
    return [*parts, (whole[len(done) :], False)]


Records = Pairs | Chats


def _checked_length(name: str, seq_length: int | None) -> int:
    if seq_length is None or seq_length < 2:
        given = "is missing" if seq_length is None else f"{seq_length} is below 2"
        raise ConfigError(
            f"{name} {given}: records are put into sequences whole, so it has to be known; give data.seq_length"
        )
    return seq_length


def records_of(
    prompt_field: str | None,
    completion_field: str | None,
    chat_field: str | None,
    chat_template: Path | None,
    tools_field: str | None,
    seq_length: int | None,
) -> Records | None:
    """Return the records that the options of `sagetrain prepare` describe, or None for plain text. Raises ConfigError
    if the options contradict each other, or the chat template cannot be read."""
    if (prompt_field is None) != (completion_field is None):
        raise ConfigError("--prompt-field and --completion-field go together: a record has a prompt and its completion")
    if prompt_field and chat_field:
        raise ConfigError("records are pairs (--prompt-field, --completion-field) or chats (--chat-field), not both")
    for option, value in (("--chat-template", chat_template), ("--tools-field", tools_field)):
        if value and not chat_field:
            raise ConfigError(f"{option} {value} is for chats: name the field of the messages (--chat-field)")
    if not prompt_field and not chat_field:
        if seq_length is not None:
            raise ConfigError(
                "--seq-length is for records (--prompt-field, --chat-field): plain text is cut while training"
            )
        return None
    length = _checked_length("--seq-length", seq_length)
    if prompt_field and completion_field:
        return Pairs(prompt_field, completion_field, length)
    return Chats(chat_field or "", length, read_template(chat_template), tools_field=tools_field or TOOLS)


def settled(records: Records, tokenizer: Tokenizer | None) -> Records:
    """Return the records with the tokenizer's chat templates where none was given. Raises ConfigError as
    settled_template does, and if there is no tokenizer yet."""
    if tokenizer is None:
        raise ConfigError(
            f"records are for a model that has a tokenizer: give it ({spelled('tokenizer')}), and no "
            f"{spelled('vocab_size')}"
        )
    if isinstance(records, Pairs):
        return records
    tool_template = "" if records.template else tokenizer.chat_templates.get("tool_use", "")
    if tool_template:
        tool_template = settled_template(tool_template, tokenizer)
    return replace(records, template=settled_template(records.template, tokenizer), tool_template=tool_template)


def _value(record: Mapping[str, Any], name: str, option: str) -> Any:
    try:
        return value_at(record, name)
    except KeyError as error:
        raise ValueError(no_such_key(name, record, option)) from error


def _note_unread(record: Mapping[str, Any], read: Iterable[str], notes: Notes) -> None:
    for key in record.keys() - {root_of(each, record) for each in read}:
        notes[UNREAD, key] += 1
