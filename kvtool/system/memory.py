"""Memory of this process and of this machine, as the operating system reports it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress

from kvtool.system import cgroups

_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
"""Limit, bytes in use, and the part of them that the kernel can free, for each version of control groups."""


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
    """Return the bytes of memory that this process can still use; half of all memory if not reported."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return total_bytes() // 2
    return max(0, min([free, *(limit - used for limit, used in _limits())]))


def total_bytes() -> int:
    """Return the memory in bytes that this process may use; 8 GiB if the system does not report it."""
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 8 * 2**30
    return min([total, *(limit for limit, _ in _limits())])


def _limits() -> Iterator[tuple[int, int]]:
    """Yield (limit, bytes in use) of each control group of this process that limits memory."""
    for version, group in cgroups.of_process("memory"):
        names = _FILES[version]
        # a group without a limit has the word "max", and the topmost group has no file
        with suppress(OSError, ValueError, KeyError):
            limit, used = (int((group / name).read_text()) for name in names[:2])
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            yield limit, used - int(stat[names[2]])
