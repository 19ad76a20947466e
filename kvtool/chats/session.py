"""A chat in one file, written whole or not at all, and checked when it is read.

The first line has the format's number and the SHA-256 of the second line and of the rest. The second line is
JSON, and has all that a person may want to read: it is there even where the rest is damaged. The rest is
arrays, each a line with its name, dtype and shape, and its bytes.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kvtool.errors import SessionError
from kvtool.system.files import locked, replacing

FORMAT = 1
"""Goes up when what is saved changes its meaning."""

Meta = dict[str, Any]
Arrays = dict[str, np.ndarray]

_FIRST = "kvtool session {} {} {}\n"
_FIRST_LINE = re.compile(rb"kvtool session (\d+) ([0-9a-f]{64}) ([0-9a-f]{64})\n")
_N_FIRST = len(_FIRST.format(FORMAT, "0" * 64, "0" * 64))
_BLOCK = 2**20
_ALIGN = 64


@contextmanager
def held(path: Path) -> Iterator[None]:
    """No other kvtool has this session meanwhile. Raises SessionError where one has it already."""
    try:
        with locked(path.with_name(path.name + ".lock"), wait=False):
            yield
    except BlockingIOError:
        raise SessionError(f"{path} is in use by another chat; end that, or name another file") from None
    except OSError as error:
        raise _cannot("write", path, error) from None


def write(path: Path, meta: Meta, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Takes the file's place once all is on the disk. Raises SessionError, with the old file as it was."""
    try:
        with replacing(path) as file:
            dump(file, meta, arrays)
    except OSError as error:
        raise _cannot("write", path, error) from None


def read(path: Path) -> tuple[Meta, Arrays]:
    """What was written. Raises SessionError for what is no session, of another format, or damaged."""
    try:
        with path.open("rb") as file:
            return load(file, str(path))
    except OSError as error:
        raise _cannot("read", path, error) from None


def read_meta(path: Path) -> Meta:
    """The JSON alone, whatever the rest is like. Raises SessionError as `read` does."""
    try:
        with path.open("rb") as file:
            return _head(file, str(path))[0]
    except OSError as error:
        raise _cannot("read", path, error) from None


def dump(file: BinaryIO, meta: Meta, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    """Writes a session to an empty file that can be sought in; arrays one by one, as they come."""
    line = json.dumps(meta, ensure_ascii=False).encode() + b"\n"
    digest = hashlib.sha256()
    # the hash of what follows goes in last
    file.seek(_N_FIRST)
    file.write(line)
    for name, array in arrays:
        array = np.ascontiguousarray(array)
        title = f"{name} {array.dtype.str} {','.join(map(str, array.shape))}".encode()
        # bytes start where an array of any type may lie
        title += b" " * (-(file.tell() + len(title) + 1) % _ALIGN) + b"\n"
        for part in (title, array.reshape(-1).view(np.uint8).data):
            digest.update(part)
            file.write(part)
    file.seek(0)
    file.write(_FIRST.format(FORMAT, hashlib.sha256(line).hexdigest(), digest.hexdigest()).encode())


def load(file: BinaryIO, name: str) -> tuple[Meta, Arrays]:
    """What `dump` wrote. The arrays are views of the file, read when they are looked at."""
    meta, start, wanted = _head(file, name)
    data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    digest = hashlib.sha256()
    for at in range(start, len(data), _BLOCK):
        digest.update(data[at : at + _BLOCK])
    if digest.hexdigest() != wanted:
        raise _damaged(name)
    arrays = {}
    at = start
    while at < len(data):
        end = data.find(b"\n", at)
        key, dtype, shape = data[at:end].decode().split()
        dims = [int(n) for n in shape.split(",")]
        n_item = int(np.prod(dims))
        arrays[key] = np.frombuffer(data, dtype, n_item, end + 1).reshape(dims)
        at = end + 1 + arrays[key].nbytes
    return meta, arrays


def _head(file: BinaryIO, name: str) -> tuple[Meta, int, str]:
    """The JSON, where the arrays start, and their hash."""
    file.seek(0)
    found = _FIRST_LINE.fullmatch(file.readline(_N_FIRST))
    if not found:
        raise SessionError(f"{name} is no session of kvtool, or damaged; name another file")
    if int(found[1]) != FORMAT:
        raise SessionError(
            f"{name} is a session of format {int(found[1])}, and this kvtool reads format {FORMAT}; "
            "go on with the kvtool that wrote it"
        )
    line = file.readline()
    if hashlib.sha256(line).hexdigest() != found[2].decode():
        raise _damaged(name)
    return json.loads(line), _N_FIRST + len(line), found[3].decode()


def _damaged(name: str) -> SessionError:
    return SessionError(
        f"{name} is damaged, and the chat in it cannot go on; "
        f"`kvtool session export {name}` prints its text where that is whole"
    )


def _cannot(what: str, path: Path, error: OSError) -> SessionError:
    kept = "; what was saved before is still there" if what == "write" and path.exists() else ""
    return SessionError(f"cannot {what} {path} ({error.strerror}){kept}")
