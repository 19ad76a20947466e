"""Where kvtool is, and where it keeps what it builds and downloads. Standard library only."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from kvtool.system.cpu import cpu_features

_PACKAGE = Path(__file__).resolve().parent.parent


def checkout() -> Path | None:
    """The checkout that kvtool runs from; None if it was installed from a wheel."""
    root = _PACKAGE.parent
    return root if (root / "patches" / "UPSTREAM").is_file() else None


def build_command() -> str:
    """The command that builds llama.cpp."""
    return "make setup" if checkout() else "kvtool build"


def extra_command(extra: str) -> str:
    """The command that installs the packages of an extra."""
    root = checkout()
    return f"pip install '{root}[{extra}]'" if root else f"pip install 'kvtool[{extra}]'"


def cache_dir() -> Path:
    """The per-user cache: $KVTOOL_CACHE, or the platform's folder for such files.

    Not by platformdirs: make asks for it before anything is installed, and it is these seven lines.
    """
    if chosen := os.environ.get("KVTOOL_CACHE"):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "kvtool"


def kernel_files() -> list[Path]:
    """The files that define kernels."""
    found = (path for name in ("kernels", "engine", "policies") for path in (_PACKAGE / name).glob("*.py"))
    return sorted(path for path in found if b"\n@kernel(" in path.read_bytes())


def kernel_dir() -> Path:
    """The folder of the present kernels; its name changes with their sources, the CPU and this checkout.

    numba would notice changes in a kernel's own file, but not in the files of kernels that it calls.
    """
    digest = hashlib.sha256()
    for path in sorted({*kernel_files(), *(_PACKAGE / "kernels").glob("*.*")}):
        digest.update(path.read_bytes())
    # numba's index has the folder of the sources in it
    digest.update(str(_PACKAGE).encode())
    digest.update(cpu_features().encode())
    # numba does not tell kernels with bounds checks from others
    digest.update(os.environ.get("NUMBA_BOUNDSCHECK", "").encode())
    return cache_dir() / "kernels" / digest.hexdigest()[:16]


def kernel_library() -> Path:
    """The shared library of the present kernels, made by kvtool/build/kernels.py."""
    return kernel_dir() / "kernels.so"
