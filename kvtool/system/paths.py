"""Paths of kvtool, its builds and its downloads. Imports only the standard library."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from kvtool.system.cpu import cpu_features

_PACKAGE = Path(__file__).resolve().parent.parent


def checkout() -> Path | None:
    """Checkout that kvtool runs from; None if it was installed from a wheel."""
    root = _PACKAGE.parent
    return root if (root / "patches" / "UPSTREAM").is_file() else None


def build_command() -> str:
    """Command that builds llama.cpp."""
    return "make setup" if checkout() else "kvtool build"


def extra_command(extra: str) -> str:
    """Command that installs the packages of an extra."""
    root = checkout()
    return f"pip install '{root}[{extra}]'" if root else f"pip install 'kvtool[{extra}]'"


def cache_dir() -> Path:
    """Per-user cache folder: $KVTOOL_CACHE, or the platform's default.

    Written without platformdirs, because make calls it before anything is installed.
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
    """Files that define kernels."""
    files = (path for name in ("kernels", "engine", "policies") for path in (_PACKAGE / name).glob("*.py"))
    return sorted(path for path in files if b"\n@kernel(" in path.read_bytes())


def kernel_dir() -> Path:
    """Folder of the current kernels; its name depends on their sources, the CPU and this checkout.

    All sources count: numba notices changes in a kernel's file, but not in the files of kernels that the
    kernel calls.
    """
    digest = hashlib.sha256()
    for path in sorted({*kernel_files(), *(_PACKAGE / "kernels").glob("*.*")}):
        digest.update(path.read_bytes())
    # numba's index contains the folder of the sources: each checkout needs its own kernels
    digest.update(str(_PACKAGE).encode())
    digest.update(cpu_features().encode())
    # numba does not distinguish kernels with bounds checks from kernels without
    digest.update(os.environ.get("NUMBA_BOUNDSCHECK", "").encode())
    return cache_dir() / "kernels" / digest.hexdigest()[:16]


def kernel_library() -> Path:
    """Shared library of the current kernels, built by kvtool/build/kernels.py."""
    return kernel_dir() / "kernels.so"
