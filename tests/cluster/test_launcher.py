"""Read the ranks that launchers tell a process, and name the variables that another job left behind."""

import os
import subprocess

import pytest

from runs import BIN, ROOT
from sagetrain.cluster import launcher
from sagetrain.cluster.launcher import launched, unknown_launcher
from sagetrain.config import ConfigError


def environment(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split())


@pytest.mark.parametrize(("given", "expected"), [
    ("", (0, 1)),
    ("LOCAL_RANK=0", (0, 1)),
    ("RANK=0 WORLD_SIZE=1", (0, 1)),
    ("MASTER_PORT=29501", (0, 1)),
    ("RANK=9 WORLD_SIZE=16 LOCAL_RANK=1 LOCAL_WORLD_SIZE=8 MASTER_ADDR=a MASTER_PORT=1", (9, 16)),  # torchrun
    ("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_SIZE=2 CROSS_SIZE=1 MASTER_ADDR=a MASTER_PORT=1", (1, 2)),  # deepspeed
    ("RANK=2 WORLD_SIZE=4 LOCAL_RANK=0 LOCAL_WORLD_SIZE= SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=4 MASTER_ADDR=a "
     "MASTER_PORT=1", (2, 4)),
    ("SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1 SLURM_NTASKS=8", (0, 1)),  # srun --pty bash
    ("PMI_RANK=0 PMI_SIZE=1 PMIX_RANK=0 NODE_RANK=0 TORCHELASTIC_USE_AGENT_STORE=False", (0, 1)),
    ("SLURM_PROCID=3 SLURM_STEP_NUM_TASKS=8 RANK=0 WORLD_SIZE=1", (0, 1)),  # Each task starts a run of its own.
])  # fmt: skip
def test_a_launcher_tells_rank_and_world_size(monkeypatch, given, expected) -> None:
    monkeypatch.setattr(os, "environ", environment(given))
    assert launched() == expected


@pytest.mark.parametrize(("given", "message"), [
    ("WORLD_SIZE=8", "WORLD_SIZE=8 in .*: 8 ranks cannot meet without RANK and MASTER_ADDR and MASTER_PORT"),
    ("WORLD_SIZE=8 RANK=0 MASTER_ADDR=a MASTER_PORT=", "cannot meet without MASTER_PORT.*unset RANK WORLD_SIZE"),
    ("WORLD_SIZE=0", "WORLD_SIZE=0 in the environment: a run has at least one rank"),
    ("RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=2(x4)", r"LOCAL_WORLD_SIZE=2\(x4\) in .*: it must be a number"),
    ("SLURM_PROCID=0 SLURM_CPUS_PER_TASK=all", "SLURM_CPUS_PER_TASK=all in the environment: it must be a number"),
    ("WORLD_SIZE=eight", "WORLD_SIZE=eight in the environment: it must be a number.*unset WORLD_SIZE"),
    ("MASTER_PORT=70000", "MASTER_PORT=70000 in the environment: it must be a port, .*unset MASTER_PORT$"),
    ("RANK=0 WORLD_SIZE=1 MASTER_PORT=tcp://10.0.0.1:6443", "it must be a port, a number from 1 to 65535"),
    ("RANK=1 WORLD_SIZE=2 MASTER_ADDR=a MASTER_PORT=0", "MASTER_PORT=0 in the environment: it must be a port"),
    ("RANK=-1", "RANK=-1 in the environment: it must be a number"),
    ("RANK=", "RANK= in the environment: it must be a number"),
    ("RANK=3", "RANK=3 in the environment: .* the last of WORLD_SIZE 1 is 0.*unset RANK$"),
    ("RANK=8 WORLD_SIZE=8 MASTER_ADDR=a MASTER_PORT=1", "the last of WORLD_SIZE 8 is 7"),
    ("LOCAL_RANK=3", "LOCAL_RANK=3 in the environment: rank 0 cannot be number 3 of its host.*unset LOCAL_RANK$"),
    ("LOCAL_WORLD_SIZE=8", "LOCAL_WORLD_SIZE=8 in the environment: this would be one of several tasks"),
    ("SLURM_PROCID=2 SLURM_STEP_NUM_TASKS=8 SLURM_STEP_TASKS_PER_NODE=8",
     "SLURM_PROCID=2, SLURM_STEP_NUM_TASKS=8, .*config slurm.*unset SLURM_PROCID SLURM_STEP_NUM_TASKS"),
    ("PMIX_RANK=1", "PMIX_RANK=1 in the environment: this would be one of several tasks"),
    ("PMI_RANK=0 PMI_SIZE=4 NODE_RANK=1", "PMI_SIZE=4, NODE_RANK=1 in the environment: .*unset PMI_SIZE NODE_RANK"),
    ("MV2_COMM_WORLD_SIZE=2 FLUX_JOB_SIZE=2", "MV2_COMM_WORLD_SIZE=2, FLUX_JOB_SIZE=2 in .*: this would be one"),
    ("TORCHELASTIC_USE_AGENT_STORE=True WORLD_SIZE=1",
     "USE_AGENT_STORE=True, WORLD_SIZE=1 .*: torchrun, .* sets RANK and MASTER_ADDR and MASTER_PORT, too"),
    ("OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE=4 in .*export RANK, WORLD_SIZE"),
])  # fmt: skip
def test_what_another_job_left_behind_is_named(monkeypatch, given, message) -> None:
    monkeypatch.setattr(os, "environ", environment(given))
    with pytest.raises(ConfigError, match=message):
        launched()


