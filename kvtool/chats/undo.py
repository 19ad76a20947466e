"""Undo. A turn is undone with a mark in the stream.

A command that replaces the chat is undone with a copy of the chat on disk.
"""

from __future__ import annotations

import os
from io import FileIO
from itertools import takewhile
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np

from kvtool.chats.template import Message

MAX_COPIES = 10
"""Maximum number of copies."""

MAX_BYTES = 512 * 2**20
"""Maximum bytes of all copies, without the archive of the newest copy.

The newest copy is always kept, even if it is larger.
"""


def turn_label(text: str) -> str:
    """Name of a turn in messages about undo: its first words, on one line."""
    return f'the turn "{first_words(text)}"'


def first_words(text: str) -> str:
    """Return the beginning of a text on one line, in at most 40 characters."""
    words = " ".join(text.split())
    return words if len(words) <= 40 else words[:39] + "\u2026"


class Copy(NamedTuple):
    """Copy of the chat before a command. The owner must close the copy.

    Attributes
    ----------
    command
        The command that changed the chat.
    file
        Open session file.
    archive
        Open archive file, if the session lists segments.
    thought_budget
        `Conversation.thought_budget`, which sessions do not store.
    """

    command: str
    file: BinaryIO
    archive: FileIO | None = None
    thought_budget: int | None = None

    def close(self) -> None:
        self.file.close()
        if self.archive:
            self.archive.close()


class Mark(NamedTuple):
    """Position in a chat between two turns, to which the cache can be rewound. Sessions save it as JSON.

    Attributes
    ----------
    n_past, n_message
        Number of decoded tokens, and number of messages.
    n_reply
        Number of replies started.
    writer
        State of the writer, from `Writer.save`.
    digest
        Digest of the messages, in hexadecimal digits. A server uses it to find the chat.
    """

    n_past: int
    n_message: int
    n_reply: int
    writer: dict[str, Any]
    digest: str = ""

    @property
    def n_token(self) -> int:
        """Number of tokens, including tokens that are not decoded yet."""
        return self.n_past + len(self.writer["unread"])

    def close(self) -> None:
        """Do nothing: a mark has no files."""


class LastTurn(NamedTuple):
    """The last turn with its reply. After another turn has replaced it, `Conversation.put_back` restores it.

    Attributes
    ----------
    before
        Mark before the turn.
    tokens
        i32[n]: all tokens of the turn and its reply.
    messages
        Messages of the chat, including the turn and its reply.
    writer
        State of the writer after the reply, from `Writer.save`.
    """

    before: Mark
    tokens: np.ndarray
    messages: list[Message]
    writer: dict[str, Any]


UndoPoint: TypeAlias = "Copy | Mark"
"""State of a chat before a change."""


class UndoStack:
    """Stack of marks and copies, oldest first.

    The oldest marks and copies are dropped if there are too many copies, or if they take too many bytes.
    """

    def __init__(self) -> None:
        self._points: list[UndoPoint] = []

    def __len__(self) -> int:
        return len(self._points)

    @property
    def on_disk(self) -> list[Copy]:
        return [point for point in self._points if isinstance(point, Copy)]

    @property
    def n_bytes(self) -> int:
        """Size of the copies on disk in bytes, without archives that a session file also uses."""
        files = sum(os.fstat(copy.file.fileno()).st_size for copy in self.on_disk)
        return files + sum(self._archives().values())

    def _archives(self) -> dict[int, int]:
        """Size in bytes of each archive that no session uses.

        The keys are the inodes of the archives, because several copies may share an archive.
        """
        stats = (os.fstat(copy.archive.fileno()) for copy in self.on_disk if copy.archive)
        return {stat.st_ino: stat.st_size for stat in stats if not stat.st_nlink}

    def _is_full(self) -> bool:
        if not (copies := self.on_disk):
            return False
        newest = copies[-1].archive
        shared = self._archives().get(os.fstat(newest.fileno()).st_ino, 0) if newest else 0
        return len(copies) > MAX_COPIES or (len(copies) > 1 and self.n_bytes - shared > MAX_BYTES)

    @property
    def newest(self) -> UndoPoint | None:
        """State before the last change."""
        return self._points[-1] if self._points else None

    @property
    def marks(self) -> list[Mark]:
        """The marks that are newer than all copies. Older marks belong to streams that only copies hold."""
        newest = takewhile(lambda point: isinstance(point, Mark), reversed(self._points))
        return [point for point in newest if isinstance(point, Mark)][::-1]

    def push(self, point: UndoPoint) -> None:
        self._points.append(point)
        while self._is_full():
            self.drop_oldest()

    def pop(self) -> UndoPoint:
        """Remove and return the newest mark or copy. The caller must close it."""
        return self._points.pop()

    def drop_marks(self) -> None:
        """Drop the marks that are newer than all copies."""
        del self._points[len(self._points) - len(self.marks) :]

    def drop_oldest(self) -> None:
        self._points.pop(0).close()

    def close(self) -> None:
        while self._points:
            self.drop_oldest()
