"""Session file of a chat. It is replaced as a whole, and checked when it is read.

Line 1 holds the format number, the SHA-256 of line 2, and the SHA-256 of the rest. Line 2 is JSON with the
text of the chat and its options. It can be read even if the rest is damaged. The rest holds arrays. Each
array is a line with name, dtype and shape, followed by the array's bytes. If there are archived tokens or
checkpoints, some of the arrays list the parts of a second file, FILE.archive (`archive_file`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import mmap
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path
from shlex import quote
from typing import Any, BinaryIO

import numpy as np

from kvtool.chats import archive_file, session_meta
from kvtool.chats.archive_file import ArchivedArrays, with_archive
from kvtool.errors import SessionError
from kvtool.llama.cache.segment import CHECKPOINTS, SEGMENTS, TABLE
from kvtool.system import files
from kvtool.system.arrays import arrays_in, parts_of
from kvtool.system.files import LOCK, is_locked, locked, replacing

FORMAT, FORMAT_ARCHIVED, NEWEST_FORMAT = 1, 2, 3
"""Numbers of the formats: a session without FILE.archive, with it, and with checkpoints in it.

A change in the meaning of the file's contents needs a new number.
"""

SERVED = re.compile(r"([0-9a-f]{16})\.kv(?:\.(\d+))?")
"""Name of a session file in a server's folder.

A file with a number at the end holds an earlier turn. Earlier versions of kvtool wrote such files.
"""

_FORMATS = {SEGMENTS: FORMAT_ARCHIVED, CHECKPOINTS: NEWEST_FORMAT}
"""Names of arrays, each with the format number of a session that has this array."""

Meta = dict[str, Any]
Arrays = Mapping[str, np.ndarray]

_FIRST = "kvtool session {} {} {}\n"
_FIRST_LINE = re.compile(rb"kvtool session (\d+) ([0-9a-f]{64}) ([0-9a-f]{64})\n")
_N_FIRST = len(_FIRST.format(FORMAT, "0" * 64, "0" * 64))
_BLOCK = 2**20


class DiskFull(SessionError):
    """A session cannot be written, because the disk or the user's quota is full."""


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the lock of this session. Raises SessionError if another kvtool process uses the session.

    Also raises SessionError for a folder, a device or a pipe.
    """
    with ExitStack() as stack:
        with _as_session_error("write", path):
            real = Path(os.path.realpath(path))
            lock = lock_of(real)
            if real.exists() and not real.is_file():
                raise SessionError(f"{path} is not a regular file; name another file")
            try:
                stack.enter_context(locked(lock, wait=False))
            except BlockingIOError:
                in_use = f"{path} is in use by another chat; end that chat, or name another file"
                raise SessionError(in_use) from None
            # First lock the session, then look for a server's lock. A server first locks its folder, then
            # looks for locks of sessions. So at least one of the two processes finds the other's lock
            if SERVED.fullmatch(real.name) and is_locked(real.with_name(LOCK)):
                in_use = f"{path} is in use by the server that runs with --sessions {real.parent}"
                raise SessionError(f"{in_use}; end that server, or copy the file and its .archive")
        yield


def lock_of(path: Path) -> Path:
    """Path of the lock file that a chat locks while it uses this session."""
    return path.with_name(path.name + LOCK)


@contextmanager
def _as_session_error(what: str, path: Path) -> Iterator[None]:
    """Convert an OSError or a ValueError that is raised inside the context to a SessionError."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise cannot(what, path, error) from None


