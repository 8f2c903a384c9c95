"""Ranks find each other before they join: who does not come is named, instead of waited for in silence.

A launcher starts what it can reach. When ssh fails on one host of three, the ranks of the other two would wait inside
torch.distributed for as long as any collective may take.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store, TCPStore

from sagetrain.config.errors import ConfigError

T = TypeVar("T", bound=Mapping[str, Any])


class RanksMissing(ConfigError):
    """Not all ranks of a run came; the message says who did."""


def meet(minutes: float) -> Store | None:
    """Wait until every rank of WORLD_SIZE has come to MASTER_ADDR:MASTER_PORT; collective.

    Returns what keeps the meeting place open: the caller holds it until the process group exists.

    Raises:
        RanksMissing: on every rank that came, if others have not so many `minutes` after rank 0 did; without rank 0,
            three times as many after the rank itself.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if world_size == 1:
        return None
    host, patience = socket.gethostname(), timedelta(minutes=minutes)
    # torchrun's agent hosts the store, elsewhere rank 0 does: in one server with the process group's, at the same port.
    opens = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        server = TCPStore(address, port, None, opens, timeout=patience, wait_for_workers=False, multi_tenant=True)
    except DistNetworkError as error:
        raise RanksMissing(
            f"rank {rank} on {host} does not reach rank 0 at {address}:{port} after {minutes:g} minutes; nothing was "
            f"started or written. Look for errors of that host above, and for a firewall between the hosts ({error})"
        ) from error
    store = PrefixStore(f"meet/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", server)
    store.set(f"host/{rank}", host)
    if rank == 0:
        present = _present(store, world_size, patience)
        problem = _problem(present, f"{address}:{port}", minutes)
        store.set("problem", problem)
    else:
        try:  # rank 0 may come later than this one, and only then begins to wait
            store.wait(["problem"], 3 * patience)
            problem = store.get("problem").decode()
        except DistStoreError:
            problem = _problem(_present(store, world_size, timedelta(0)), f"{address}:{port}", 3 * minutes)
    if problem:
        store.set(f"read/{rank}", "")
        if rank == 0:  # the store may live in this process: it leaves last
            with suppress(DistStoreError):  # one that came may have ended since
                store.wait([f"read/{other}" for other, host in present.items() if host], patience)
        raise RanksMissing(problem)
    return server


def _present(store: Store, world_size: int, patience: timedelta) -> dict[int, str]:
    """Host of every rank that has come once all have, or the patience is over; nothing for the others."""
    deadline, present = time.monotonic() + patience.total_seconds(), {}
    for rank in range(world_size):
        key, left = [f"host/{rank}"], deadline - time.monotonic()
        with suppress(DistStoreError):
            if left >= 0.001:  # less would round to 0, which a store takes for no limit
                store.wait(key, timedelta(seconds=left))
        present[rank] = store.get(*key).decode() if store.check(key) else ""
    return present


def _problem(present: dict[int, str], address: str, minutes: float) -> str:
    """What to say of the ranks that did not come (without a host in `present`), or nothing."""
    missing = [rank for rank, host in present.items() if not host]
    if not missing:
        return ""
    here = where([{"host": host, "rank": rank} for rank, host in present.items() if host])
    return (
        f"{len(missing)} of {len(present)} ranks have not come to {address} within {minutes:g} minutes: rank "
        f"{ranges(missing)}. Here are {here}. Nothing was started or written. Look above for a host that ssh could not "
        "reach, or that ended early; take it out of the hostfile, or open the way from it to that address"
    )


def where(rows: Sequence[Mapping[str, Any]], most: int = 3) -> str:
    """`node0 (ranks 0..7), node1 (ranks 8..15) and 14 more`, of rows with `host` and `rank`."""
    hosts = by_host(rows)
    named = [
        f"{host} (rank{'s' * (len(members) > 1)} {ranges(row['rank'] for row in members)})"
        for host, members in list(hosts.items())[:most]
    ]
    return ", ".join(named) + (f" and {len(hosts) - most} more" if len(hosts) > most else "")


def by_host(rows: Iterable[T]) -> dict[str, list[T]]:
    """Rows with a `host`, by that."""
    hosts: dict[str, list[T]] = {}
    for row in rows:
        hosts.setdefault(row["host"], []).append(row)
    return hosts


def ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 3, 6 -> `0..3, 6`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)
