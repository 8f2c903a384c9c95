"""Keep the errors of a user's functions until all ranks can end the run together.

A rank that raised an error inside of a step would leave the other ranks waiting for it. So a callback or a loss that
fails is not called again, and the step goes on to its reduction, by which the ranks stop anyway. Only then do they tell
each other what failed.
"""

from __future__ import annotations

import torch.distributed as dist

from sagetrain.config.errors import TrainingError


class Failures:
    """The first error of a user's functions on this rank."""

    def __init__(self) -> None:
        self.text: str | None = None
        """The function that failed, and its error. None: nothing has failed on this rank."""
        self._cause: Exception | None = None

    def keep(self, who: str, error: Exception) -> None:
        """Keep an error. `who` names the function, such as "the callback Mine failed in on_step"."""
        if self.text is None:
            self.text, self._cause = f"{who}: {type(error).__name__}: {error}", error

    def check(self) -> None:
        """Raise TrainingError on every rank if a function has failed on any of them; collective."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            said = self.text
        else:
            texts: list[str | None] = [None] * dist.get_world_size()
            dist.all_gather_object(texts, self.text)
            ranks = {each: [rank for rank, text in enumerate(texts) if text == each] for each in texts if each}
            said = "; ".join(f"rank {', '.join(map(str, own))}: {each}" for each, own in ranks.items()) or None
        if said is not None:
            raise TrainingError(said) from self._cause
