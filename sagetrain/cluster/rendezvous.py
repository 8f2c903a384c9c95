"""The rendezvous of the ranks before they join the process group. A rank that does not come is named in an error, and
is not waited for in silence.

A launcher starts ranks on the hosts that it can reach. If ssh failed on one host of three, the ranks of the other two
would wait inside torch.distributed for as long as a collective may take.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import DistNetworkError, DistStoreError, HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from sagetrain.cluster.launcher import ASKING, agent_left_over, by_agent
from sagetrain.cluster.lifeline import die_with_parent, generation, lifeline
from sagetrain.config.errors import ConfigError, some
from sagetrain.data.open_files import allow_connections

T = TypeVar("T", bound=Mapping[str, Any])

_NAME_SECONDS = 30
"""The time in seconds that a name server may take to learn of a host that has just started."""
_QUIET_SECONDS = 15
"""The time in seconds that ranks wait before they print that they wait."""


class RanksMissing(ConfigError):
    """Not all ranks of a run came. The message says which ranks did."""


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM, SIGUSR1 and Ctrl-C end the process at once, with exit code 128 + signal, while the block waits for
    other ranks.

    A wait inside torch does not let Python's signal handlers run, so a thread gets the signal through a pipe. Call this
    in the main thread.
    """
    hears, tells = socket.socketpair()
    tells.setblocking(False)
    # The earlier handlers are replaced after the thread listens, and restored before it stops listening, so no signal
    # is lost in between.
    wakeup = signal.set_wakeup_fd(tells.fileno(), warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in ASKING}
    thread = threading.Thread(target=_end_when_told, args=(hears,), name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)
        signal.set_wakeup_fd(wakeup)
        tells.close()
        thread.join()
        hears.close()


def _end_when_told(hears: socket.socket) -> None:
    while told := hears.recv(1):
        if told[0] in ASKING:
            _say(f"ended by {signal.Signals(told[0]).name} before training began: nothing was trained or written")
            os._exit(128 + told[0])


def meet(minutes: float) -> Store:
    """Wait until every rank of WORLD_SIZE has come to MASTER_ADDR:MASTER_PORT. Return the store that they met at, for
    the process group; collective. Raises RanksMissing on every rank that came if other ranks have not come within
    `minutes` after rank 0. If rank 0 is missing, the limit is three times `minutes` after the rank itself came. On rank
    0 the error comes at once if the rank cannot listen at its port or may not open enough files. On every rank it comes
    within half a minute if the address cannot be resolved.

    A world of one rank meets on this host. Without MASTER_PORT the system chooses the port. No other run can take that
    port, because this process listens at it from the beginning.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # torchrun's agent or a keeper may host the store. Otherwise rank 0 hosts it.
    kept = lifeline() is not None and world_size > 1
    opens = rank == 0 and not by_agent() and not kept
    if world_size == 1 and opens:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("MASTER_PORT") or "0")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        _make_room(world_size, None if opens or kept else os.getppid())
    listener = listen(port) if opens else None
    try:
        if listener:
            port = int(listener.getsockname()[1])
        os.environ["MASTER_PORT"] = str(port)
        _reach(address, port, rank, minutes, opens)
        server, again = _store(address, port, minutes, listener), generation()
        attempt = f"{_attempt()}.{again}" if again else _attempt()
        _gather(PrefixStore(f"meet/{attempt}", server), rank, world_size, f"{address}:{port}", minutes)
        return PrefixStore(f"run/{attempt}", server)
    except DistNetworkError as error:
        raise RanksMissing(
            f"rank {rank} on {socket.gethostname()} has lost rank 0 at {address}:{port} before all ranks had come; "
            f"nothing was started or written. Look above for what ended rank 0 ({error})"
        ) from error
    finally:
        if listener:
            listener.close()


def _attempt() -> str:
    """Return the number of times that torchrun has started the ranks before, if its agent's store outlives them. Each
    agent counts for itself, and one that has come later has another number."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if by_agent() else "0"


