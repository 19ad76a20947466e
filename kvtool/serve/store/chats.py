"""Chats on disk: each as it was after its newest turn, and after earlier ones, as many as fit.

A chat is a session file, with its archive beside it, as `kvtool chat --session` writes them. Before a turn
replaces it, the file gets a second name, FILE.1, FILE.2, ...: these are what an edited or repeated request
goes back to. Their archives are parts of the newest one's, which only grows. Where the cache itself can go
back, the newest is all that is kept.
"""

from __future__ import annotations

import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvtool.chats import archive_file, session
from kvtool.errors import SessionError
from kvtool.llama.archive import Archive
from kvtool.serve.store.leftovers import PREFIX, SUFFIX, leftovers, remove
from kvtool.system.files import LOCK, is_locked, locked, second_name, spare_folder

_UNFINISHED = re.compile(rf"([0-9a-f]{{16}}){re.escape(SUFFIX)}(?:((?:\.kvtool)?\.part)|\.archive(\.next)?)")

_NEWEST = 2**62
"""Stands for the number of a file without one: it comes last."""

Saved = Callable[[archive_file.Listing], tuple[session.Meta, Iterator[tuple[str, np.ndarray]]]]
"""Gives what is to be written, with the listing of the archive."""


class ReplyEnd(NamedTuple):
    """Where a reply of a chat ends.

    Attributes
    ----------
    n_message, n_token
        Messages up to there, and tokens of the stream.
    recent
        The tokens that were sampled last, as `Sampler.recent`.
    """

    n_message: int
    n_token: int
    recent: list[int]


@dataclass(eq=False, slots=True)
class StoredChat:
    """A chat: its snapshots, the oldest first. The newest one's file has no number.

    Attributes
    ----------
    beginnings
        Digests of the newest one's beginnings, by their numbers of messages.
    turns
        Where its replies end, as far as they were written here.
    """

    path: Path
    archive_file: archive_file.ArchiveFile
    snapshots: list[Snapshot] = field(default_factory=list)
    n_named: int = 0
    beginnings: list[bytes] = field(default_factory=list)
    turns: list[ReplyEnd] = field(default_factory=list)


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
    tokens
        Of its stream, i32[n], once they are known; see `ChatStore.tokens`.
    """

    line: StoredChat
    digest: bytes
    path: Path
    n_bytes: int
    used: float = field(default_factory=time.monotonic)
    tokens: np.ndarray | None = None

    @property
    def is_newest(self) -> bool:
        """Whether it is its chat's newest; False once it is dropped."""
        return self.line.snapshots[-1:] == [self]


