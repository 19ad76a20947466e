"""Where kvtool keeps what it builds and downloads. Imports the standard library only."""

import os
import sys
from pathlib import Path


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
