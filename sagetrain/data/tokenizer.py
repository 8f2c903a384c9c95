"""Tokenizers: SentencePiece models and Hugging Face's tokenizer.json behind one interface.

The text of a control token, such as </s> or <|im_end|>, is that token wherever it is written, as in transformers.
"""

from __future__ import annotations

import json
import os
import re
import string
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import sentencepiece
import tokenizers

from sagetrain.config.errors import ConfigError, refuse_pointer
from sagetrain.config.schema import TOKENIZER_JSON, DataConfig, tokenizer_in
from sagetrain.config.schema import TOKENIZER_NAME as TOKENIZER_NAME
from sagetrain.data.tokenizer_copy import (
    CONVERT,
    SPLIT_SPECIAL,
    TOKENIZER_CONFIG,
    completed,
    is_json,
    kept_templates,
    sha256_of,
    split,
)

# SentencePiece writes a space as this character inside its pieces, and would decode the character as a space.
_SPACE_MARK = "\u2581"
OTHER_FILES = ("vocab.json", "tekken.json", "spiece.model", "sentencepiece.bpe.model")
"""Files of tokenizers from which transformers can write a tokenizer.json."""
_AROUND = 8
"""Number of characters on both sides of a place in a text that decide whether white space there is joined."""
_BEFORE = ("", "\n", "|", "a", "1")
"""Texts behind which another one is encoded, the first whose tokens end with it."""
_STAND_INS = range(0xE000, 0xF900)
"""Characters for private use. One of them stands for the space mark. All have three bytes, as the mark has."""

INSIDE = (
    "it ends in white space that the tokenizer joins to the word behind it, and few texts that a model has learned "
    "from have tokens that end there"
)
LEAVE_OUT = "leave the white space out, unless the model was trained on prompts that end so"
"""The way out for a prompt that `ends_inside` finds. INSIDE says what is wrong with the prompt."""

Spans = list[tuple[int, int]]
"""For each token in a text, its first character and the one after its last."""


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

    def __init__(self, model: bytes):
        """Build the tokenizer from the bytes of a SentencePiece model or of a tokenizer.json.

        Raises:
            ValueError: they are neither.
        """
        self._codec: _Codec = _HuggingFace(model) if is_json(model) else _SentencePiece(model)
        self.model = model
        self.file_name = TOKENIZER_JSON if is_json(model) else TOKENIZER_NAME
        self.sha256 = sha256_of(model)
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

    @property
    def chat_template(self) -> str | None:
        """The default Jinja template of chats. None if there is none."""
        return self.chat_templates.get("default")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Read a tokenizer file, and the files beside it that complete it. Those hold further tokens, the end-of-text
        token, whether a SentencePiece model puts bos before a text, and chat templates (tokenizer_config.py).

        Raises:
            ConfigError: the file is missing, is something else, lacks an eos token, or is contradicted by a file beside
                it.
        """
        try:
            model, notes = completed(Path(path).read_bytes(), Path(path))
        except IsADirectoryError as error:
            raise ConfigError(f"tokenizer {path}: is a folder; {_in_folder(Path(path))}") from error
        except OSError as error:
            raise ConfigError(f"tokenizer {path}: {error.strerror}; `sagetrain prepare` can train one") from error
        except ConfigError:
            raise
        except json.JSONDecodeError as error:
            raise ConfigError(f"tokenizer {path} is not valid JSON ({error}); copy it again") from error
        except ValueError as error:
            raise _no_tokenizer(path, error) from error
        try:
            tokenizer = cls(model)
        except ValueError as error:
            raise _no_tokenizer(path, error) from error
        tokenizer.notes = notes
        if tokenizer.eos_id < 0:
            fix = '; name it in a tokenizer_config.json beside it, as in {"eos_token": "<|endoftext|>"}'
            raise ConfigError(
                f"tokenizer {path} has no end-of-sentence token, which must end every document"
                f"{fix if is_json(model) else ''}"
            )
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the token ids of `text`, without bos or eos around it. Raises ValueError if the text holds half of a
        surrogate pair."""
        return self._codec.encode(_valid(text))

    def encode_parts(self, parts: Sequence[tuple[str, bool]], control: Literal[True] = True) -> EncodedParts:
        """Encode texts end to end. What stands before a marked part has the tokens that it has alone, as when a model
        is asked to go on from there.

        Args:
            parts: texts, each with a mark.
            control: the texts of control tokens are these tokens. Callers of earlier versions say it.

        Raises:
            ValueError: a text holds half of a surrogate pair.
        """
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
        return _any_of(map(self._codec.piece, self.control_tokens))

    def control_texts_in(self, text: str) -> list[str]:
        """Return the texts of control tokens that stand in a text."""
        return self._control_texts.findall(text) if self._control_texts else []

    def is_control(self, token: int) -> bool:
        """Whether a token is a control token, as bos and eos are."""
        return self._codec.is_control(token)

    def spelling(self, token: int) -> str:
        """Return a token as its file has it, with a space where the file has SentencePiece's mark for one."""
        return self._codec.piece(token).replace(_SPACE_MARK, " ")

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


