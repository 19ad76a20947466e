"""A chat whose changes can be taken back: by copies of it, or by marks where its cache can go back."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from io import FileIO
from itertools import chain
from typing import BinaryIO

import numpy as np

from kvtool.chats import session
from kvtool.chats.archive_file import ArchiveFile, Listing
from kvtool.chats.template import Message
from kvtool.chats.undo import Copy, Mark, UndoPoint, UndoStack
from kvtool.chats.writer import Writer
from kvtool.errors import UsageError
from kvtool.llama.archive import Archive
from kvtool.system.files import temporary


class Undoable:
    """What a chat is besides its cache, and how it was before it changed.

    Attributes
    ----------
    id
        Identifies the chat for as long as it is the same one: a reset starts another.
    version
        Increases with every change of the chat.
    system
        The system prompt, which is never evicted.
    is_pinned
        False where the template leaves out, cuts or moves the system prompt, so that it cannot be pinned.
        Known after `pin_system` or the first turn.
    messages
        What was said, as templates take it.
    n_reply
        Replies begun, including those taken back, so that another attempt draws other tokens.
    undoable
        Whether `remember` marks or copies the chat, so that `undo` can take a change back.
    undo_stack
        Those marks and copies.
    open_saved
        Opens the files that hold the chat as it is now, or returns None. It saves writing a copy.
    """

    id: str
    system: str | None
    is_pinned: bool
    messages: list[Message]

    def __init__(self, writer: Writer, *, undoable: bool) -> None:
        self.writer = writer
        self.undoable = undoable
        self.undo_stack = UndoStack()
        self.open_saved: Callable[[], tuple[BinaryIO, FileIO | None] | None] = lambda: None
        # where copies have their archive, if not in the session's
        self._archive_file = ArchiveFile()
        self.n_reply = self.version = 0

    @property
    def archive(self) -> Archive | None:
        """What its policy has archived; `save` leaves that out."""
        return self.writer.engine.context.archive

    def save(self, listed: Listing) -> tuple[session.Meta, Iterator[tuple[str, np.ndarray]]]:
        """Return the whole chat: its part in JSON, and its arrays one at a time.

        listed: as `ArchiveFile.write` yields it.
        """
        arrays = chain([("tokens", self.writer.tokens)], self.writer.engine.save(archived=False), listed)
        return {
            "id": self.id,
            "system": self.system,
            "messages": self.messages,
            "n_reply": self.n_reply,
            "writer": self.writer.save(),
            "marks": [mark.saved() for mark in self.undo_stack.marks],
        }, arrays

    def restore(self, meta: session.Meta, arrays: session.Arrays, *, seed: int | None = None) -> None:
        """Continues from what `save` returned. If it does not fit, raises SessionError; nothing changes.

        seed: what is drawn by from now on, if not by the saved one.
        """
        self.writer.engine.restore(arrays)
        self.version += 1
        self.writer.restore(meta["writer"], arrays["tokens"], seed)
        self.system, self.messages, self.n_reply = meta["system"], meta["messages"], meta["n_reply"]
        # sessions of earlier versions have none
        self.id = meta.get("id") or secrets.token_hex(8)
        self.is_pinned = True

    def resume(self, meta: session.Meta, arrays: session.Arrays) -> None:
        """Continues as `restore` does, and can go back from there as the saved chat could, but for copies."""
        self.restore(meta, arrays)
        # sessions of earlier versions have none
        for saved in meta.get("marks", ()):
            self.undo_stack.push(Mark.restored(saved, self.messages))

    @property
    def goes_back(self) -> bool:
        """Whether the cache itself can go back in the chat. A full archive forgets what it would need."""
        archive = self.archive
        return self.writer.engine.goes_back and (archive is None or archive.n < archive.n_max)

    def _mark(self, change: str, turn: str | None = None) -> Mark:
        n = self.writer.engine.n_past, len(self.messages), self.n_reply
        return Mark(change, *n, self.writer.save(), turn)

    def _go_to(self, before: UndoPoint) -> None:
        """Makes the chat what it was. Raises as `undo` does; then nothing changes."""
        if isinstance(before, Copy):
            self.restore(*session.load(before.file, "the copy of the chat", before.archive))
            return
        if not self.writer.go_back(before.n_past, before.writer):
            raise UsageError(
                "the archive has forgotten tokens that the cache would need; a larger --archive keeps more"
            )
        self.version += 1
        self.messages, self.n_reply = self.messages[: before.n_message], before.n_reply

    def remember(self, change: str, turn: str | None = None) -> bool:
        """Keeps what `undo` needs to take a change back. turn: what the user says, if it is a turn.

        That is a copy of the chat, or a mark where the cache can go back itself. Returns False where there is
        no room for a copy, even without the older ones.
        """
        if turn is not None and self.goes_back:
            # a session keeps it for a chat that is undoable
            self.undo_stack.push(self._mark(change, turn))
            return True
        if not self.undoable:
            self.undo_stack.close()
            return False
        while True:
            try:
                self.undo_stack.push(Copy(change, *(self.open_saved() or self._copy()), turn))
            except OSError:
                # copies without a gap, or none
                if not len(self.undo_stack):
                    self._archive_file.close()
                    return False
                self.undo_stack.drop_oldest()
            else:
                return True

    def undo(self) -> str | None:
        """Takes the last change back; returns what it was, or None if there is no copy and no mark.

        Raises SessionError for a damaged copy, which is then dropped; nothing else changes. Raises UsageError
        likewise where the archive has forgotten what a mark needs.
        """
        return self._undo_last().change if len(self.undo_stack) else None

    def undo_turn(self) -> str | None:
        """Takes the last turn back, if that is the last change; returns what the user said, or None.

        Raises as `undo` does.
        """
        return self._undo_last().turn if self.undo_stack.newest_turn is not None else None

    def _undo_last(self) -> UndoPoint:
        with closing(self.undo_stack.pop()) as before:
            n_reply = self.n_reply
            self._go_to(before)
        self.n_reply = max(n_reply, self.n_reply)
        return before

    def close(self) -> None:
        """Drops copies and marks."""
        self.undo_stack.close()
        self._archive_file.close()

    def _copy(self) -> tuple[BinaryIO, FileIO | None]:
        with ExitStack() as stack:
            file = stack.enter_context(temporary())
            with self._archive_file.write(self.archive) as listed:
                session.dump(file, *self.save(listed))
                file.flush()
            archive = self._archive_file.reopen()
            stack.pop_all()
            return file, archive

    def _copy_of_now(self) -> UndoPoint | None:
        if self.goes_back:
            return self._mark("")
        try:
            return Copy("", *self._copy())
        except OSError:
            # without room the thought stays
            return None
