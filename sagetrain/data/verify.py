"""What a host's own copies of the token files hold, checked before training and compared between hosts and starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from sagetrain.data.loader import SampleStream

# Corpora up to this size are read through and compared with their checksum at the first start: a minute or less. Larger
# ones are checked by samples of index and tokens, and each sequence when it is read.
DEEP_CHECK_TOKENS = 16_000_000_000
_SECONDS = 10.0


def verify(streams: Mapping[str, SampleStream], *, deep: bool, say: Callable[[str], None]) -> dict[str, str]:
    """Check blocks of every file's index. With `deep`, check all tokens and checksums too, up to DEEP_CHECK_TOKENS of a
    stream; of a larger stream, the whole indexes that are from elsewhere. Without `deep`, what is read does not grow
    with the corpus.

    Returns what SampleStream.content says of each stream, by the stream's name. `say` gets a line every ten seconds.

    Raises:
        ConfigError: a file is damaged, or holds tokens outside of the vocabulary.
    """
    hashes: dict[str, str] = {}
    for name, stream in streams.items():
        progress = _Progress(name, stream.num_tokens, say)
        stream.validate(deep and stream.num_tokens <= DEEP_CHECK_TOKENS, deep, progress)
        hashes |= {f"{name}{of}": digest for of, digest in stream.content(progress).items()}
    return hashes


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Lines for training data that a checkpoint was not trained on, by the hashes of `verify` then and now.

    What one side does not know is not compared: checkpoints of older versions hold no hashes, files from elsewhere no
    checksums. Held-out data may change.
    """
    return [
        f"{name}: checkpoint {before[name]}, this run {digest}"
        for name, digest in now.items()
        if name.startswith("data.train (") and before.get(name, digest) != digest
    ]


class _Progress:
    """Says every ten seconds how far the check of a stream has come."""

    def __init__(self, name: str, total: int, say: Callable[[str], None]):
        self._name, self._total, self._say = name, total, say
        self._done, self._said = 0, time.monotonic()

    def __call__(self, tokens: int) -> None:
        self._done += tokens
        if time.monotonic() - self._said >= _SECONDS:
            self._said = time.monotonic()
            read = f"{self._done:,} of {self._total:,} tokens compared with their checksum" if self._done else "index"
            self._say(f"checking {self._name} before training: {read}")
