"""Write files so that a crash or a full disk leaves the old file or the new file, never a partial file."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO, cast

from kvtool.system.paths import cache_dir

LOCK = ".lock"
"""Suffix of the name of a file's lock, and name of a folder's lock."""


PART = ".kvtool.part"
"""Suffix of a file that is being written. It is not just .part, which other programs use."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file, which replaces the file at `path` once all of it is on the disk.

    The new file keeps the old file's permissions. If `path` is a link, its target is replaced. Leftovers of a
    killed process are overwritten. Raises OSError, leaving the old file unchanged.
    """
    path = Path(os.path.realpath(path))
    part = path.with_name(path.name + PART)
    try:
        with part.open("w+b") as file:
            with suppress(FileNotFoundError):
                shutil.copymode(path, part)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    _sync_folder(path.parent)


def _sync_folder(path: Path) -> None:
    """Sync a folder, so that a new name reaches the disk."""
    if os.name == "posix":
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def free_disk_bytes(path: str) -> int:
    """Free bytes of the disk that holds, or will hold, a file. Raises OSError."""
    return shutil.disk_usage(os.path.dirname(os.path.abspath(path))).free


def create(path: Path, like: Path) -> FileIO:
    """Open an empty, unbuffered file, with the permissions of `like` if that file exists.

    Truncates an existing file. Raises OSError.
    """
    file = path.open("w+b", buffering=0)
    try:
        with suppress(FileNotFoundError):
            shutil.copymode(like, path)
        _sync_folder(path.parent)
    except BaseException:
        file.close()
        raise
    return file


def temporary(buffering: int = -1) -> BinaryIO:
    """Open a file without a name, on the disk of the cache folder. Raises OSError."""
    return cast(BinaryIO, tempfile.TemporaryFile(buffering=buffering, dir=spare_folder()))


def spare_folder() -> Path | None:
    """Folder for temporary files: the cache folder, as /tmp may be in memory. None if it is not writable."""
    folder = cache_dir()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder if os.access(folder, os.W_OK) else None


def write_all(file: FileIO, data: bytes | memoryview) -> None:
    """Write all data to an unbuffered file, whose `write` may take only a part. Raises OSError."""
    while data:
        data = data[file.write(data) :]


def write(path: Path, data: bytes) -> None:
    """Replace a file, or raise OSError and leave the old file. Devices and pipes are written directly."""
    if path.exists() and not path.is_file():
        with path.open("wb") as device:
            device.write(data)
        return
    with replacing(path) as file:
        file.write(data)


class Log:
    """Text file to which whole entries are appended. A part that was written before an error is removed.

    Raises OSError if the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # unbuffered, so that no part of a failed entry is written later
        self._file = path.open("ab", buffering=0)

    def append(self, text: str) -> None:
        """Append an entry. Raises OSError."""
        data = text.encode("utf-8", "replace")
        # a pipe cannot be truncated
        end = self._file.seek(0, os.SEEK_END) if self._file.seekable() else None
        try:
            write_all(self._file, data)
        except OSError:
            if end is not None:
                with suppress(OSError):
                    self._file.truncate(end)
            raise

    def close(self) -> None:
        self._file.close()


def set_aside(path: Path, *suffixes: str) -> Path:
    """Give files second names, and return the new name of `path`: the first free of PATH.1, PATH.2, ...

    suffixes: each file PATH + suffix that exists gets a second name. The default is "", which is PATH itself.
    A number n is taken if a file is named PATH.n, or PATH.n + one of the suffixes. Raises OSError; then no
    file has a second name.
    """
    path = Path(os.path.realpath(path))
    suffixes = suffixes or ("",)
    existing = [suffix for suffix in suffixes if os.path.lexists(f"{path}{suffix}")]
    n = 0
    while True:
        n += 1
        spare = path.with_name(f"{path.name}.{n}")
        if any(os.path.lexists(f"{spare}{suffix}") for suffix in ("", *suffixes)):
            continue
        made: list[Path] = []
        try:
            for suffix in existing:
                made.append(second_name(Path(f"{path}{suffix}"), Path(f"{spare}{suffix}")))
        except OSError as error:
            for other in made:
                other.unlink()
            if isinstance(error, FileExistsError):
                continue
            raise
        return spare


def second_name(path: Path, spare: Path) -> Path:
    """Give a file a second name, which must be free, and return it. Raises OSError.

    Makes a hard link if the file system has them, otherwise a copy.
    """
    try:
        os.link(path, spare)
    except FileExistsError:
        raise
    except OSError:
        with path.open("rb") as source, replacing(spare) as copy:
            shutil.copyfileobj(source, copy)
    return spare


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a lock, which the operating system releases when the process dies.

    `path` is the lock file; it is removed at the end. Without `wait`, raises BlockingIOError if another
    process holds the lock. Raises OSError for a file that is not empty: it is not a lock.
    """
    # imported here: it takes 30 ms and 1.4 MB, and most chats need no lock
    from filelock import FileLock, Timeout

    if not path.parent.is_dir():
        # filelock would create the folder
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path.parent))
    if path.is_file() and path.stat().st_size:
        # filelock would empty it
        raise OSError(errno.EINVAL, f"{path.name} is not a lock of kvtool; rename it", str(path))
    lock = FileLock(path, timeout=-1 if wait else 0)
    try:
        lock.acquire()
    except Timeout:
        raise BlockingIOError(f"{path} is locked by another process") from None
    try:
        yield
    finally:
        # filelock 4 leaves the file on Unix. Removing it is safe while the lock is held: since 3.24 a waiting
        # process that gets a lock on a removed file tries again (its _finalize_locked_fd).
        if os.name == "posix":
            with suppress(OSError):
                path.unlink()
        lock.release()


def is_locked(path: Path) -> bool:
    """True if another process holds the lock with this file. Raises OSError."""
    try:
        if path.exists():
            with locked(path, wait=False):
                pass
    except BlockingIOError:
        return True
    return False
