"""Memory of this process, as the operating system counts it."""

from __future__ import annotations

import sys


def peak_rss_bytes() -> int | None:
    """The most resident memory so far, in bytes; None if the system does not say."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def rss_bytes() -> int | None:
    """The resident memory now, in bytes; None if the system does not say."""
    try:
        with open("/proc/self/statm") as file:
            n_page = int(file.read().split()[1])
    except OSError:
        return None
    import resource

    return n_page * resource.getpagesize()
