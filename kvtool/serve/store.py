"""Chats on disk: each as it was after its newest turn, and after earlier ones, as many as fit.

A chat is a session file, with its archive beside it, as `kvtool chat --session` writes them. Before a turn
replaces it, the file gets a second name, FILE.1, FILE.2, ...: these are what an edited or repeated request
goes back to. Their archives are parts of the newest one's, which only grows.
"""

from __future__ import annotations

import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvtool.chats import segments, session
from kvtool.errors import SessionError
from kvtool.llama.archive import Archive
from kvtool.system.files import locked
from kvtool.system.paths import cache_dir

SUFFIX = ".kv"

_NAME = re.compile(rf"([0-9a-f]{{16}}){re.escape(SUFFIX)}(?:\.(\d+))?")

_NEWEST = 2**62
"""Stands for the number of a file without one: it comes last."""

Saved = Callable[[segments.Listing], tuple[session.Meta, Iterator[tuple[str, np.ndarray]]]]
"""Gives what is to be written, with the listing of the archive."""


@dataclass(eq=False, slots=True)
class Line:
    """A chat: its snapshots, the oldest first. The newest one's file has no number."""

    path: Path
    store: segments.Store
    snapshots: list[Snapshot] = field(default_factory=list)
    n_named: int = 0


@dataclass(eq=False, slots=True)
class Snapshot:
    """A chat as it was after a turn.

    Attributes
    ----------
    digest
        Of its messages.
    path
        Its file.
    n_bytes
        Of the file.
    used
        When it was last needed, by a clock that only goes forward.
    """

    line: Line
    digest: bytes
    path: Path
    n_bytes: int
    used: float = field(default_factory=time.monotonic)

    @property
    def is_newest(self) -> bool:
        return self.line.snapshots[-1] is self


