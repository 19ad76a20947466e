"""The stored chats of a server. Each chat is a session with an archive file.

`kvtool chat --session` writes files of the same format. After the next turn of a chat, its session is
replaced. If a request edits or repeats an earlier turn, the stream is rewound, and the result is stored as
another chat.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from kvtool.chats import archive_file, session
from kvtool.chats.conversation import Conversation
from kvtool.chats.session_meta import completed
from kvtool.chats.undo import TurnEnd
from kvtool.errors import SessionError
from kvtool.serve.api.messages import Message
from kvtool.system.files import LOCK, free_disk_bytes, is_locked, locked, spare_folder

SUFFIX = ".kv"
"""The name of a chat's file ends with this."""

_PREFIX = "serve-"
"""The name of a server's temporary folder begins with this."""

_TOKEN_BYTES = np.dtype(np.int32).itemsize

_UNFINISHED = re.compile(rf"([0-9a-f]{{16}}){re.escape(SUFFIX)}(?:((?:\.kvtool)?\.part)|\.archive(\.next)?)")


@dataclass(eq=False, slots=True)
class StoredChat:
    """State of a stored chat after a turn. After the next turn, a new object with the same file replaces it.

    Attributes
    ----------
    n_bytes
        Number of bytes of the session file and its archive.
    is_system_only
        True if the chat has only a system prompt. Several chats may begin with it.
    turn_ends
        Ends of the replies that the server wrote.
    places
        Number of tokens before each checkpoint in the archive file.
    used
        Time of the last use, in seconds of `time.monotonic`.
    token_bytes
        Bytes of the stream's tokens, i32[n]. None until `ChatStore.tokens` reads them.
    name
        Name of the chat, if the client names its chats: see `History`.
    """

    path: Path
    archive_file: archive_file.ArchiveFile
    digest: bytes
    n_bytes: int
    is_system_only: bool
    turn_ends: list[TurnEnd]
    places: list[int]
    used: float = field(default_factory=time.monotonic)
    token_bytes: bytes | None = None
    name: str | None = None


