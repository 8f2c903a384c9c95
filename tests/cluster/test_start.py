"""The start of a run on many ranks, up to the saver. Ranks are threads of one process, on hosts of eight by name."""

from __future__ import annotations

import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # This import registers the backend "fake".
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

from distributed import run_distributed
from sagetrain.checkpoint.saving import Saver
from sagetrain.cluster import launcher, preflight, rendezvous
from sagetrain.cluster.interfaces import use_interface
from sagetrain.cluster.join import init_distributed
from sagetrain.cluster.run_folder import RunFolder
from sagetrain.config.load import load_config
from sagetrain.config.schema import RunConfig
from sagetrain.parallel.topology import ParallelGroups, Topology

HOST = 8
"""Number of ranks of a host."""
MINUTES = 10.0


class Environment(MutableMapping[str, str]):
    """The environment of the process, together with the variables that this thread has set."""

    def __init__(self, shared: MutableMapping[str, str]):
        self._shared, self._local = shared, threading.local()

    @property
    def own(self) -> dict[str, str]:
        """The variables that this thread has set, by name."""
        return self._local.__dict__

    def __getitem__(self, name: str) -> str:
        return self.own[name] if name in self.own else self._shared[name]

    def __setitem__(self, name: str, value: str) -> None:
        self.own[name] = value

    def __delitem__(self, name: str) -> None:
        self.own.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter({**self._shared, **self.own})

    def __len__(self) -> int:
        return len(list(self))


class Counts(threading.local):
    """Counts of this thread's rank: its requests to stores, and its calls of new_group."""

    requests = groups = 0

    def __init__(self) -> None:
        self.asked: set[str] = set()


counts = Counts()


def counted(name: str) -> Callable[..., Any]:
    def request(self: CountingStore, *arguments: Any) -> Any:
        asked, changes = f"{name} {arguments[0]}", name in ("set", "delete_key") or (name == "add" and arguments[1])
        # A rank that waits asks the same again after a time. How often depends on the host.
        counts.requests += bool(changes) or asked not in counts.asked
        counts.asked.add(asked)
        return getattr(self.store, name)(*arguments)

    return request


class CountingStore(dist.Store):
    """A store that counts its requests, whether Python or C++ makes them."""

    every: ClassVar[list[CountingStore]] = []
    """All stores. C++ would keep a store alive, but not what Python adds to it."""

    def __init__(self, store: dist.Store):
        super().__init__()
        self.store = store
        self.every.append(self)

    set, get, add, check, wait = counted("set"), counted("get"), counted("add"), counted("check"), counted("wait")
    deleteKey = counted("delete_key")

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the store. This does not count as a request."""
        self.store.set_timeout(timeout)


def start(rank: int, topology: Topology, port: int, cfg: RunConfig) -> tuple[list[float], tuple[int, int]]:
    """Start as this rank. Return when each part was done, and what was counted."""
    ranks = topology.world_size
    local = {"LOCAL_RANK": rank % HOST, "LOCAL_WORLD_SIZE": min(ranks, HOST)}
    job = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in {**job, **local}.items()})
    use_interface(cfg.training.network_interface)
    device = init_distributed(2 * MINUTES)
    times = [time.monotonic()]
    preflight.check_in(cfg, topology, device, lambda say: {"tokenizer": "the same"})
    times.append(time.monotonic())
    folder = RunFolder(Path(cfg.training.run_dir))
    preflight.share(folder)
    groups = ParallelGroups.create(topology, timedelta(minutes=2 * MINUTES))
    times.append(time.monotonic())
    Saver(folder, groups, cfg.checkpoint, timedelta(minutes=MINUTES))
    return [*times, time.monotonic()], (counts.requests, counts.groups)


def starts(topology: Topology, run_dir: str) -> tuple[list[float], int, int]:
    """Start all ranks. Return when the last one was done with each part, and how many requests and groups were made."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # Rank 0 raises this limit.
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, hard))
    cfg = load_config("7b", ["model.num_layers=2", "parallel.zero_stage=3", f"training.run_dir={run_dir}"])
    sys.setswitchinterval(0.5)  # Otherwise threads that wait for the interpreter would wake up 200 times a second each.
    port, environment = launcher.free_port(), Environment(os.environ)
    open_store, join, new_group = rendezvous._store, dist.init_process_group, dist.new_group

    def counted_group(*arguments: Any, **how: Any) -> dist.ProcessGroup:
        counts.groups += 1
        return new_group(*arguments, **how)

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    with (
        patch.object(os, "environ", environment),
        patch.object(socket, "gethostname", lambda: f"node{int(environment['RANK']) // HOST:03d}"),
        patch.object(dist.distributed_c10d, "_world", ThreadLocalWorld()),
        patch.object(rendezvous, "_store", lambda *arguments: CountingStore(open_store(*arguments))),
        # With gloo each rank would connect to every other one.
        patch.object(dist, "init_process_group", lambda backend, **how: join("fake", **how)),
        patch.object(dist, "new_group", counted_group),
    ):
        pool = ThreadPoolExecutor(topology.world_size)
        ranks = [pool.submit(start, rank, topology, port, cfg) for rank in range(topology.world_size)]
        # If a rank fails, the others would wait for it. The process ends without them.
        times, made = zip(*(rank.result() for rank in as_completed(ranks)), strict=True)
    torch._C._distributed_c10d._set_thread_isolation_mode(False)
    requests, groups = map(sum, zip(*made, strict=True))
    return [max(part) for part in zip(*times, strict=True)], requests, groups


def test_the_work_of_a_rank_at_the_start_does_not_grow(monkeypatch, tmp_path) -> None:
    """Store requests and process groups of all ranks together grow in proportion to the ranks."""
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")  # Older versions of torch end each new_group with a barrier.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # torch's store asks for the name of each host that connects, which takes seconds without a name server.
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
    topologies = Topology(8, 1, 1), Topology(16, 1, 1), Topology(32, 1, 1), Topology(8, 2, 2)
    found = [run_distributed(starts, 1, each, str(tmp_path / str(i)))[0] for i, each in enumerate(topologies)]
    assert all(times == sorted(times) for times, _, _ in found)
    *plain, layered = (groups for _, _, groups in found)
    assert plain == [2 * 8, 2 * 16, 2 * 32]
    assert layered == 3 * 8
    of_8, of_16, of_32, layered = (requests for _, requests, _ in found)
    # Rank 0 makes some 8 requests at any number of ranks, so the test compares additions of ranks. If each rank asked
    # once for every other one, the ratio would be 2.8 instead of 2.
    assert of_32 - of_16 < 1.1 * 2 * (of_16 - of_8)
    assert max(of_8 / 8, of_16 / 16, of_32 / 32) < 40
    assert layered / 8 < 45
