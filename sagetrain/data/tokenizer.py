"""SentencePiece tokenizers: train one, load one, encode and decode exactly.

Decoding gives back the very text that was encoded: no normalization, no added or removed spaces, newlines and tabs
kept, characters outside the vocabulary spelled as UTF-8 byte tokens.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import sentencepiece

from sagetrain.config.errors import ConfigError
from sagetrain.config.schema import TOKENIZER_NAME as TOKENIZER_NAME
from sagetrain.config.schema import DataConfig

# SentencePiece writes a space as this character inside its pieces, and so would decode the character as a space.
_SPACE_MARK = "\u2581"
_MAX_SENTENCE_BYTES = 1 << 14


class Tokenizer:
    """A SentencePiece model. Control tokens (bos, eos) never come out of text; `sagetrain prepare` appends eos."""

    def __init__(self, model: bytes):
        """From the bytes of a SentencePiece model file; RuntimeError if they are none."""
        self._processor = sentencepiece.SentencePieceProcessor()
        self._processor.load_from_serialized_proto(model)
        self.model = model
        self.sha256 = hashlib.sha256(model).hexdigest()
        self.vocab_size: int = self._processor.vocab_size()
        self.bos_id: int = self._processor.bos_id()
        self.eos_id: int = self._processor.eos_id()
        byte_ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in _SPACE_MARK.encode()]
        self._space_mark_ids = byte_ids if all(map(self._processor.is_byte, byte_ids)) else None

    @classmethod
    def load(cls, path: str | os.PathLike) -> Tokenizer:
        """Read a SentencePiece model file. ConfigError if it is missing, is something else, or lacks an eos token."""
        try:
            model = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"tokenizer {path}: {error.strerror}; `sagetrain prepare` can train one") from error
        try:
            tokenizer = cls(model)
        except RuntimeError as error:
            raise ConfigError(f"tokenizer {path} is not a SentencePiece model file") from error
        if tokenizer.eos_id < 0:
            raise ConfigError(f"tokenizer {path} has no end-of-sentence token, which must end every document")
        return tokenizer

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without bos or eos. ValueError if the text holds half of a surrogate pair."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"not valid Unicode: a lone surrogate at character {error.start}") from error
        if _SPACE_MARK not in text or self._space_mark_ids is None:
            return self._processor.encode(text)
        first, *rest = text.split(_SPACE_MARK)
        ids = self._processor.encode(first)
        for part in rest:
            ids += self._space_mark_ids
            ids += self._processor.encode(part)
        return ids

    def decode(self, ids: list[int]) -> str:
        """The text of token ids. Control tokens give nothing; byte tokens that are no UTF-8 give U+FFFD."""
        return self._processor.decode(ids)


def find_tokenizer(data: DataConfig) -> Path:
    """data.tokenizer, or else the tokenizer.model that `sagetrain prepare` left beside the first training source."""
    return Path(data.tokenizer_path)


def known_vocab_size(data: DataConfig) -> int | None:
    """Tokens of the run's tokenizer; None if the file does not exist yet."""
    file = find_tokenizer(data)
    return Tokenizer.load(file).vocab_size if file.is_file() else None


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """Train a byte-pair encoding with byte fallback and single digits on `texts`; returns the model file's bytes.

    Deterministic in the texts. ConfigError if the texts are too few, or too diverse, for `vocab_size`.
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
            num_threads=1,  # recorded in the file, and no faster with more
            minloglevel=2,
        )
    except RuntimeError as error:
        if counter.interrupted:
            raise KeyboardInterrupt from error
        if counter.lines == 0:
            raise ConfigError("no text to train the tokenizer on") from error
        reason = str(error).rsplit("] ", 1)[-1].strip()
        raise ConfigError(
            f"a tokenizer of {vocab_size:,} tokens cannot be trained on this sample ({counter.lines:,} lines, "
            f"{counter.characters:,} characters): {reason}"
        ) from error
    return model.getvalue()


class _Counter:
    """The lines of the texts, cut to what SentencePiece accepts, and how many there were.

    No line holds a newline, so no piece does: a newline is always a byte token, and a text may be encoded in parts
    that end with one.
    """

    def __init__(self, texts: Iterable[str]):
        self._texts = texts
        self.lines = 0
        self.characters = 0
        self.interrupted = False
        """By Ctrl-C, of which SentencePiece makes a RuntimeError."""

    def __iter__(self) -> Iterator[str]:
        try:
            yield from self._lines()
        except KeyboardInterrupt:
            self.interrupted = True
            raise

    def _lines(self) -> Iterator[str]:
        width = _MAX_SENTENCE_BYTES // 4  # a character is at most 4 bytes
        for text in self._texts:
            for line in text.split("\n"):
                for start in range(0, len(line), width):
                    part = line[start : start + width].replace("\0", "")
                    if part:
                        self.lines += 1
                        self.characters += len(part)
                        yield part