class _Codec(Protocol):
    vocab_size: int
    bos_id: int
    eos_id: int
    prefix: list[int]
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]

    def encode(self, text: str) -> list[int]: ...

    def spans(self, text: str) -> tuple[list[int], Spans]: ...

    def is_control(self, token: int) -> bool: ...

    def piece(self, token: int) -> str: ...

    def decode(self, ids: list[int]) -> str: ...


class _SentencePiece:
    def __init__(self, model: bytes):
        self._processor = sentencepiece.SentencePieceProcessor()
        model, config = split(model)
        try:
            self._processor.load_from_serialized_proto(model)
        except RuntimeError as error:
            raise ValueError("a SentencePiece model file, nor a tokenizer.json") from error
        self.vocab_size: int = self._processor.vocab_size()
        self.bos_id: int = self._processor.bos_id()
        self.eos_id: int = self._processor.eos_id()
        self._byte_ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        named = {"bos_token": self.bos_id, "eos_token": self.eos_id}
        self.special_tokens = {name: token for name, token in config.items() if name.endswith("_token")}
        self.special_tokens |= {name: self._processor.id_to_piece(each) for name, each in named.items() if each >= 0}
        self.special_tokens.pop("add_bos_token", None)
        self.prefix = [self.bos_id] if config.get("add_bos_token") and self.bos_id >= 0 else []
        self.chat_templates = kept_templates(config)
        self._as_characters = bool(config.get(SPLIT_SPECIAL))

    def encode(self, text: str) -> list[int]:
        if not self._written or not self._written.search(text):
            return self._plain(text)
        ids: list[int] = []
        for part in self._written.split(text):
            ids += [self._control[part]] if part in self._control else self._plain(part)
        return ids

    def _plain(self, text: str) -> list[int]:
        return self._spelled(self._processor.encode(self._without_marks(text)), text)

    @cached_property
    def _stand_in(self) -> str | None:
        """A character that the model spells in bytes, or None if the model has no bytes. It stands for the space mark,
        which SentencePiece would take for a space."""
        if not all(map(self._processor.is_byte, self._byte_ids)):
            return None
        return next((each for each in map(chr, _STAND_INS) if self._is_spelled(each)), None)

    def _is_spelled(self, character: str) -> bool:
        ids, spelled = self._processor.encode(f"a{character}a"), self._bytes(character)
        return any(ids[place : place + 3] == spelled for place in range(len(ids)))

    def _bytes(self, text: str) -> list[int]:
        return [self._byte_ids[byte] for byte in text.encode()]

    def _without_marks(self, text: str) -> str:
        """Replace space marks by the stand-in. The text is encoded as a whole, because a model may put a space before
        or behind each text."""
        return text.replace(_SPACE_MARK, self._stand_in) if _SPACE_MARK in text and self._stand_in else text

    def _spelled(self, ids: Iterable[int], text: str) -> list[int]:
        """Return the token ids of `_without_marks(text)`, with the bytes of the space mark where the text has it."""
        found = list(ids)
        if _SPACE_MARK not in text or not self._stand_in:
            return found
        theirs, mark = self._bytes(self._stand_in), self._bytes(_SPACE_MARK)
        marks = (letter == _SPACE_MARK for letter in text if letter in (_SPACE_MARK, self._stand_in))
        for place in range(len(found) - 2):
            if found[place : place + 3] == theirs and next(marks):
                found[place : place + 3] = mark
        return found

    @cached_property
    def _control(self) -> dict[str, int]:
        """Ids of control tokens by their texts. The text of the unknown token is that token, too."""
        if self._as_characters:
            return {}
        ids = filter(lambda each: self.is_control(each) or self._processor.is_unknown(each), range(self.vocab_size))
        return {self.piece(each): each for each in ids}

    @cached_property
    def _written(self) -> re.Pattern[str] | None:
        return _any_of(self._control)

    def spans(self, text: str) -> tuple[list[int], Spans]:
        from sentencepiece.sentencepiece_pb2 import SentencePieceText  # type: ignore[attr-defined]

        found, spans, begin = [], [], 0
        for part in self._written.split(text) if self._written else [text]:
            if part in self._control:
                found.append(self._control[part])
                spans.append((begin, begin + len(part)))
            else:
                encoded = self._processor.encode(self._without_marks(part), out_type="serialized_proto")
                pieces = SentencePieceText.FromString(encoded).pieces
                # The offsets count bytes. This list has the number of characters that begin before each byte.
                characters = [*accumulate((byte & 0xC0 != 0x80 for byte in part.encode()), initial=begin)]
                found += self._spelled((piece.id for piece in pieces), part)
                # Pieces without a length are bytes of the next character, or a space before or behind the text.
                last = characters[-1] - (1 if part else 0)
                starts = (min(characters[p.begin], last) for p in pieces)
                spans += [(at, max(at + 1, characters[p.end])) for at, p in zip(starts, pieces, strict=True)]
            begin += len(part)
        return found, spans

    def is_control(self, token: int) -> bool:
        return bool(self._processor.is_control(token))

    def piece(self, token: int) -> str:
        return str(self._processor.id_to_piece(token))

    def decode(self, ids: list[int]) -> str:
        return str(self._processor.decode(ids))


