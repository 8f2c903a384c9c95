"""What of its host's cores is one rank's."""

from __future__ import annotations

import os
import re

_MOST_THREADS = 16


def ranks_of_host() -> int | None:
    """Ranks of this run on this host, as torchrun, deepspeed or Slurm's srun tell it; None: nobody does."""
    told = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    if told:
        return int(told)
    hosts = []  # of srun: 8(x2),4 are three hosts
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")):
        hosts += [int(count)] * int(times or 1)
    number = int(os.environ.get("SLURM_NODEID", "0"))
    return hosts[number] if number < len(hosts) else None


def cores_of_rank() -> int:
    """Cores that this rank may keep busy: what Slurm gave its task, or an equal share of what this process may use."""
    of_task = os.environ.get("SLURM_CPUS_PER_TASK") if "SLURM_PROCID" in os.environ else None
    if of_task:
        return int(of_task)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // (ranks_of_host() or 1))


def use_cores() -> str:
    """Choose the threads of torch on the CPU, unless OMP_NUM_THREADS does; returns what to say of it, or nothing. Call
    before torch is imported.

    Threads that wait for each other sleep: spinning, as is OpenMP's default, two threads on two busy cores computed at
    a sixteenth of one thread's speed, and asleep as fast.
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
    """The variables of Slurm that decide the share of the cores. They may be left over from another job."""
    names = [name for name in ("SLURM_CPUS_PER_TASK", "SLURM_STEP_TASKS_PER_NODE") if os.environ.get(name)]
    given = ", ".join(f"{name}={os.environ[name]}" for name in names)
    return f" ({given})" if given and "SLURM_PROCID" in os.environ else ""
