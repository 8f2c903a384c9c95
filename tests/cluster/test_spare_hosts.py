"""Hosts that are lost or left out under torchrun's elasticity, with real processes: an agent of torchrun is a host."""

import json
import os
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch.distributed import HashStore, TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from forked import PATIENCE, Command
from kept import copied, events_of
from runs import BIN, finish, log_of, rows_of, wait_for, write_config
from sagetrain.cluster.agreement import host_to_leave
from sagetrain.cluster.keeper import Keeper
from sagetrain.cluster.launcher import elastic, elastic_in_vain
from sagetrain.cluster.lifeline import Death

# A host has a name and a memory. Ranks wait in step 10 for what happens then, and those on the third host die twice.
SCRIPT = """
import os, signal, socket, time
from pathlib import Path

host = os.environ["HOST"]
socket.gethostname = lambda: host
from sagetrain.checkpoint import slots
from sagetrain.engines.step import Engine

slots.ROOT, plain = Path(os.environ["HOSTS"], host), Engine.step

def step(self, *how):
    while self.optimizer_steps == 9 and not Path(os.environ["HOSTS"], "go").exists():
        time.sleep(0.01)
    if host == "host3":
        mark = Path(os.environ["HOSTS"], f"died-{self.optimizer_steps + 1}")
        if self.optimizer_steps + 1 in (14, 17) and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return plain(self, *how)

Engine.step = step
from sagetrain.__main__ import program
program()
"""


def start(config: Path, host: int, port: int, last_call: float = 10) -> Command:
    """Start the agent of a host. Agents are ordered by address, and the spare one comes first. If the agent is the
    first one of a world, it waits so many seconds for a second one."""
    script, address = config.with_name("script.py"), {1: "127.0.0.2", 2: "127.0.0.3", 3: "127.0.0.1"}[host]
    script.write_text(SCRIPT)
    (memory := config.with_name("memory")).mkdir(exist_ok=True)
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "HOST": f"host{host}",
           "HOSTS": str(memory), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
           "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}  # fmt: skip
    words = ["torchrun", "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "9", "--monitor-interval", "0.1"]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    how = f"is_host=0,keep_alive_interval=1,keep_alive_max_attempt=6,last_call_timeout={last_call:.0f}"
    words += ["--rdzv-conf", how]
    words += ["--local-addr", address, str(script), "train", str(config)]
    return Command(words, env, config.with_suffix(".log"), config.parent)


def rendezvous(store: TCPStore) -> Any:
    """Return the hosts that are in the world of now, and those that wait."""
    found = C10dRendezvousBackend(store, "none").get_state()
    return pickle.loads(found[0]) if found else SimpleNamespace(participants={}, redundancy_list=set())


def losses_of(run: Path) -> dict[int, float]:
    """Return the last loss of each step that a run has written."""
    return {row["step"]: row["train/loss"] for row in rows_of(run) if "train/loss" in row}


def test_a_spare_host_and_then_fewer_replicas(tmp_path, corpus) -> None:
    """A host is lost with its memory, and a spare one goes on from the copy that the other host holds, to the bit.
    Ranks on the spare host die twice. It is left out, and the last host takes the same steps alone."""
    sections = {"training": {"restarts": 9}, "checkpoint": {"every_tokens": 10**6, "in_memory_every": 1}}
    alone = write_config(tmp_path / "alone.yaml", corpus, tmp_path / "alone", steps=20)
    finish("ranks", alone)
    config = write_config(tmp_path / "run.yaml", corpus, tmp_path / "run", steps=20, **sections)
    # The store of all hosts outlives each of them.
    store, metrics = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), tmp_path / "run/metrics.jsonl"
    port = store.port
    second = start(config, 2, port, PATIENCE)
    wait_for(second, config, lambda: rendezvous(store).participants)
    first = start(config, 1, port)

    wait_for(first, config, lambda: metrics.exists() and '"step": 8,' in metrics.read_text())
    spare = start(config, 3, port)
    # It waits at the rendezvous until the first host begins again.
    wait_for(spare, config, lambda: rendezvous(store).redundancy_list)
    wait_for(first, config, lambda: copied(tmp_path / "memory"))
    whole = copied(tmp_path / "memory")
    for process in [psutil.Process(second.pid), *psutil.Process(second.pid).children(recursive=True)]:
        process.kill()
    (tmp_path / "memory/go").touch()
    assert first.wait(PATIENCE) == 0, log_of(config)[-3000:]
    assert spare.wait(PATIENCE) != 0
    events, said = events_of(config), log_of(config)
    print([event["text"] for event in events])
    facts = [(event["host"], event["from_memory"], event["from_step"]) for event in events]
    # The run goes on from the newest copy that was whole on all hosts at the kill: the one seen above, or a later one.
    assert facts[0][:2] == ("host2", True) and whole <= facts[0][2] <= 9 and "host host2 of rank 1 was lost" in said
    assert [fact[:2] for fact in facts[1:]] == [("host3", True), ("host3", False)]
    assert "as ranks there have before: host3 is left out" in said and not list((tmp_path / "run").glob(".deaths*"))
    expected, found = losses_of(tmp_path / "alone"), losses_of(tmp_path / "run")
    same = facts[2][2]  # From there on another number of ranks adds up.
    assert same > 10 and [found[step] for step in range(1, same + 1)] == [expected[step] for step in range(1, same + 1)]
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-5)


