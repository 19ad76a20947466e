"""Stored chats of a server: sessions of each chat's newest turn, and of earlier turns while there is room.

A chat is a session file with its archive file, as `kvtool chat --session` writes them. Before a turn replaces
the session, the old file gets a second name: FILE.1, FILE.2, ... A request that edits or repeats an earlier
turn continues from one of these. They need no archive files, because the newest archive has their segments.
If the cache can be rewound, only the newest session is stored.
"""

from __future__ import annotations

import os
import re
import secrets
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvtool.chats import archive_file, session
from kvtool.chats.conversation import Conversation
from kvtool.chats.undo import Mark
from kvtool.errors import SessionError
from kvtool.serve.api.messages import Message
from kvtool.serve.store.leftovers import PREFIX, SUFFIX, leftovers, remove
from kvtool.system.files import LOCK, is_locked, locked, second_name, spare_folder

_UNFINISHED = re.compile(rf"([0-9a-f]{{16}}){re.escape(SUFFIX)}(?:((?:\.kvtool)?\.part)|\.archive(\.next)?)")

_NEWEST = 2**62
"""Number used for the newest file, whose name has no number: it sorts last."""


@dataclass(eq=False, slots=True)
class StoredChat:
    """A chat and its snapshots, oldest first. The newest snapshot's file has no number.

    Attributes
    ----------
    path
        File of the newest snapshot.
    archive_file
        Archive of all its snapshots.
    n_named
        Highest number in a snapshot's file name.
    marks
        Marks at the ends of the replies that the server wrote.
    """

    path: Path
    archive_file: archive_file.ArchiveFile
    snapshots: list[Snapshot] = field(default_factory=list)
    n_named: int = 0
    marks: list[Mark] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Snapshot:
    """A chat after a turn.

    Attributes
    ----------
    line
        The stored chat that has it.
    digest
        Digest of its messages.
    path
        Session file.
    n_bytes
        Bytes of the session file.
    is_start
        True if its messages are a system prompt alone, with which several chats may begin.
    used
        Time of its last use, by the monotonic clock.
    tokens
        Tokens i32[n] of its stream, or None before `ChatStore.tokens` reads them.
    """

    line: StoredChat
    digest: bytes
    path: Path
    n_bytes: int
    is_start: bool
    used: float = field(default_factory=time.monotonic)
    tokens: np.ndarray | None = None

    @property
    def is_newest(self) -> bool:
        """True if it is the newest of its chat; False after it is dropped."""
        return self.line.snapshots[-1:] == [self]


