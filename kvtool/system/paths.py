"""Paths of kvtool, its builds and its downloads. Imports only the standard library."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from kvtool.system.cpu import cpu_features

_PACKAGE = Path(__file__).resolve().parent.parent


def checkout() -> Path | None:
    """Return the root of the checkout from which kvtool runs. None if kvtool was installed from a wheel."""
    root = _PACKAGE.parent
    return root if (root / "patches" / "UPSTREAM").is_file() else None


def build_command() -> str:
    """Return the command that builds llama.cpp."""
    return "make setup" if checkout() else "kvtool build"


def extra_command(extra: str) -> str:
    """Return the command that installs the packages of an extra of kvtool."""
    root = checkout()
    return f"pip install '{root}[{extra}]'" if root else f"pip install 'kvtool[{extra}]'"


def expanded(name: str) -> Path:
    """Return the path of a name, with the user's home folder for ~.

    A name such as ~x stays as it is unless there is a user x. `Path.expanduser` would raise RuntimeError.
    """
    return Path(os.path.expanduser(name))


def cache_dir() -> Path:
    """Return the user's cache folder: $KVTOOL_CACHE, or else the platform's default.

    This does not use platformdirs, because make calls it before anything is installed.
    """
    if chosen := os.environ.get("KVTOOL_CACHE"):
        return expanded(chosen).absolute()
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "kvtool"


def kernel_files() -> list[Path]:
    """Return the files that define kernels."""
    files = (path for name in ("kernels", "engine", "policies") for path in (_PACKAGE / name).glob("*.py"))
    return sorted(path for path in files if b"\n@kernel(" in path.read_bytes())


def kernel_dir() -> Path:
    """Return the folder of the compiled kernels.

    Its name depends on the sources of all kernels, on the CPU and on the path of this checkout. If one source
    changes, all kernels are compiled again in a new folder. This is necessary because numba notices a change
    in a kernel's own file, but not in the files of kernels that the kernel calls.
    """
    digest = hashlib.sha256()
    for path in sorted({*kernel_files(), *(_PACKAGE / "kernels").glob("*.*")}):
        digest.update(path.read_bytes())
    # each checkout needs its own kernels, because numba's index contains the folder of the sources
    digest.update(str(_PACKAGE).encode())
    digest.update(cpu_features().encode())
    # kernels with bounds checks need another folder, because numba's cache does not distinguish them
    digest.update(os.environ.get("NUMBA_BOUNDSCHECK", "").encode())
    return cache_dir() / "kernels" / digest.hexdigest()[:16]


def kernel_library() -> Path:
    """Return the path of the kernels' shared library, which kvtool/build/kernels.py builds."""
    return kernel_dir() / "kernels.so"
