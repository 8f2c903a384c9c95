"""Tokenizers: SentencePiece models and Hugging Face's tokenizer.json behind one interface.

The text of a control token, such as </s> or <|im_end|>, is that token wherever it is written, as in transformers.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sagetrain.config.errors import ConfigError, refuse_pointer
from sagetrain.config.schema import TOKENIZER_JSON, DataConfig, tokenizer_in
from sagetrain.config.schema import TOKENIZER_NAME as TOKENIZER_NAME
from sagetrain.data.tokenizer_codecs import SPACE_MARK, HuggingFace, SentencePiece, Spans, any_of
from sagetrain.data.tokenizer_config import CONFIG
from sagetrain.data.tokenizer_copy import CONVERT, completed, is_json, parted, sha256_of

OTHER_FILES = ("vocab.json", "tekken.json", "spiece.model", "sentencepiece.bpe.model")
"""Files of tokenizers from which transformers can write a tokenizer.json."""
_AROUND = 8
"""Number of characters on both sides of a place in a text that decide whether white space there is joined."""
_BEFORE = ("", "\n", "|", "a", "1")
"""Texts behind which another one is encoded, the first whose tokens end with it."""
INSIDE = (
    "it ends in white space that the tokenizer joins to the next word, and few texts that a model has learned "
    "from have tokens that end there"
)
LEAVE_OUT = "leave the white space out, unless the model was trained on prompts that end so"
"""The way out for a prompt that `ends_inside` finds. INSIDE says what is wrong with the prompt."""


class EncodedParts(NamedTuple):
    """The tokens of several texts end to end."""

    ids: list[int]
    counted: list[bool]
    """For each token, whether one of its characters is in a marked part."""
    apart: int
    """The number of marked parts that were encoded apart, because the text before them would have other tokens."""


class Tokenizer:
    """A tokenizer, built from the bytes of its file. It puts no bos or eos around a text; `sagetrain prepare` appends
    eos."""

    def __init__(self, model: bytes, config: Mapping[str, Any] | None = None):
        """Build the tokenizer. Raises ValueError if the bytes are neither a SentencePiece model nor a tokenizer.json.

        Args:
            config: the special tokens and chat templates, as tokenizer_config.json names them. None: there are none, or
                the file is the copy of an earlier version, which holds them.
        """
        if config is None:
            model, config = parted(model)
        self.model, self.config = model, config
        self._codec = (HuggingFace if is_json(model) else SentencePiece)(model, config or {})
        self.file_name = TOKENIZER_JSON if is_json(model) else TOKENIZER_NAME
        self.sha256 = sha256_of(model, config)
        self.vocab_size = self._codec.vocab_size
        self.bos_id, self.eos_id = self._codec.bos_id, self._codec.eos_id
        """The ids of the control tokens. -1: the tokenizer has none."""
        self.prefix: list[int] = self._codec.prefix
        """The tokens that transformers puts before a text, such as Llama's bos; `encode` does not. The post-processor
        of a tokenizer.json names them; for a SentencePiece model, the tokenizer_config.json beside it does."""
        self.special_tokens: dict[str, str] = self._codec.special_tokens
        """Texts of control tokens, by the names that chat templates have for them: "eos_token"."""
        self.chat_templates: dict[str, str] = self._codec.chat_templates
        """Jinja templates of chats by name: "default", and "tool_use" for chats with tools."""
        self.notes: list[str] = []
        """Sentences about what files beside the tokenizer add to it, and where they contradict each other."""
        encode = self._codec.encode
        self._differs = lru_cache(1 << 12)(lambda a, b: encode(a + b)[: len(alone := encode(a))] != alone)

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer, (self.model, self.config)

    @property
    def files(self) -> dict[str, bytes]:
        """The files that the tokenizer travels as, by name: its own and, if something has to be said beside it, a
        tokenizer_config.json, with which transformers loads a tokenizer.json, too."""
        if not self.config:
            return {self.file_name: self.model}
        of_class = {"tokenizer_class": "PreTrainedTokenizerFast"} if self.file_name == TOKENIZER_JSON else {}
        config = json.dumps(of_class | {**self.config}, indent=2, ensure_ascii=False)
        return {CONFIG: f"{config}\n".encode(), self.file_name: self.model}

    def write(self, folder: Path) -> None:
        """Write the tokenizer's files into a folder, in the place of another tokenizer's. Raises OSError."""
        from sagetrain.data.token_file import write_atomic  # This import loads numpy, which a plan may do without.

        for name in {TOKENIZER_NAME, TOKENIZER_JSON, CONFIG} - self.files.keys():
            (folder / name).unlink(missing_ok=True)
        for name, content in self.files.items():
            write_atomic(folder / name, content)

    @property
    def chat_template(self) -> str | None:
        """The default Jinja template of chats. None if there is none."""
        return self.chat_templates.get("default")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Read a tokenizer file, and the files beside it that complete it. Those hold further tokens, the end-of-text
        token, whether a SentencePiece model puts bos before a text, and chat templates (tokenizer_config.py). Raises
        ConfigError if the file is missing, is something else, lacks an eos token, or is contradicted by a file beside
        it."""
        try:
            model, config, notes = completed(Path(path).read_bytes(), Path(path))
        except IsADirectoryError as error:
            raise ConfigError(f"tokenizer {path}: is a folder; {_in_folder(Path(path))}") from error
        except OSError as error:
            refuse_pointer(path)
            raise ConfigError(
                f"tokenizer {path}: {error.strerror}; `sagetrain prepare` can train one, and that of a model of the "
                "Hugging Face hub comes by `hf download NAME --include '*token*' --local-dir DIR`"
            ) from error
        except ConfigError:
            raise
        except json.JSONDecodeError as error:
            raise ConfigError(f"tokenizer {path} is not valid JSON ({error}); copy it again") from error
        except ValueError as error:
            raise _no_tokenizer(path, error) from error
        try:
            tokenizer = cls(model, config)
        except ValueError as error:
            raise _no_tokenizer(path, error) from error
        tokenizer.notes = notes
        if tokenizer.eos_id < 0:
            usual = "<|endoftext|>" if is_json(model) else "</s>"
            raise ConfigError(
                f"tokenizer {path} has no end-of-sentence token, which must end every document; name it in a "
                f'tokenizer_config.json beside it, as in {{"eos_token": "{usual}"}}'
            )
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without bos or eos around it. Raises ValueError if the text holds half of a
        surrogate pair."""
        return self._codec.encode(_valid(text))

    def encode_parts(self, parts: Sequence[tuple[str, bool]], control: Literal[True] = True) -> EncodedParts:
        """Encode texts, each with a mark, end to end. What stands before a marked part has the tokens that it has
        alone, as when a model is asked to go on from there. The texts of control tokens are these tokens, which callers
        outside of this library say by `control`. Raises ValueError if a text holds half of a surrogate pair."""
        text = _valid("".join(text for text, _ in parts))
        stops = list(accumulate(len(text) for text, _ in parts))
        marked = [(stop - len(text), stop) for stop, (text, mark) in zip(stops, parts, strict=True) if mark and text]
        cuts = [start for start, _ in marked if text[:start][-1:].isspace() and self._is_cut_by(text, start)]
        ids, spans = self._spans(text, cuts)
        if inside := [start for start, _ in marked if _first(spans, start) < bisect_left(spans, (start, 0))]:
            cuts = sorted({*cuts, *inside})
            ids, spans = self._spans(text, cuts)
        counted = [False] * len(ids)
        for start, stop in marked:
            tokens = slice(_first(spans, start), bisect_left(spans, (stop, 0)))
            counted[tokens] = [True] * len(counted[tokens])
        return EncodedParts(ids, counted, len(cuts))

    def ends_inside(self, text: str) -> bool:
        """Whether a text ends in white space that is joined to a word behind it."""
        return text[-1:].isspace() and self._is_cut_by(f"{text}a", len(text))

    def _is_cut_by(self, text: str, place: int) -> bool:
        """Whether white space before a place has other tokens alone than before what follows it."""
        return self._differs(text[max(0, place - _AROUND) : place], text[place : place + _AROUND])

    def _spans(self, text: str, cuts: Sequence[int]) -> tuple[list[int], Spans]:
        """Encode the parts of a text between cuts, each without what follows it."""
        ids, spans = self._codec.spans(text[: cuts[0]] if cuts else text)
        for start, stop in pairwise([*cuts, len(text)]):
            found, theirs = self._following(text[start:stop])
            ids, spans = ids + found, spans + [(start + begin, start + end) for begin, end in theirs]
        return ids, spans

    def _following(self, text: str) -> tuple[list[int], Spans]:
        """Encode a text that follows another one, without a space that the tokenizer puts before a text."""
        for before in _BEFORE[self._adds_space :]:
            ids, spans = self._codec.spans(before + text)
            first = bisect_left(spans, (len(before), 0))
            if all(end <= len(before) for _, end in spans[:first]):
                return ids[first:], [(begin - len(before), end - len(before)) for begin, end in spans[first:]]
        raise ValueError(f"this tokenizer has no tokens for {text[:40]!r} apart from the text before it")

    @cached_property
    def _adds_space(self) -> bool:
        return self._codec.encode("\na") != self._codec.encode("\n") + self._codec.encode("a")

    @cached_property
    def control_tokens(self) -> frozenset[int]:
        """The ids of the control tokens."""
        return frozenset(filter(self._codec.is_control, range(self.vocab_size)))

    @cached_property
    def _control_texts(self) -> re.Pattern[str] | None:
        return any_of(map(self._codec.piece, self.control_tokens))

    def control_texts_in(self, text: str) -> list[str]:
        """Return the texts of control tokens that stand in a text."""
        return self._control_texts.findall(text) if self._control_texts else []

    @property
    def unknown_tokens(self) -> list[int]:
        """The token that stands for what has no token, as a list. The list is empty if there is none, or if it is also
        the token that begins or ends a text."""
        return [each for each in (self._codec.unknown_id,) if each not in (-1, self.bos_id, self.eos_id)]

    def is_control(self, token: int) -> bool:
        """Whether a token is a control token, as bos and eos are."""
        return self._codec.is_control(token)

    def spelling(self, token: int) -> str:
        """Return a token as its file has it, with a space where the file has SentencePiece's mark for one."""
        return self._codec.piece(token).replace(SPACE_MARK, " ")

    def decode(self, ids: list[int]) -> str:
        """Return the text of token ids. Control tokens become nothing, and byte tokens that are not UTF-8 become
        U+FFFD."""
        return self._codec.decode(ids)