def keepers_store(minutes: float) -> Store:
    """Return the store of the keepers (keeper.py), at which their ranks meet as well. Without torchrun's agent, a
    process beside the keeper of rank 0 hosts the store. A single keeper has a store of its own. Raises RanksMissing if
    the keeper of rank 0 cannot listen, or nobody listens within `minutes`."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        return HashStore()
    address, port, hosts = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank == 0 and not by_agent()
    if rank == 0:
        # Each rank connects to the store, and so does its keeper.
        _make_room(2 * world_size, None if hosts else os.getppid())
    if hosts:
        _host_store(address, port, minutes)
    _reach(address, port, rank, minutes, hosts)
    return PrefixStore(f"keepers/{_attempt()}", _store(address, port, minutes, None))


def _host_store(address: str, port: int, minutes: float) -> None:
    """Fork a process that hosts the store as long as this process lives. A store has threads, which a process that
    forks must not have."""
    parent = os.getpid()
    with listen(port) as listener:
        sys.stdout.flush()
        sys.stderr.flush()
        if os.fork():
            return
        die_with_parent(parent)
        # Ranks that were told to stop still need the store.
        for number in ASKING:
            signal.signal(number, signal.SIG_IGN)
        Path("/proc/self/comm").write_text("sagetrain store")
        store = _store(address, port, minutes, listener)
        while store:
            signal.pause()


def _make_room(world_size: int, launcher: int | None) -> None:
    """Raise the limit of open files for the connections that the other ranks make to rank 0, or to the launcher if the
    store is there."""
    try:
        allow_connections(world_size, os.getpid())
        if launcher:
            allow_connections(world_size, launcher)
    except ConfigError as error:
        raise RanksMissing(f"rank 0 on {socket.gethostname()}: {error}; nothing was started or written") from error
    # The launcher belongs to another user.
    except OSError as error:
        _say(f"rank 0 cannot raise the limit of open files of process {launcher}, its launcher ({error.strerror}): if "
             f"ranks do not come, start that with a higher one (ulimit -n)")  # fmt: skip


def store_of_rank_0() -> Store:
    """Open a store that lives in rank 0, wherever the process group's store lives; collective. Threads with stores of
    their own do not wait for each other's requests."""
    known, rank, address, minutes = _get_default_store(), dist.get_rank(), os.environ["MASTER_ADDR"], 10.0
    place = f"store/{known.add(f'stores of rank {rank}', 1)}"
    if rank:
        return _store(address, int(known.get(place)), minutes, None)
    with listen(0) as listener:
        port = int(listener.getsockname()[1])
        store = _store(address, port, minutes, listener)
    known.set(place, str(port))
    return store


def _store(address: str, port: int, minutes: float, listener: socket.socket | None) -> TCPStore:
    """Return the store at an address. With `listener` this process hosts the store and the store takes over the socket;
    without, another process hosts it."""
    return TCPStore(
        address,
        port,
        None,
        listener is not None,
        timeout=timedelta(minutes=minutes),
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener else None,
    )


def listen(port: int) -> socket.socket:
    """Return a listening socket, rank 0's above all. It is opened here because the store does not say why it cannot
    listen. Port 0: the system chooses one."""
    both = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", port), family=socket.AF_INET6 if both else socket.AF_INET, dualstack_ipv6=both, backlog=4096
        )
    except OSError as error:
        why = "another process listens there" if error.errno == errno.EADDRINUSE else error.strerror
        raise RanksMissing(
            f"rank 0 on {socket.gethostname()} cannot listen at port {port}: {why}; nothing was started or written. "
            "End what uses the port (another run, or what is left of one), or choose another: --master_port of the "
            "launcher, or MASTER_PORT"
        ) from error