class ChatStore:
    """All chats in a folder.

    Parameters
    ----------
    folder
        The folder, which is made if it is missing. One server uses it at a time.
    most_bytes
        Maximum bytes of all files. The least recently used snapshots are deleted.
    fixed
        Values that a session must have for this server to continue it. Other sessions are left alone.

    Attributes
    ----------
    n_others
        Number of files that this server cannot continue and leaves alone.

    Raises
    ------
    SessionError
        If the folder cannot be read or made.
    """

    def __init__(self, folder: Path, most_bytes: int, fixed: dict[str, Any]) -> None:
        self.folder = folder
        self.most_bytes = most_bytes
        self.fixed = fixed
        self._lines: list[StoredChat] = []
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
        archives = sum(archive_file.size(line.path) for line in self._lines)
        return archives + sum(each.n_bytes for each in self._snapshots)

    @property
    def newest(self) -> list[Snapshot]:
        """Newest snapshot of each chat."""
        return [line.snapshots[-1] for line in self._lines]

    @property
    def _snapshots(self) -> list[Snapshot]:
        return [each for line in self._lines for each in line.snapshots]

    def __len__(self) -> int:
        return len(self._lines)

    def find(self, digests: list[bytes]) -> tuple[int, Snapshot] | None:
        """Return the index of the longest of these beginnings that is stored, and its snapshot."""
        stored = {each.digest: each for each in self._snapshots}
        for i in range(len(digests) - 1, -1, -1):
            if snapshot := stored.get(digests[i]):
                snapshot.used = time.monotonic()
                return i, snapshot
        return None

    def tokens(self, snapshot: Snapshot) -> np.ndarray:
        """Return the tokens i32[n] of a snapshot's stream. Only `load` checks them."""
        if snapshot.tokens is None:
            try:
                snapshot.tokens = session.read_tokens(snapshot.path)
            except SessionError:
                return np.empty(0, np.int32)
        return snapshot.tokens

    def load(self, snapshot: Snapshot) -> tuple[session.Meta, session.Arrays]:
        """Read a snapshot. Raises SessionError if it cannot be read. A damaged one is dropped."""
        try:
            with snapshot.path.open("rb") as file:
                meta, arrays = session.load(file, snapshot.path.name, snapshot.line.path)
        except (SessionError, FileNotFoundError) as error:
            self.drop(snapshot)
            raise SessionError(str(error)) from None
        except OSError as error:
            # keep the snapshot: a later try may succeed, for example after too many open files
            raise session.cannot("read", snapshot.path, error) from None
        if snapshot.is_newest:
            snapshot.line.archive_file.adopt(arrays)
        return meta, arrays

    def add(
        self,
        before: Snapshot | None,
        digest: bytes,
        chat: Conversation,
        meta: session.Meta,
        *,
        marks: list[Mark],
        is_enough: bool = False,
    ) -> Snapshot:
        """Store a chat, which is on the disk when this returns.

        Parameters
        ----------
        before
            Snapshot from which the chat was continued, or None.
        digest
            Digest of its messages.
        chat, meta
            The chat, and values for its session's JSON.
        marks
            As in `StoredChat`.
        is_enough
            True if the new snapshot replaces `before`; otherwise both stay.

        Raises
        ------
        SessionError
            If the chat cannot be written. The stored chats are then unchanged.
        """
        is_next = before is not None and before.is_newest and not before.is_start
        line = before.line if before and is_next else self._new_line()
        with ExitStack() as failed:
            failed.callback(_give_up, line)
            try:
                if not is_enough:
                    _number(line)
                meta = {**meta, "digest": digest.hex(), "marks": marks}
                listed = chat.save_to(line.path, line.archive_file, meta)
                n_bytes = line.path.stat().st_size
            except OSError as error:
                raise session.cannot("write", line.path, error) from None
            failed.pop_all()
        snapshot = Snapshot(
            line, digest, line.path, n_bytes, _is_start(chat.messages), tokens=chat.writer.tokens
        )
        # `adopt` closes the archive's file: with thousands of chats, too many files would be open
        line.archive_file.adopt(dict(listed))
        for twin in self._snapshots:
            # a repeated request replaces its earlier snapshot
            if twin.digest == digest:
                self.drop(twin)
        if not line.snapshots:
            self._lines.append(line)
        elif is_enough and line.snapshots[-1].path == line.path:
            line.snapshots.pop()
        line.snapshots.append(snapshot)
        line.marks = marks
        self._shrink(keep=snapshot)
        return snapshot

    def drop(self, snapshot: Snapshot) -> None:
        """Delete a snapshot. If it is the newest, the one before it gets its file name."""
        line = snapshot.line
        if snapshot not in line.snapshots:
            return
        is_newest = snapshot.is_newest
        line.snapshots.remove(snapshot)
        if not line.snapshots:
            _delete(line)
            self._lines.remove(line)
        with suppress(OSError):
            snapshot.path.unlink(missing_ok=True)
            if is_newest and line.snapshots:
                os.replace(line.snapshots[-1].path, line.path)
                line.snapshots[-1].path = line.path

    def close(self) -> None:
        """Close open files; they stay on the disk."""
        for line in self._lines:
            line.archive_file.close()

    def _new_line(self) -> StoredChat:
        path = self.folder / f"{secrets.token_hex(8)}{SUFFIX}"
        return StoredChat(path, archive_file.ArchiveFile(path))

    def _shrink(self, keep: Snapshot) -> None:
        """Drop the least recently used snapshots until the rest is small enough."""
        while self.n_bytes > self.most_bytes:
            others = [each for each in self._snapshots if each is not keep]
            # the next turn continues from a chat's newest snapshot: drop older ones first
            old = [each for each in others if not each.is_newest] or others
            if not old:
                return
            self.drop(min(old, key=lambda each: each.used))

    def _read(self, names: list[str]) -> None:
        """Find the chats of earlier servers in the folder."""
        files_of: dict[str, list[tuple[int, Path]]] = {}
        for name in names:
            if match := session.SERVED.fullmatch(name):
                number = int(match[2]) if match[2] else _NEWEST
                files_of.setdefault(match[1], []).append((number, self.folder / name))
        for key, files in files_of.items():
            path = self.folder / f"{key}{SUFFIX}"
            line = StoredChat(path, archive_file.ArchiveFile(path))
            line.n_named = max((number for number, _ in files if number < _NEWEST), default=0)
            for _, file in sorted(files):
                self._read_one(line, file)
            if line.snapshots:
                self._lines.append(line)
        self._tidy(names, files_of)

    def _tidy(self, names: list[str], keys: Collection[str]) -> None:
        """Remove unfinished files of a killed server. keys: names of the chats that have a session file.

        An archive without a session stays, because the user may have moved the session.
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
            marks = _marks_in(meta)
            if meta.get("fixed") != self.fixed:
                raise ValueError
        except (SessionError, OSError, LookupError, ValueError, TypeError):
            # the session is damaged, or of another model or policy
            self.n_others += 1
            return
        for second in [each for each in line.snapshots if each.digest == digest]:
            # two names of one file: a server was killed after it gave the newest file a second name
            line.snapshots.remove(second)
            with suppress(OSError):
                second.path.unlink()
        used = time.monotonic() - max(time.time() - stat.st_mtime, 0)
        is_start = _is_start(meta["messages"])
        line.snapshots.append(Snapshot(line, digest, path, stat.st_size, is_start, used))
        line.marks = marks


def _marks_in(meta: session.Meta) -> list[Mark]:
    """Return the marks of a session."""
    if "turns" not in meta:
        return [Mark(*saved) for saved in meta.get("marks", ())]
    # the session is of an earlier version of kvtool
    return [
        Mark(n_token, n, 0, {"recent": recent, "unread": [], "seed": 0}, meta["beginnings"][n])
        for n, n_token, recent in meta["turns"]
    ]


def _is_start(messages: list[Message]) -> bool:
    return all(message["role"] == "system" for message in messages)


def _number(line: StoredChat) -> None:
    """Give the newest snapshot the name FILE.n; its name FILE stays until replaced. Raises OSError."""
    newest = line.snapshots[-1] if line.snapshots else None
    # after a failed write its name may already have a number
    if newest and newest.path == line.path:
        line.n_named += 1
        newest.path = second_name(line.path, line.path.with_name(f"{line.path.name}.{line.n_named}"))


def _give_up(line: StoredChat) -> None:
    """Undo the changes for a turn that could not be written."""
    if not line.snapshots:
        _delete(line)
        return
    newest = line.snapshots[-1]
    with suppress(OSError):
        if newest.path != line.path and newest.path.samefile(line.path):
            newest.path.unlink()
            newest.path = line.path


def _delete(line: StoredChat) -> None:
    """Remove a chat without snapshots.

    The archive is removed first, because no later server removes an archive without a session.
    """
    line.archive_file.close()
    archive_file.delete(line.path)
    with suppress(OSError):
        line.path.unlink(missing_ok=True)


@contextmanager
def lock_folder(folder: Path | None) -> Iterator[Path]:
    """Yield a folder, locked for this server. folder: None for a temporary one.

    Raises SessionError if another server uses the folder, or `kvtool chat` uses one of its files.
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