def _no_tokenizer(path: str | os.PathLike[str], error: ValueError) -> ConfigError:
    refuse_pointer(path)
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\s", Path(path).read_bytes()[:1024]):
        return ConfigError(
            f"tokenizer {path} is a file of tiktoken, which has no special tokens and no rule that cuts a text; name "
            f"the tokenizer.json of the model's folder on the Hugging Face hub ({CONVERT} writes one, too)"
        )
    return ConfigError(f"tokenizer {path} is not {error}")


def _in_folder(folder: Path) -> str:
    there = [name for name in (TOKENIZER_JSON, TOKENIZER_NAME, *OTHER_FILES) if (folder / name).is_file()]
    if there and there[0] in OTHER_FILES:
        return f"it has {there[0]} and no {TOKENIZER_JSON}, which {CONVERT} writes"
    return f"name {tokenizer_in(folder)}"


def _first(spans: Spans, start: int) -> int:
    """Return the first token that holds a character from `start` on."""
    return bisect_right(spans, start, key=lambda span: span[1])


def _valid(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"not valid Unicode: a lone surrogate at character {error.start}") from error
    return text


def tokenizer_of(data: DataConfig, vocab_size: int | None) -> Tokenizer | None:
    """Load the tokenizer of a run. Return None if there is none beside the token files and the size of the vocabulary
    is given. Raises ConfigError as Tokenizer.load does."""
    if vocab_size and data.tokenizer is None and not Path(data.tokenizer_path).is_file():
        return None
    return Tokenizer.load(data.tokenizer_path)


def known_tokenizer(data: DataConfig) -> Tokenizer | None:
    """Load the run's tokenizer. Return None if the file does not exist yet."""
    return Tokenizer.load(data.tokenizer_path) if Path(data.tokenizer_path).is_file() else None


def known_vocab_size(data: DataConfig) -> int | None:
    """Return the vocabulary size of the run's tokenizer. Return None if the file does not exist yet."""
    tokenizer = known_tokenizer(data)
    return tokenizer.vocab_size if tokenizer else None
