"""What takes changes of a chat back: copies of it on disk, or marks where the cache itself can go back."""

from __future__ import annotations

import os
from collections.abc import Sequence
from io import FileIO
from itertools import takewhile
from typing import Any, BinaryIO, NamedTuple, TypeAlias

MOST = 10
"""Copies that are kept."""

MOST_BYTES = 512 * 2**20
"""Bytes that the copies may take together; the newest one is kept whatever it takes, and what it shares."""


def turn_label(text: str) -> str:
    """What a turn is called as a change: by its first words, on one line."""
    words = " ".join(text.split())
    brief = words if len(words) <= 40 else words[:39] + "\u2026"
    return f'the turn "{brief}"'


class Copy(NamedTuple):
    """A chat as it was before a change.

    Attributes
    ----------
    change
        What was done next, in words: a turn, or a command.
    file
        The chat as `session.dump` writes it; the caller closes it.
    archive
        The file with the segments that it lists, if any; the caller closes it as well.
    turn
        What the user said next, if the change is a turn.
    """

    change: str
    file: BinaryIO
    archive: FileIO | None = None
    turn: str | None = None

    def close(self) -> None:
        self.file.close()
        if self.archive:
            self.archive.close()


class Mark(NamedTuple):
    """Where a chat was before a change, for a cache that can go back there.

    Attributes
    ----------
    change, turn
        As in `Copy`.
    n_past, n_message
        Tokens and messages of the chat.
    n_reply
        Replies begun.
    writer
        What `Writer.save` gave.
    """

    change: str
    n_past: int
    n_message: int
    n_reply: int
    writer: dict[str, Any]
    turn: str | None = None

    def close(self) -> None:
        """Nothing: there is no file."""

    def saved(self) -> tuple[Any, ...]:
        """As JSON can hold it beside the chat's messages."""
        return self[1:-1]

    @classmethod
    def restored(cls, saved: Sequence[Any], messages: Sequence[dict[str, Any]]) -> Mark:
        """What `saved` returned, in a chat of these messages."""
        n_past, n_message, n_reply, writer = saved
        turn = messages[n_message]["content"]
        return cls(turn_label(turn), n_past, n_message, n_reply, writer, turn)


UndoPoint: TypeAlias = "Copy | Mark"
"""A chat as it was before a change."""


class UndoStack:
    """A stack of copies and marks, which drops the oldest to stay within `most` copies and `most_bytes`."""

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self.most = most
        self.most_bytes = most_bytes
        self._copies: list[UndoPoint] = []

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def on_disk(self) -> list[Copy]:
        """Those that are no marks."""
        return [each for each in self._copies if isinstance(each, Copy)]

    @property
    def n_bytes(self) -> int:
        """Bytes that the copies take on disk, without archives that a session also has."""
        files = sum(os.fstat(copy.file.fileno()).st_size for copy in self.on_disk)
        return files + sum(self._archives().values())

    def _archives(self) -> dict[int, int]:
        """Bytes of the archives that no session has, by their inodes: many copies share one."""
        archives = (os.fstat(copy.archive.fileno()) for copy in self.on_disk if copy.archive)
        return {each.st_ino: each.st_size for each in archives if not each.st_nlink}

    def _is_full(self) -> bool:
        if not (copies := self.on_disk):
            return False
        newest = copies[-1].archive
        shared = self._archives().get(os.fstat(newest.fileno()).st_ino, 0) if newest else 0
        return len(copies) > self.most or (len(copies) > 1 and self.n_bytes - shared > self.most_bytes)

    @property
    def newest_turn(self) -> str | None:
        """What the user said in the change that the newest copy was made before; None if that is no turn."""
        return self._copies[-1].turn if self._copies else None

    @property
    def marks(self) -> list[Mark]:
        """Those that are newer than all copies: the chat can go back through them, from the newest on."""
        newest = takewhile(lambda each: isinstance(each, Mark), reversed(self._copies))
        return [each for each in newest if isinstance(each, Mark)][::-1]

    def push(self, copy: UndoPoint) -> None:
        self._copies.append(copy)
        while self._is_full():
            self.drop_oldest()

    def pop(self) -> UndoPoint:
        """Takes the newest copy out."""
        return self._copies.pop()

    def drop_oldest(self) -> None:
        self._copies.pop(0).close()

    def close(self) -> None:
        """Drops all copies."""
        while self._copies:
            self.drop_oldest()
