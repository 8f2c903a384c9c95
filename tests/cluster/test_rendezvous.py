"""Ranks that wait for each other say whom they wait for, and end at signals and time limits."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
from torch.distributed import DistStoreError, Store, TCPStore

from forked import PATIENCE, Command, until
from runs import BIN, free_port, write_config
from sagetrain.cluster import rendezvous


def as_rank(monkeypatch, rank: int, world_size: int, port: int, address: str = "127.0.0.1") -> None:
    environment = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "MASTER_PORT": port}
    for key, value in {**environment, "MASTER_ADDR": address}.items():
        monkeypatch.setenv(key, str(value))
    for key in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(key, raising=False)


@pytest.fixture
def own_clock(monkeypatch) -> None:
    """Let time pass in the pauses of the rendezvous alone, however long a look for an address takes on this host."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds))
    monkeypatch.setattr(rendezvous, "time", clock)


def test_ranges() -> None:
    assert rendezvous.ranges([3, 0, 1, 6, 6, 7, 9]) == "0..1, 3, 6..7, 9"


class InVain(Store):
    """A store in which a wait for `key` ends without it as soon as `given_up` is set, however long it was to last. The
    lengths are appended to `lengths`."""

    every: ClassVar[list[InVain]] = []  # C++ would keep a store alive, but not what Python adds to it.

    def __init__(self, store: Store, key: str, given_up: threading.Event, lengths: list[float]):
        super().__init__()
        self.store, self.key, self.given_up, self.lengths = store, key, given_up, lengths
        self.every.append(self)

    def set(self, key: str, value: str) -> None:
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        return self.store.get(key)

    def check(self, keys: list[str]) -> bool:
        return self.store.check(keys)

    def wait(self, keys: list[str], length: timedelta) -> None:
        if keys == [self.key]:
            self.lengths.append(length.total_seconds())
            assert self.given_up.wait(PATIENCE)
            raise DistStoreError
        self.store.wait(keys, length)


@pytest.mark.parametrize(("order", "missing", "waited"), [([1, 0], 2, 1), ([1, 2], 0, 3)])
def test_under_torchrun_all_that_came_name_the_one_that_did_not(monkeypatch, order, missing, waited) -> None:
    """The store lives in torchrun's agent, so no rank waits for rank 0 before it can connect."""
    agent, minutes = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), PATIENCE / 60
    awaited = "meet/0/problem" if missing == 0 else f"meet/0/host/{missing}"
    open_store, given_up, lengths = rendezvous._store, threading.Event(), []
    monkeypatch.setattr(rendezvous, "_store", lambda *how: InVain(open_store(*how), awaited, given_up, lengths))
    with ThreadPoolExecutor(2) as ranks:
        came = []
        for rank in order:
            as_rank(monkeypatch, rank, 3, agent.port)
            monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
            came.append(ranks.submit(rendezvous.meet, minutes))
            agent.wait([f"meet/0/host/{rank}"])
        given_up.set()
        both = f"ranks {'0..1' if missing == 2 else '1..2'}"
        said = (
            f"1 of 3 ranks have not come to .* within {waited * minutes:g} minutes: rank {missing}. Here are .*{both}"
        )
        for rank in came:
            error = rank.exception()
            assert isinstance(error, rendezvous.RanksMissing)
            assert re.search(said, str(error))
    assert sum(lengths) == pytest.approx(waited * PATIENCE * (1 if missing else 2), rel=0.01)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_port_in_use_is_the_cause_at_once(monkeypatch, capfd, world_size) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        as_rank(monkeypatch, 0, world_size, port)
        with pytest.raises(rendezvous.RanksMissing) as error:
            rendezvous.meet(2 * PATIENCE / 60)
    text = str(error.value)
    assert f"cannot listen at port {port}: another process listens there" in text
    assert "--master_port" in text and "MASTER_PORT" in text and "firewall" not in text
    assert capfd.readouterr() == ("", "")  # torch's own store prints nothing either.


def test_an_unknown_address_is_said_at_once_and_soon_given_up(monkeypatch, capfd, own_clock) -> None:
    monkeypatch.setattr(rendezvous, "_NAME_SECONDS", 1)
    for rank, fixes in ((0, "an address"), (1, "--master_addr")):
        as_rank(monkeypatch, rank, 2, free_port(), "no-such-host.invalid")
        monkeypatch.setenv("LOCAL_RANK", "0")
        with pytest.raises(
            rendezvous.RanksMissing, match=f"cannot resolve MASTER_ADDR 'no-such-host.invalid'.*{fixes}"
        ):
            rendezvous.meet(2 * PATIENCE / 60)
        (line,) = capfd.readouterr().err.splitlines()
        assert line.endswith("; trying for 1 s")


def test_an_agent_that_is_gone_is_said_at_once(monkeypatch, capfd, own_clock) -> None:
    """The shell of a former torchrun tells a process that an agent listens."""
    monkeypatch.setattr(rendezvous, "_NAME_SECONDS", 0.2)
    as_rank(monkeypatch, 0, 1, free_port())
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(
        rendezvous.RanksMissing, match=r"AGENT_STORE=True says that torchrun listens .* unset TORCHELAST"
    ):
        rendezvous.meet(2 * PATIENCE / 60)
    (line,) = capfd.readouterr().err.splitlines()
    assert "does not reach rank 0" in line and line.endswith("; trying for 0.2 s")


