"""Write files safely: a crash or a full disk leaves the old file or the new file, never a partial file."""

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
"""Suffix of a file's lock file, and name of a folder's lock file, which is inside the folder."""


PART = ".kvtool.part"
"""Suffix of a file that is being written. It is not just .part, because other programs use .part."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a new file for the block. After the block, the new file replaces the file at `path`.

    The old file is replaced only when the new file is completely on the disk. The new file gets the
    permissions of the old file. If `path` is a link, the target of the link is replaced. If a killed process
    left a partial new file, this partial file is overwritten. If another process is writing the file, wait
    for it. If OSError is raised, the old file is unchanged.
    """
    path = Path(os.path.realpath(path))
    part = path.with_name(path.name + PART)
    with _alone(part) as file:
        try:
            with suppress(FileNotFoundError):
                shutil.copymode(path, part)
            yield file
            file.flush()
            os.fsync(file.fileno())
            if os.name != "posix":
                # Windows cannot rename an open file
                file.close()
            os.replace(part, path)
        except BaseException:
            if os.name != "posix":
                file.close()
            with suppress(OSError):
                part.unlink()
            raise
    _sync_folder(path.parent)


def _alone(part: Path) -> BinaryIO:
    """Open a file and empty it. While another process or thread has it open by this function, wait.

    `locked` would do the same with a second file, but the import of filelock takes long.
    """
    if os.name != "posix":
        return part.open("w+b")
    import fcntl

    while True:
        # unlike "w+b", this mode leaves the content of another process's file alone
        file = open(part, "r+b", opener=lambda path, flags: os.open(path, flags | os.O_CREAT, 0o666))  # noqa: SIM115
        try:
            with suppress(OSError):
                # some network file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            # the process that had the file open has renamed or deleted it: then open a new file
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), part.stat()):
                    file.truncate()
                    return file
        except BaseException:
            file.close()
            raise
        file.close()


def _sync_folder(path: Path) -> None:
    """Sync a folder, so that the new name of a file is on the disk."""
    if os.name == "posix":
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def free_disk_bytes(path: str | Path) -> int:
    """Return the free space, in bytes, of the disk on which a file is or will be. Raises OSError."""
    return shutil.disk_usage(os.path.dirname(os.path.abspath(path))).free


def create(path: Path, like: Path) -> FileIO:
    """Open an empty, unbuffered file. If the file exists, it is truncated. Raises OSError.

    The file gets the permissions of the file `like`, if `like` exists.
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
    """Open a file that has no name. It is on the disk of the cache folder. Raises OSError."""
    return cast(BinaryIO, tempfile.TemporaryFile(buffering=buffering, dir=spare_folder()))


def spare_folder() -> Path | None:
    """Return the folder for temporary files. This is the cache folder, or None if it cannot be written.

    /tmp is not used, because it may be in memory.
    """
    folder = cache_dir()
    return folder if can_write(folder) else None


def can_write(folder: Path) -> bool:
    """Return True if files can be written in a folder. If it does not exist, it is created.

    False if the disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(buffering=0, dir=folder) as file:
            return file.write(b"0") == 1
    except OSError:
        return False


def write_all(file: FileIO, data: bytes | memoryview) -> None:
    """Write all data to an unbuffered file, whose method `write` may write only a part. Raises OSError."""
    while data:
        data = data[file.write(data) :]


def write(path: Path, data: bytes) -> None:
    """Replace a file, as `replacing` does. Devices and pipes are written directly. Raises OSError."""
    if path.exists() and not path.is_file():
        with path.open("wb") as device:
            device.write(data)
        return
    with replacing(path) as file:
        file.write(data)


class Log:
    """Text file to which whole entries are appended. Raises OSError if the file cannot be opened.

    If there is an error while an entry is written, the part that was already written is removed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # do not buffer: otherwise, a part of a failed entry could be written later
        self._file = path.open("ab", buffering=0)
        # the last entry, and the size of the file after it
        self._last: tuple[bytes, int | None] = b"", None

    def append(self, text: str, replaced: str = "") -> None:
        """Append an entry. Raises OSError.

        replaced: entry to replace by this one if it is the last in the file, unless the file is a pipe.
        """
        data, old = text.encode("utf-8", "replace"), replaced.encode("utf-8", "replace")
        # after an error, the file is truncated to its present size; a pipe cannot be truncated
        end = self._file.seek(0, os.SEEK_END) if self._file.seekable() else None
        if end is not None and old and (old, end) == self._last:
            end -= len(old)
            self._file.truncate(end)
        else:
            old = b""
        try:
            write_all(self._file, data)
        except OSError:
            if end is not None:
                with suppress(OSError):
                    self._file.truncate(end)
                    write_all(self._file, old)
            raise
        self._last = data, None if end is None else end + len(data)

    def close(self) -> None:
        self._file.close()


def set_aside(path: Path, *suffixes: str) -> Path:
    """Give PATH (`path`), or files such as PATH.archive, a second name with a number n. Return PATH.n.

    suffixes: each file PATH + suffix that exists gets the second name PATH.n + suffix. Without suffixes, only
    PATH gets a second name.

    n is the smallest number from 1 on for which PATH.n and all paths PATH.n + suffix are free. If OSError is
    raised, no file has a second name.
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
    """Give a file the second name `spare`, and return this name. Raises OSError, also if the name exists.

    The second name is a hard link. If the file system has no hard links, the file is copied.
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
    """Hold a lock during the block. If the process dies, the operating system releases the lock.

    path: the lock file, which is removed at the end. Raises OSError if this file is not empty, because a lock
    is always empty. wait: what to do if another process holds the lock. True to wait, False to raise
    BlockingIOError.
    """
    # imported here, because the import takes 30 ms and 1.4 MB, and most chats need no lock
    from filelock import FileLock, Timeout

    if not path.parent.is_dir():
        # check this, because filelock would create the folder
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path.parent))
    if path.is_file() and path.stat().st_size:
        # check this, because filelock would empty the file
        raise OSError(errno.EINVAL, f"{path.name} is not a lock of kvtool; rename it", str(path))
    # raise OSError here if the file cannot be created: filelock would report that the lock is in use
    path.touch()
    lock = FileLock(path, timeout=-1 if wait else 0)
    try:
        lock.acquire()
    except Timeout:
        raise BlockingIOError(f"{path} is locked by another process") from None
    try:
        yield
    finally:
        # Remove the file, because filelock 4 does not do this on Unix. This is safe while the lock is held:
        # if a waiting process gets a lock on a removed file, it tries again (_finalize_locked_fd in filelock,
        # since 3.24).
        if os.name == "posix":
            with suppress(OSError):
                path.unlink()
        lock.release()


def is_locked(path: Path) -> bool:
    """True if another process holds the lock whose file is `path`. Raises OSError."""
    try:
        if path.exists():
            with locked(path, wait=False):
                pass
    except BlockingIOError:
        return True
    return False
