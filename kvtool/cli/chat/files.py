"""Files of a chat: its session and its transcript."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, BinaryIO

from kvtool.chats import archive_file, session
from kvtool.chats.session import Arrays, Meta
from kvtool.chats.session_meta import difference, fixed_of, meta_of
from kvtool.cli.progress import hashing_progress, restoring_progress
from kvtool.cli.writing import sampling_of
from kvtool.config.generation import GenerationOptions
from kvtool.config.run import RunOptions
from kvtool.errors import SessionError, StreamEnd, UsageError
from kvtool.system.files import Log

if TYPE_CHECKING:
    from io import FileIO

    from kvtool.chats.conversation import Conversation
    from kvtool.chats.template import Message


class ChatFiles:
    """Session and transcript of a chat.

    The session file is replaced whenever a turn is finished or undone. If it holds turns that the chat does
    not have, for example after a reset, it is first renamed to FILE.1 (or FILE.2, ...). Undone and replaced
    turns are the exception: they are not kept.

    Attributes
    ----------
    run, generation
        The options that are saved in the session. `set` changes the sampling options among them.
    transcript
        File to which finished turns are appended, or None.
    unsaved
        Error of the last save, or None if there was no error.
    previous_path
        Path to which the last `keep_session` moved the previous chat, or None.
    moved_archive
        New path of another chat's archive that the last save had to rename, or None.
    recovered
        The files among FILE.1, FILE.2, ... that the last `keep_session` deleted, because the session holds
        their chats again.
    """

    def __init__(
        self, chat: Conversation, run: RunOptions, generation: GenerationOptions, path: Path | None = None
    ) -> None:
        self.chat = chat
        self.run = run
        self._generation = generation
        self.path = path
        self.transcript: Log | None = None
        self.unsaved: SessionError | None = None
        self.previous_path: Path | None = None
        self.moved_archive: Path | None = None
        self.recovered: list[Path] = []
        # `chat.version` when the chat was last saved to `path` or loaded from there, or None
        self._saved_version: int | None = None
        # result of `_comparable` for the chat that the file at `path` holds
        self._saved: Meta | None = None
        self._archive_file = archive_file.ArchiveFile(path)
        # files to which chats were moved, each with `Conversation.first_version` of its chat
        self._set_aside: dict[Path, int] = {}
        chat.open_saved = self._open_saved

    @property
    def generation(self) -> GenerationOptions:
        """Options for generating text, with the thinking effort and budget that the chat has now."""
        return self._generation.changed(think=self.chat.effort, think_budget=self.chat.thought_budget)

    def resume(self, path: Path, system: str | None = None) -> None:
        """Continue the chat that a session holds. Raises SessionError if the given options do not match.

        system: system prompt that the session must have; None to accept any.
        """
        seed = self.generation.seed
        meta, arrays = self.read(path, typed=self.run.typed)
        self.continue_chat(meta, arrays)
        self._archive_file.adopt(arrays)
        self._saved_version = self.chat.version if seed is None else None
        self._saved = self._comparable()
        if system is not None and system.strip() != (self.chat.system or ""):
            raise SessionError(
                f"{path} has another system prompt; leave --system out, or read the text again with "
                f"`{rereading(path)}`"
            )
        if seed is not None:
            self.chat.writer.sampler.seed = seed

    def read(self, path: Path, typed: Collection[str] = ()) -> tuple[Meta, Arrays]:
        """Read a session that this chat can continue. Raises SessionError for any other file.

        typed: see `difference`.
        """
        meta, arrays = session.read(path)
        session.check_chat(path, meta)
        model = self.chat.writer.engine.model.path
        if why := difference(meta["fixed"], self._fixed, Path(meta["options"]["model"]), model, typed):
            raise SessionError(f"{path} {why}read its text again with `{rereading(path)}`")
        self._check_archive(path, arrays)
        return meta, arrays

    def continue_chat(self, meta: Meta, arrays: Arrays) -> None:
        """Continue a chat that `read` returned. To make this undoable, call `Conversation.remember` first."""
        with restoring_progress(self.chat.archive):
            self.chat.resume(meta, arrays)

    def set(self, name: str, text: str | None) -> None:
        """Change one of the `GenerationOptions`, and give all of them to the sampler for the next text.

        text: the value, or None for the default. The seed -1 chooses a random seed. Raises UsageError or
        InputError if the name or the value is wrong. In that case nothing changes.
        """
        generation, sampler = self.generation.set(name, text), self.chat.writer.sampler
        sampler.change(sampling_of(generation))
        if GenerationOptions.field(name) == "seed":
            sampler.set_seed(generation.seed)
        self._generation = generation

    @property
    def has_previous(self) -> bool:
        """True if the session file holds turns that the chat does not have."""
        return self._saved is not None and self._would_lose(self._saved)

    def save(self, path: Path, may_replace: Callable[[str], bool] = lambda description: False) -> bool:
        """Write the chat to a file. Return True if it was written.

        If the file holds another chat, `may_replace` is called with a description of that chat. If it returns
        False, nothing is written.

        Raises SessionError if the file is not a session, is in use, or cannot be written.
        """
        if self._is_own(path):
            self.keep_session()
            self.check()
            return True
        with session.lock(path):
            saved = session.peek(path)
            if saved and self._would_lose(saved) and not may_replace(self._described(path, saved)):
                return False
            self._write(path)
        # the user has saved the turns that the session lacks
        self.unsaved = None
        return True

    def keep(self, *, undone: bool = False, continued: Sequence[Message] = ()) -> None:
        """Save the last turn and its reply in the session and in the transcript.

        If saving fails, the error is stored in `unsaved`. undone: see `keep_session`.
        continued: messages of the chat before its last reply was continued; empty for another reply.
        """
        if not self.chat.n_turn:
            return
        self.keep_session(undone=undone, is_new_turn=True)
        if self.transcript:
            from kvtool.chats.conversation import transcript

            try:
                self.transcript.append(transcript(self.chat.messages[-2:]), transcript(continued[-2:]))
            except OSError as error:
                self.unsaved = SessionError(f"cannot write {self.transcript.path}: {error.strerror}")

    def keep_session(self, *, undone: bool = False, is_new_turn: bool = False) -> None:
        """Write the chat to `path`, unless `path` is None. If this fails, store the error in `unsaved`.

        undone: True if a turn was undone or replaced. After an undo, a file that holds an earlier chat is not
        changed: the user may return to that chat with further undos.

        is_new_turn: True after a new turn. The file is then always written.
        """
        self.unsaved = self.previous_path = self.moved_archive = None
        self.recovered.clear()
        self._saved_version = None
        if self.path and (is_new_turn or not undone or not self._holds_earlier_chat(self.path)):
            try:
                self._replace_own(self.path, undone)
            except SessionError as error:
                self.unsaved = error
            else:
                self._saved_version = self.chat.version
                self._saved = self._comparable()

    def advice(self, error: StreamEnd) -> str:
        """Return an error's message. If it advises options that a session cannot change, add what to do."""
        engine = self.chat.writer.engine
        if not (self.path and self._saved) or (
            engine.policy.evicts and engine.settings.positions != "original"
        ):
            return str(error)
        return f"{error}, in a new session: `{rereading(self.path)}` reads this chat's text again"

    @property
    def n_unsaved(self) -> int:
        """Number of replies that the session lacks because the last save failed."""
        if not self.unsaved or not self.path or self._saved_version is not None:
            return 0
        saved = self._saved["messages"] if self._saved and self._saved["id"] == self.chat.id else []
        messages = self.chat.messages
        n_same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(saved, messages, strict=False))))
        return sum(message["role"] == "assistant" for message in messages[n_same:])

    def moved_line(self) -> str | None:
        """Return a message if the last save renamed another chat's archive, else None."""
        if not (spare := self.moved_archive):
            return None
        # if `spare` is FILE.1.archive, the archive's path was FILE.archive
        name = spare.with_suffix("").stem + spare.suffix
        return f"{name} belonged to another chat; it is now {spare.name}"

    def check(self) -> None:
        """Raise the error of the last save, if there was one."""
        if self.unsaved:
            raise self.unsaved

    def _check_archive(self, path: Path, arrays: Arrays) -> None:
        """Raise SessionError if a session has more archived tokens than this chat's archive can hold."""
        archive = self.chat.writer.engine.context.archive
        if archive and (n := archive.n_saved(arrays)) > archive.n_max:
            raise SessionError(
                f"{path} has {n:,} archived tokens, and this chat's archive takes {archive.n_max:,}; "
                f"start the chat with --archive {n} or more"
            )

    def _replace_own(self, path: Path, undone: bool) -> None:
        aside = None
        if self.has_previous and not (undone and self._is_present) and path.exists():
            try:
                self._archive_file.open()
                self._archive_file.finish_rename()
                aside = session.set_aside(path)
            except OSError as error:
                raise SessionError(f"cannot set {path} aside: {error.strerror}; it was not written") from None
        try:
            self._write(path)
        except SessionError:
            if aside:
                session.delete(aside)
            raise
        self.previous_path = aside
        if undone:
            self._drop_recovered()
        if aside and self._saved:
            self._set_aside[aside] = self._saved["first_version"]

    def _holds_earlier_chat(self, path: Path) -> bool:
        """Return True if the session file holds an earlier chat, to which the user may return with undos.

        Return False if the file holds the present chat, perhaps with turns that were undone since.
        """
        return self.has_previous and not self._is_present and path.exists() and not any(self._recovered())

    @property
    def _is_present(self) -> bool:
        """True if the session file holds the present chat, perhaps with other turns.

        The `id` does not tell: if the user loads an older copy of the chat in the file, it is the same.
        """
        return self._saved is not None and self._saved["first_version"] == self.chat.first_version

    def _recovered(self) -> Iterator[Path]:
        """Yield the files among FILE.1, FILE.2, ... to whose chats the user has returned with undos."""
        for spare, version in list(self._set_aside.items()):
            with suppress(OSError, SessionError):
                if version == self.chat.first_version and not self._would_lose(session.read_meta(spare)):
                    yield spare

    def _drop_recovered(self) -> None:
        """Delete the files of `_recovered`."""
        for spare in self._recovered():
            del self._set_aside[spare]
            with suppress(OSError, SessionError):
                session.delete(spare)
                self.recovered.append(spare)

    def _comparable(self) -> Meta:
        """Return values of the present chat, in the form that `_would_lose` takes."""
        chat = self.chat
        messages = list(chat.messages)
        return {
            "id": chat.id,
            "first_version": chat.first_version,
            "n_turn": chat.n_turn,
            "messages": messages,
        }

    def _write(self, path: Path) -> None:
        """Write the chat to a session. Raises SessionError."""
        is_own = self._is_own(path)
        archive = self._archive_file if is_own else archive_file.ArchiveFile(path, session.archive_id(path))
        try:
            options = self.run.session_values() | self.generation.session_values()
            self.chat.save_to(
                path, archive, meta_of(self.chat.writer.engine, self.chat.n_turn, self._fixed, options)
            )
        except OSError as error:
            raise session.cannot("write", archive_file.archive_path(path), error, path) from None
        finally:
            self.moved_archive = archive.moved
            if not is_own:
                archive.close()

    def _is_own(self, path: Path) -> bool:
        return self.path is not None and os.path.realpath(path) == os.path.realpath(self.path)

    def _would_lose(self, saved: Meta) -> bool:
        """True if a saved chat has turns that this chat does not have."""
        messages = saved["messages"]
        is_ours = saved.get("id") == self.chat.id and messages == self.chat.messages[: len(messages)]
        return saved["n_turn"] > 0 and not is_ours

    def _described(self, path: Path, saved: Meta) -> str:
        content = "another chat" if saved.get("id") != self.chat.id else "more of this chat"
        return f"{path} holds {content} ({turns(saved['n_turn'])}, saved {saved['saved']})"

    def _open_saved(self) -> tuple[BinaryIO, FileIO | None] | None:
        """Open the session's files if they hold the current state of the chat. Otherwise return None.

        The session may be replaced while the files are open. On POSIX systems, the open files then still have
        the old content. On other systems, the result is None.
        """
        if self.path and self._saved_version == self.chat.version and os.name == "posix":
            with ExitStack() as stack, suppress(OSError):
                # there is an OSError if the user has removed the file
                file = stack.enter_context(self.path.open("rb"))
                archive = self._archive_file.reopen()
                stack.pop_all()
                return file, archive
        return None

    def close(self) -> None:
        self._archive_file.close()

    @cached_property
    def _fixed(self) -> dict[str, Any]:
        # call `fixed_of` only if its result is needed, because it hashes the model, which takes time
        return fixed_of(self.chat.writer.engine, self.run, self.chat.template, hashing_progress)


def open_transcript(path: Path) -> Log:
    """Open a transcript. Raises UsageError if it cannot be written."""
    try:
        return Log(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None


def rereading(path: Path) -> str:
    """Return the options that start a new session with the text of the session at this path."""
    return f"--reread {quote(str(path))} --session NEW.kv"


def turns(n: int) -> str:
    return f"{n or 'no'} turn{'s' * (n != 1)}"