class ChatStore:
    """All chats in a folder.

    Parameters
    ----------
    folder
        Where they are; made if it is missing. One server has it at a time.
    most_bytes
        What they may take: the snapshots that were not needed for the longest time go.
    fixed
        What must be the same to go on with a chat: others are left alone, and not counted.

    Attributes
    ----------
    n_others
        Files that this server cannot go on with, and leaves alone.

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
        self._lines: list[StoredChat] = []
        self._by_beginning: dict[bytes, list[StoredChat]] = {}
        self.n_others = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            names = sorted(os.listdir(folder))
        except OSError as error:
            raise session.cannot("read", folder, error) from None
        self._read(names)

    @property
    def n_bytes(self) -> int:
        """Bytes of all snapshots and archives."""
        snapshots = (each.n_bytes for line in self._lines for each in line.snapshots)
        return sum(archive_file.size(line.path) for line in self._lines) + sum(snapshots)

    def __len__(self) -> int:
        return len(self._lines)

    def find(self, digests: list[bytes]) -> tuple[int, Snapshot] | None:
        """The longest of these beginnings that is stored, as its place among them, and its snapshot."""
        for i in range(len(digests) - 1, -1, -1):
            if found := self._by_digest.get(digests[i]):
                found.used = time.monotonic()
                return i, found
        return None

    def find_shared(self, beginnings: list[bytes], at: Snapshot | None) -> tuple[int, Snapshot] | None:
        """The newest snapshot of a chat that shares the longest of these beginnings, and that one's place.

        at: the one that the engine is at. The beginning without messages is shared with that alone.
        """
        for i in range(len(beginnings) - 1, -1, -1):
            lines = self._by_beginning.get(beginnings[i], [])
            if at and at.line in lines and at.is_newest:
                return i, at
            if lines and beginnings[i] != beginnings[0]:
                found = lines[-1].snapshots[-1]
                found.used = time.monotonic()
                return i, found
        return None

    def find_similar(self, tokens: np.ndarray) -> tuple[int, Snapshot] | None:
        """The newest snapshot whose stream begins like these tokens i32[n] for longest, and for how long.

        Of equal ones the shortest, which is loaded soonest.
        """
        newest = [line.snapshots[-1] for line in self._lines]
        found = [(n_equal(self.tokens(each), tokens), -len(self.tokens(each)), each) for each in newest]
        n, _, snapshot = max(found, key=itemgetter(0, 1), default=(0, 0, None))
        if snapshot is None:
            return None
        snapshot.used = time.monotonic()
        return n, snapshot

    def tokens(self, snapshot: Snapshot) -> np.ndarray:
        """The tokens i32[n] of a snapshot's stream. Those of a damaged one may be wrong: `load` tells."""
        if snapshot.tokens is None:
            try:
                snapshot.tokens = session.read_tokens(snapshot.path)
            except SessionError:
                return np.empty(0, np.int32)
        return snapshot.tokens

    def load(self, snapshot: Snapshot) -> tuple[session.Meta, session.Arrays]:
        """Reads a snapshot. Raises SessionError where it cannot be; a damaged one is dropped."""
        try:
            with snapshot.path.open("rb") as file:
                meta, arrays = session.load(file, snapshot.path.name, snapshot.line.path)
        except (SessionError, FileNotFoundError) as error:
            self.drop(snapshot)
            raise SessionError(str(error)) from None
        except OSError as error:
            # such as too many open files: it may be read the next time
            raise session.cannot("read", snapshot.path, error) from None
        if snapshot.is_newest:
            snapshot.line.archive_file.adopt(arrays)
        return meta, arrays

    def add(
        self,
        before: Snapshot | None,
        digest: bytes,
        tokens: np.ndarray,
        archive: Archive | None,
        saved: Saved,
        *,
        beginnings: list[bytes],
        turns: list[ReplyEnd],
        is_enough: bool = False,
    ) -> Snapshot:
        """Writes a chat as it is now; it is on the disk when this returns.

        Parameters
        ----------
        before
            What it went on from, if that was stored.
        tokens
            Of its stream, i32[n].
        beginnings, turns
            As `StoredChat` has them.
        is_enough
            Whether this snapshot takes the place of `before`.

        Raises
        ------
        SessionError
            Then all is as it was.
        """
        # a system prompt alone stays for other chats: they all have lines of their own
        is_own = before is not None and before.is_newest and bool(before.line.beginnings)
        line = before.line if before and is_own else self._new_line()
        own = {"digest": digest.hex(), "beginnings": [each.hex() for each in beginnings], "turns": turns}
        with ExitStack() as failed:
            failed.callback(_give_up, line)
            try:
                if not is_enough:
                    _number(line)
                with line.archive_file.write(archive) as listed:
                    meta, arrays = saved(listed)
                    session.write(line.path, meta | own, arrays)
                found = Snapshot(line, digest, line.path, line.path.stat().st_size, tokens=tokens)
            except OSError as error:
                raise session.cannot("write", line.path, error) from None
            failed.pop_all()
        # nothing stays open: there may be thousands of chats
        line.archive_file.adopt(dict(listed))
        if twin := self._by_digest.get(digest):
            # the same chat again, of a repeated request
            self.drop(twin)
        if not line.snapshots:
            self._lines.append(line)
        elif is_enough and line.snapshots[-1].path == line.path:
            self._forget(line.snapshots.pop())
        line.snapshots.append(found)
        self._by_digest[digest] = found
        self._index(line, beginnings, turns)
        self._shrink(keep=found)
        return found

    def drop(self, snapshot: Snapshot) -> None:
        """Forgets a snapshot; its file goes, and the one before it takes its name."""
        line = snapshot.line
        if snapshot not in line.snapshots:
            return
        is_newest = snapshot.is_newest
        line.snapshots.remove(snapshot)
        self._forget(snapshot)
        if not line.snapshots:
            _delete(line)
            self._lines.remove(line)
            self._index(line, [], [])
        with suppress(OSError):
            snapshot.path.unlink(missing_ok=True)
            if is_newest and line.snapshots:
                os.replace(line.snapshots[-1].path, line.path)
                line.snapshots[-1].path = line.path

    def _forget(self, snapshot: Snapshot) -> None:
        if self._by_digest.get(snapshot.digest) is snapshot:
            del self._by_digest[snapshot.digest]

    def _index(self, line: StoredChat, beginnings: list[bytes], turns: list[ReplyEnd]) -> None:
        """Lets a chat be found by these beginnings, and by no others."""
        for digest in set(line.beginnings):
            lines = self._by_beginning[digest]
            lines.remove(line)
            if not lines:
                del self._by_beginning[digest]
        for digest in set(beginnings):
            self._by_beginning.setdefault(digest, []).append(line)
        line.beginnings, line.turns = beginnings, turns

    def close(self) -> None:
        """Closes what is open; the files stay."""
        for line in self._lines:
            line.archive_file.close()

    def _new_line(self) -> StoredChat:
        path = self.folder / f"{secrets.token_hex(8)}{SUFFIX}"
        return StoredChat(path, archive_file.ArchiveFile(path))

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
            if match := session.SERVED.fullmatch(name):
                number = int(match[2]) if match[2] else _NEWEST
                found.setdefault(match[1], []).append((number, self.folder / name))
        for key, files in found.items():
            path = self.folder / f"{key}{SUFFIX}"
            line = StoredChat(path, archive_file.ArchiveFile(path))
            line.n_named = max((number for number, _ in files if number < _NEWEST), default=0)
            for _, file in sorted(files):
                self._read_one(line, file)
            if line.snapshots:
                self._lines.append(line)
        self._tidy(names, found)

    def _tidy(self, names: list[str], keys: Collection[str]) -> None:
        """Removes what a killed server was about to write. keys: of chats that have a file.

        An archive whose chat is gone stays: somebody may have moved that chat.
        """
        for match in filter(None, map(_UNFINISHED.fullmatch, names)):
            if match[2] or (match[3] and match[1] not in keys):
                with suppress(OSError):
                    (self.folder / match[0]).unlink()
            elif match[1] not in keys:
                self.n_others += 1

    def _read_one(self, line: StoredChat, path: Path) -> None:
        try:
            meta = session.read_meta(path)
            digest, stat = bytes.fromhex(meta["digest"]), path.stat()
            # earlier versions have none
            beginnings = [bytes.fromhex(each) for each in meta.get("beginnings", ())]
            turns = [ReplyEnd(*each) for each in meta.get("turns", ())]
            if meta.get("fixed") != self.fixed:
                raise ValueError
        except (SessionError, OSError, KeyError, ValueError, TypeError):
            # not this server's, or damaged
            self.n_others += 1
            return
        if digest in self._by_digest and self._by_digest[digest].line is line:
            # the second name of the newest, from a server that was killed behind it
            self._drop_second(line, digest)
        age = max(time.time() - stat.st_mtime, 0)
        snapshot = Snapshot(line, digest, path, stat.st_size, used=time.monotonic() - age)
        line.snapshots.append(snapshot)
        self._by_digest[digest] = snapshot
        self._index(line, beginnings, turns)

    def _drop_second(self, line: StoredChat, digest: bytes) -> None:
        """Forgets the name of a snapshot whose file has another one."""
        second = self._by_digest.pop(digest)
        line.snapshots.remove(second)
        with suppress(OSError):
            second.path.unlink()


