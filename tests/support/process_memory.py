"""What a process has in memory, as the kernel counts it, when its allocator keeps nothing that was freed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

_M_MMAP_THRESHOLD = -3  # of glibc's malloc.h


def return_what_is_freed() -> None:
    """From now on this process gives blocks of 64 KiB and more back to the system when they are freed.

    Else glibc raises that limit to the largest block it has seen freed, and keeps what is smaller: by chance as much
    again as what a test measures.
    """
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16) == 1, "glibc's mallopt refused"


def resident() -> int:
    """Bytes of this process in memory now."""
    return _status("VmRSS")


def peak_of(act: Callable[[], object]) -> int:
    """How many bytes more than before an action took at its peak."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident()
    act()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[key].split()[0])
