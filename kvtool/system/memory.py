"""Memory of this process and of this machine, as the operating system reports it."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def peak_rss_bytes() -> int | None:
    """Return the peak resident memory of this process in bytes, or None if the system does not report it."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def rss_bytes() -> int | None:
    """Return the resident memory of this process in bytes, or None if the system does not report it."""
    try:
        with open("/proc/self/statm") as file:
            n_page = int(file.read().split()[1])
    except OSError:
        return None
    import resource

    return n_page * resource.getpagesize()


def give_back() -> None:
    """Return freed memory to the system. Otherwise the C library keeps it for later use. Needs glibc."""
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def free_bytes() -> int:
    """Return the available memory of this machine in bytes, or half of all memory if it is not reported."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return total_bytes() // 2


def total_bytes() -> int:
    """Return the total memory of this machine in bytes, or 8 GiB if the system does not report it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 8 * 2**30
