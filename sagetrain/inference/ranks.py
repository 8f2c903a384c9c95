"""The processes that share one model because it does not fit on one GPU: tensor parallel, over all ranks of a
launcher."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from sagetrain.cluster.join import init_distributed
from sagetrain.config.errors import ConfigError
from sagetrain.parallel.objects import of_rank_0
from sagetrain.parallel.topology import ParallelGroups, Topology

T = TypeVar("T")

_PATIENCE = timedelta(days=7)
"""Ranks wait this long, because a user may type slowly."""


@dataclass(frozen=True)
class Ranks:
    """One process, or all processes that RANK and WORLD_SIZE announce."""

    groups: ParallelGroups
    device: torch.device
    _words: dist.ProcessGroup | None = None
    """The group over which rank 0 tells the others what to do."""

    @classmethod
    def alone(cls) -> Ranks:
        """Return this process as the only one, on a GPU or without one."""
        return cls(ParallelGroups.single(), torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    @classmethod
    def join(cls) -> Ranks:
        """Wait for the other ranks, if there are any. Collective. Raises RanksMissing, a ConfigError, if some do not
        come."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls.alone()
        device = init_distributed(timeout_minutes=10)
        groups = ParallelGroups.create(Topology(size, size))
        return cls(groups, device, dist.new_group(backend="gloo", timeout=_PATIENCE))

    @property
    def main(self) -> bool:
        """Whether this is the rank that reads and writes."""
        return self.groups.rank == 0

    def tell(self, make: Callable[[], T]) -> T:
        """Return the result of `make` on rank 0, on all ranks. Its ConfigError is raised on all ranks too."""
        if self._words is None:
            return make()
        made = list[T | ConfigError]()
        if self.main:
            try:
                made = [make()]
            except ConfigError as error:
                made = [error]
        (told,) = of_rank_0(made, self._words)
        if isinstance(told, ConfigError):
            raise told
        return told
