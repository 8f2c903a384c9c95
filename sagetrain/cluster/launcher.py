"""Read and check the environment variables of a launcher: RANK, WORLD_SIZE, LOCAL_RANK and MASTER_*.

Shells and services pass on the variables of a finished job. The variables are therefore checked before torch is
imported and before a rank waits for others. This module does not import torch.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import signal
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from sagetrain.config.errors import ConfigError, many

ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
"""The signals by which launchers, services and people ask a run to end."""
_TOGETHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables that every launcher sets together."""
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""torchrun sets this variable to True if its agent hosts the store at MASTER_ADDR:MASTER_PORT."""
_OF_HOST = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "SLURM_NODEID", "SLURM_CPUS_PER_TASK")
"""The variables that parallel/host.py reads as numbers."""
_ALONE = {
    "LOCAL_WORLD_SIZE": "1",
    "LOCAL_SIZE": "1",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "OMPI_COMM_WORLD_SIZE": "1",
    "OMPI_COMM_WORLD_RANK": "0",
    "PMI_SIZE": "1",
    "PMI_RANK": "0",
    "PMIX_RANK": "0",
    "MV2_COMM_WORLD_SIZE": "1",
    "FLUX_JOB_SIZE": "1",
    "JSM_NAMESPACE_SIZE": "1",
    "NODE_RANK": "0",
    "GROUP_RANK": "0",
}
"""The variables with which launchers count tasks or hosts, and the value of each for a single task: torchrun,
deepspeed, srun, the kinds of mpirun, flux, jsrun, and services that start one task on each host."""
_PORTS = range(10_000, 65_536)
_SERVED = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""The file with the first and the last port that the system gives to whoever asks for any."""
_CLAIMS: list[socket.socket] = []
"""A socket with the name of each port that free_port returned. No two sockets of a host have the same name."""


