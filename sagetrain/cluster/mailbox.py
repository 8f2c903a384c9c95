"""Messages between rank 0 and the other ranks through a key-value store, for a thread that runs beside training.

Collectives of two threads in training's group could be matched with each other, and a group of the thread's own would
connect every rank with every other one. Here each rank has one connection, to rank 0, and a message takes a few
requests, however many ranks there are.
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
"""How long rank 0 waits at most until the others have read what it tells."""


class Mailbox:
    """What rank 0 tells the others and what it gathers from them, in the same order on every rank, from one thread.

    Making one is collective. A call waits `timeout` for another rank, and then raises DistStoreError; it raises
    DistNetworkError if rank 0 is gone. Both are RuntimeErrors.
    """

    def __init__(self, timeout: timedelta):
        self._rank, self._world_size, self._timeout, self._number = dist.get_rank(), dist.get_world_size(), timeout, 0
        # The process group's store may live in a launcher, and ranks save when that is killed; and training's requests
        # would wait behind one that waits.
        self._store = store_of_rank_0()

    def tell(self, value: T) -> T:
        """Return rank 0's value on every rank. Rank 0 returns when the others have it: it may end then."""
        key, others = self._next(), self._world_size - 1
        if self._rank == 0:
            self._store.set(key, pickle.dumps(value))  # type: ignore[arg-type]  # it takes bytes
            if others:
                with suppress(dist.DistStoreError):  # one that should read may have ended
                    self._store.wait([f"{key}/read"], min(_FAREWELL, self._timeout))
            return value
        self._store.wait([key], self._timeout)
        told: T = pickle.loads(self._store.get(key))
        if self._store.add(f"{key}/readers", 1) == others:
            self._store.set(f"{key}/read", "")
        return told

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks on rank 0, elsewhere an empty list."""
        key = self._next()
        if self._rank:
            self._store.set(f"{key}/{self._rank}", pickle.dumps(value))  # type: ignore[arg-type]
            return []
        keys = [f"{key}/{rank}" for rank in range(1, self._world_size)]
        try:
            if keys:
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
