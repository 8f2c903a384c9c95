"""The cap on the learned gains of QK-norm (stability.qk_gain.cap), held after every update."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from sagetrain.parallel.topology import ParallelGroups

Gains = Callable[[], Iterable[tuple[Tensor, Sequence[Tensor]]]]
"""Return each gain as this rank keeps it: the 1-D fp32 master, which may be empty, and what the model computes with."""


class GainCap:
    """An observer of updates (engines/protocol.UpdateObserver) that clips the gains after each update, and counts how
    many of them were at the cap before it."""

    def __init__(self, cap: float, gains: Gains, groups: ParallelGroups, device: torch.device) -> None:
        self._cap, self._gains, self._groups, self._device = cap, gains, groups, device

    @torch.no_grad()
    def before_update(self) -> None:
        """Add qk_gain/capped_share, the share of the gains that are at the cap, to the step's metrics."""
        every = torch.cat(
            [torch.zeros(0, device=self._device), *(master.to(self._device) for master, _ in self._gains())]
        )
        at_cap = (every.abs() >= self._cap).sum()
        self._groups.metrics.derive("qk_gain/capped_share", operator.truediv, at_cap, len(every))

    @torch.no_grad()
    def after_update(self) -> None:
        """Clip the masters, and the copies that the model computes with, which stay the rounded masters. Ranks that
        hold the same gains clip them in the same way."""
        values = [tensor for master, copies in self._gains() for tensor in (master, *copies) if len(tensor)]
        if values:
            torch._foreach_clamp_max_(values, self._cap)
            torch._foreach_clamp_min_(values, -self._cap)
