"""Join and leave the process group of a run."""

from __future__ import annotations

import datetime
import os
import sys
import warnings

import torch
import torch.distributed as dist

from sagekernels.graphs import forget as forget_recordings
from sagetrain.cluster import rendezvous
from sagetrain.config.errors import ConfigError
from sagetrain.parallel import copies

# Ranks wait this long for each other at the start, because hosts start at different times.
_ARRIVAL_MINUTES = 10


def init_distributed(timeout_minutes: float) -> torch.device:
    """Join the process group named by RANK, WORLD_SIZE, LOCAL_RANK and MASTER_*, and return this rank's device. A
    collective may take `timeout_minutes`. A single process without these variables becomes a world of one rank. Raises
    RanksMissing if not all ranks come. It is a ConfigError of cluster/rendezvous.py."""
    for key, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        os.environ.setdefault(key, value)
    on_gpu = torch.cuda.is_available()
    # The warning is about a wrong current device, but the current device is the one of this rank.
    warnings.filterwarnings("ignore", message="barrier\\(\\): using the device under current context")
    # The warning comes from an autograd thread whose first operation is a matmul. The thread gets its context then.
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA context")
    # Collectives are called here, and by DeepSpeed, by the names that torch 2.13 has renamed and earlier versions need.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    device = torch.device("cpu")
    if on_gpu:
        local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= gpus:
            raise ConfigError(
                f"rank {local} of this host has no GPU: it sees {gpus} (CUDA_VISIBLE_DEVICES="
                f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')}). Start at most as many ranks on a host as it has GPUs, "
                "and let each rank see all of them (Slurm: no --gpus-per-task)"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
        # A rank may launch a collective that another rank replays. NCCL would register the memory of replays alone.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
    timeout, backend = datetime.timedelta(minutes=timeout_minutes), "nccl" if on_gpu else "gloo"
    if not dist.is_initialized():
        # A group that is bound to a device would have NCCL create each smaller group with all ranks of the world.
        store = rendezvous.meet(min(_ARRIVAL_MINUTES, timeout_minutes))
        store.set_timeout(timeout)
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world_size)
    return device


def end_distributed() -> None:
    """Destroy all process groups in a program that continues, and clear what DeepSpeed and the copy engines remember of
    them."""
    forget_recordings()
    # A later run in this process uses the same names of groups.
    copies.forget()
    known = sys.modules.get("deepspeed.comm")
    (known.destroy_process_group if known and known.is_initialized() else dist.destroy_process_group)()
