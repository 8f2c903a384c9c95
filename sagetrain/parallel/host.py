"""What of its host's cores is one rank's."""

from __future__ import annotations

import os
import re


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