class Chats:
    """All chats in a folder.

    Parameters
    ----------
    folder
        Where they are; made if it is missing. One server has it at a time.
    most_bytes
        What they may take: the snapshots that were not needed for the longest time go.
    fixed
        What must be the same to go on with a chat: others are left alone, and not counted.

    Raises
    ------
    SessionError
        Where the folder cannot be read or made.
    """

    def __init__(self, folder: Path, most_bytes: int, fixed: dict[str, Any]) -> None:
        self.folder = folder
        self.most_bytes = most_bytes
        self.fixed = fixed
        self._by_digest: dict[bytes, Snapshot] = {}
        self._lines: list[Line] = []
        try:
            folder.mkdir(parents=True, exist_ok=True)
            names = sorted(os.listdir(folder))
        except OSError as error:
            raise session.cannot("read", folder, error) from None
        self._read(names)

    @property
    def n_bytes(self) -> int:
        """Bytes of all snapshots and archives."""
        return sum(_line_bytes(line) for line in self._lines)

    def __len__(self) -> int:
        return len(self._lines)

    def find(self, digests: list[bytes]) -> tuple[int, Snapshot] | None:
        """The longest of these beginnings that is stored, as its place among them, and its snapshot."""
        for i in range(len(digests) - 1, -1, -1):
            if found := self._by_digest.get(digests[i]):
                found.used = time.monotonic()
                return i, found
        return None

    def load(self, snapshot: Snapshot) -> tuple[session.Meta, session.Arrays]:
        """Reads a snapshot. Raises SessionError for a damaged one, which is dropped."""
        try:
            with snapshot.path.open("rb") as file:
                archive = segments.beside(snapshot.line.path)
                with archive.open("rb", buffering=0) if archive.exists() else nullcontext() as raw:
                    meta, arrays = session.load(file, snapshot.path.name, raw)
        except OSError as error:
            self.drop(snapshot)
            raise session.cannot("read", snapshot.path, error) from None
        except SessionError:
            self.drop(snapshot)
            raise
        if snapshot.is_newest:
            snapshot.line.store.adopt(arrays)
        return meta, arrays

    def put(self, before: Snapshot | None, digest: bytes, archive: Archive | None, saved: Saved) -> Snapshot:
        """Writes a chat as it is now; it is on the disk when this returns.

        before: what it went on from, if that was stored. Raises SessionError; then all is as it was.
        """
        line = before.line if before and before.is_newest else self._new_line()
        try:
            if line.snapshots:
                _number(line)
            with line.store.put(archive) as listed:
                meta, arrays = saved(listed)
                more = {"fixed": self.fixed, "digest": digest.hex(), "saved": time.strftime("%F %T")}
                session.write(line.path, meta | more, arrays)
        except OSError as error:
            raise session.cannot("write", line.path, error) from None
        finally:
            if not line.snapshots and not line.path.exists():
                line.store.close()
        if not line.snapshots:
            self._lines.append(line)
        found = Snapshot(line, digest, line.path, line.path.stat().st_size)
        line.snapshots.append(found)
        self._by_digest[digest] = found
        self._shrink(keep=found)
        return found

    def drop(self, snapshot: Snapshot) -> None:
        """Forgets a snapshot; its file goes, and the one before it takes its name."""
        line = snapshot.line
        if snapshot not in line.snapshots:
            return
        is_newest = snapshot.is_newest
        line.snapshots.remove(snapshot)
        if self._by_digest.get(snapshot.digest) is snapshot:
            del self._by_digest[snapshot.digest]
        with suppress(OSError):
            snapshot.path.unlink()
            if is_newest and line.snapshots:
                os.replace(line.snapshots[-1].path, line.path)
                line.snapshots[-1].path = line.path
        if not line.snapshots:
            line.store.close()
            segments.delete(line.path)
            self._lines.remove(line)

    def close(self) -> None:
        """Closes what is open; the files stay."""
        for line in self._lines:
            line.store.close()

    def _new_line(self) -> Line:
        path = self.folder / f"{secrets.token_hex(8)}{SUFFIX}"
        return Line(path, segments.Store(path))

    def _shrink(self, keep: Snapshot) -> None:
        """Drops what was not needed for the longest time, until the rest is small enough."""
        while self.n_bytes > self.most_bytes:
            others = [each for line in self._lines for each in line.snapshots if each is not keep]
            # a chat's newest turn is what it goes on from: it goes after the others
            old = [each for each in others if not each.is_newest] or others
            if not old:
                return
            self.drop(min(old, key=lambda each: each.used))

    def _read(self, names: list[str]) -> None:
        """Finds the chats that another server has left in the folder."""
        found: dict[str, list[tuple[int, Path]]] = {}
        for name in names:
            if match := _NAME.fullmatch(name):
                number = int(match[2]) if match[2] else _NEWEST
                found.setdefault(match[1], []).append((number, self.folder / name))
        for key, files in found.items():
            path = self.folder / f"{key}{SUFFIX}"
            line = Line(path, segments.Store(path))
            line.n_named = max((number for number, _ in files if number < _NEWEST), default=0)
            for _, file in sorted(files):
                self._read_one(line, file)
            if line.snapshots:
                self._lines.append(line)

    def _read_one(self, line: Line, path: Path) -> None:
        try:
            meta = session.read_meta(path)
            digest, n_bytes = bytes.fromhex(meta["digest"]), path.stat().st_size
        except (SessionError, OSError, KeyError, ValueError):
            # not this server's
            return
        if meta.get("fixed") != self.fixed:
            return
        if digest in self._by_digest and self._by_digest[digest].line is line:
            # the second name of the newest, from a server that was killed behind it
            self._drop_second(line, digest)
        snapshot = Snapshot(line, digest, path, n_bytes, used=time.monotonic() - 1e6)
        line.snapshots.append(snapshot)
        self._by_digest[digest] = snapshot

    def _drop_second(self, line: Line, digest: bytes) -> None:
        """Forgets the name of a snapshot whose file has another one."""
        second = self._by_digest.pop(digest)
        line.snapshots.remove(second)
        with suppress(OSError):
            second.path.unlink()


def _number(line: Line) -> None:
    """Gives the newest snapshot a second name, and lets that be its name. Raises OSError."""
    path = line.path.with_name(f"{line.path.name}.{line.n_named + 1}")
    os.link(line.path, path)
    line.n_named += 1
    line.snapshots[-1].path = path


def _line_bytes(line: Line) -> int:
    archive = segments.beside(line.path)
    n = sum(each.n_bytes for each in line.snapshots)
    with suppress(OSError):
        n += archive.stat().st_size
    return n


@contextmanager
def held(folder: Path | None) -> Iterator[Path]:
    """The folder for one server alone; one that goes at the end, where none is named.

    Raises SessionError where another server has it.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="serve-", dir=_spare_folder()) as path:
            yield Path(path)
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / ".lock", wait=False):
            yield folder
    except BlockingIOError:
        raise SessionError(f"{folder} is in use by another server; name another folder") from None
    except OSError as error:
        raise session.cannot("write", folder, error) from None


def _spare_folder() -> Path | None:
    """On the disk of the cache, as a folder for temporary files may be memory."""
    folder = cache_dir()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    return folder if os.access(folder, os.W_OK) else None