class _HuggingFace:
    def __init__(self, model: bytes):
        tree = json.loads(model)
        config = tree.pop(TOKENIZER_CONFIG, {})
        try:
            # Spans would lose the spaces at their ends, so that the last spaces of a part would count nowhere.
            post = tree.get("post_processor") or {}
            for step in post.get("processors") or [post]:
                step |= {"trim_offsets": False} if "trim_offsets" in step else {}
            self._pipeline = tokenizers.Tokenizer.from_str(json.dumps(tree))
        except Exception as error:
            raise ValueError(f"a tokenizer.json of the tokenizers package ({error})") from error
        self._pipeline.no_truncation()
        self._pipeline.no_padding()
        self._pipeline.encode_special_tokens = bool(config.get(SPLIT_SPECIAL))
        self.vocab_size: int = max(self._pipeline.get_vocab().values()) + 1
        self.bos_id, self.eos_id = (self._id(config.get(name)) for name in ("bos_token", "eos_token"))
        # In the encoding of an empty text, tokens before and behind it cannot be told apart.
        text = self._pipeline.encode(string.printable)
        self.prefix = text.ids[: [*text.special_tokens_mask, 0].index(0)]
        self.special_tokens = {name: token for name, token in config.items() if name.endswith("_token")}
        self.chat_templates = kept_templates(config)

    @cached_property
    def _control(self) -> frozenset[int]:
        return frozenset(each for each, added in self._pipeline.get_added_tokens_decoder().items() if added.special)

    def _id(self, token: str | None) -> int:
        number = self._pipeline.token_to_id(token) if token else None
        return -1 if number is None else number

    def encode(self, text: str) -> list[int]:
        return self._pipeline.encode(text, add_special_tokens=False).ids

    def spans(self, text: str) -> tuple[list[int], Spans]:
        encoding = self._pipeline.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def is_control(self, token: int) -> bool:
        return token in self._control

    def piece(self, token: int) -> str:
        return self._pipeline.id_to_token(token) or ""

    def decode(self, ids: list[int]) -> str:
        return self._pipeline.decode(ids, skip_special_tokens=True)


def _first(spans: Spans, start: int) -> int:
    """Return the first token that holds a character from `start` on."""
    return bisect_right(spans, start, key=lambda span: span[1])


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that finds any of these texts, the longest first. Return None if there are none."""
    found = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, found))})") if found else None


def _valid(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"not valid Unicode: a lone surrogate at character {error.start}") from error
    return text


def find_tokenizer(data: DataConfig) -> Path:
    """Return the path of data.tokenizer, or else of the tokenizer that `sagetrain prepare` left beside the first
    training source."""
    return Path(data.tokenizer_path)


def tokenizer_of(data: DataConfig, vocab_size: int | None) -> Tokenizer | None:
    """Load the tokenizer of a run. Return None if there is none beside the token files and the size of the vocabulary
    is given. Raises ConfigError as Tokenizer.load does."""
    file = find_tokenizer(data)
    if vocab_size and data.tokenizer is None and not file.is_file():
        return None
    return Tokenizer.load(file)


def known_tokenizer(data: DataConfig) -> Tokenizer | None:
    """Load the run's tokenizer. Return None if the file does not exist yet."""
    file = find_tokenizer(data)
    return Tokenizer.load(file) if file.is_file() else None


def known_vocab_size(data: DataConfig) -> int | None:
    """Return the vocabulary size of the run's tokenizer. Return None if the file does not exist yet."""
    tokenizer = known_tokenizer(data)
    return tokenizer.vocab_size if tokenizer else None
