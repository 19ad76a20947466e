"""Where kvtool lies, and where it keeps what it builds and downloads. Imports the standard library only."""

import hashlib
import os
import sys
from pathlib import Path

from kvtool.system.cpu import cpu_features

_PACKAGE = Path(__file__).resolve().parent.parent


def checkout() -> Path | None:
    """The folder of the checkout that kvtool runs from; None where it was installed from a wheel."""
    root = _PACKAGE.parent
    return root if (root / "patches" / "UPSTREAM").is_file() else None


def build_command() -> str:
    """What a user types to build llama.cpp."""
    return "make setup" if checkout() else "kvtool build"


def cache_dir() -> Path:
    """The per-user cache: $KVTOOL_CACHE, or the platform's own place for such files."""
    if chosen := os.environ.get("KVTOOL_CACHE"):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "kvtool"


def kernel_dir() -> Path:
    """Where today's kernels are cached: numba sees changes in a kernel's own file, none in its callees'."""
    digest = hashlib.sha256()
    for path in sorted(
        [
            *(_PACKAGE / "kernels").glob("*.py"),
            _PACKAGE / "engine" / "rows.py",
            *(_PACKAGE / "policies").glob("*.py"),
        ]
    ):
        digest.update(path.read_bytes())
    # numba keeps what it compiles apart by the folder of the source
    digest.update(str(_PACKAGE).encode())
    digest.update(cpu_features().encode())
    # numba would take kernels without bounds checks from its cache for ones with them
    digest.update(os.environ.get("NUMBA_BOUNDSCHECK", "").encode())
    return cache_dir() / "kernels" / digest.hexdigest()[:16]


def kernel_library() -> Path:
    """The shared library of today's kernels, which kvtool/build/kernels.py makes."""
    return kernel_dir() / "kernels.so"
