"""Time the start of a run on hundreds of ranks, simulated on one machine. Everything but the model takes part.

    python3 results/start/start.py --ranks 64 256 1024

Each rank is a thread with the environment that a launcher would give it. By its name it is on a host of eight ranks; a
process has 64 of them. It runs training's own code. The ranks meet over TCP, report who they are, find the shared run
folder and make their process groups, which connect to nobody, as NCCL's do at first. Then a checkpoint is saved. Its
manifest is as large as that of 7B at ZeRO 3, where every rank has a piece of every parameter. The ledger is then read
from it.

For each part, the seconds from the start of the first rank until the last one was done with it are printed. All ranks
share the cores of this machine, while on a cluster eight ranks have the cores of a host, so what each rank computes for
itself is overstated. `requests` are the requests to the key-value stores, and `groups` the calls of new_group, of all
ranks together.

This script is frozen. It runs with the library as it was at commit 263ff01c.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # This import registers the backend "fake".
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

from sagetrain.checkpoint import on_disk
from sagetrain.checkpoint.ledger import Ledger, check_consumed, expected_fold
from sagetrain.checkpoint.manifest import KINDS
from sagetrain.checkpoint.saving import Saver
from sagetrain.checkpoint.state import Identity, RunState
from sagetrain.cluster import interfaces, launcher, preflight, rendezvous
from sagetrain.cluster.join import init_distributed
from sagetrain.cluster.run_folder import RunFolder
from sagetrain.config.arithmetic import padded_vocab_size
from sagetrain.config.errors import CheckpointError
from sagetrain.config.load import dump_config, load_config
from sagetrain.config.schema import RunConfig
from sagetrain.engines.build_engine import partitioner
from sagetrain.engines.protocol import Owned
from sagetrain.model.tensors import tensors
from sagetrain.optim.states import Fp32
from sagetrain.parallel.rng import rng_state
from sagetrain.parallel.topology import ParallelGroups, Topology

RANKS_OF_HOST, RANKS_OF_PROCESS = 8, 64
PATIENCE = 10.0  # This is a number of minutes.
STEPS, TOKENS_PER_STEP = 100_000, 2**24  # These are numbers of the ledger.
ORDER = "a fingerprint"


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


counted = threading.local()
"""Counts of this thread's rank: how many requests it sent to stores (`requests`), and how often it called new_group
(`groups`)."""


def _counted(name: str) -> Callable[..., Any]:
    def request(self: CountingStore, *arguments: Any) -> Any:
        counted.requests = getattr(counted, "requests", 0) + 1
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

    set, get, add, check, wait = _counted("set"), _counted("get"), _counted("add"), _counted("check"), _counted("wait")
    deleteKey = _counted("delete_key")

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the store. This does not count as a request."""
        self.store.set_timeout(timeout)


def make_ranks_threads() -> None:
    """Prepare this process so that each of its threads can be a rank."""
    # Otherwise 64 threads that wait for the interpreter would wake up 200 times per second each.
    sys.setswitchinterval(0.5)
    os.environ = Environment(os.environ)  # noqa: B003 - what the process has stays below
    socket.gethostname = lambda: f"node{int(os.environ['RANK']) // RANKS_OF_HOST:03d}"
    dist.distributed_c10d._world = ThreadLocalWorld()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    open_store, join, new_group = rendezvous._store, dist.init_process_group, dist.new_group

    def _counted_group(*arguments: Any, **how: Any) -> dist.ProcessGroup:
        counted.groups = getattr(counted, "groups", 0) + 1
        return new_group(*arguments, **how)

    rendezvous._store = lambda *arguments: CountingStore(open_store(*arguments))
    # With gloo each rank would connect to every other one.
    dist.init_process_group = lambda backend, **how: join("fake", **how)
    dist.new_group = _counted_group


def every_parameter(cfg: RunConfig) -> list[Owned]:
    """Return a piece of each parameter, as every rank has one at ZeRO 3: its place, and a single number in place of its
    values."""
    rows, one = padded_vocab_size(cfg.model.vocab_size or 32_768), torch.zeros(1)
    moments = {kind: Fp32(one) for kind in KINDS[1:]}
    return [Owned(spec, 0, 1, one, moments) for spec in tensors(cfg.model, cfg.attention, rows)]


