"""The progress of `sagetrain prepare`: a bar on a terminal and in a notebook, a line every ten seconds elsewhere."""

from __future__ import annotations

import io
import sys
import time
from types import TracebackType

from tqdm import tqdm

from sagetrain.config.errors import in_notebook
from sagetrain.corpus.chunk import Place
from sagetrain.corpus.encode import Encoded
from sagetrain.corpus.sources import Corpus


class _Lines(io.StringIO):
    """Standard error without a terminal. The bar comes there as lines, because a log keeps all that it was."""

    def write(self, text: str) -> int:
        if line := text.strip():
            print(line, file=sys.stderr, flush=True)
        return len(text)


class Progress:
    """A bar that shows the bytes read, the time left and tokens per second. If the size is unknown, it shows tokens
    alone."""

    def __init__(self, corpus: Corpus, place: Place, done: int, shown: bool = True) -> None:
        """Start the bar. `done` is the position of an earlier call's bar at `place`. A bar that is not `shown` counts,
        too."""
        terminal = sys.stderr.isatty() or in_notebook()
        self._bar = tqdm(
            total=corpus.size,
            initial=done,
            unit=" tokens" if corpus.size is None else "B",
            unit_scale=True,
            desc="tokenizing",
            mininterval=0.2 if terminal else 10.0,
            delay=0.0 if terminal else 10.0,
            ncols=None if terminal else 80,
            dynamic_ncols=terminal,
            file=(sys.stderr if terminal else _Lines()) if shown else io.StringIO(),
        )
        self._input = corpus.inputs[place.input].name
        self._consumed = done - sum(each.size or 0 for each in corpus.inputs[: place.input])
        self._tokens = 0
        self._begin = time.monotonic()

    @property
    def done(self) -> int:
        """The position of the bar."""
        return int(self._bar.n)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None and self._bar.total:
            self._bar.update(self._bar.total - self._bar.n)
        self._bar.close()

    def update(self, encoded: Encoded) -> None:
        """Move the bar to the end of an encoded chunk."""
        tokens, chunk = encoded.tally.tokens, encoded.chunk
        self._tokens += tokens
        if self._bar.total is None:
            self._bar.update(tokens)
            return
        if chunk.input != self._input:
            self._input, self._consumed = chunk.input, 0
        rate = self._tokens / (time.monotonic() - self._begin + 1e-9)
        self._bar.set_postfix_str(f"{tqdm.format_sizeof(rate)} tokens/s", refresh=False)
        self._bar.update(chunk.consumed - self._consumed)
        self._consumed = chunk.consumed