def _number(line: StoredChat) -> None:
    """Gives the newest snapshot a second name, and lets that be its name. Raises OSError."""
    newest = line.snapshots[-1] if line.snapshots else None
    # after a kill or a failure it may have one
    if newest and newest.path == line.path:
        line.n_named += 1
        newest.path = second_name(line.path, line.path.with_name(f"{line.path.name}.{line.n_named}"))


def _give_up(line: StoredChat) -> None:
    """Leaves nothing of a turn that could not be written."""
    if not line.snapshots:
        _delete(line)
        return
    newest = line.snapshots[-1]
    with suppress(OSError):
        if newest.path != line.path and newest.path.samefile(line.path):
            newest.path.unlink()
            newest.path = line.path


def _delete(line: StoredChat) -> None:
    """Removes a chat without snapshots: its archive first, since a later server would not remove that."""
    line.archive_file.close()
    archive_file.delete(line.path)
    with suppress(OSError):
        line.path.unlink(missing_ok=True)


def n_equal(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two texts i32[n] have in common at their start."""
    n = min(len(one), len(other))
    differ = np.flatnonzero(one[:n] != other[:n])
    return int(differ[0]) if len(differ) else n


@contextmanager
def lock_folder(folder: Path | None) -> Iterator[Path]:
    """The folder for one server alone; one that goes at the end, where none is named.

    Raises SessionError where another server has it, or a chat one of its files.
    """
    if folder is None:
        spare = spare_folder()
        for left in leftovers(spare) if spare else ():
            remove(left.path)
        with (
            tempfile.TemporaryDirectory(prefix=PREFIX, dir=spare) as path,
            locked(Path(path) / LOCK, wait=False),
        ):
            yield Path(path)
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / LOCK, wait=False):
            for file in folder.iterdir():
                if session.SERVED.fullmatch(file.name) and is_locked(session.lock_of(file)):
                    raise SessionError(f"{file} is in use by a chat; end that chat, or name another folder")
            yield folder
    except BlockingIOError:
        raise SessionError(f"{folder} is in use by another server; name another folder") from None
    except (FileExistsError, NotADirectoryError):
        raise SessionError(f"{folder} is not a folder; name another one") from None
    except OSError as error:
        raise session.cannot("write", folder, error) from None