def test_when_torchrun_leaves_hosts_out(monkeypatch) -> None:
    for restarts, shared, found, said in (
        ("0", "True", False, ""),
        ("9", "False", True, ""),
        ("9", "True", False, "=1"),
    ):
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
        assert elastic() == found and said in elastic_in_vain() and bool(said) == bool(elastic_in_vain())


def deaths_on(*hosts: str, **changes: Any) -> list[Death]:
    """Return a death a minute on these hosts."""
    return [
        replace(Death(3, host, -9, "killed by SIGKILL", 10 * number, 60.0 * number, again=True), **changes)
        for number, host in enumerate(hosts)
    ]


def test_deaths_of_another_job_do_not_count(monkeypatch, tmp_path) -> None:
    """The id that torchrun gives a job is "none" in all jobs whose command names none."""
    env = {"TORCHELASTIC_MAX_RESTARTS": "9", "TORCHELASTIC_USE_AGENT_STORE": "False", "TORCHELASTIC_RUN_ID": "none"}
    for name, value in {**env, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "GROUP_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "_exit", sys.exit)

    def keeper() -> Keeper:
        return Keeper(9, HashStore(), True, tmp_path, print)

    first, deaths = keeper(), deaths_on("host1", "host1")
    assert first._earlier() == []
    with pytest.raises(SystemExit):
        first._begin_elsewhere(None, deaths, "host1 is left out")
    assert keeper()._earlier() == deaths, "the same torchrun begins again"
    whole = json.loads(first._path.read_text())
    for other in ([], 5, {"launchers": 5}, {**whole, "deaths": 5}, {**whole, "deaths": [{"of": "another release"}]}):
        first._path.write_text(json.dumps(other))
        assert keeper()._earlier() == [], other
    first._path.write_text(json.dumps(whole))
    monkeypatch.setattr(os, "getppid", lambda: 1)
    assert keeper()._earlier() == []


def test_which_host_is_left_out() -> None:
    first, second = deaths_on("host1", "host1")
    assert host_to_leave([first, second], 2) == "host1"
    assert host_to_leave([first, second], 1) == "", "nobody would be left"
    assert host_to_leave(deaths_on("host1", "host2", "host1"), 2) == "host1"
    assert host_to_leave([first, replace(second, time=4000.0)], 2) == "", "an hour has passed"
    for hosts in (["host1"], ["host1", "host2"], ["host1", "host1", "host2"], ["host2", "host1", "host2", "host1"]):
        assert host_to_leave(deaths_on(*hosts), 2) == ""
    assert host_to_leave(deaths_on("host1", "host1", memory=True), 2) == ""
