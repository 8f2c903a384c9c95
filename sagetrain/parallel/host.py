"""The host: the share of its cores that one rank may use, its memory, and what its driver says of GPUs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

_MOST_THREADS = 16


def ranks_of_host() -> int | None:
    """Return the number of this run's ranks on this host, as torchrun, deepspeed or Slurm's srun report it. None: it is
    not reported."""
    told = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    if told:
        return int(told)
    hosts = []  # srun writes 8(x2),4 for three hosts of 8, 8 and 4 ranks
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")):
        hosts += [int(count)] * int(times or 1)
    number = int(os.environ.get("SLURM_NODEID", "0"))
    return hosts[number] if number < len(hosts) else None


def cores_of_rank() -> int:
    """Return the number of cores that this rank may keep busy: the cores that Slurm gave its task, or an equal share of
    the cores that this process may use."""
    of_task = os.environ.get("SLURM_CPUS_PER_TASK") if "SLURM_PROCID" in os.environ else None
    if of_task:
        return int(of_task)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // (ranks_of_host() or 1))


def memory_of_host() -> int | None:
    """Return the bytes of memory that processes on this host may still take: what Linux calls available, or the limit
    of the control group if that is less. None: the system does not say."""
    found = []
    for file, pattern, unit in (
        ("/proc/meminfo", r"MemAvailable:\s+(\d+) kB", 1024),
        ("/sys/fs/cgroup/memory.max", r"(\d+)", 1),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", r"(\d+)", 1),
    ):
        with suppress(OSError):
            if match := re.search(pattern, Path(file).read_text()):
                found.append(unit * int(match[1]))
    return min(found, default=None)


def nvidia_smi(*words: str) -> list[str]:
    """Return the lines that the driver's tool prints. There are none without the tool, and if it fails."""
    if (tool := shutil.which("nvidia-smi")) is None:
        return []
    try:
        return subprocess.run(
            [tool, *words], capture_output=True, text=True, timeout=20, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []


def use_cores() -> str:
    """Choose torch's number of CPU threads, unless OMP_NUM_THREADS does. Return a line that says the number and its
    reason, or an empty string. Call it before torch is imported.

    Threads that wait for each other sleep. OpenMP's default is to spin: on two busy cores, two spinning threads
    computed at a sixteenth of one thread's speed, and two sleeping threads at the speed of one.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if "OMP_NUM_THREADS" in os.environ:
        return ""
    threads = min(_MOST_THREADS, cores_of_rank())
    os.environ["OMP_NUM_THREADS"] = str(threads)
    share = f"its share of this host's cores{_given_by_slurm()}"
    return (
        f"{threads} thread{'s' * (threads > 1)} a rank on the CPU: {share}, at most {_MOST_THREADS}; OMP_NUM_THREADS "
        "sets another number"
    )


def _given_by_slurm() -> str:
    """Return the variables of Slurm that decide the share of the cores. They may be left over from another job."""
    names = [name for name in ("SLURM_CPUS_PER_TASK", "SLURM_STEP_TASKS_PER_NODE") if os.environ.get(name)]
    given = ", ".join(f"{name}={os.environ[name]}" for name in names)
    return f" ({given})" if given and "SLURM_PROCID" in os.environ else ""
