"""Description of the machine of a measurement, for comparison."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

from kvtool.llama.devices import devices
from kvtool.measure.records import versions
from kvtool.system.cpu import cpu_name

N_DIGIT = 12
"""Number of digits of the patch's digest shown in a line."""


def machine() -> dict[str, Any]:
    """Describe this machine by name: CPU, cores, other devices, system, and versions."""
    beside = [f"{each['name']}: {each['description']}" for each in devices() if each["type"] != "cpu"]
    return {
        "cpu": cpu_name(),
        "n_core": os.cpu_count(),
        "devices": beside,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **versions(),
    }


def line(said: Mapping[str, Any]) -> str:
    """Format the result of `machine` as one line."""
    n = said["n_core"]
    parts = [
        f"{said['cpu']}, {n} core{'s' * (n != 1)}",
        *(said["devices"] or ["no GPU"]),
        said["system"],
        f"Python {said['python']}",
        f"kvtool {said['kvtool']}",
        f"llama-cpp-python {said['llama_cpp_python']}",
        f"patch {(said['patch'] or 'none')[:N_DIGIT]}",
    ]
    return "; ".join(parts)
