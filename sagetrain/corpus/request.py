"""The request of `sagetrain prepare`. The command line builds one, and prepare and its corpus read it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sagetrain.config.arguments import check_fields, spelled
from sagetrain.config.errors import ConfigError
from sagetrain.config.schema import TOKENIZER_NAME, tokenizer_in

if TYPE_CHECKING:
    from sagetrain.corpus.records import Records

_MIN_VOCAB_SIZE = 256 + 3 + 1
_MAX_VOCAB_SIZE, _MAX_WORKERS = 1_000_000, 1024


@dataclass(frozen=True)
class TextRequest:
    """The text that is read, and how it is read."""

    sources: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
    """One source or several: files (.jsonl or .ndjson, .json, .csv, .tsv, .parquet, text; .gz, .bz2, .xz and .zst too),
    folders, archives (.tar, .tar.gz and the like, .zip), Hugging Face datasets (hub name, or a folder written by
    save_to_disk), or "python-stdlib". They are read in this order."""
    _: KW_ONLY
    text_key: str = "text"
    """Field or column that holds the text."""
    glob: str | None = None
    """Pattern of the files of a folder or archive that are read, e.g. "**/*.md". Default: its JSON and Parquet files;
    if there are none, its plain text or its tables and archives, whichever are more bytes."""
    split_on: str | None = None
    """Text that stands between the documents of a plain text file, such as "<|endoftext|>" or "\\n\\n". Default: a
    plain text file is one document."""
    dataset_config: str | None = None
    """Configuration of a Hugging Face dataset."""
    dataset_split: str = "train"
    """Split of a Hugging Face dataset."""
    skip_bad_lines: bool = False
    """Leave out and count lines and rows that hold no text, instead of stopping at the first."""

    def __post_init__(self) -> None:
        """Check the types of all settings. Raises ConfigError if one is wrong."""
        check_fields(self)

    @property
    def source_texts(self) -> list[str]:
        """The sources as texts."""
        given = [self.sources] if isinstance(self.sources, str | os.PathLike) else self.sources
        return [os.fspath(each) for each in given]


@dataclass(frozen=True)
class Request(TextRequest):
    """The token file that is made, its text and its tokenizer."""

    output: str | os.PathLike[str]
    """Path of the token file without suffix, e.g. data/train."""
    tokenizer: str | os.PathLike[str] | None = None
    """An existing SentencePiece model, or a tokenizer.json with its tokenizer_config.json beside it. Default: the
    tokenizer in the output's folder."""
    vocab_size: int | None = None
    """Train a new tokenizer of this size first."""
    tokenizer_sample: int = 100_000_000
    """Characters of the corpus that a new tokenizer is trained on."""
    records: Records | None = None
    """Prompts with completions, or chats, instead of text. A loss mask (.mask) then says which tokens count."""
    valid_fraction: float = 0.0
    """Share of the documents, chosen by a hash of their text, that goes to the token file `valid` in the output's
    folder instead."""
    num_workers: int = 1
    """Processes that turn text into tokens; 1 does it in this process."""
    overwrite: bool = False
    """Replace existing files that were made from something else, also the folder's tokenizer."""
    shard: str | None = None
    """"K/N" prepares the K-th of N parts of the text, alike in bytes, as NAME-0000K-of-0000N: each of N hosts does one,
    and `path: NAME-*` trains on all. Lines are divided, other files are whole in one of the parts; a saved dataset is
    divided by rows, a streamed one by its files."""

    def check(self) -> None:
        """Check that the settings agree. Raises ConfigError if they do not; the message has the words of the command
        line."""
        output, vocab_size = Path(self.output), self.vocab_size
        if os.fspath(self.output).endswith("/") or output.is_dir():
            raise ConfigError(
                f"output {self.output} is a folder: name the token file in it, e.g. -o {output / 'train'}"
            )
        if output.suffix in (".bin", ".idx") or not output.name:
            raise ConfigError(f"output {output}: give a path without .bin/.idx, e.g. data/train")
        if vocab_size is not None and vocab_size < _MIN_VOCAB_SIZE:
            raise ConfigError(
                f"{spelled('vocab_size')} {vocab_size} is below {_MIN_VOCAB_SIZE} (256 bytes, 3 control tokens, one "
                "character): give a larger one, e.g. 32000"
            )
        if vocab_size is not None and vocab_size > _MAX_VOCAB_SIZE:
            raise ConfigError(
                f"{spelled('vocab_size')} {vocab_size} is above {_MAX_VOCAB_SIZE}, larger than any vocabulary in use: "
                "give a smaller one, e.g. 32000"
            )
        if self.tokenizer_sample < 1:
            raise ConfigError(
                f"{spelled('tokenizer_sample')} {self.tokenizer_sample} is below 1, and counts characters of the text"
            )
        if self.tokenizer and vocab_size:
            raise ConfigError(f"give either {spelled('tokenizer')} or {spelled('vocab_size')} to train one, not both")
        if not 0 <= self.valid_fraction < 1:
            raise ConfigError(f"{spelled('valid_fraction')} {self.valid_fraction} is not in [0, 1)")
        if self.valid_fraction and output.name == "valid":
            raise ConfigError(
                "the held-out file is named valid, so the output (-o) needs another name with "
                f"{spelled('valid_fraction')}"
            )
        if self.records and self.text_key != "text":
            raise ConfigError(
                f"{spelled('text_key')} {self.text_key!r} names the field of a text, and the records are read from "
                f"{', '.join(self.records.options.values())}: leave one of them out"
            )
        if not 1 <= self.num_workers <= _MAX_WORKERS:
            raise ConfigError(
                f"{spelled('num_workers')} {self.num_workers} is not from 1 to {_MAX_WORKERS}: one for each core is "
                "enough"
            )

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer, or one is trained."""
        return bool(self.tokenizer or self.vocab_size or tokenizer_in(Path(self.output).parent).is_file())

    def no_tokenizer(self) -> ConfigError:
        """Return the error for a request without a tokenizer."""
        return ConfigError(
            f"there is no {TOKENIZER_NAME} in {Path(self.output).parent}: give {spelled('tokenizer')}, or "
            f"{spelled('vocab_size')} to train one"
        )

    @property
    def division(self) -> tuple[int, int] | None:
        """The part K of N that is made, and N. None if the text is not divided. Raises ConfigError if `shard` is not
        K/N."""
        if not self.shard:
            return None
        match = re.fullmatch(r"(\d{1,5})/(\d{1,5})", self.shard)
        number, count = map(int, match.groups()) if match else (0, 0)
        if not 1 <= number <= count:
            raise ConfigError(
                f"{spelled('shard')} {self.shard}: give K/N, part K of N, counted from 1: {spelled('shard')} 1/8"
            )
        return number, count
