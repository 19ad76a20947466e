"""Features, name and cores of the CPU. Imports only the standard library."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from kvtool.system import cgroups

_CPUS = Path("/sys/devices/system/cpu")
"""Linux's folder with the topology of the CPUs."""


def cpu_features() -> str:
    """Return the CPU features that a native build may use.

    If a CPU does not have all of these features, such a build may crash with an illegal instruction.
    """
    features = [platform.machine()]
    if sys.platform == "darwin":
        import subprocess

        sysctl = subprocess.run(
            ["sysctl", "machdep.cpu.brand_string", "hw.optional"], capture_output=True, text=True, check=False
        )
        features.append(sysctl.stdout)
    elif (cpuinfo := Path("/proc/cpuinfo")).is_file():
        # read only the first core's lines: Linux generates the file during reading, and that takes long for
        # hundreds of cores
        with cpuinfo.open(errors="replace") as lines:
            flags = next((line for line in lines if re.match(r"(flags|Features)\s*:", line)), "")
        features += sorted(set(flags.partition(":")[2].split()))
    else:
        features.append(platform.processor())
    return " ".join(features)


def cpu_name() -> str:
    """Return the name of the CPU, or "unknown" if the system does not report it."""
    if sys.platform == "darwin":
        import subprocess

        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        return result.stdout.strip() or "unknown"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        with cpuinfo.open(errors="replace") as lines:
            if name := next((line for line in lines if line.startswith("model name")), ""):
                return name.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown"


def _allowed() -> Collection[int]:
    """Return the numbers of the CPUs on which this process may run."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def n_cpu() -> int:
    """Return the number of CPUs that this process may use, also by the quotas of its control groups."""
    return min([len(_allowed()), *_quotas()])


def _quotas() -> Iterator[int]:
    """Yield the quota of each control group of this process that limits CPU time, in CPUs, rounded up."""
    for version, group in cgroups.of_process("cpu"):
        # in a group without a limit, the quota is the word "max" in version 2, and -1 in version 1
        with suppress(OSError, ValueError):
            names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = map(int, " ".join((group / name).read_text() for name in names).split())
            if quota > 0:
                yield -(-quota // period)


def default_threads() -> int:
    """Return the number of cores that this process may use.

    More threads would be slower: two threads on one core slow each other down, and threads that use up a
    quota all wait.
    """
    return min(_n_core(), n_cpu())


def _n_core() -> int:
    """Return the number of cores of the CPUs on which this process may run."""
    cpus = _allowed()
    try:
        shared = (_CPUS / "smt" / "active").read_text().strip() == "1"
    except OSError:
        shared = False
    if not shared:
        return len(cpus)
    try:
        # all CPUs of a core have the same list, so the number of different lists is the number of cores. Do
        # not halve the number of CPUs: taskset can give the process only one CPU of a core
        return len({(_CPUS / f"cpu{n}" / "topology" / "thread_siblings_list").read_text() for n in cpus})
    except OSError:
        return max(len(cpus) // 2, 1)
