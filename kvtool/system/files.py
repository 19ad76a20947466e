"""Writes files so that a crash or a full disk leaves the old file or the new one, never a part of one."""

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
"""End of the name of a file's lock, and the name of a folder's."""


PART = ".kvtool.part"
"""Behind the name of a file that is being written. Other programs end theirs with .part, too."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Opens a new file, which replaces the one at `path` once all of it is on the disk.

    The new file keeps the old one's permissions. Where `path` is a link, its target is replaced. What a
    killed process left behind is overwritten. Raises OSError, with the old file as it was.
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
    """A new name must reach the disk too."""
    if os.name == "posix":
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def free_disk_bytes(path: str) -> int:
    """The free bytes of the disk on which a file lies or will lie. Raises OSError."""
    return shutil.disk_usage(os.path.dirname(os.path.abspath(path))).free


def create(path: Path, like: Path) -> FileIO:
    """Opens an empty file without a buffer. It has the permissions of `like`, if there is such a file.

    What was there is gone. Raises OSError.
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
    """Opens a file without a name, on the disk of the cache folder. Raises OSError."""
    return cast(BinaryIO, tempfile.TemporaryFile(buffering=buffering, dir=spare_folder()))


def spare_folder() -> Path | None:
    """The cache folder, for what is temporary: the usual folder may be memory. None: it is not to be used."""
    folder = cache_dir()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder if os.access(folder, os.W_OK) else None


def write_all(file: FileIO, data: bytes | memoryview) -> None:
    """Writes all of it to a file without a buffer, so that nothing of it comes later. Raises OSError."""
    while data:
        data = data[file.write(data) :]


def write(path: Path, data: bytes) -> None:
    """Writes a file whole, or raises OSError and leaves the old one. A device or a pipe is written to."""
    if path.exists() and not path.is_file():
        with path.open("wb") as device:
            device.write(data)
        return
    with replacing(path) as file:
        file.write(data)


class Log:
    """A text file that only grows, by whole entries: after a failed `append` it ends where it ended before.

    Raises OSError where the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # without a buffer: nothing of a failed entry is written later
        self._file = path.open("ab", buffering=0)

    def append(self, text: str) -> None:
        """Adds an entry. Raises OSError."""
        data = text.encode("utf-8", "replace")
        # a pipe has no end to go back to
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

    suffixes: PATH + each of them gets a second name, if there is such a file; "" stands for PATH itself, and
    without suffixes it is the only one. A number is free if neither PATH nor one of these files has it.
    Raises OSError; then no file has a second name.
    """
    path = Path(os.path.realpath(path))
    suffixes = suffixes or ("",)
    there = [each for each in suffixes if os.path.lexists(f"{path}{each}")]
    n = 0
    while True:
        n += 1
        spare = path.with_name(f"{path.name}.{n}")
        if any(os.path.lexists(f"{spare}{each}") for each in ("", *suffixes)):
            continue
        made: list[Path] = []
        try:
            for each in there:
                made.append(second_name(Path(f"{path}{each}"), Path(f"{spare}{each}")))
        except OSError as error:
            for other in made:
                other.unlink()
            if isinstance(error, FileExistsError):
                continue
            raise
        return spare


def second_name(path: Path, spare: Path) -> Path:
    """Gives a file a second name, which must be free, and returns that. Raises OSError.

    Costs no bytes where the file system has hard links, else a copy.
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
    """Holds a lock, which the operating system releases when the process dies.

    `path` is the lock's own file; it is removed at the end. Without `wait`, raises BlockingIOError where
    another process holds the lock. Raises OSError for a file that is not empty: it is not a lock.
    """
    # here, since it takes 30 ms and 1.4 MB, and most chats lock nothing
    from filelock import FileLock, Timeout

    if not path.parent.is_dir():
        # filelock would make the folder
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
    """Whether another process holds the lock whose file this is. Raises OSError."""
    try:
        if path.exists():
            with locked(path, wait=False):
                pass
    except BlockingIOError:
        return True
    return False
