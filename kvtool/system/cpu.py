"""What this CPU can do. Imports the standard library only."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path


def cpu_features() -> str:
    """What a native build depends on: code for another CPU may crash with an illegal instruction."""
    found = [platform.machine()]
    if sys.platform == "darwin":
        import subprocess

        asked = subprocess.run(
            ["sysctl", "machdep.cpu.brand_string", "hw.optional"], capture_output=True, text=True, check=False
        )
        found.append(asked.stdout)
    elif (cpuinfo := Path("/proc/cpuinfo")).is_file():
        # the first core alone: Linux makes the text as it is read, which takes long for hundreds
        with cpuinfo.open(errors="replace") as lines:
            flags = next((line for line in lines if re.match(r"(flags|Features)\s*:", line)), "")
        found += sorted(set(flags.partition(":")[2].split()))
    else:
        found.append(platform.processor())
    return " ".join(found)
