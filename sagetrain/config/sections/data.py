"""Token files and their tokenizer."""

from __future__ import annotations

import glob
import hashlib
import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from sagetrain.config.sections.base import LocalPath, PathOrUrl, Section, is_url

TOKENIZER_NAME, TOKENIZER_JSON = "tokenizer.model", "tokenizer.json"
"""The name of the tokenizer that `sagetrain prepare` leaves beside a token file. The first is a SentencePiece model,
the second a file of Hugging Face's tokenizers."""
NO_DATA = "none"
"""The path of data.train in the configuration of an imported model, which has no data."""


def tokenizer_in(folder: Path) -> Path:
    """Return the path of the tokenizer in a folder of token files or of a run. The file does not exist if there is
    none."""
    other = folder / TOKENIZER_JSON
    return other if other.is_file() and not (folder / TOKENIZER_NAME).is_file() else folder / TOKENIZER_NAME


def cache_folder(kind: str = "data") -> Path:
    """Return the folder in which this host keeps what it has read of token files in stores (`data`), or what `auto` has
    chosen (`choices`). Raises RuntimeError if the user has no home folder, and SAGETRAIN_CACHE names none."""
    return Path(os.environ.get("SAGETRAIN_CACHE") or Path.home() / ".cache/sagetrain") / kind


def cached_path(url: str) -> str:
    """Return the path that this host has for the URL of a token file."""
    folder, _, name = url.rpartition("/")
    return str(cache_folder() / hashlib.sha256(folder.encode()).hexdigest()[:16] / name)


class DataSource(Section):
    """One token file, or a pattern of several, and its share of the mix."""

    path: PathOrUrl
    """Path of a token file written by `sagetrain prepare`, without .bin/.idx; or a pattern such as data/train-* for
    many files, which are read as one. It may be in a bucket: s3://BUCKET/FOLDER/NAME, or gs://."""
    weight: PositiveFloat | Literal["proportional"] = 1.0
    """Relative share of the sequences drawn from this source; the weights of a list need not sum to 1. proportional
    (all sources of the list must have it): the source's share of the text, so that all text is read equally often."""

    @property
    def files(self) -> list[str]:
        """The paths of the source's token files, sorted. For a pattern, these are the files that exist. For a URL, they
        are the paths that this host has for it (data/remote_blocks.py)."""
        path = cached_path(self.path) if is_url(self.path) else self.path
        if not any(sign in self.path for sign in "*?[") or Path(f"{path}.idx").is_file():
            return [path]
        return sorted(file.removesuffix(".idx") for file in glob.glob(f"{path}.idx"))


class DataConfig(Section):
    """The token files, and how training sequences are cut from them."""

    train: Annotated[list[DataSource], Field(min_length=1)]
    """Training sources, blended by weight."""
    valid: list[DataSource] = []
    """Held-out sources for evaluation. Empty: no evaluation."""
    tokenizer: LocalPath | None = None
    """SentencePiece model (tokenizer.model) or Hugging Face tokenizer (tokenizer.json). Default: the one that
    `sagetrain prepare` left beside train[0]; token files from elsewhere need none if model.vocab_size is given."""
    cache_gb: PositiveFloat = 100.0
    """GB (10^9 bytes) of a host's disk that token files in a bucket may take, in the folder SAGETRAIN_CACHE (default:
    ~/.cache/sagetrain). A block is fetched when it is read first."""
    seq_length: PositiveInt
    """Tokens of one training sequence (context length)."""
    micro_batch_size: PositiveInt
    """Sequences one rank processes at once."""
    document_attention: bool = True
    """Attention does not cross document boundaries inside a packed sequence."""
    document_positions: bool = True
    """Rotary positions restart at every document boundary. Needs document_attention."""
    num_workers: Annotated[int, Field(ge=0, le=256)] = 1
    """Threads that prepare batches ahead of the step; 0 prepares them in the training thread."""

    @property
    def missing(self) -> bool:
        """Whether there is no data, because this is the configuration of an imported model."""
        return self.train[0].path == NO_DATA

    @property
    def tokenizer_path(self) -> str:
        """The path of the tokenizer file: the configured one, or else the one beside the first training source."""
        first = next(iter(self.train[0].files), self.train[0].path)
        return self.tokenizer or str(tokenizer_in(Path(first).parent))
