"""Marks and copies for undo: `kvtool.chats` explains these two ways to go back."""

from __future__ import annotations

from io import FileIO
from itertools import takewhile
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np

from kvtool.chats.template import Message

MAX_COPIES = 3
"""Maximum number of copies."""


def turn_label(text: str) -> str:
    """Name of a turn in messages about undo: its first words, on one line."""
    return f'the turn "{first_words(text)}"'


def first_words(text: str) -> str:
    """Return the beginning of a text on one line, in at most 40 characters."""
    words = " ".join(text.split())
    return words if len(words) <= 40 else words[:39] + "\u2026"


class Copy(NamedTuple):
    """Copy of the chat before a command, in open files. The owner must close the copy.

    `archive` is the archive file, if the session `file` lists segments.
    """

    command: str
    file: BinaryIO
    archive: FileIO | None = None

    def close(self) -> None:
        self.file.close()
        if self.archive:
            self.archive.close()


class Mark(NamedTuple):
    """Position in a chat between two turns, to which the cache can be rewound. Sessions save it as JSON.

    Attributes
    ----------
    n_past
        Number of decoded tokens.
    n_reply
        See `Conversation`.
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

    tokens: i32[n], all tokens of the turn and its reply.
    messages: messages of the chat, including the turn and its reply.
    writer: state of the writer after the reply, from `Writer.save`.
    """

    before: Mark
    tokens: np.ndarray
    messages: list[Message]
    writer: dict[str, Any]


UndoPoint: TypeAlias = "Copy | Mark"
"""State of a chat before a change."""


class UndoStack:
    """Stack of marks and copies, oldest first. The oldest are dropped if there are too many copies."""

    def __init__(self) -> None:
        self._points: list[UndoPoint] = []

    def __len__(self) -> int:
        return len(self._points)

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
        while sum(isinstance(each, Copy) for each in self._points) > MAX_COPIES:
            self._points.pop(0).close()

    def pop(self) -> UndoPoint:
        """Remove and return the newest mark or copy. The caller must close it."""
        return self._points.pop()

    def drop_marks(self) -> None:
        """Drop the marks that are newer than all copies."""
        del self._points[len(self._points) - len(self.marks) :]

    def drop_copies(self) -> None:
        """Drop all copies, and the marks that are older than any of them."""
        marks = self.marks
        for point in self._points:
            point.close()
        self._points = [*marks]

    def close(self) -> None:
        self.drop_copies()
        self.drop_marks()
