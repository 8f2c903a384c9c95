"""Keep the errors of single ranks, most of them of a user's functions, until all ranks can end the run together.

A rank that raised an error inside of a step would leave the other ranks waiting for it. So a callback, a
loss or a function of tokens that fails is not called again, and the step goes on to its reduction, by which the ranks
stop anyway. Only then do they tell each other what failed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sagetrain.config.errors import TrainingError
from sagetrain.parallel.objects import of_every_rank


class Failures:
    """The first error on this rank that the other ranks do not have."""

    def __init__(self) -> None:
        self.text: str | None = None
        """The function that failed, or the part of the run, and the error. None: nothing has failed on this rank."""
        self._cause: Exception | None = None
        self._own: Exception | None = None

    def keep(self, who: str, error: Exception) -> None:
        """Keep an error. `who` says what failed, such as "the callback Mine failed in on_step". It may be empty if the
        error says it."""
        if self.text is None:
            self.text, self._cause = f"{who}: {type(error).__name__}: {error}" if who else str(error), error

    @contextmanager
    def kept(self, who: str) -> Iterator[None]:
        """Keep any error of the block until all ranks call `check`."""
        try:
            yield
        # Whatever the error is, the other ranks have to learn of it.
        except Exception as error:  # noqa: BLE001
            self.keep(who, error)
            self._own = error

    def check(self) -> None:
        """Raise TrainingError on every rank if something has failed on any of them; collective. A rank raises an error
        of `kept` as it is."""
        said, texts = self.text, of_every_rank(self.text)
        if len(texts) > 1:
            ranks = {each: [rank for rank, text in enumerate(texts) if text == each] for each in texts if each}
            said = "; ".join(f"rank {', '.join(map(str, own))}: {each}" for each, own in ranks.items()) or None
        if self._own is not None:
            raise self._own
        if said is not None:
            raise TrainingError(said) from self._cause
