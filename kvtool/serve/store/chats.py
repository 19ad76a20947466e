"""Stored chats of a server: a session of each, with its archive file, as `kvtool chat --session` writes them.

The next turn of a chat replaces its session. A request that edits or repeats an earlier turn rewinds the
stream, and is stored as another chat.
"""

from __future__ import annotations

import os
import re
import secrets
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
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
from kvtool.system.files import LOCK, is_locked, locked, spare_folder

_UNFINISHED = re.compile(rf"([0-9a-f]{{16}}){re.escape(SUFFIX)}(?:((?:\.kvtool)?\.part)|\.archive(\.next)?)")


@dataclass(eq=False, slots=True)
class StoredChat:
    """A chat after a turn. The chat after its next turn is another object, in the same file.

    Attributes
    ----------
    path
        Session file.
    archive_file
        Its archive file.
    digest
        Digest of its messages.
    n_bytes
        Bytes of the session file.
    is_start
        True if its messages are a system prompt alone, with which several chats may begin.
    marks
        Marks at the ends of the replies that the server wrote.
    places
        Numbers of tokens before the checkpoints in its archive file.
    used
        Time of its last use, by the monotonic clock.
    tokens
        Tokens i32[n] of its stream, or None before `ChatStore.tokens` reads them.
    """

    path: Path
    archive_file: archive_file.ArchiveFile
    digest: bytes
    n_bytes: int
    is_start: bool
    marks: list[Mark]
    places: list[int]
    used: float = field(default_factory=time.monotonic)
    tokens: np.ndarray | None = None


