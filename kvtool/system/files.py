"""Files that outlive a crash: written whole or not at all, one process at a time."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the path's place once it is on the disk; until then the old one stays.

    What a killed process left behind is written over. Raises OSError, with the old file as it was.
    """
    part = path.with_name(path.name + ".part")
    try:
        with part.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    if os.name == "posix":
        # the new name itself has to reach the disk
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """One process at a time. The operating system lets go of the lock when the process dies.

    The file goes away at the end. Without wait raises BlockingIOError where another process has it.
    """
    while True:
        with path.open("ab") as file:
            _lock(file, wait)
            try:
                # who had it before may have taken the file away
                if os.fstat(file.fileno()).st_ino != path.stat().st_ino:
                    continue
            except FileNotFoundError:
                continue
            try:
                yield
            finally:
                with suppress(OSError):
                    path.unlink()
            return


def _lock(file: BinaryIO, wait: bool) -> None:
    if sys.platform == "win32":
        import msvcrt

        while True:
            try:
                # LK_LOCK gives up after ten seconds by itself
                msvcrt.locking(file.fileno(), msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
                return
            except OSError as error:
                if not wait:
                    raise BlockingIOError from error
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
