"""The training of SentencePiece models. They give back exactly the text that was encoded: no normalization, no added or
removed spaces, newlines and tabs kept, and characters outside the vocabulary spelled as UTF-8 byte tokens."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator

import sentencepiece

from sagetrain.config.arguments import spelled
from sagetrain.config.errors import ConfigError, many

_MAX_SENTENCE_BYTES = 1 << 14


def train_tokenizer(texts: Iterable[str], vocab_size: int, origin: str = "the texts") -> bytes:
    """Train a byte-pair encoding with byte fallback and single digits on `texts`, and return the bytes of its file. It
    depends on the texts alone. Raises ConfigError if they are too few, or too diverse, for `vocab_size`. The message
    names their `origin`."""
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
            raise ConfigError(
                f"{origin}: no text to train the tokenizer on, because all documents are empty; name a source with text"
            ) from error
        reason = str(error).rsplit("] ", 1)[-1].strip()
        if least := re.search(r"required_chars\. \d+ vs (\d+)", reason):
            reason = f"{spelled('vocab_size')} {least[1]} or more"
        elif most := re.search(r"too high.*<= (\d+)", reason):
            reason = f"{spelled('vocab_size')} {most[1]} or less, or more text"
        raise ConfigError(
            f"{origin}: a tokenizer of {vocab_size:,} tokens cannot be trained on this sample "
            f"({many(counter.lines, 'line')}, {counter.characters:,} characters): {reason}"
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
