"""A rank takes its share of the cores of its host."""

import os

import pytest

from sagetrain.parallel.host import cores_of_rank, ranks_of_host, use_cores

NAMES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID", "SLURM_CPUS_PER_TASK")


@pytest.mark.parametrize(("environment", "ranks", "cores"), [
    ({}, None, 64),
    ({"LOCAL_WORLD_SIZE": "8"}, 8, 8),  # torchrun
    ({"LOCAL_SIZE": "4"}, 4, 16),  # deepspeed
    ({"LOCAL_SIZE": "100"}, 100, 1),
    ({"SLURM_STEP_TASKS_PER_NODE": "16", "SLURM_NODEID": "0"}, 16, 4),
    ({"SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_NODEID": "1"}, 8, 8),
    ({"SLURM_STEP_TASKS_PER_NODE": "8(x2),4", "SLURM_NODEID": "2"}, 4, 16),
    ({"SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_CPUS_PER_TASK": "6", "SLURM_PROCID": "3"}, 8, 6),
    ({"SLURM_CPUS_PER_TASK": "6", "LOCAL_WORLD_SIZE": "2"}, 2, 32),  # torchrun runs on a host that Slurm lent.
])  # fmt: skip
def test_the_cores_of_a_host_are_shared_by_its_ranks(monkeypatch, environment, ranks, cores) -> None:
    for name in (*NAMES, "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert (ranks_of_host(), cores_of_rank()) == (ranks, cores)


@pytest.mark.parametrize(("ranks", "given", "threads"), [("8", None, "8"), ("1", None, "16"), ("1", "3", "3")])
def test_threads_are_chosen_unless_somebody_has(monkeypatch, ranks, given, threads) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    environment = {"LOCAL_WORLD_SIZE": ranks} | ({"OMP_NUM_THREADS": given} if given else {})
    monkeypatch.setattr(os, "environ", environment)
    said = use_cores()
    assert environment["OMP_NUM_THREADS"] == threads
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE" and (said == "") == bool(given)
    assert given or said.startswith(f"{threads} threads a rank on the CPU")
    assert use_cores() == ""  # The message comes once.
