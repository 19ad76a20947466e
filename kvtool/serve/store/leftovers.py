"""Temporary folders with chats that killed servers have left in the cache folder."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from kvtool.system.files import LOCK, is_locked, locked

PREFIX = "serve-"
"""The name of a server's temporary folder begins with this."""

SUFFIX = ".kv"
"""The name of a chat's file ends with this."""

_YOUNG_S = 60.0


class Leftover(NamedTuple):
    """The temporary folder of a server that was killed. `n_bytes` counts all its files."""

    path: Path
    n_chat: int
    n_bytes: int


def leftovers(cache: Path) -> Iterator[Leftover]:
    """Yield the folders of killed servers in the cache folder."""
    for folder in sorted(cache.glob(f"{PREFIX}*")):
        with suppress(OSError):
            stat = folder.stat()
            # leave out young folders, which their server may not have locked yet
            if time.time() - stat.st_mtime > _YOUNG_S and not is_locked(folder / LOCK):
                # restore the folder's time, which `is_locked` has changed
                os.utime(folder, ns=(stat.st_atime_ns, stat.st_mtime_ns))
                sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
                n_chat = sum(bool(re.fullmatch(rf"\w+{re.escape(SUFFIX)}", name)) for name in sizes)
                yield Leftover(folder, n_chat, sum(sizes.values()))


def remove(folder: Path) -> bool:
    """Remove the temporary folder of a server. Returns False if it is in use or cannot be removed."""
    with suppress(OSError), locked(folder / LOCK, wait=False):
        shutil.rmtree(folder, ignore_errors=True)
    return not folder.exists()
