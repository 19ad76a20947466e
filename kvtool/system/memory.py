"""Memory of this process and machine, from the operating system's counters."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def peak_rss_bytes() -> int | None:
    """Peak resident memory in bytes; None if the system does not report it."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def rss_bytes() -> int | None:
    """Current resident memory in bytes; None if the system does not report it."""
    try:
        with open("/proc/self/statm") as file:
            n_page = int(file.read().split()[1])
    except OSError:
        return None
    import resource

    return n_page * resource.getpagesize()


def give_back() -> None:
    """Give freed memory, which the C library keeps for later use, back to the system. Needs glibc."""
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def free_bytes() -> int:
    """Available memory in bytes; half of the total if the system does not report it."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return total_bytes() // 2


def total_bytes() -> int:
    """Total memory in bytes; 8 GiB if the system does not report it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 8 * 2**30