def start(
    rank: int, world_size: int, tp_size: int, cp_size: int, port: int, cfg: RunConfig, parameters: list[Owned]
) -> dict[str, float]:
    """Go through the start of a run as this rank, and through its first checkpoint. Return when each part was done."""
    done = {}

    def tick(part: str) -> None:
        done[part] = time.monotonic()

    tick("started")
    local = {"LOCAL_RANK": rank % RANKS_OF_HOST, "LOCAL_WORLD_SIZE": min(world_size, RANKS_OF_HOST)}
    job = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in {**job, **local}.items()})
    interfaces.use_interface(cfg.training.network_interface)
    device = init_distributed(2 * PATIENCE)
    tick("met")
    topology = Topology(world_size, tp_size, cp_size)
    preflight.check_in(cfg, topology, device, lambda say: {"tokenizer": "the same"})
    tick("checked in")
    folder = RunFolder(Path(cfg.training.run_dir))
    preflight.share(folder)
    tick("folder shared")
    groups = ParallelGroups.create(topology, timedelta(minutes=2 * PATIENCE))
    tick("groups made")
    saver = Saver(folder.checkpoints, groups, 1, None, timedelta(minutes=PATIENCE))
    tick("saver ready")
    counts = dict(vars(counted))

    samples = TOKENS_PER_STEP // cfg.data.seq_length
    samples -= samples % groups.dp_size
    fold = tp_size * cp_size * expected_fold(0, samples, 1, groups.dp_size)
    check_consumed(fold, 0, samples, 1, groups.dp_size, world_size)
    tick("ledger of a step")
    state = RunState(
        step=STEPS,
        tokens=STEPS * TOKENS_PER_STEP,
        sequences=STEPS * samples,
        ledger=Ledger("of a run", [[0, samples, STEPS]]),
        identity=Identity(model=cfg.model.model_dump(), qk_norm=cfg.attention.qk_norm, vocab_size=1),
    )
    at = groups.replica_rank
    cut = {"shape": (groups.num_replicas,), "cut": None, "dim": None}
    own = [replace(piece, spec=replace(piece.spec, **cut), start=at, stop=at + 1) for piece in parameters]
    saver.start(state, dump_config(cfg), own, rng_state())
    saver.wait()
    tick("checkpoint saved")
    if rank == 0:
        state = on_disk.read_state(folder.checkpoints / on_disk.folder_name(STEPS))
        tick("manifest read")
        done["manifest, MB"] = (folder.checkpoints / on_disk.folder_name(STEPS) / "manifest.json").stat().st_size / 1e6
        with contextlib.suppress(CheckpointError):  # The head of the ledger is made up.
            Ledger.verified(state.ledger, ORDER, state.step, state.sequences, folder.checkpoints)
        tick("ledger verified")
    return done | counts


def simulate(world_size: int, tp_size: int, cp_size: int, cfg: RunConfig, patience: float = 600.0) -> dict[str, float]:
    """Start `world_size` ranks.

    Returns:
        For each part, the seconds from the start of the first rank until the last one was done with it, and the sums of
        what was counted.

    Raises:
        RuntimeError: a rank failed (the message holds its traceback), or took longer than `patience` seconds.
    """
    torch.set_num_threads(1)
    # This is set before any library looks for a GPU.
    os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
    with contextlib.redirect_stdout(io.StringIO()):
        partitioner(cfg, ParallelGroups.single())  # This imports DeepSpeed once for all ranks.
    # torch's store asks for the name of each host that connects, which takes seconds without a name server.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    port, parameters, processes = launcher.free_port(), every_parameter(cfg), set()
    with tempfile.TemporaryDirectory() as scratch:
        cfg = cfg.model_copy(update={"training": cfg.training.model_copy(update={"run_dir": f"{scratch}/run"})})
        said, began = Path(scratch) / "ranks.jsonl", time.monotonic()
        said.touch()
        try:
            for first in range(0, world_size, RANKS_OF_PROCESS):
                if not (pid := os.fork()):
                    ranks = range(first, min(world_size, first + RANKS_OF_PROCESS))
                    _be(
                        [partial(start, rank, world_size, tp_size, cp_size, port, cfg, parameters) for rank in ranks],
                        said,
                    )
                processes.add(pid)
            while processes:
                pid, status = os.waitpid(-1, os.WNOHANG)
                processes.discard(pid)
                if status or time.monotonic() > began + patience:
                    what = "a rank failed" if status else f"ranks have not finished in {patience} s"
                    raise RuntimeError(f"{what}:\n{said.read_text()}")
                time.sleep(0 if pid else 0.05)
        finally:
            for pid in processes:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        rows = [json.loads(line) for line in said.read_text().splitlines()]
    counts = {name: sum(row.pop(name, 0) for row in rows) for name in ("requests", "groups", "manifest, MB")}
    parts = max(rows, key=len)
    return {part: max(row.get(part, 0.0) for row in rows) - began for part in parts} | counts


def _be(ranks: list[Callable[[], dict[str, float]]], said: Path) -> None:
    """Run ranks in threads of this process, which ends with them. Each writes a line to `said`."""

    def run(rank: Callable[[], dict[str, float]]) -> None:
        try:
            text, code = json.dumps(rank()), 0
        except BaseException:  # noqa: BLE001 - whatever it is, the parent shows it
            text, code = traceback.format_exc(), 1
        with open(said, "a") as file:
            file.write(text + "\n")
        if code:
            os._exit(code)

    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)
    make_ranks_threads()
    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(0)


def main(words: Sequence[str] | None = None) -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--context-parallel-size", type=int, default=1)
    parser.add_argument("--config", default="7b")
    options = parser.parse_args(words)
    columns = []
    for world_size in options.ranks:
        sizes = world_size, options.tensor_parallel_size, options.context_parallel_size
        columns.append(simulate(*sizes, load_config(options.config, ["parallel.zero_stage=3"])))
        print(f"{world_size} ranks: ready after {columns[-1]['saver ready']:.1f} s", file=sys.stderr, flush=True)
    print("ranks".ljust(20), *(f"{world_size:>9,}" for world_size in options.ranks))
    for part in columns[0]:
        number = "9,.0f" if part in ("requests", "groups") else "9.1f"
        print(part.ljust(20), *(format(column[part], number) for column in columns))


if __name__ == "__main__":
    main()