def test_rank_0_that_runs_elsewhere_than_master_addr_says_so(monkeypatch) -> None:
    monkeypatch.setattr(rendezvous, "_NAME_SECONDS", 0.2)
    other = socket.create_server(("127.0.0.2", 0))
    port = other.getsockname()[1]
    other.close()
    as_rank(monkeypatch, 0, 2, port, "240.0.0.1")  # No host has this address.
    with pytest.raises(rendezvous.RanksMissing, match=f"MASTER_ADDR must be an address of {socket.gethostname()}"):
        rendezvous.meet(2 * PATIENCE / 60)


def wait_for_the_others(rank: int, port: int, log: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="3", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.stderr = log.open("a")
    os.dup2(sys.stderr.fileno(), 2)
    rendezvous._QUIET_SECONDS = PATIENCE  # The test may take longer to start all ranks than they wait in silence.
    with rendezvous.ended_by_signals():
        (log.parent / f"{rank}.ready").touch()
        rendezvous.meet(2 * PATIENCE / 60)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_ranks_that_wait(tmp_path, number) -> None:
    """Rank 0 waits for rank 2, rank 1 waits with it, and another rank 1 waits for a rank 0 that never came."""
    context, port, ended = multiprocessing.get_context("fork"), free_port(), {}
    for rank, at, name in ((0, port, "0"), (1, port, "1"), (1, free_port(), "1.lonely")):
        folder = tmp_path / name
        folder.mkdir()
        process = context.Process(target=wait_for_the_others, args=(rank, at, folder / "log"))
        process.start()
        ended[process] = folder / "log"
        until((folder / f"{rank}.ready").exists)
        if rank == 0:
            until(lambda: listens(port))
    store = TCPStore("127.0.0.1", port, is_master=False)
    store.wait(["meet/0/host/0", "meet/0/host/1"], timedelta(seconds=PATIENCE))
    for process in reversed(ended):
        os.kill(process.pid, number)
        process.join(PATIENCE)  # They would wait for the others twice as long.
        assert process.exitcode == 128 + number
    for log in ended.values():
        assert log.read_text().splitlines() == [
            f"ended by {number.name} before training began: nothing was trained or written"
        ]


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def test_a_run_whose_ranks_have_not_come_leaves_at_a_signal(tmp_path, corpus) -> None:
    """The real command runs here, because the order of its first steps counts."""
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run", tp_size=2)
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": ""}
    port = free_port()
    process = subprocess.Popen(
        [BIN / "sagetrain", "train", "--config", config],
        env={**{k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}, **rank, "MASTER_PORT": str(port)},
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: listens(port), lambda: process.poll() is None)
    store = TCPStore("127.0.0.1", port, is_master=False)
    with suppress(DistStoreError):
        store.wait(["meet/0/host/0"], timedelta(seconds=PATIENCE))
    del store
    process.terminate()
    _, text = process.communicate(timeout=PATIENCE)  # Without the signal the process would wait for half an hour.
    assert process.returncode == 128 + signal.SIGTERM
    assert text.splitlines()[-1].startswith("ended by SIGTERM before training began"), text
    assert text.count("ended by") == 1 and "c10d" not in text
    assert len(re.findall(r"^\d+ threads? a rank on the CPU", text, re.M)) == 1
    assert not (tmp_path / "run").exists()


def test_a_world_of_one_listens_at_its_port_from_the_beginning(tmp_path) -> None:
    """Another run could take a port that is only looked for before the process group listens there. One of eighteen
    runs that began at once on a host ended so. Collectives that newer torch has renamed bring no warning."""
    code = """
import errno, os, socket, warnings
warnings.simplefilter("error", FutureWarning)  # The process of the tests ignores them.
from sagetrain.cluster import rendezvous
from sagetrain.cluster.join import init_distributed
from sagetrain.config import ConfigError
from sagetrain.cluster.join import init_distributed
place = rendezvous.meet
def seen(minutes):
    store = place(minutes)
    try:
        socket.create_server(("", int(os.environ["MASTER_PORT"])))
    except OSError as error:
        print(errno.errorcode[error.errno])
    return store
rendezvous.meet = seen
init_distributed(1.0)
import torch, torch.distributed as dist
dist.barrier()
dist.all_gather_into_tensor(torch.zeros(1), torch.ones(1))
dist.reduce_scatter_tensor(torch.zeros(1), torch.ones(1))
print(dist.get_world_size(), dist.distributed_c10d._get_default_store().num_keys() > 0)
"""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MASTER_")} | {"CUDA_VISIBLE_DEVICES": ""}
    program, output, errors = (tmp_path / name for name in ("program.py", "output", "errors"))
    program.write_text(code)
    assert Command(["python", str(program)], environment, output, tmp_path, errors).wait(PATIENCE) == 0
    assert output.read_text().splitlines() == ["EADDRINUSE", "1 True"], errors.read_text()
