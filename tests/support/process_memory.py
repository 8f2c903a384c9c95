"""Measure a process's memory as the kernel counts it, while its allocator keeps nothing that was freed."""

import ctypes
from collections.abc import Callable
from pathlib import Path

_M_MMAP_THRESHOLD = -3  # The value is defined in glibc's malloc.h.


def return_what_is_freed() -> None:
    """Make this process give blocks of 64 KiB and more back to the system when they are freed.

    Otherwise glibc raises that limit to the largest block that was freed, and keeps smaller ones. By chance it would
    keep as much memory as a test measures.
    """
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16) == 1, "glibc's mallopt refused"


def resident() -> int:
    """Return the bytes that this process has in memory now."""
    return _status("VmRSS")


def peak_of(act: Callable[[], object]) -> int:
    """Run an action and return its peak: the bytes in memory beyond those before the action."""
    Path("/proc/self/clear_refs").write_text("5")  # Writing 5 resets the kernel's record of the peak.
    before = resident()
    act()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(lines[key].split()[0])
