"""Tokenizers: SentencePiece models and Hugging Face's tokenizer.json behind one interface, and the training of
SentencePiece models.

Tokenizers that are trained here give back exactly the text that was encoded: no normalization, no added or removed
spaces, newlines and tabs kept, and characters outside the vocabulary spelled as UTF-8 byte tokens.
"""

from __future__ import annotations

import io
import json
import os
import re
import string
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import sentencepiece
import tokenizers

from sagetrain.config.errors import ConfigError, many
from sagetrain.config.schema import TOKENIZER_JSON, DataConfig, tokenizer_in
from sagetrain.config.schema import TOKENIZER_NAME as TOKENIZER_NAME
from sagetrain.data.kinds import refuse_pointer
from sagetrain.data.tokenizer_copy import (
    CONVERT,
    TOKENIZER_CONFIG,
    completed,
    is_json,
    kept_templates,
    sha256_of,
    split,
)

# SentencePiece writes a space as this character inside its pieces, and would decode the character as a space.
_SPACE_MARK = "\u2581"
_MAX_SENTENCE_BYTES = 1 << 14
OTHER_FILES = ("vocab.json", "tekken.json", "spiece.model", "sentencepiece.bpe.model")
"""Files of tokenizers from which transformers can write a tokenizer.json."""
_STAND_INS = range(0xE000, 0xF900)
"""Characters for private use. One of them stands for the space mark. All have three bytes, as the mark has."""


class Tokenizer:
    """A tokenizer, built from the bytes of its file. Control tokens (bos, eos) never come out of text; `sagetrain
    prepare` appends eos."""

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
        """Return the token ids of `text`, without bos or eos. Raises ValueError if the text holds half of a surrogate
        pair."""
        return self._codec.encode(_valid(text))

    def encode_parts(self, parts: Sequence[tuple[str, bool]], control: bool = False) -> tuple[list[int], list[bool]]:
        """Encode the texts of the parts end to end.

        Args:
            parts: texts, each with a mark.
            control: whether the text of a control token is that token, as a chat template means it.

        Returns:
            The token ids, and for each token whether one of its characters is in a part whose mark is True.

        Raises:
            ValueError: a text holds half of a surrogate pair.
        """
        ids, spans = self._codec.spans(_valid("".join(text for text, _ in parts)), control)
        stops = list(accumulate(len(text) for text, _ in parts))
        marked = [(stop - len(text), stop) for stop, (text, mark) in zip(stops, parts, strict=True) if mark]
        return ids, [any(begin < stop and start < end for start, stop in marked) for begin, end in spans]

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


Spans = list[tuple[int, int]]
"""For each token in a text, its first character and the one after its last."""


class _Codec(Protocol):
    vocab_size: int
    bos_id: int
    eos_id: int
    prefix: list[int]
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]

    def encode(self, text: str) -> list[int]: ...

    def spans(self, text: str, control: bool) -> tuple[list[int], Spans]: ...

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

    def encode(self, text: str) -> list[int]:
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
        """Ids of control tokens by their texts, the longest first."""
        ids = filter(self._processor.is_control, range(self.vocab_size))
        texts = {self._processor.id_to_piece(each): each for each in ids}
        return dict(sorted(texts.items(), key=lambda item: -len(item[0])))

    def spans(self, text: str, control: bool) -> tuple[list[int], Spans]:
        from sentencepiece.sentencepiece_pb2 import SentencePieceText  # type: ignore[attr-defined]

        whole = self._control if control else {}
        found, spans, begin = [], [], 0
        for part in re.split(f"({'|'.join(map(re.escape, whole))})", text) if whole else [text]:
            if part in whole:
                found.append(whole[part])
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
        self._pipeline.encode_special_tokens = True  # In a text, </s> is four characters.
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

    def spans(self, text: str, control: bool) -> tuple[list[int], Spans]:
        self._pipeline.encode_special_tokens = not control
        try:
            encoding = self._pipeline.encode(text, add_special_tokens=False)
        finally:
            self._pipeline.encode_special_tokens = True
        return encoding.ids, encoding.offsets

    def is_control(self, token: int) -> bool:
        return token in self._control

    def piece(self, token: int) -> str:
        return self._pipeline.id_to_token(token) or ""

    def decode(self, ids: list[int]) -> str:
        return self._pipeline.decode(ids, skip_special_tokens=True)


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


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """Train a byte-pair encoding with byte fallback and single digits on `texts`. The result depends on the texts
    alone.

    Args:
        texts: texts to train on.
        vocab_size: number of tokens.

    Returns:
        The bytes of the model file.

    Raises:
        ConfigError: the texts are too few, or too diverse, for `vocab_size`.
    """
    counter = _Counter(texts)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(counter),
            model_writer=model,
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            split_digits=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            character_coverage=0.9998,
            max_sentence_length=_MAX_SENTENCE_BYTES,
            num_threads=1,  # The number of threads is recorded in the file, and more are not faster.
            minloglevel=2,
        )
    except RuntimeError as error:
        if counter.error is not None:
            raise counter.error from None
        if counter.lines == 0:
            raise ConfigError("no text to train the tokenizer on") from error
        reason = str(error).rsplit("] ", 1)[-1].strip()
        if least := re.search(r"required_chars\. \d+ vs (\d+)", reason):
            reason = f"--vocab-size {least[1]} or more"
        elif most := re.search(r"too high.*<= (\d+)", reason):
            reason = f"--vocab-size {most[1]} or less, or more text"
        raise ConfigError(
            f"a tokenizer of {vocab_size:,} tokens cannot be trained on this sample ({many(counter.lines, 'line')}, "
            f"{counter.characters:,} characters): {reason}"
        ) from error
    return model.getvalue()


class _Counter:
    """An iterator over the lines of the texts, cut to what SentencePiece accepts. It counts the lines.

    No line holds a newline, so no piece does: a newline is always a byte token, and a text may be encoded in parts that
    end with one.
    """

    def __init__(self, texts: Iterable[str]):
        self._texts = texts
        self.lines = 0
        self.characters = 0
        self.error: BaseException | None = None
        """The exception that the texts raised (a bad line, Ctrl-C). SentencePiece turns it into a RuntimeError."""

    def __iter__(self) -> Iterator[str]:
        try:
            yield from self._lines()
        except (Exception, KeyboardInterrupt) as error:
            self.error = error
            raise

    def _lines(self) -> Iterator[str]:
        width = _MAX_SENTENCE_BYTES // 4  # A character is at most 4 bytes.
        for text in self._texts:
            for line in text.split("\n"):
                for start in range(0, len(line), width):
                    part = line[start : start + width].replace("\0", "")
                    if part:
                        self.lines += 1
                        self.characters += len(part)
                        yield part
