"""The token files of one data source as one. The windows of the source are those of its files, one file after the
other."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, takewhile
from pathlib import Path

import numpy as np

from sagetrain.config.arguments import spelled
from sagetrain.config.errors import ConfigError
from sagetrain.config.schema import DataSource
from sagetrain.data.open_files import allow_open_files
from sagetrain.data.remote_blocks import is_remote
from sagetrain.data.token_file import SAMPLES, TokenFile

_FEWEST = 4  # Every file has at least this many blocks, whatever its share.


class TokenFiles:
    """The files of a source, one or thousands. A window is found in O(log files)."""

    def __init__(self, source: DataSource, seq_length: int):
        """Open the files. Raises ConfigError if one is missing or damaged, or they hold no sequence of `seq_length`
        tokens."""
        self.weight = source.weight
        if not source.files:
            raise ConfigError(f"token file {source.path}: no {source.path}.idx; `sagetrain prepare` makes them")
        self.files = [TokenFile(path) for path in source.files]
        self.num_tokens = sum(file.num_tokens for file in self.files)
        self._ends = list(accumulate(max(0, file.num_tokens - 1) // seq_length for file in self.files))
        self.num_windows = self._ends[-1]
        if self.num_windows < 1:
            raise ConfigError(
                f"token file {source.path} has {self.num_tokens:,} tokens, too few for one sequence of "
                f"data.seq_length {seq_length:,} (and the token after it); more text, or a shorter data.seq_length"
            )

    def window(self, number: int) -> tuple[TokenFile, int]:
        """Return the file that holds window `number`, and the index of the window in that file."""
        file = bisect_right(self._ends, number)
        return self.files[file], number - (self._ends[file - 1] if file else 0)

    def identity(self) -> str:
        """Return a hash that identifies the files (TokenFile.identity)."""
        first, *others = [file.identity() for file in self.files]
        return hashlib.sha256("".join([first, *others]).encode()).hexdigest() if others else first


def open_sources(
    sources: Sequence[DataSource], seq_length: int, document_attention: bool, tokenizer_sha256: str | None
) -> list[TokenFiles]:
    """Open the files of all sources, each for the life of the run. Raises ConfigError if a file is missing or damaged;
    records would be cut or would see one another; files were made with different tokenizers, or with another one than
    `tokenizer_sha256`; or a process may not have so many files open."""
    paths = [path for source in sources for path in source.files]
    # A mask is open beside the tokens, and a large index by its map. A file of a store has three more.
    most = sum(6 if is_remote(path) else 3 for path in paths)
    allow_open_files(most, f"the {len(paths):,} token files of data")
    opened = [TokenFiles(source, seq_length) for source in sources]
    every = [file for source in opened for file in source.files]
    _check_records(every, seq_length, document_attention)
    check_tokenizers(every, tokenizer_sha256)
    return opened


def _check_records(files: Sequence[TokenFile], seq_length: int, document_attention: bool) -> None:
    """Check that the sequences of fine-tuning records would not be cut elsewhere, and that their records stay apart.
    Raises ConfigError."""
    for file in files:
        packed = file.provenance().get("seq_length")
        if packed and seq_length % packed:
            raise ConfigError(
                f"token file {file.path} was prepared for sequences of {packed:,} tokens ({spelled('seq_length')}), "
                f"and data.seq_length (eval: --context) {seq_length:,} would cut its records: use {packed:,}, or "
                "prepare it again"
            )
        if packed and not document_attention:
            raise ConfigError(
                f"token file {file.path} holds records, several in a sequence, and with data.document_attention false "
                "each would see the ones before it: set data.document_attention: true"
            )


def check_tokenizers(files: Sequence[TokenFile], expected: str | None) -> None:
    """Check that no files record different tokenizers, or another one than expected. Files from elsewhere record none
    and are trusted. Raises ConfigError if the tokenizers differ."""
    recorded = {file.path: file.provenance().get("tokenizer_sha256") for file in files}
    known = [(path, sha) for path, sha in recorded.items() if sha]
    for path, sha in known:
        if expected and sha != expected:
            raise ConfigError(
                f"token file {path} was prepared with another tokenizer than data.tokenizer (SHA-256 {sha[:12]} in its "
                f".json, {expected[:12]} here); name its own, or prepare it again with this one"
            )
        if sha != known[0][1]:
            raise ConfigError(f"token files {known[0][0]} and {path} were prepared with different tokenizers")


def check_vocabulary(file: TokenFile, tokens: np.ndarray, vocab_size: int) -> None:
    """Check that tokens of a file are inside of the vocabulary. Raises ConfigError if not."""
    if not 0 <= tokens.min() <= tokens.max() < vocab_size:
        raise ConfigError(
            f"token file {file.path} holds token {int(tokens.max()):,}, outside of the vocabulary of "
            f"{vocab_size:,}: it was made with another tokenizer, or is damaged"
        )


def shares(files: Sequence[TokenFile]) -> list[int]:
    """Return how many blocks of each file are looked at when a run starts: about 2^14 in all, in proportion to the
    files' tokens."""
    tokens = sum(file.num_tokens for file in files)
    return [max(_FEWEST, -(-SAMPLES * file.num_tokens // tokens)) for file in files]


def content(files: Sequence[TokenFile], progress: Callable[[int], None] = lambda tokens: None) -> dict[str, str]:
    """Return hashes of the contents of files, by the way in which each was taken. `progress` is called with 0 after
    each file.

    One hash is of samples. Files in stores have none, because it would fetch every block. Another is of the checksums
    that `sagetrain prepare` recorded, if it made all of the files. What is read does not grow with the corpus: about
    2^14 blocks in all, in proportion to the files' tokens, and at least four of each file (TokenFile.content). Up to 33
    million tokens everything is read.
    """
    hashes, digest = {}, hashlib.sha256()
    if not any(file.remote for file in files):
        with ThreadPoolExecutor(8, "content") as pool:  # Most of the time is spent waiting for the disk or the network.
            for file, blocks in zip(files, shares(files), strict=True):
                digest.update(file.content(blocks, pool.map).encode())
                progress(0)
        hashes[" (samples)"] = digest.hexdigest()
    checksums = [file.provenance().get("sha256") for file in files]
    if all(checksums):
        hashes[" (checksums in .json)"] = hashlib.sha256("".join(map(str, checksums)).encode()).hexdigest()
    return hashes


def source_names(paths: Sequence[str]) -> list[str]:
    """Return short names of token files: their paths without the leading folders and the trailing parts that all of
    them share. data/web/valid and data/code/valid become web and code. A single path becomes its last part."""
    parts = [Path(path).parts for path in paths]

    def shared(rows: list[tuple[str, ...]]) -> int:
        alike = takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False))
        return min(sum(1 for _ in alike), min(map(len, rows)) - 1)

    begin = shared(parts)
    end = shared([each[begin:][::-1] for each in parts])
    return ["/".join(each[begin : len(each) - end]) for each in parts]
