"""The number of files that a process may have open: token files, and the connections of rank 0."""

from __future__ import annotations

import os
import resource

from sagetrain.config.errors import ConfigError

_SPARE_FILES = 512
"""Files that a process opens besides: libraries, devices, NCCL's sockets to a rank's neighbours."""
_CONNECTIONS = 3
"""Largest number of connections that rank 0 holds to each rank: the store of the process group, the store of the saver,
and one of NCCL."""


def files_of_rank_0(world_size: int) -> int:
    """Return how many files rank 0 may have open in a run of so many ranks, beside its token files."""
    return _CONNECTIONS * world_size + _SPARE_FILES


def ranks_allowed(files: int) -> int:
    """Return how many ranks a run may have if its rank 0 may have so many files open."""
    return max(0, files - _SPARE_FILES) // _CONNECTIONS


def allow_connections(world_size: int, process: int) -> None:
    """Raise the limit of open files for rank 0, or for the process that has the ranks' store, so that all ranks can
    connect to it. Raises ConfigError as allow_open_files does."""
    allow_open_files(_CONNECTIONS * world_size, f"the connections of {world_size:,} ranks", process)


def allow_open_files(more: int, what: str, process: int = 0) -> None:
    """Raise the soft limit of open files of a process (0: this one), so that `more` files, and some to spare, can be
    opened beside those that are open. `what` names the files in the message. Raises ConfigError if the hard limit is
    lower."""
    wanted = len(os.listdir(f"/proc/{process or 'self'}/fd")) + more + _SPARE_FILES
    soft, hard = resource.prlimit(process, resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ConfigError(
            f"{what} take {wanted:,} open files, and a process may have {hard:,} here (ulimit -Hn): raise that hard "
            "limit (/etc/security/limits.conf, LimitNOFILE= of a service, --ulimit nofile= of a container)"
        )
    resource.prlimit(process, resource.RLIMIT_NOFILE, (wanted, hard))
