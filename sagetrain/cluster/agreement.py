"""The agreement of a run's keepers (keeper.py) through their key-value store: why a generation of ranks ended, that all
of its ranks are gone, and which hosts are alive."""

from __future__ import annotations

import json
import os
import socket
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

from sagetrain.cluster.lifeline import Death
from sagetrain.config.errors import many

TICK = 0.05
"""The seconds between two looks of a keeper at its rank."""
_REQUESTS = 2_000
"""The number of requests a second that all keepers of a run make to their store together."""
_BEAT = 1.0
"""The seconds between two signs of life of a host."""
SILENT_BEATS = 30
"""A host that has given no sign of life for so many beats is lost. The beats are those of the keeper that watches, so
time in which the whole job was stopped does not count."""
MISSED_BEATS = 10
"""The number of beats where the ranks of a host should be gone by now, and torchrun can begin again without it."""
_HOUR = 3600.0
_PATIENCE = 300.0
"""The longest time in seconds that the first keeper waits until all hosts have come."""
_FAREWELL = 10.0
"""The longest time in seconds that the first keeper waits for the others, which may still ask its store."""


class Agreement:
    """One keeper's part in the agreement. The first keeper of each host gives its signs of life, and the keeper of
    rank 0 watches them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.rank, self.world_size = (int(os.environ.get(name, one)) for name, one in (("RANK", 0), ("WORLD_SIZE", 1)))
        self._interval = max(TICK, 2 * self.world_size / _REQUESTS)
        self._asked = self._beat = time.monotonic()
        self._hosts: dict[int, tuple[int, str, str]] = {}
        self._signs: dict[int, tuple[int, int]] = {}
        self._leads = os.environ.get("LOCAL_RANK", "0") == "0"
        if self._leads:
            number = store.add("hosts", 1)
            store.set(f"host/{number}", json.dumps([self.rank, socket.gethostname(), _launcher()]))

    def due(self) -> bool:
        """Whether the store may be asked again."""
        now = time.monotonic()
        if now - self._asked < self._interval:
            return False
        self._asked = now
        return True

    # -- generations ----------------------------------------------------------------------------------------------

    def report(self, death: Death) -> None:
        """Say that a rank has died. The first report about a generation counts."""
        self._store.compare_set(f"died/{death.generation}", "", json.dumps(asdict(death)))

    def death(self, generation: int) -> Death | None:
        """Return the reason why a generation ends; None if it has not been said that it ends."""
        return self.lost() or self._read(f"died/{generation}")

    def lost(self) -> Death | None:
        """Return the loss of a host; None if none was lost."""
        return self._read("lost")

    def lose(self, rank: int, host: str, why: str, ago: float = 0.0) -> None:
        """Say that a host is lost, whose first rank is named. The first one that is said counts."""
        death = Death(rank, host, 0, why, 0, time.time() - ago, again=False, lost=True)
        self._store.compare_set("lost", "", json.dumps(asdict(death)))

    def told(self, text: str) -> str:
        """Return the text of the keeper of rank 0 on every keeper."""
        if self.rank == 0:
            self._store.set("told", text)
        return str(self._store.get("told").decode())

    def _read(self, key: str) -> Death | None:
        return Death(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def say(self, what: str, generation: int) -> None:
        """Say that the rank of this keeper is done, or is gone."""
        self._store.add(f"{what}/{generation}", 1)

    def everybody(self, what: str, generation: int) -> bool:
        """Whether all keepers have said so."""
        return bool(self._store.add(f"{what}/{generation}", 0) >= self.world_size)

    def anybody(self, what: str, generation: int) -> bool:
        """Whether any keeper has said so."""
        return bool(self._store.add(f"{what}/{generation}", 0) > 0)

    def leave(self) -> None:
        """End the agreement. The first keeper leaves last, because the store may end with it."""
        self.say("left", 0)
        deadline = time.monotonic() + _FAREWELL
        while self.rank == 0 and not self.everybody("left", 0) and time.monotonic() < deadline:
            time.sleep(self._interval)

    # -- hosts ----------------------------------------------------------------------------------------------------

    def beat(self, patience: int = SILENT_BEATS, *, due: bool = False) -> None:
        """Give this host's sign of life, and on rank 0 look for the signs of the others, where that is due, or now if
        `due`. A host is lost after `patience` beats without a sign."""
        if self.world_size == 1 or (time.monotonic() - self._beat < _BEAT and not due):
            return
        self._beat = time.monotonic()
        if self._leads:
            self._store.add(f"beat/{self.rank}", 1)
        if self.rank == 0:
            self._look(patience)

    def launchers(self, hosts: int) -> list[str]:
        """Return the identity of each host's launcher, which no other process has, on rank 0; elsewhere []. A host that
        does not come is not waited for longer than the others wait for rank 0."""
        deadline = time.monotonic() + _PATIENCE
        while self.rank == 0 and len(self._came()) < hosts and time.monotonic() < deadline:
            time.sleep(self._interval)
        return [launcher for _, _, launcher in self._hosts.values()]

    def _came(self) -> dict[int, tuple[int, str, str]]:
        """Return the first rank, the name and the launcher of each host that has come."""
        for number in range(len(self._hosts) + 1, self._store.add("hosts", 0) + 1):
            if not self._store.check([f"host/{number}"]):
                break
            self._hosts[number] = tuple(json.loads(self._store.get(f"host/{number}")))
        return self._hosts

    def _look(self, patience: int) -> None:
        for number, (rank, host, _) in self._came().items():
            now, (sign, silent) = self._store.add(f"beat/{rank}", 0), self._signs.get(number, (-1, 0))
            silent = silent + 1 if now == sign else 0
            self._signs[number] = now, silent
            if silent >= patience:
                seconds = silent * _BEAT
                self.lose(rank, host, f"no sign of life for {seconds:.0f} s", seconds)


def _launcher() -> str:
    """Return the identity of the process that has started this one."""
    parent, began = os.getppid(), ""
    with suppress(OSError, IndexError):
        began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{socket.gethostname()} {parent} {began}"


def suspects(deaths: Sequence[Death]) -> str:
    """Name the hosts on which ranks have died twice or more, as a further part of a sentence. It is empty if there are
    none, and where all deaths were on one host, which may be the only one."""
    counts = Counter(death.host for death in deaths)
    named = [f"{host} ({number} deaths)" for host, number in counts.most_common() if number > 1 and len(counts) > 1]
    return f"; hosts to look at, and to leave out of the next job: {', '.join(named)}" if named else ""


def host_to_leave(deaths: Sequence[Death], hosts: int) -> str:
    """Return the host of the last death if it is to be left out: ranks have died on it twice in an hour, and more often
    than on any other host. Return "" if it is not, and if it is the only one of the `hosts` that train."""
    last = deaths[-1]
    if hosts == 1:
        return ""
    counts = Counter(death.host for death in deaths if last.time - death.time < _HOUR and not death.memory)
    most = max(number for host, number in [("", 1), *counts.items()] if host != last.host)
    return last.host if counts[last.host] > most else ""


def why_it_ends(deaths: Sequence[Death], restarts: int) -> str:
    """Say why a run does not begin again after the last of all its deaths. The text is empty if it does. `restarts` is
    the value of training.restarts."""
    *before, last = deaths
    if not last.again:
        why = ": another attempt would end in the same way"
    elif last.memory and any(death.memory for death in before):
        why = ": memory ran out for the second time"
    elif before and last.step <= before[-1].step and (last.rank == before[-1].rank or last.why == before[-1].why):
        why = f", after {before[-1].said}: the run does not get past it. Look at that step and that host"
    elif len(before) >= restarts:
        why = f": after {many(restarts, 'restart')} training.restarts allows no more"
    else:
        return ""
    return f"{last.said}{why}{suspects(deaths)}"
