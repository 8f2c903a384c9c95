"""Messages between rank 0 and the other ranks through a key-value store, for a thread that runs beside training.

If two threads used collectives in training's process group, a collective of one could be matched with a collective of
the other. A second process group would connect every rank with every other rank. With a mailbox each rank has one
connection, to rank 0, and a message takes a few requests, however many ranks there are.
"""

from __future__ import annotations

import pickle
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from sagetrain.cluster.rendezvous import ranges, store_of_rank_0

T = TypeVar("T")

_FAREWELL = timedelta(minutes=1)
"""The longest time that rank 0 waits until the other ranks have read its message."""


class Mailbox:
    """Send values from rank 0 to the other ranks, and gather values on rank 0. Every rank makes the same calls in the
    same order, from one thread.

    Making a mailbox is collective, and there are two ranks at least.

    Calls raise a RuntimeError: DistStoreError if a rank did not answer within `timeout`, and DistNetworkError if rank 0
    is gone.
    """

    def __init__(self, timeout: timedelta):
        self._rank, self._world_size, self._timeout, self._number = dist.get_rank(), dist.get_world_size(), timeout, 0
        # The process group's store may live in a launcher, and ranks still save when the launcher is killed. In a
        # shared store, training's requests would also wait behind a request of this thread.
        self._store = store_of_rank_0()

    def tell(self, value: T) -> T:
        """Return rank 0's value on every rank. Rank 0 returns when the other ranks have the value, because rank 0 may
        end then."""
        key, others = self._next(), self._world_size - 1
        if self._rank == 0:
            self._store.set(key, pickle.dumps(value))  # type: ignore[arg-type]  # it takes bytes
            # A rank that should read may have ended.
            with suppress(dist.DistStoreError):
                self._store.wait([f"{key}/read"], min(_FAREWELL, self._timeout))
            return value
        self._store.wait([key], self._timeout)
        told: T = pickle.loads(self._store.get(key))
        if self._store.add(f"{key}/readers", 1) == others:
            self._store.set(f"{key}/read", "")
        return told

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks on rank 0, and an empty list on the other ranks."""
        key = self._next()
        if self._rank:
            self._store.set(f"{key}/{self._rank}", pickle.dumps(value))  # type: ignore[arg-type]
            return []
        keys = [f"{key}/{rank}" for rank in range(1, self._world_size)]
        try:
            self._store.wait(keys, self._timeout)
        except dist.DistStoreError as error:
            missing = [rank for rank, key in enumerate(keys, 1) if not self._store.check([key])]
            raise dist.DistStoreError(f"rank {ranges(missing)} has said nothing") from error
        values: list[Any] = [value]
        for key in keys:
            values.append(pickle.loads(self._store.get(key)))
            self._store.delete_key(key)
        return values

    def _next(self) -> str:
        self._number += 1
        return str(self._number)
