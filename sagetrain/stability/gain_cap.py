"""The cap on the learned gains of QK-norm (stability.qk_gain.cap), held after every update."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from sagetrain.parallel.topology import ParallelGroups


class Gain(Protocol):
    """A gain as this rank keeps it (engines/protocol.Owned)."""

    @property
    def weight(self) -> Tensor:
        """The memory of the master, 1-D. It may be empty."""
        ...

    @property
    def copies(self) -> Sequence[Tensor]:
        """The copies that the model computes with."""
        ...

    def read(self, kind: str) -> Tensor: ...

    def write(self, kind: str, values: Tensor) -> None: ...


class GainCap:
    """An observer of updates (engines/protocol.UpdateObserver) that clips the gains after each update, and counts how
    many of them were at the cap before it.

    Args:
        gains: returns the gains of this rank.
    """

    def __init__(
        self, cap: float, gains: Callable[[], Iterable[Gain]], groups: ParallelGroups, device: torch.device
    ) -> None:
        self._gains, self._groups, self._device = gains, groups, device
        # Masters in bf16 cannot hold every cap.
        held = (gain.weight.dtype for gain in gains() if len(gain.weight))
        self._cap = torch.tensor(cap, dtype=next(held, torch.float32)).item()

    @torch.no_grad()
    def before_update(self) -> None:
        """Add qk_gain/capped_share, the share of the gains that are at the cap, to the step's metrics."""
        every = torch.cat([gain.weight.to(self._device) for gain in self._gains()])
        at_cap = (every.abs() >= self._cap).sum()
        self._groups.metrics.derive("qk_gain/capped_share", operator.truediv, at_cap, len(every))

    @torch.no_grad()
    def after_update(self) -> None:
        """Clip the masters, and the copies that the model computes with, which stay the rounded masters. Ranks that
        hold the same gains clip them in the same way."""
        masters = [(gain, gain.read("weight")) for gain in self._gains() if len(gain.weight)]
        values = [master for _, master in masters]
        values += [copy for gain in self._gains() for copy in gain.copies if len(copy)]
        if values:
            torch._foreach_clamp_max_(values, self._cap)
            torch._foreach_clamp_min_(values, -self._cap)
        for gain, master in masters:
            gain.write("weight", master)
