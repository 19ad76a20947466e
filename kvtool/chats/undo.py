"""Copies of a chat on disk, so that what changed it can be taken back."""

from __future__ import annotations

import os
from typing import BinaryIO, NamedTuple

MOST = 10
"""Copies that are kept."""

MOST_BYTES = 512 * 2**20
"""Bytes that the copies may take together; the newest one is kept whatever it takes."""


class Copy(NamedTuple):
    """A chat as it was before a change.

    Attributes
    ----------
    change
        What was done next, in words: a turn, or a command.
    file
        The chat as `session.dump` writes it; the caller closes it.
    """

    change: str
    file: BinaryIO


class Copies:
    """A stack of copies, which drops the oldest ones to stay within `most` copies and `most_bytes`."""

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self.most = most
        self.most_bytes = most_bytes
        self._copies: list[Copy] = []

    def __len__(self) -> int:
        return len(self._copies)

    @property
    def n_bytes(self) -> int:
        """Bytes that the copies take on disk."""
        return sum(os.fstat(copy.file.fileno()).st_size for copy in self._copies)

    def push(self, copy: Copy) -> None:
        self._copies.append(copy)
        while len(self) > self.most or (len(self) > 1 and self.n_bytes > self.most_bytes):
            self.drop_oldest()

    def pop(self) -> Copy:
        """Takes the newest copy out."""
        return self._copies.pop()

    def drop_oldest(self) -> None:
        self._copies.pop(0).file.close()

    def close(self) -> None:
        """Drops all copies."""
        while self._copies:
            self.drop_oldest()