class ChatStore:
    """All chats in a folder, which is made if it is missing. Only one server at a time may use it.

    Raises SessionError if the folder cannot be read or made.

    Parameters
    ----------
    max_bytes
        Maximum number of bytes of all chats. `add` deletes chats if there are more, or if the disk is full:
        see `_least_needed`.
    fixed
        Values that a session must have to be continued, for example the model's digest.
    log
        Called with a line about each damaged chat that is deleted. None if there is no log.

    Attributes
    ----------
    others
        Chats of servers with other values of `fixed`.
    n_unusable
        Number of damaged files and of archives without a chat. They are never changed or deleted.
    n_foreign
        Number of chats that `kvtool chat` has saved. They are never changed or deleted.
    in_use
        Functions that return the chats that a slot uses. A full disk does not let `add` delete these chats.
    """

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        fixed: dict[str, Any],
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.folder = folder
        self.max_bytes = max_bytes
        self.fixed = fixed
        self.chats: list[StoredChat] = []
        self.others: list[StoredChat] = []
        self.n_unusable = self.n_foreign = 0
        self.in_use: list[Callable[[], set[StoredChat]]] = []
        self._log = log
        try:
            folder.mkdir(parents=True, exist_ok=True)
            names = sorted(os.listdir(folder))
        except OSError as error:
            raise session.cannot("read", folder, error) from None
        self._read(names)

    @property
    def n_bytes(self) -> int:
        """Number of bytes of all sessions and archives, also of other servers."""
        return sum(chat.n_bytes for chat in [*self.chats, *self.others])

    def __len__(self) -> int:
        return len(self.chats)

    def find(self, digest: bytes) -> StoredChat | None:
        """Return the chat whose messages have this digest, or None."""
        return next((chat for chat in self.chats if chat.digest == digest), None)

    def tokens(self, chat: StoredChat) -> np.ndarray:
        """Return the tokens of a chat's stream, i32[n]. They are not checked here, only in `load`."""
        if chat.token_bytes is None:
            try:
                chat.token_bytes = session.read_stream(chat.path).tobytes()
            except SessionError:
                return np.empty(0, np.int32)
        return np.frombuffer(chat.token_bytes, np.int32)

    def load(self, chat: StoredChat) -> tuple[session.Meta, session.Arrays]:
        """Read a chat. Raises SessionError if it cannot be read. If the chat is damaged, it is deleted."""
        try:
            with chat.path.open("rb") as file:
                meta, arrays = session.load(file, chat.path.name, chat.path)
        except (SessionError, FileNotFoundError) as error:
            self.drop(chat)
            if self._log:
                self._log(f"{chat.path} is damaged or missing: this stored chat was deleted")
            raise SessionError(str(error)) from None
        except OSError as error:
            # do not delete the chat, because a later try may succeed, for example if too many files were open
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
        turn_ends: list[TurnEnd],
        name: str | None = None,
    ) -> StoredChat:
        """Store a chat. When this returns, the chat is on the disk.

        If the disk is full, delete other chats that no slot uses, one by one, until the chat can be written.
        Raises SessionError if the chat cannot be written. Its earlier version is then unchanged.

        before: the stored chat that this chat continues, or None. The new chat replaces it, unless `before`
        has only a system prompt or is no longer stored.
        meta: values for the session's JSON.
        """
        replaced = before if before and before in self.chats and not before.is_system_only else None
        path = replaced.path if replaced else self.folder / f"{secrets.token_hex(8)}{SUFFIX}"
        archive = replaced.archive_file if replaced else archive_file.ArchiveFile(path)
        is_written = False
        try:
            places = [each.n_past for each in conversation.writer.engine.checkpoints.to_save()]
            meta = {**meta, "digest": digest.hex(), "name": name, "marks": turn_ends, "checkpoints": places}
            used = {replaced, *chain.from_iterable(chats() for chats in self.in_use)}
            listed, n_bytes = self._save(conversation, path, archive, meta, self._least_needed(used))
            is_written = True
        finally:
            if not (is_written or replaced):
                _delete(path, archive)
        # `adopt` also closes the archive's file: otherwise thousands of chats would keep too many files open
        archive.adopt(dict(listed))
        if replaced:
            self.chats.remove(replaced)
        for twin in [each for each in self.chats if each.digest == digest]:
            # if a request was repeated, delete the chat that the first request has stored
            self.drop(twin)
        is_system_only = _is_system_only(conversation.messages)
        chat = StoredChat(path, archive, digest, n_bytes, is_system_only, turn_ends, places, name=name)
        chat.token_bytes = conversation.writer.stream.tobytes()
        self.chats.append(chat)
        self._shrink(keep=chat)
        return chat

    def _save(
        self,
        conversation: Conversation,
        path: Path,
        archive: archive_file.ArchiveFile,
        meta: session.Meta,
        others: Iterator[StoredChat],
    ) -> tuple[archive_file.Listing, int]:
        """Write a chat's files. Return the listing of its archive, and the size of the files in bytes.

        others: chats that may be deleted if the disk is full. Raises SessionError.
        """
        while True:
            try:
                return conversation.save_to(path, archive, meta), session.size(path)
            except OSError as error:
                failure = session.cannot("write", path, error)
            except SessionError as error:
                failure = error
            if not (isinstance(failure, session.DiskFull) and self._frees_space(others)):
                raise failure

    def _frees_space(self, others: Iterator[StoredChat]) -> bool:
        """Delete the next of these chats. Return True if there is then more space on the disk.

        Deleting files frees no space if, for example, a snapshot of the file system still has them.
        """
        with suppress(OSError, StopIteration):
            chat = next(others)
            before = free_disk_bytes(chat.path)
            self.drop(chat)
            return free_disk_bytes(chat.path) > before
        return False

    def drop(self, chat: StoredChat) -> None:
        """Delete a chat if it is still stored."""
        for stored in (self.chats, self.others):
            if chat in stored:
                stored.remove(chat)
                _delete(chat.path, chat.archive_file)

    def close(self) -> None:
        """Close open files. The files stay on the disk."""
        for chat in self.chats:
            chat.archive_file.close()

    def _shrink(self, keep: StoredChat) -> None:
        """Delete chats until all files together have at most `max_bytes`."""
        n_bytes, others = self.n_bytes, self._least_needed({keep})
        while n_bytes > self.max_bytes and (chat := next(others, None)):
            self.drop(chat)
            n_bytes -= chat.n_bytes

    def _least_needed(self, kept: Collection[StoredChat | None]) -> Iterator[StoredChat]:
        """Yield the chats that are not in `kept`, the least recently used ones first.

        Variants come before other chats: each repeated or edited request stores a variant of its chat, and
        many variants of one chat should not displace other chats.
        """
        stored = sorted([*self.chats, *self.others], key=lambda each: each.used)
        yield from (chat for chat in dict.fromkeys(chain(_variants(stored), stored)) if chat not in kept)

    def _read(self, names: list[str]) -> None:
        """Read the chats that earlier servers have stored in the folder."""
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
        """Remove unfinished files of a killed server. keys: names of chats that have a session file.

        An archive without a session is not removed, because the user may have moved the session.
        """
        for match in filter(None, map(_UNFINISHED.fullmatch, names)):
            if match[2] or (match[3] and match[1] not in keys):
                with suppress(OSError):
                    (self.folder / match[0]).unlink()
            elif match[1] not in keys:
                self.n_unusable += 1

    def _read_one(self, path: Path, numbered: list[Path]) -> None:
        """Read a chat.

        numbered: FILE.1, FILE.2, ..., in which earlier versions of kvtool stored earlier turns of the chat.
        """
        if numbered and not path.exists():
            with suppress(OSError):
                os.replace(numbered[-1], path)
                del numbered[-1]
        try:
            meta = session.read_meta(path)
            if "digest" not in meta:
                self.n_foreign += 1
                return
            digest, n_bytes, used_at = bytes.fromhex(meta["digest"]), session.size(path), path.stat().st_mtime
            # sessions of earlier versions have no checkpoints, or do not list them in their JSON
            turn_ends, places = _turn_ends_in(meta), meta.get("checkpoints", [])
            is_system_only = _is_system_only(meta["messages"])
            stored = self.chats if completed(meta["fixed"], self.fixed) == self.fixed else self.others
        except (SessionError, OSError, LookupError, ValueError, TypeError):
            self.n_unusable += 1 + len(numbered)
            return
        used = time.monotonic() - max(time.time() - used_at, 0)
        archive = archive_file.ArchiveFile(path)
        chat = StoredChat(path, archive, digest, n_bytes, is_system_only, turn_ends, places, used)
        # sessions of earlier versions have no name
        chat.name = meta.get("name")
        stored.append(chat)