def launched() -> tuple[int, int]:
    """Return the rank and the world size that a launcher set for this process; (0, 1) without a launcher. Raises
    ConfigError if the variables contradict each other, as they do when some are left over from another job. The ranks
    would wait for others that nobody started, or each rank would start a run of its own."""
    rank, world_size, local_rank = (_number(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    for name in _OF_HOST:
        if os.environ.get(name):
            _number(name)
    size, number = world_size or 1, rank or 0
    if world_size == 0:
        raise _left_over(["WORLD_SIZE"], "a run has at least one rank")
    lacking = [name for name in _TOGETHER if not os.environ.get(name)]
    if size > 1 and lacking:
        raise _left_over(_TOGETHER, f"{size} ranks cannot meet without {' and '.join(lacking)}")
    if by_agent() and lacking:
        raise _left_over([AGENT_STORE, *_TOGETHER], f"torchrun, which sets it, sets {' and '.join(lacking)}, too")
    # Kubernetes sets this variable to a URL if a service is called master.
    port = os.environ.get("MASTER_PORT", "")
    if port and not (re.fullmatch(r"[0-9]{1,5}", port) and (0 if size == 1 else 1) <= int(port) <= 65535):
        raise _left_over(["MASTER_PORT"], "it must be a port, a number from 1 to 65535")
    if number >= size:
        raise _left_over(_TOGETHER, f"ranks are numbered from 0, so the last of WORLD_SIZE {size} is {size - 1}")
    if (local_rank or 0) > number:
        raise _left_over(["LOCAL_RANK", *_TOGETHER], f"rank {number} cannot be number {local_rank} of its host")
    tasks = [name for name, alone in _ALONE.items() if os.environ.get(name, alone) not in ("", alone)]
    if tasks and rank is None and world_size is None:
        raise _left_over(
            tasks,
            "this would be one of several tasks, but nothing says which rank of how many: each would train a run of "
            "its own. Start the run as the script of `sagetrain config slurm` does, or export RANK, WORLD_SIZE, "
            "LOCAL_RANK, MASTER_ADDR and MASTER_PORT in each task (RANK=0 WORLD_SIZE=1 for a run of one rank)",
        )
    return number, size


def unknown_launcher() -> str:
    """Say which variables make this process wait for others if no known launcher started it. The text is empty if there
    is nothing to say.

    An unknown launcher sets the same variables that a finished job leaves behind, so this is not an error.
    """
    rooms = [name for name in ("SLURM_NTASKS", "SLURM_NNODES") if os.environ.get(name, "") not in ("", "1")]
    if rooms and not {"RANK", "WORLD_SIZE", "SLURM_STEP_NUM_TASKS"} & os.environ.keys():
        # Slurm counts tasks only if the job asks for a number of them.
        room = os.environ[rooms[0]] if rooms[0] == "SLURM_NTASKS" else f"ranks on {os.environ[rooms[0]]} hosts"
        return (
            f"{_settings(rooms[:1])} in the environment, and this run has one rank: if it is to have {room}, start it "
            "with srun, as the script of `sagetrain config slurm` does"
        )
    size, rank = os.environ.get("WORLD_SIZE", "1"), os.environ.get("RANK", "0")
    tasks = (os.environ.get(name) for name in ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"))
    if {"TORCHELASTIC_RUN_ID", "CROSS_SIZE"} & os.environ.keys() or rank in tasks:
        return ""
    if size != "1":
        return (
            f"{_settings(_TOGETHER)} in the environment: this process waits for {many(int(size) - 1, 'other')}, "
            f"although none of torchrun, deepspeed, srun and mpirun started it. {_unset(_TOGETHER)}"
        )
    address = os.environ.get("MASTER_ADDR", "")
    if address not in ("", "localhost", "127.0.0.1", "::1", socket.gethostname()):
        return (
            f"{_settings(['MASTER_ADDR'])} in the environment has no effect on one process. {_unset(['MASTER_ADDR'])}"
        )
    return ""


def by_agent() -> bool:
    """Whether the environment says that torchrun's agent hosts the store."""
    return os.environ.get(AGENT_STORE) == "True"


def elastic() -> bool:
    """Whether torchrun begins again with the hosts that are there, if ranks end with an error. Ranks of such a world
    cannot meet in the store of an agent, because agents that have joined later do not know it."""
    return not by_agent() and _begins_again()


def elastic_in_vain() -> str:
    """Say which variable torchrun lacks if it begins again, and cannot leave a host out; "" if it lacks none."""
    if not (by_agent() and _begins_again()):
        return ""
    return (
        "torchrun has --max-restarts, and its agent hosts the store of the ranks: a host that is lost is neither left "
        "out nor replaced. If it is to be, export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 on all hosts (docs/failures.md)"
    )


def _begins_again() -> bool:
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def agent_left_over() -> str:
    """Say what to do if torchrun's agent does not host the store, as the environment says."""
    return f"{AGENT_STORE}=True says that torchrun listens there. {_unset([AGENT_STORE, *_TOGETHER])}"


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    if text is not None and not re.fullmatch(r"[0-9]{1,9}", text):
        raise _left_over([name], "it must be a number that counts from 0")
    return None if text is None else int(text)


def _left_over(names: Iterable[str], what: str) -> ConfigError:
    return ConfigError(f"{_settings(names)} in the environment: {what}. {_unset(names)}")


def _settings(names: Iterable[str]) -> str:
    return ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)


def _unset(names: Iterable[str]) -> str:
    there = " ".join(name for name in names if name in os.environ)
    return f"If another job left this behind: unset {there}"


def free_port() -> int:
    """Return a port that nobody listens at, for a process that this one starts.

    Another process could take a port between this search and the moment when it is used. So the port is outside of the
    range from which the system serves whoever asks for any port, and this process claims it until it ends: no other
    caller of this function on the host gets the same one.
    """
    first, last = map(int, _SERVED.read_text().split())
    apart = [port for port in _PORTS if not first <= port <= last] or _PORTS
    for port in secrets.SystemRandom().sample(apart, len(apart)):
        claim = socket.socket(socket.AF_UNIX)
        with suppress(OSError), socket.socket() as s:
            claim.bind(f"\0sagetrain's port {port}")
            s.bind(("", port))
            _CLAIMS.append(claim)
            return port
        claim.close()
    raise OSError(errno.EADDRINUSE, f"no port from {apart[0]} to {apart[-1]} is free on {socket.gethostname()}")
