"""The memory for rows of experts that a rank receives from others, and what follows if rows do not fit into it.

No shape depends on what routers choose, so the room is a number that the host knows. Rows without room are left out,
which a flag on the device notes. The flag travels with the step's reduction, and the step is refused on all ranks. It
is taken again with twice the room, as often as needed: the largest room has place for every row. Results do not depend
on the room.
"""

from __future__ import annotations

import torch

from sagetrain.model.moe import MoE
from sagetrain.model.transformer import Transformer
from sagetrain.parallel.metrics import Metrics

METRIC = "room"
"""The name of the number of ranks that lacked room, in the step's reduction."""


class Room:
    """The room for rows of experts in a model's passes with gradients, in multiples of the mean over ranks
    (parallel.expert_room)."""

    def __init__(self, model: Transformer, times: float, device: torch.device) -> None:
        self._mixtures = [module for module in model.modules() if isinstance(module, MoE)]
        self._most = model.groups.ep_size
        self._lacking = torch.zeros((), dtype=torch.bool, device=device)
        self._set(times)

    def _set(self, times: float) -> None:
        self.times = min(times, float(self._most))
        """The room in multiples of the mean over ranks."""
        for moe in self._mixtures:
            moe.room, moe.lacking = round(100 * self.times), self._lacking

    def begin(self) -> None:
        """Prepare for a step."""
        self._lacking.zero_()

    def end(self, metrics: Metrics) -> None:
        """Add whether any pass of the step has lacked room to its metrics."""
        metrics.sum(METRIC, self._lacking)

    def grow(self) -> float:
        """Double the room, and return what it is."""
        self._set(2 * self.times)
        if self._lacking.is_cuda:
            # What the allocator kept for rows of the smaller room is too short for those of the larger one.
            torch.cuda.empty_cache()
        return self.times
