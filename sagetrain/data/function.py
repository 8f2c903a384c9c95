"""Training samples that a user's function returns, in the place of token files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence

import numpy as np

from sagetrain.config.errors import ConfigError, TrainingError
from sagetrain.config.schema import DataConfig
from sagetrain.data.batch import Sample
from sagetrain.data.loader import SampleStream

SampleFunction = Callable[[int], Sample | np.ndarray | Sequence[int]]
"""A user's source of tokens: the index of a sequence of the run, from 0 -> its seq_length + 1 tokens, or a Sample that
has document_starts as well. The same index has to give the same tokens on every rank and at every start."""

_LOOKED_AT = (0, 1, 2, 3, 10, 100, 1000)
"""The sequences by which a function is recognized when hosts are compared and when a run continues."""


class FunctionStream(SampleStream):
    """The endless sequence of samples of a function. A run reads it as it reads token files, by index alone, so it can
    be continued at any layout. The function does not get the seed, but the identity of the order has it, as for files.
    Raises ConfigError if data.train is not [{path: none}]."""

    def __init__(self, function: SampleFunction, data: DataConfig, seed: int, vocab_size: int) -> None:
        if not data.missing:
            paths = [source.path for source in data.train]
            raise ConfigError(
                f"data.train = {paths}: a function gives the tokens of this run (train(..., tokens=...)); "
                "set data.train: [{path: none}], or leave `tokens` out"
            )
        self.seq_length, self.seed = data.seq_length, seed
        self.document_attention, self.document_positions = data.document_attention, data.document_positions
        self.names = ["tokens"]
        self._function, self._vocab_size = function, vocab_size
        order = json.dumps(["function", self.seq_length, seed])
        self.fingerprint = hashlib.sha256(order.encode()).hexdigest()

    @property
    def num_windows(self) -> int:
        """Raise ConfigError, because a function has no end that an evaluation could reach."""
        raise ConfigError("a function of tokens has no end: evaluate on token files (data.valid)")

    @property
    def num_tokens(self) -> int:
        """The number of tokens that are known without reading, which is 0."""
        return 0

    @property
    def masked(self) -> bool:
        """Whether tokens may be left out of the loss, which a function cannot ask for."""
        return False

    def validate(self, deep: bool, first: bool, progress: Callable[[int], None] = lambda tokens: None) -> None:
        """Check nothing more: every sequence is checked when it is read."""

    def content(self, progress: Callable[[int], None] = lambda tokens: None) -> dict[str, str]:
        """Return a hash of some sequences. Raises TrainingError if the function does not return one of them."""
        digest = hashlib.sha256()
        for index in _LOOKED_AT:
            digest.update(self.sample(index).tokens.tobytes())
        return {" (samples)": digest.hexdigest()}

    def sample(self, index: int, seed: int | None = None) -> Sample:
        """Call the function for sequence `index`, and check what it returns. Raises TrainingError if the function
        raises an error, or returns no sequence of tokens."""
        name = getattr(self._function, "__qualname__", type(self._function).__name__)
        try:
            found = self._function(index)
        # Whatever the error is, the message says whose it is.
        except Exception as error:
            raise TrainingError(f"tokens: {name}({index}) failed: {type(error).__name__}: {error}") from error
        sample = found if isinstance(found, Sample) else Sample(np.asarray(found), [])
        wanted = f"return {self.seq_length + 1:,} tokens (data.seq_length + 1) as integers"
        tokens = np.asarray(sample.tokens)
        if tokens.shape != (self.seq_length + 1,) or tokens.dtype.kind not in "iu":
            raise TrainingError(f"tokens: {name}({index}) returned {tokens.dtype} {tokens.shape}; {wanted}")
        if not 0 <= tokens.min() <= tokens.max() < self._vocab_size:
            raise TrainingError(
                f"tokens: {name}({index}) returned tokens from {tokens.min():,} to {tokens.max():,}, outside of the "
                f"vocabulary of {self._vocab_size:,} (model.vocab_size or the tokenizer's)"
            )
        starts = list(sample.document_starts)
        if starts != sorted({start for start in starts if 0 < start < self.seq_length}):
            raise TrainingError(
                f"tokens: {name}({index}) returned document_starts {starts}; they rise inside of 1..data.seq_length - 1"
            )
        if sample.counted is not None:
            raise TrainingError(
                f"tokens: {name}({index}) masks tokens; masks need token files (`sagetrain prepare` of records)"
            )
        return Sample(tokens.astype(np.int64), starts)

    def document_lengths(self, count: int) -> list[list[int]]:
        """Return for each of the first `count` samples the lengths of its documents."""
        return super().document_lengths(min(count, 8))