def _reach(address: str, port: int, rank: int, minutes: float, own: bool) -> None:
    """Return when somebody listens at the address. The store would wait, too, but would fill the screen with messages.
    `own`: this process hosts the store."""
    here, began, said = socket.gethostname(), time.monotonic(), set()
    while True:
        try:
            socket.create_connection((address, port), timeout=10).close()
            return
        except (socket.gaierror, UnicodeError) as error:
            limit, quiet = min(_NAME_SECONDS, 60 * minutes), 0.0
            problem = f"{here} cannot resolve MASTER_ADDR {address!r} ({getattr(error, 'strerror', error)})"
            fix = "Give a name that every host resolves (DNS, /etc/hosts), or an address: --master_addr, MASTER_ADDR"
        except OSError as error:
            limit, quiet = 60 * minutes, _QUIET_SECONDS
            problem = f"rank {rank} on {here} does not reach rank 0 at {address}:{port} ({error.strerror or error})"
            fix = "Look for errors of that host above, and for a firewall between the hosts"
            # torchrun's agent listens before it starts ranks, so hardly anybody listens later.
            if by_agent() and isinstance(error, ConnectionRefusedError):
                limit, quiet, fix = min(_NAME_SECONDS, limit), 0.0, agent_left_over()
            # This process itself is the listener.
            if own:
                limit = min(_NAME_SECONDS, limit)
                fix = f"MASTER_ADDR must be an address of {here}, where rank 0 runs"
        waited = time.monotonic() - began
        if waited >= limit:
            raise RanksMissing(f"{problem}, for {waited:.0f} s; nothing was started or written. {fix}")
        if waited >= quiet and fix not in said:
            said.add(fix)
            _say(f"{problem}; trying for {_duration(limit)}")
        time.sleep(min(0.5, max(0.05, limit - waited)))


def _gather(store: Store, rank: int, world_size: int, place: str, minutes: float) -> None:
    """Register this rank and wait for all others."""
    store.set(f"host/{rank}", socket.gethostname())
    patience = timedelta(minutes=minutes)
    if rank == 0:
        quiet = min(timedelta(seconds=_QUIET_SECONDS), patience)
        present = _present(store, world_size, quiet)
        if missing := [other for other, host in present.items() if not host]:
            _say(f"{len(missing)} of {world_size} ranks have not come to {place} yet: rank {ranges(missing)}; "
                 f"waiting for {_duration(60 * minutes)}")  # fmt: skip
            present = _present(store, world_size, patience - quiet)
        problem = _problem(present, place, minutes)
        store.set("problem", problem)
    else:
        # Rank 0 may come later than this rank, and begins to wait only then.
        try:
            store.wait(["problem"], 3 * patience)
            problem = store.get("problem").decode()
        except DistStoreError:
            problem = _problem(_present(store, world_size, timedelta(0)), place, 3 * minutes)
    if problem:
        store.set(f"read/{rank}", "")
        # The store may live in this process, so this rank leaves last.
        if rank == 0:
            # A rank that came may have ended since.
            with suppress(DistStoreError):
                store.wait([f"read/{other}" for other, host in present.items() if host], patience)
        raise RanksMissing(problem)


def _say(text: str) -> None:
    """Print a line once on each host."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)


def _duration(seconds: float) -> str:
    return f"{seconds / 60:g} minutes" if seconds >= 60 else f"{seconds:g} s"


def _present(store: Store, world_size: int, patience: timedelta) -> dict[int, str]:
    """Return the host of each rank that has come, once all ranks have come or `patience` is over. Missing ranks are not
    in the dict."""
    deadline, present = time.monotonic() + patience.total_seconds(), {}
    for rank in range(world_size):
        key, left = [f"host/{rank}"], deadline - time.monotonic()
        with suppress(DistStoreError):
            # A shorter time would round to 0, and a store takes 0 for no limit.
            if left >= 0.001:
                store.wait(key, timedelta(seconds=left))
        present[rank] = store.get(*key).decode() if store.check(key) else ""
    return present


def _problem(present: dict[int, str], address: str, minutes: float) -> str:
    """Say which ranks did not come, namely those without a host in `present`. The text is empty if all came."""
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
    """Return `node0 (ranks 0..7), node1 (ranks 8..15) and 14 more` for rows with the keys `host` and `rank`."""
    hosts = by_host(rows)
    named = [
        f"{host} (rank{'s' * (len(members) > 1)} {ranges(row['rank'] for row in members)})"
        for host, members in hosts.items()
    ]
    return some(named, most)


def by_host(rows: Iterable[T]) -> dict[str, list[T]]:
    """Group rows by their key `host`."""
    hosts: dict[str, list[T]] = {}
    for row in rows:
        hosts.setdefault(row["host"], []).append(row)
    return hosts


def ranges(numbers: Iterable[int]) -> str:
    """Return the text `0..3, 6` for the numbers 0, 1, 2, 3, 6."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)
