"""Ends of turns, and copies, for undo: `kvtool.chats` explains these two ways to go back."""

from __future__ import annotations

from io import FileIO
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np

from kvtool.chats.template import Message
from kvtool.system.texts import first_words

MAX_COPIES = 3
"""Maximum number of copies."""


def turn_label(text: str) -> str:
    """Name of a turn in messages about undo: its first words, on one line."""
    return f'the turn "{first_words(text)}"'


class Copy(NamedTuple):
    """Copy of the chat before a command, in open files. The owner must close the copy.

    `archive` is the archive file, if the session `file` lists segments. `first_version`: see `Conversation`.
    """

    command: str
    file: BinaryIO
    archive: FileIO | None = None
    first_version: int = 0

    def close(self) -> None:
        self.file.close()
        if self.archive:
            self.archive.close()


class TurnEnd(NamedTuple):
    """End of a turn, or the start of a chat. The cache can be rewound to it. Sessions save it as JSON.

    Attributes
    ----------
    n_past
        Number of decoded tokens.
    n_message
        Number of messages of the chat up to here.
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
        """Do nothing: the end of a turn has no files."""


class LastTurn(NamedTuple):
    """The last turn with its reply. After another turn has replaced it, `Conversation.put_back` restores it.

    tokens: i32[n], all tokens of the turn and its reply.
    messages: messages of the chat, including the turn and its reply.
    writer: state of the writer after the reply, from `Writer.save`.
    """

    before: TurnEnd
    tokens: np.ndarray
    messages: list[Message]
    writer: dict[str, Any]


UndoPoint: TypeAlias = "Copy | TurnEnd"
"""State of a chat before a change."""


class UndoStack:
    """Ends of turns and copies, oldest first. The oldest are dropped if there are too many copies."""

    def __init__(self) -> None:
        self._points: list[UndoPoint] = []

    def __len__(self) -> int:
        return len(self._points)

    @property
    def newest(self) -> UndoPoint | None:
        """State before the last change."""
        return self._points[-1] if self._points else None

    @property
    def turn_ends(self) -> list[TurnEnd]:
        """The ends of turns after all copies. Older ones belong to streams that only copies hold."""
        newest: list[TurnEnd] = []
        for point in self._points:
            if isinstance(point, Copy):
                newest.clear()
            else:
                newest.append(point)
        return newest

    def push(self, point: UndoPoint) -> None:
        self._points.append(point)
        while sum(isinstance(each, Copy) for each in self._points) > MAX_COPIES:
            self._points.pop(0).close()

    def pop(self) -> UndoPoint:
        """Remove and return the newest end of a turn or copy. The caller must close it."""
        return self._points.pop()

    def drop_turn_ends(self) -> None:
        """Drop the ends of turns that are newer than all copies."""
        del self._points[len(self._points) - len(self.turn_ends) :]

    def drop_copies(self) -> None:
        """Drop all copies, and the ends of turns that are older than any of them."""
        newest = self.turn_ends
        for point in self._points:
            point.close()
        self._points = [*newest]

    def close(self) -> None:
        self.drop_copies()
        self.drop_turn_ends()
