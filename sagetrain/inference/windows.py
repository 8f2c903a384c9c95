"""Split text into windows of tokens. Each token is scored once, with as much context as the stride leaves it.

Windows are as long as the model's context and begin `stride` tokens apart. The first window scores all of its labels.
Each further one scores its last `stride` labels, which the windows before have not seen, with at least window - stride
tokens of context, or with the whole of their document so far. The last window ends with the text, so what it scores has
more context.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sagetrain.config.arguments import spelled
from sagetrain.config.errors import ConfigError, is_utf8
from sagetrain.config.schema import DataSource, is_url
from sagetrain.corpus.encode import Encoder, encode
from sagetrain.corpus.request import TextRequest
from sagetrain.corpus.sources import Corpus
from sagetrain.data.batch import Sample
from sagetrain.data.token_file import TokenFile, token_path
from sagetrain.data.token_files import check_tokenizers, check_vocabulary
from sagetrain.data.tokenizer import Tokenizer

Tokens = NDArray[np.int64]
Piece = tuple[Tokens, Tokens]
"""Consecutive tokens (~token is a token that does not count), and the places among them at which documents begin."""
_BLOCK = 1 << 20  # This is a number of tokens.


class PreparedDocuments:
    """The documents of token files, one file after the other. They can be read once. What `sagetrain prepare` put
    before each document does not count."""

    def __init__(self, name: str, paths: Sequence[str], tokenizer: Tokenizer | None, vocab_size: int) -> None:
        """Open the files. Raises ConfigError if one cannot be read, or was made with another tokenizer."""
        self.name = name
        self._files, self._tokenizer, self._vocab_size = [TokenFile(path) for path in paths], tokenizer, vocab_size
        check_tokenizers(self._files, tokenizer.sha256 if tokenizer else None)
        recorded: list[Any] = [file.provenance().get("bytes") for file in self._files]
        self._count = None in recorded and tokenizer is not None
        nothing = tokenizer is None or any(file.masked for file in self._files)
        self.bytes = None if nothing else 0 if self._count else sum(recorded)
        """Bytes of the text in UTF-8, as far as it was read. None: there are only tokens, or not all of them count."""
        self.counted = "in the decoded tokens" if self._count else "by prepare"

    def __iter__(self) -> Iterator[Piece]:
        for file in self._files:
            size = len(file.provenance().get("request", {}).get("prefix", []))
            for start in range(0, file.num_tokens, _BLOCK):
                stop = min(start + _BLOCK, file.num_tokens)
                tokens = file.tokens(start, stop)
                check_vocabulary(file, tokens, self._vocab_size)
                if self._count and self._tokenizer and self.bytes is not None:
                    self.bytes += decoded_bytes(self._tokenizer, tokens)
                if (counted := file.counted(start, stop)) is not None:
                    tokens = np.where(counted, tokens, ~tokens)
                begins = np.array(file.document_starts(start - max(1, size), stop), dtype=np.int64) - start
                _leave_out(tokens, begins, size)
                yield tokens, begins[begins >= 0]


class Raw:
    """The documents of text files, which can be read once. Everything that `sagetrain prepare` takes is turned into
    tokens on the way."""

    counted = "in the text"

    def __init__(self, source: str, tokenizer: Tokenizer, text_key: str, prefix: Sequence[int]) -> None:
        """Find the source. `prefix` are tokens before every document, which do not count. Raises ConfigError if there
        is no such source."""
        self.name = source
        self._corpus = Corpus(TextRequest([source], text_key=text_key))
        self._encoder = Encoder(tokenizer, text_key, 0.0, prefix=prefix)
        self.bytes: int | None = 0

    def __iter__(self) -> Iterator[Piece]:
        for encoded in encode(self._corpus.chunks(), self._encoder, 1):
            for side, part in encoded.parts.items():
                begins = np.cumsum(part.lengths) - part.lengths
                begins = begins[1:] if encoded.chunk.continues else begins
                self.bytes = (self.bytes or 0) + encoded.tally.counts[side].bytes
                tokens = part.tokens.astype(np.int64)
                _leave_out(tokens, begins, len(self._encoder.prefix))
                yield tokens, begins


def _leave_out(tokens: np.ndarray, begins: np.ndarray, size: int) -> None:
    """Mark the first `size` tokens of each document as not counted. Some of them may be outside or marked already."""
    places = (begins[:, None] + np.arange(size)).ravel()
    places = places[(places >= 0) & (places < len(tokens))]
    tokens[places] = np.minimum(tokens[places], ~tokens[places])


def text_of(
    path: str, tokenizer: Tokenizer | None, vocab_size: int, text_key: str, prefix: Sequence[int]
) -> PreparedDocuments | Raw:
    """Open token files (NAME or NAME.bin, or a pattern of names), or text, whose documents each follow `prefix`. Where
    a file or folder has the very name NAME, it is the text that is read, and NAME.bin names the token file. Raises
    ConfigError if the files or the text cannot be read, or there is no tokenizer for text."""
    # A model of pydantic checks that a text is UTF-8 and which URLs it names, and the name of a file need not be UTF-8.
    there, checked = os.path.exists(path), is_utf8(path) and not is_url(path)
    name = path.removesuffix(".bin") if there else path
    files = (DataSource(path=name) if checked else DataSource.model_construct(path=name)).files
    if files and token_path(files[0], ".idx").exists() and not (there and name == path):
        return PreparedDocuments(path, files, tokenizer, vocab_size)
    if tokenizer is None:
        raise ConfigError(
            f"{spelled('texts')} {path}: no token file, and the run was trained without a tokenizer, so no tokens can "
            "be made of text: put the tokenizer.model or tokenizer.json that made its token files into the run's folder"
        )
    return Raw(path, tokenizer, text_key, prefix)


def windows(pieces: Iterable[Piece], size: int, stride: int, eos_id: int) -> Iterator[tuple[Sample, int]]:
    """Yield sequences of size + 1 tokens, each with the number of its last tokens that are to be scored. Every token is
    scored once. The single sequence of a shorter text is shorter. Windows are `stride` tokens apart, 1 to size. The
    token eos_id stands before the text, as before every document in a token file. -1: none, and the first token is not
    scored."""
    lead = [(np.array([eos_id]), np.array([], dtype=np.int64))] if eos_id >= 0 else []
    held = begins = np.array([], dtype=np.int64)
    # These are the place in `held` where the next window begins, and the place of the last token that was scored.
    following = scored = 0

    def window(first: int) -> Sample:
        starts = begins[(begins > first) & (begins < first + size)] - first
        tokens = held[first : first + size + 1]
        counted = None if tokens.min() >= 0 else tokens[1:] >= 0
        return Sample(np.maximum(tokens, ~tokens), starts.tolist(), counted=counted)

    for tokens, starts in chain(lead, pieces):
        begins, held = np.concatenate([begins, starts + len(held)]), np.concatenate([held, tokens])
        while following + size < len(held):
            yield window(following), following + size - scored
            scored, following = following + size, following + stride
        passed = max(0, following - stride)
        held, begins = held[passed:], begins[begins >= passed] - passed
        following, scored = following - passed, scored - passed
    if scored < len(held) - 1:
        yield window(max(0, len(held) - 1 - size)), len(held) - 1 - scored


def decoded_bytes(tokenizer: Tokenizer, tokens: Tokens) -> int:
    """Return the UTF-8 bytes of the text of tokens, document by document. A character that is cut at an end may count
    too much."""
    documents = np.split(tokens, np.flatnonzero(tokens == tokenizer.eos_id) + 1)
    return sum(len(tokenizer.decode(document.tolist()).encode()) for document in documents)