def _turn_ends_in(meta: session.Meta) -> list[TurnEnd]:
    if "turns" not in meta:
        return [TurnEnd(*saved) for saved in meta.get("marks", ())]
    # an earlier version of kvtool has written the session
    return [
        TurnEnd(n_token, n, 0, {"recent": recent, "unread": [], "seed": 0}, meta["beginnings"][n])
        for n, n_token, recent in meta["turns"]
    ]


def _is_system_only(messages: list[Message]) -> bool:
    return all(message["role"] == "system" for message in messages)


def _variants(stored: Iterable[StoredChat]) -> Iterator[StoredChat]:
    """Yield the variants among stored chats, which are sorted by the time of their last use.

    A chat is a variant if a chat that was used later begins with at least half of its tokens. A system prompt
    is not a variant, because chats begin with it. No files are read: chats whose tokens are still unknown are
    not compared.
    """
    known = [(chat, chat.token_bytes) for chat in stored if chat.token_bytes]
    later = sorted(tokens for _, tokens in known)
    for chat, tokens in known:
        del later[bisect_left(later, tokens)]
        half = tokens[: (len(tokens) // _TOKEN_BYTES + 1) // 2 * _TOKEN_BYTES]
        # in sorted order, the streams that begin with `half` come first of those that are not below `half`
        at = bisect_left(later, half)
        if not chat.is_system_only and at < len(later) and later[at].startswith(half):
            yield chat


def _delete(path: Path, archive: archive_file.ArchiveFile) -> None:
    """Remove the files of a chat.

    The archive is removed first, because later servers do not remove an archive that has no session.
    """
    archive.close()
    archive_file.delete(path)
    with suppress(OSError):
        path.unlink(missing_ok=True)


@contextmanager
def lock_folder(folder: Path | None) -> Iterator[Path]:
    """Lock a folder for this server, and yield it. folder: None for a temporary folder.

    Raises SessionError if another server uses the folder, or if `kvtool chat` uses a file in it.
    """
    if folder is None:
        spare = spare_folder()
        with ExitStack() as stack:
            # only one server at a time is here, so none removes the new folder of another before it is locked
            with locked(spare / f"serve{LOCK}") if spare else nullcontext():
                if spare:
                    _remove_left(spare)
                # at the end, a server that starts may remove the folder at the same time
                new = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=spare, ignore_cleanup_errors=True)
                path = Path(stack.enter_context(new))
                stack.enter_context(locked(path / LOCK, wait=False))
            yield path
        return
    try:
        # other users must not read chats
        folder.mkdir(0o700, parents=True, exist_ok=True)
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


def _remove_left(cache: Path) -> None:
    """Remove the temporary folders of killed servers, which are not locked."""
    for folder in cache.glob(f"{_PREFIX}*"):
        with suppress(OSError), locked(folder / LOCK, wait=False):
            shutil.rmtree(folder, ignore_errors=True)