def write(path: Path, meta: Meta, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Replace the session once the new file is on the disk.

    Raises SessionError, leaving the old file unchanged.
    """
    with _as_session_error("write", path), replacing(path) as file:
        dump(file, meta, arrays)


def read(path: Path) -> tuple[Meta, Arrays]:
    """Read a session. Raises SessionError if it is damaged, has another format, or is not a session."""
    with _as_session_error("read", path), path.open("rb") as file:
        return load(file, str(path), path)


def read_meta(path: Path) -> Meta:
    """Read only the JSON: the rest may be damaged. Raises SessionError as `read` does."""
    with _as_session_error("read", path), path.open("rb") as file:
        return _head(file, str(path))[0]


def read_chat(path: Path) -> Meta:
    """Read only the JSON of a chat. Raises SessionError as `read` does, and as `check_chat` does."""
    return check_chat(path, read_meta(path))


def read_messages(path: Path) -> tuple[list[dict[str, Any]], str | None]:
    """Return the messages of a chat, and the path of its model.

    The file is a session, or the output of `kvtool session export --json`, which names no model: the path is
    then None. Raises SessionError as `read_chat` does, and for any other file.
    """
    with _as_session_error("read", path), path.open("rb") as file:
        data = file.read(_N_FIRST)
        if not data.lstrip().startswith(b"["):
            if not data.startswith(b"kvtool session "):
                exported = "the output of `kvtool session export --json`"
                raise SessionError(f"{path} is neither a session nor {exported}; name such a file")
            meta = read_chat(path)
            return meta["messages"], meta["options"]["model"]
        messages: Any = None
        with suppress(ValueError, RecursionError):
            messages = json.loads(data + file.read())
    if not session_meta.are_messages(messages):
        wanted = "a JSON list of messages, each with role and content"
        raise SessionError(f"{path} is neither a session nor {wanted}; name another file")
    return messages, None


def check_chat(path: Path, meta: Meta) -> Meta:
    """Return the JSON of a session. Raises SessionError if a value that every chat has is missing."""
    if not session_meta.is_chat(meta):
        raise SessionError(f"{path} lacks values of a chat, or they are damaged; name another file")
    return meta


def peek(path: Path) -> Meta | None:
    """Read the JSON of the session that `write` would replace; None if the file is missing or empty.

    Raises SessionError as `read_chat` does, so that only sessions are replaced.
    """
    with _as_session_error("read", path):
        if not path.exists() or (path.is_file() and path.stat().st_size == 0):
            return None
    return read_chat(path)


def archive_id(path: Path) -> bytes | None:
    """Id of the archive that a session lists. None if it lists no archive, or if it cannot be read."""
    with suppress(OSError, ValueError, SessionError), path.open("rb") as file:
        return archive_file.id_in(_load(file, str(path))[1])
    return None


def size(path: Path) -> int:
    """Size of a session and its archive in bytes. Raises OSError."""
    return path.stat().st_size + archive_file.size(path)


def set_aside(path: Path) -> Path:
    """Give a session and its archive a second name each (hard links), and return the session's new name.

    Raises OSError.
    """
    return files.set_aside(path, archive_file.SUFFIX, "")


def delete(path: Path) -> None:
    """Remove a session and its archive. Raises OSError."""
    path.unlink()
    archive_file.delete(path)


def dump(file: BinaryIO, meta: Meta, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write a session to an empty, seekable file, one array at a time."""
    # the path of a model may hold bytes that are not UTF-8
    line = json.dumps(meta, ensure_ascii=False).encode("utf-8", "surrogateescape") + b"\n"
    digest = hashlib.sha256()
    number = FORMAT
    # the first line is written last, because it has the hash of the arrays
    file.seek(_N_FIRST)
    file.write(line)
    for name, array in arrays:
        number = max(number, _FORMATS.get(name, FORMAT))
        for part in parts_of(name, array, file.tell()):
            digest.update(part)
            file.write(part)
    file.seek(0)
    file.write(_FIRST.format(number, hashlib.sha256(line).hexdigest(), digest.hexdigest()).encode())


def load(file: BinaryIO, name: str, archive: FileIO | Path | None = None) -> tuple[Meta, Arrays]:
    """Read a file that `dump` wrote. The arrays are views of the mapped file, read when they are used.

    name: name of the file in error messages. archive: the open archive file, or the path of the session,
    whose FILE.archive is then opened. If FILE.archive is missing or damaged, and the session lists only
    checkpoints and no archived tokens, the checkpoints are left out. Raises SessionError as `read` does, and
    OSError.
    """
    meta, arrays = _load(file, name)
    if SEGMENTS not in arrays:
        return meta, arrays
    try:
        if isinstance(archive, Path):
            return meta, with_archive(archive, arrays)
        return meta, ArchivedArrays(arrays, archive, f"the archive of {name}", name)
    except SessionError:
        if TABLE in arrays:
            raise
    return meta, {key: array for key, array in arrays.items() if not key.startswith(CHECKPOINTS)}


def _load(file: BinaryIO, name: str) -> tuple[Meta, dict[str, np.ndarray]]:
    meta, start, wanted = _head(file, name)
    data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    digest = hashlib.sha256()
    for at in range(start, len(data), _BLOCK):
        digest.update(data[at : at + _BLOCK])
    if digest.hexdigest() != wanted:
        raise _damaged(name)
    return meta, arrays_in(data, start)


def read_stream(path: Path) -> np.ndarray:
    """Read only the tokens i32[n] of a chat's stream (see `Writer.stream`), without checking their hash.

    Raises SessionError as `read` does.
    """
    with _as_session_error("read", path), path.open("rb") as file:
        meta, start, _ = _head(file, str(path))
        file.seek(start)
        try:
            name, dtype, n = file.readline(_N_FIRST).decode().split()
            tokens = np.frombuffer(file.read(int(n) * 4), np.int32)
            unread = np.array(meta["writer"]["unread"], np.int32)
        except (ValueError, LookupError, TypeError):
            name = ""
        if name != "tokens" or dtype != tokens.dtype.str or len(tokens) != int(n):
            raise _damaged(str(path))
        return np.concatenate([tokens, unread])


def readable_messages(path: Path) -> list[dict[str, Any]]:
    """Return the messages that can be read from a session whose JSON is damaged. Raises SessionError.

    A message may have wrong characters, because the hash covers all messages together.
    """
    with _as_session_error("read", path), path.open("rb") as file:
        if not file.readline(_N_FIRST).startswith(b"kvtool session "):
            return []
        text = file.read().partition(b"\ntokens ")[0].decode(errors="replace")
    decoder, found, at = json.JSONDecoder(strict=False), [], 0
    # quotes inside a text are escaped, so no text contains the beginning of a message
    while (at := text.find('{"role": "', at)) >= 0:
        try:
            message, at = decoder.raw_decode(text, at)
            found += [message] if isinstance(message.get("content"), str) else []
        except (ValueError, RecursionError):
            at += 1
    return found


def _head(file: BinaryIO, name: str) -> tuple[Meta, int, str]:
    """Read the JSON. Return it with the offset of the arrays and their hash."""
    file.seek(0)
    first = _FIRST_LINE.fullmatch(file.readline(_N_FIRST))
    if not first:
        raise SessionError(f"{name} is not a kvtool session, or it is damaged; name another file")
    if int(first[1]) not in range(FORMAT, NEWEST_FORMAT + 1):
        raise SessionError(
            f"{name} is a session of format {int(first[1])}, and this kvtool reads up to {NEWEST_FORMAT}; "
            "use the kvtool that wrote it"
        )
    line = file.readline()
    if hashlib.sha256(line).hexdigest() != first[2].decode():
        what = "damaged" if line.endswith(b"\n") else "truncated"
        raise SessionError(f"{name} is {what}, and so is its text; restore a copy, or name another file")
    try:
        meta = json.loads(line.decode("utf-8", "surrogateescape"))
    except (ValueError, RecursionError):
        raise SessionError(f"{name} has no text that kvtool can read; name another file") from None
    return meta, _N_FIRST + len(line), first[3].decode()


def _damaged(name: str) -> SessionError:
    return SessionError(
        f"{name} is damaged and its chat cannot continue; "
        f"`kvtool chat --reread {quote(name)} --session NEW.kv` reads its text again"
    )


def cannot(what: str, path: Path, error: OSError | ValueError, session: Path | None = None) -> SessionError:
    """Return the error for a file that cannot be read or written.

    session: path of the session that the file belongs to; None if the file is the session.
    """
    why = (error.strerror if isinstance(error, OSError) else None) or error
    is_there = what == "write" and os.path.isfile(session or path)
    kept = "; the last saved version is still there" if is_there else ""
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    return (DiskFull if is_full else SessionError)(f"cannot {what} {path}: {why}{kept}")
