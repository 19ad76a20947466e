"""Description of the machine on which a measurement was made, so that measurements can be compared."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

from kvtool.llama.libllama.devices import devices
from kvtool.measure.records import versions
from kvtool.system.cpu import cpu_name


def machine() -> dict[str, Any]:
    """Describe this machine: CPU, cores, other devices, system and versions, by field name."""
    accelerators = [
        f"{device['name']}: {device['description']}" for device in devices() if device["type"] != "cpu"
    ]
    return {
        "cpu": cpu_name(),
        "n_core": os.cpu_count(),
        "devices": accelerators,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **versions(),
    }


def line(machine: Mapping[str, Any]) -> str:
    n = machine["n_core"]
    parts = [
        f"{machine['cpu']}, {n} core{'s' * (n != 1)}",
        *(machine["devices"] or ["no GPU"]),
        machine["system"],
        f"Python {machine['python']}",
        f"kvtool {machine['kvtool']}",
        f"llama-cpp-python {machine['llama_cpp_python']}",
        f"patch {(machine['patch'] or 'none')[:12]}",
    ]
    return "; ".join(parts)
