"""Control groups of Linux, with which systemd and containers limit the memory and the CPU time of processes.

Imports only the standard library.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OF_PROCESS = Path("/proc/self/cgroup")


def of_process(controller: str) -> Iterator[tuple[int, Path]]:
    """Yield (version, folder) of each control group of this process, and of all groups above it.

    controller: "memory" or "cpu". In version 1 of control groups, each controller has its own groups. A
    folder may lack files or may not exist.
    """
    try:
        lines = [line.strip().split(":", 2) for line in _OF_PROCESS.read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in lines:
        if not controllers:
            version, root = 2, _GROUPS
        elif controller in controllers.split(","):
            version, root = 1, _GROUPS / controller
        else:
            continue
        group = root / path.lstrip("/")
        while group.is_relative_to(root):
            yield version, group
            group = group.parent