class ChatStore:
    """All chats in a folder.

    Parameters
    ----------
    folder
        The folder, which is made if it is missing. One server uses it at a time.
    most_bytes
        Maximum bytes of all files. The least recently used chats are deleted.
    fixed
        Values that a session must have for this server to continue it. Other sessions are left alone.

    Attributes
    ----------
    chats
        The chats.
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
        self.chats: list[StoredChat] = []
        self.n_others = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            names = sorted(os.listdir(folder))
        except OSError as error:
            raise session.cannot("read", folder, error) from None
        self._read(names)

    @property
    def n_bytes(self) -> int:
        """Bytes of all sessions and archives."""
        return sum(archive_file.size(chat.path) + chat.n_bytes for chat in self.chats)

    def __len__(self) -> int:
        return len(self.chats)

    def find(self, digest: bytes) -> StoredChat | None:
        """Return the chat whose messages have this digest."""
        return next((chat for chat in self.chats if chat.digest == digest), None)

    def tokens(self, chat: StoredChat) -> np.ndarray:
        """Return the tokens i32[n] of a chat's stream. Only `load` checks them."""
        if chat.tokens is None:
            try:
                chat.tokens = session.read_tokens(chat.path)
            except SessionError:
                return np.empty(0, np.int32)
        return chat.tokens

    def load(self, chat: StoredChat) -> tuple[session.Meta, session.Arrays]:
        """Read a chat. Raises SessionError if it cannot be read. A damaged one is dropped."""
        try:
            with chat.path.open("rb") as file:
                meta, arrays = session.load(file, chat.path.name, chat.path)
        except (SessionError, FileNotFoundError) as error:
            self.drop(chat)
            raise SessionError(str(error)) from None
        except OSError as error:
            # keep the chat: a later try may succeed, for example after too many open files
            raise session.cannot("read", chat.path, error) from None
        chat.archive_file.adopt(arrays)
        return meta, arrays

    def add(
        self,
        before: StoredChat | None,
        digest: bytes,
        conversation: Conversation,
        meta: session.Meta,
        *,
        marks: list[Mark],
    ) -> StoredChat:
        """Store a chat, which is on the disk when this returns.

        Parameters
        ----------
        before
            The chat that it replaces, unless that is a start or another request has continued it; or None.
        digest
            Digest of its messages.
        conversation, meta
            The chat, and values for its session's JSON.
        marks
            As in `StoredChat`.

        Raises
        ------
        SessionError
            If the chat cannot be written. The stored chats are then unchanged.
        """
        replaced = before if before in self.chats and before and not before.is_start else None
        path = replaced.path if replaced else self.folder / f"{secrets.token_hex(8)}{SUFFIX}"
        archive = replaced.archive_file if replaced else archive_file.ArchiveFile(path)
        is_written = False
        try:
            places = [each.n_past for each in conversation.writer.engine.checkpoints.to_save()]
            meta = {**meta, "digest": digest.hex(), "marks": marks, "checkpoints": places}
            listed = conversation.save_to(path, archive, meta)
            n_bytes = path.stat().st_size
            is_written = True
        except OSError as error:
            raise session.cannot("write", path, error) from None
        finally:
            if not (is_written or replaced):
                _delete(path, archive)
        # `adopt` closes the archive's file: with thousands of chats, too many files would be open
        archive.adopt(dict(listed))
        if replaced:
            self.chats.remove(replaced)
        for twin in [each for each in self.chats if each.digest == digest]:
            # a repeated request replaces its earlier chat
            self.drop(twin)
        is_start = _is_start(conversation.messages)
        tokens = conversation.writer.tokens
        chat = StoredChat(path, archive, digest, n_bytes, is_start, marks, places, tokens=tokens)
        self.chats.append(chat)
        self._shrink(keep=chat)
        return chat

    def drop(self, chat: StoredChat) -> None:
        """Delete a chat, unless it is no longer stored."""
        if chat in self.chats:
            self.chats.remove(chat)
            _delete(chat.path, chat.archive_file)

    def close(self) -> None:
        """Close open files; they stay on the disk."""
        for chat in self.chats:
            chat.archive_file.close()

    def _shrink(self, keep: StoredChat) -> None:
        """Drop the least recently used chats until the rest is small enough."""
        while self.n_bytes > self.most_bytes and len(self.chats) > 1:
            self.drop(min((each for each in self.chats if each is not keep), key=lambda each: each.used))

    def _read(self, names: list[str]) -> None:
        """Find the chats of earlier servers in the folder."""
        earlier: dict[str, list[tuple[int, Path]]] = {}
        for name in names:
            if match := session.SERVED.fullmatch(name):
                files = earlier.setdefault(match[1], [])
                if match[2]:
                    files.append((int(match[2]), self.folder / name))
        for key, files in earlier.items():
            self._read_one(self.folder / f"{key}{SUFFIX}", [file for _, file in sorted(files)])
        self._tidy(names, earlier)

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

    def _read_one(self, path: Path, numbered: list[Path]) -> None:
        """Read a chat. numbered: FILE.1, FILE.2, ..., where earlier versions of kvtool kept earlier turns."""
        if numbered and not path.exists():
            with suppress(OSError):
                os.replace(numbered[-1], path)
                del numbered[-1]
        try:
            meta = session.read_meta(path)
            digest, stat = bytes.fromhex(meta["digest"]), path.stat()
            # sessions of earlier versions have no checkpoints, or do not list them here
            marks, places = _marks_in(meta), meta.get("checkpoints", [])
            if meta.get("fixed") != self.fixed:
                raise ValueError
        except (SessionError, OSError, LookupError, ValueError, TypeError):
            # the session is damaged, or of another model or policy
            self.n_others += 1 + len(numbered)
            return
        for file in numbered:
            with suppress(OSError, SessionError, LookupError):
                messages = session.read_meta(file)["messages"]
                if messages == meta["messages"][: len(messages)]:
                    file.unlink()
        used = time.monotonic() - max(time.time() - stat.st_mtime, 0)
        archive, is_start = archive_file.ArchiveFile(path), _is_start(meta["messages"])
        self.chats.append(StoredChat(path, archive, digest, stat.st_size, is_start, marks, places, used))


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


def _delete(path: Path, archive: archive_file.ArchiveFile) -> None:
    """Remove a chat's files.

    The archive is removed first, because no later server removes an archive without a session.
    """
    archive.close()
    archive_file.delete(path)
    with suppress(OSError):
        path.unlink(missing_ok=True)


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