@pytest.mark.parametrize(("given", "said"), [
    ("", ""),
    ("RANK=1 WORLD_SIZE=8 MASTER_ADDR=a MASTER_PORT=1 TORCHELASTIC_RUN_ID=none", ""),
    ("RANK=1 WORLD_SIZE=8 MASTER_ADDR=a MASTER_PORT=1 SLURM_PROCID=1", ""),
    ("MASTER_ADDR=localhost MASTER_PORT=29500", ""),
    ("SLURM_NTASKS=4 RANK=0 WORLD_SIZE=1", ""),
    ("SLURM_NTASKS=1 SLURM_PROCID=0", ""),
    ("SLURM_NTASKS=4 SLURM_PROCID=0",  # The script of sbatch runs without srun.
     "SLURM_NTASKS=4 in the environment, and this run has one rank: if it is to have 4, start it with srun, as the "
     "script of `sagetrain config slurm` does"),
    ("SLURM_NNODES=4 SLURM_NTASKS= SLURM_JOB_ID=1",
     "SLURM_NNODES=4 in the environment, and this run has one rank: if it is to have ranks on 4 hosts, start it "
     "with srun, as the script of `sagetrain config slurm` does"),
    ("SLURM_NNODES=1 SLURM_JOB_ID=1", ""),
    ("RANK=1 WORLD_SIZE=8 MASTER_ADDR=a MASTER_PORT=1",
     "RANK=1, WORLD_SIZE=8, MASTER_ADDR=a, MASTER_PORT=1 in the environment: this process waits for 7 others, "
     "although none of torchrun, deepspeed, srun and mpirun started it. If another job left this behind: unset "
     "RANK WORLD_SIZE MASTER_ADDR MASTER_PORT"),
    ("MASTER_ADDR=node7",
     "MASTER_ADDR=node7 in the environment has no effect on one process. If another job left this behind: unset "
     "MASTER_ADDR"),
])  # fmt: skip
def test_what_no_known_launcher_set_is_said(monkeypatch, given, said) -> None:
    monkeypatch.setattr(os, "environ", environment(given))
    assert unknown_launcher() == said


def test_commands_name_leftovers_before_they_import_torch() -> None:
    """The real command runs here, because leftovers must not reach anything that would wait."""
    left = {"WORLD_SIZE": "4", "RANK": "1"}
    for words in (["train", ROOT / "configs/minimal.yaml"], ["doctor"]):
        run = subprocess.run([BIN / "sagetrain", *words], env={**os.environ, **left}, capture_output=True, text=True)
        assert run.returncode == 2
        assert run.stderr.startswith("error: RANK=1, WORLD_SIZE=4 in the environment: 4 ranks cannot meet"), run.stderr


def test_a_free_port_is_claimed_and_is_served_to_nobody(monkeypatch, tmp_path) -> None:
    """Three ports are left: the system serves the last two of them, or all."""
    ports = sorted(launcher.free_port() for _ in range(3))
    for claim in launcher._CLAIMS[-3:]:
        claim.close()
    monkeypatch.setattr(launcher, "_PORTS", ports)
    monkeypatch.setattr(launcher, "_SERVED", tmp_path / "served")
    (tmp_path / "served").write_text(f"{ports[1]}\t65535\n")
    assert launcher.free_port() == ports[0]
    with pytest.raises(OSError, match=f"no port from {ports[0]} to {ports[0]} is free"):
        launcher.free_port()
    (tmp_path / "served").write_text("1024\t65535\n")
    assert sorted(launcher.free_port() for _ in range(2)) == ports[1:]
