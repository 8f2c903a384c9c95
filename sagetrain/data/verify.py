"""Checks of a host's own copies of the token files before training, and hashes to compare them between hosts and
starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from sagetrain.data.loader import SampleStream

# Corpora up to this size are read completely and compared with their checksum at the first start, which takes a minute
# or less. Of larger corpora, samples of index and tokens are checked, and each sequence is checked when it is read.
DEEP_CHECK_TOKENS = 16_000_000_000
_SECONDS = 10.0


def verify(streams: Mapping[str, SampleStream], *, deep: bool, say: Callable[[str], None]) -> dict[str, str]:
    """Check blocks of every file's index. Without `deep`, what is read does not grow with the corpus. Raises
    ConfigError if a file is damaged, or holds tokens outside of the vocabulary.

    Args:
        deep: also check all tokens and checksums of streams up to DEEP_CHECK_TOKENS. Of a larger stream, check the
            whole index of files from elsewhere.
        say: gets a line every ten seconds.

    Returns:
        The hashes of SampleStream.content, by the name of the stream and of the hash.
    """
    hashes: dict[str, str] = {}
    for name, stream in streams.items():
        progress = _Progress(name, stream.num_tokens, say)
        stream.validate(deep and stream.num_tokens <= DEEP_CHECK_TOKENS, deep, progress)
        hashes |= {f"{name}{of}": digest for of, digest in stream.content(progress).items()}
    return hashes


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return lines about training data that a checkpoint was not trained on, by the hashes of `verify` then and now.

    Hashes that one side lacks are not compared: checkpoints of older versions hold no hashes, and files from elsewhere
    no checksums. Held-out data may change.
    """
    return [
        f"{name}: checkpoint {before[name]}, this run {digest}"
        for name, digest in now.items()
        if name.startswith("data.train (") and before.get(name, digest) != digest
    ]


class _Progress:
    """A progress report for the check of a stream, every ten seconds."""

    def __init__(self, name: str, total: int, say: Callable[[str], None]):
        self._name, self._total, self._say = name, total, say
        self._done, self._said = 0, time.monotonic()

    def __call__(self, tokens: int) -> None:
        self._done += tokens
        if time.monotonic() - self._said >= _SECONDS:
            self._said = time.monotonic()
            read = f"{self._done:,} of {self._total:,} tokens compared with their checksum" if self._done else "index"
            self._say(f"checking {self._name} before training: {read}")
