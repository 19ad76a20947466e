"""Files of a chat: its session and its transcript."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import kvtool
from kvtool.cli.progress import bytes_progress, restoring_progress
from kvtool.cli.writing import sampling_of
from kvtool.config.generation import GenerationOptions
from kvtool.config.run import RunOptions
from kvtool.errors import SessionError, UsageError
from kvtool.system.files import Log
from kvtool.units import FEW_BITS, PLAIN

if TYPE_CHECKING:
    from io import FileIO

    from kvtool.chats.archive_file import ArchiveFile
    from kvtool.chats.conversation import Conversation
    from kvtool.chats.session import Arrays, Meta
    from kvtool.engine.loop import Engine


class ChatFiles:
    """Session and transcript of a chat.

    The session is replaced when a turn is finished or undone. If it holds turns that the chat lacks, for
    example after a reset, it is set aside first, as FILE.1, FILE.2, ..., so that no chat is lost.

    Attributes
    ----------
    run, generation
        The options that the session keeps. `set` changes how tokens are sampled.
    path
        Path of the session, or None.
    transcript
        Log to which finished turns are appended, or None.
    unsaved
        Error of the last save, or None.
    previous_path
        Name to which the last `keep_session` moved the previous chat, or None.
    moved_archive
        New name of another chat's archive that was in the way of the last save, or None.
    recovered
        Files that were set aside earlier and that the last `keep_session` deleted, because the session has
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
        # the chat in the session file: its version, and the values that `_would_lose` compares
        self._saved_version: int | None = None
        self._saved: Meta | None = None
        self._set_aside: list[Path] = []
        chat.open_saved = self._open_saved

    @property
    def generation(self) -> GenerationOptions:
        """Options of generated text, with the chat's effort of thinking."""
        return self._generation.changed(think=self.chat.effort)

    def resume(self, path: Path) -> None:
        """Continue the chat in a session. Raises SessionError if the given options do not match it."""
        system, seed = self.chat.system, self.generation.seed
        meta, arrays = self.read(path)
        with restoring_progress(self.chat.archive):
            self.chat.resume(meta, arrays)
        self._archive_file.adopt(arrays)
        self._saved_version = self.chat.version if seed is None else None
        self._saved = self._comparable()
        if system and system != self.chat.system:
            raise SessionError(
                f"{path} has another system prompt; leave --system out, or use /system in the chat"
            )
        if seed is not None:
            self.chat.writer.sampler.seed = seed

    def read(self, path: Path) -> tuple[Meta, Arrays]:
        """Read a session that this chat can continue. Raises SessionError for any other file."""
        from kvtool.chats import session

        meta, arrays = session.read(path)
        if differing := _differing(meta["fixed"], self._fixed):
            theirs, ours = (" ".join(parts) for parts in zip(*differing, strict=True))
            raise SessionError(
                f"{path} was started with {theirs}; it cannot continue with {ours}; name another file"
            )
        self._check_archive(path, arrays)
        return meta, arrays

    def set(self, name: str, text: str) -> None:
        """Change one option of how tokens are sampled, from the next text on.

        Raises UsageError or InputError; then nothing changes.
        """
        generation, sampler = self.generation.set(name, text), self.chat.writer.sampler
        sampler.change(sampling_of(generation))
        if generation.seed is not None:
            sampler.seed = generation.seed
        self._generation = generation

    @property
    def has_previous(self) -> bool:
        """True if the session holds turns that the chat lacks."""
        return self._saved is not None and self._would_lose(self._saved)

    def save(self, path: Path, may_replace: Callable[[str], bool] = lambda description: False) -> bool:
        """Write the chat to a file. Return False if the file holds another chat that may not be replaced.

        Raises SessionError for a file that is not a session, is in use, or cannot be written.

        may_replace: called with a description of the other chat; returns True to replace that chat.
        """
        from kvtool.chats import session

        if self._is_own(path):
            self.keep_session()
            self.check()
            return True
        with session.lock(path):
            saved = session.peek(path)
            if saved and self._would_lose(saved) and not may_replace(self._described(path, saved)):
                return False
            self._write(path)
        return True

    def keep(self, *, undone: bool = False) -> None:
        """Save a finished turn in session and transcript. An error is put in `unsaved`."""
        if not self.chat.n_turn:
            return
        self.keep_session(undone=undone, is_new_turn=True)
        if self.transcript:
            from kvtool.chats.conversation import transcript

            try:
                self.transcript.append(transcript(self.chat.messages[-2:]))
            except OSError as error:
                self.unsaved = SessionError(f"cannot write {self.transcript.path}: {error.strerror}")

    def keep_session(self, *, undone: bool = False, is_new_turn: bool = False) -> None:
        """Write the session, if there is a path for it. An error is put in `unsaved`.

        undone: True after an undo. The session may then lose the undone turns. If it holds an earlier chat,
        it is left unchanged, because further undo can lead back to that chat.

        is_new_turn: True after a new turn. The session is then written in any case.
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

    def check(self) -> None:
        """Raise the error of the last save, if there was one."""
        if self.unsaved:
            raise self.unsaved

    def _check_archive(self, path: Path, arrays: Arrays) -> None:
        """Raise SessionError for a session with more archived tokens than this chat's archive can hold."""
        archive = self.chat.writer.engine.context.archive
        if archive and (n := archive.n_saved(arrays)) > archive.n_max:
            raise SessionError(
                f"{path} has {n:,} archived tokens, and this chat's archive takes {archive.n_max:,}; "
                f"start the chat with --archive {n} or more"
            )

    def _replace_own(self, path: Path, undone: bool) -> None:
        from kvtool.chats import session

        aside = None
        is_undone = undone and self._saved is not None and self._saved["id"] == self.chat.id
        if self.has_previous and not is_undone and path.exists():
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
        if aside:
            self._set_aside.append(aside)

    def _holds_earlier_chat(self, path: Path) -> bool:
        """True if the session holds an earlier chat, and not a later one that was undone.

        An earlier chat stays in the session, because further undo can lead back to it.
        """
        is_ours = self._saved is not None and self._saved["id"] == self.chat.id
        return self.has_previous and not is_ours and path.exists() and not any(self._recovered())

    def _recovered(self) -> Iterator[Path]:
        """Yield the files that were set aside and whose turns are all in the chat again."""
        from kvtool.chats import session

        for spare in list(self._set_aside):
            with suppress(OSError, SessionError):
                if not self._would_lose(session.read_meta(spare)):
                    yield spare

    def _drop_recovered(self) -> None:
        """Delete the files that were set aside and whose turns are all in the session again."""
        from kvtool.chats import session

        for spare in self._recovered():
            self._set_aside.remove(spare)
            with suppress(OSError, SessionError):
                session.delete(spare)
                self.recovered.append(spare)

    def _comparable(self) -> Meta:
        """Return the values of the chat that `_would_lose` compares."""
        return {"id": self.chat.id, "n_turn": self.chat.n_turn, "messages": list(self.chat.messages)}

    def _write(self, path: Path) -> None:
        """Write the chat to a session. Raises SessionError."""
        from kvtool.chats import archive_file, session

        is_own = self._is_own(path)
        archive = self._archive_file if is_own else archive_file.ArchiveFile(path, session.archive_id(path))
        try:
            options = self.run.session_values() | self.generation.session_values()
            self.chat.save_to(path, archive, meta_of(self.chat, self._fixed, options))
        except OSError as error:
            raise session.cannot("write", archive_file.archive_path(path), error, path) from None
        finally:
            self.moved_archive = archive.moved
            if not is_own:
                archive.close()

    def _is_own(self, path: Path) -> bool:
        return self.path is not None and os.path.realpath(path) == os.path.realpath(self.path)

    def _would_lose(self, saved: Meta) -> bool:
        """True if a saved chat has turns that this chat lacks."""
        messages = saved["messages"]
        is_ours = saved.get("id") == self.chat.id and messages == self.chat.messages[: len(messages)]
        return saved["n_turn"] > 0 and not is_ours

    def _described(self, path: Path, saved: Meta) -> str:
        content = "another chat" if saved.get("id") != self.chat.id else "more of this chat"
        return f"{path} holds {content} ({turns(saved['n_turn'])}, saved {saved['saved']})"

    def _open_saved(self) -> tuple[BinaryIO, FileIO | None] | None:
        """Open the session's files if they hold the present chat; else return None.

        POSIX only: there an open file stays readable after its session is replaced.
        """
        if self.path and self._saved_version == self.chat.version and os.name == "posix":
            with ExitStack() as stack, suppress(OSError):
                # OSError: the user has removed the file
                file = stack.enter_context(self.path.open("rb"))
                archive = self._archive_file.reopen()
                stack.pop_all()
                return file, archive
        return None

    @cached_property
    def _archive_file(self) -> ArchiveFile:
        """Archive file of the session."""
        from kvtool.chats.archive_file import ArchiveFile

        return ArchiveFile(self.path)

    def close(self) -> None:
        """Close open files."""
        if "_archive_file" in vars(self):
            self._archive_file.close()

    @cached_property
    def _fixed(self) -> dict[str, Any]:
        # computed when needed: hashing a large model takes time
        return fixed_of(self.chat.writer.engine, self.run.policy)


def meta_of(chat: Conversation, fixed: dict[str, Any], kept: Mapping[str, Any]) -> Meta:
    """Return the values for a chat's session that `Conversation.save` does not return.

    kept: options that the session keeps.
    """
    engine = chat.writer.engine
    return {
        "kvtool": kvtool.__version__,
        "saved": time.strftime("%Y-%m-%d %H:%M:%S"),
        "n_turn": chat.n_turn,
        "n_past": engine.n_past,
        "cells": engine.mean_kv,
        "kv_bytes": engine.cache_bytes,
        "archived": engine.n_archived,
        "archive_bytes": engine.archive_bytes,
        "fixed": fixed,
        "options": {**kept, "model": os.path.abspath(engine.model.path), "policy": fixed["policy"]},
    }


def fixed_of(engine: Engine, policy: str) -> dict[str, Any]:
    """Return the values that may not change when a chat is continued. policy: as the user typed it."""
    from dataclasses import asdict

    from kvtool import policies
    from kvtool.llama.devices import library_info
    from kvtool.models.download import sha256

    path, settings, free = engine.model.path, engine.settings, engine.policy.adjustable
    with bytes_progress(f"hashing {path.name}", piped=False) as progress:
        digest = sha256(path, progress)
    lora = [f"{sha256(its.path)}:{its.scale!r}" for its in engine.model.adapters]
    return {
        "model_sha256": digest,
        "policy": str(Path(policy).resolve()) if policy.endswith(".py") else policy,
        "policy_package": policies.package(policy),
        "parameters": {name: value for name, value in asdict(engine.policy).items() if name not in free},
        "positions": settings.positions,
        "context": engine.n_ctx,
        "key_type": settings.type_k,
        "value_type": settings.type_v,
        "llama_cpp": library_info()["version"],
        **({"archive_type": _stored_type(settings.archive_type)} if engine.policy.recall else {}),
        **({"lora": lora} if lora else {}),
    }


def _stored_type(name: str) -> str:
    """Return a session's name of an archive type: "rotated q4_1", or "q4_1" if unrotated (old versions)."""
    return f"{_ROTATED}{name}" if name in FEW_BITS else name.removeprefix(PLAIN)


def resumed(run: RunOptions, saved: Meta) -> RunOptions:
    """Return the options of a chat that continues a session. Raises UsageError.

    The session's policy counts as given by the user. A session of an old kvtool may have parameters that the
    policy no longer has: these and the adjustable parameters are then left out, unless the user typed -o.
    """
    from kvtool import policies

    is_typed, run = "options" in run.typed, run.resumed(saved["options"])
    kind, parameters = policies.load(run.policy), saved["fixed"]["parameters"]
    if run.budget is None and kind.recalls():
        # earlier versions had another default budget: keep the session's
        run = replace(run, budget=str(parameters["budget"]))
    stored = saved["fixed"].get("archive_type")
    run = replace(run, is_plain=stored == run.archive_type and stored in FEW_BITS)
    if not is_typed and parameters.keys() - {"budget", "slack", *policies.params(kind)}:
        stay = policies.params(kind).keys() - set(kind.adjustable)
        run = replace(run, options=tuple(o for o in run.options if o.partition("=")[0] in stay))
    return run.changed(policy=run.policy)


def open_transcript(path: Path) -> Log:
    """Open a transcript. Raises UsageError if it cannot be written."""
    try:
        return Log(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {path}: {getattr(error, 'strerror', None) or error}") from None


def moved_line(spare: Path) -> str:
    """Return the message about another chat's archive that was moved. spare: its new name, FILE.1.archive."""
    name = spare.with_suffix("").stem + spare.suffix
    return f"{name} belonged to another chat; it is now {spare.name}"


def turns(n: int) -> str:
    """Return a number of turns as text."""
    return f"{n or 'no'} turn{'s' * (n != 1)}"


_ROTATED = "rotated "
"""Prefix of a session's archive type whose numbers are multiplied by a Hadamard matrix."""

_FLAGS = {
    "model_sha256": "the model of SHA-256 {:.12}",
    "lora": "--lora {}",
    "policy": "--policy {}",
    "policy_package": "a policy of the package {}",
    "budget": "--budget {}",
    "slack": "--evict-every {}",
    "positions": "--positions {}",
    "context": "--ctx-size {}",
    "key_type": "--cache-type-k {}",
    "archive_type": "--archive-type {}",
    "value_type": "--cache-type-v {}",
    "llama_cpp": "llama.cpp {}",
}
"""Options that set the values of `fixed_of`; parameters of a policy are -o name=value."""


def _differing(theirs: dict[str, Any], ours: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the differing options of two chats, as pairs (theirs, ours).

    If the model, the policy or the budget differs, only its pair is returned.
    """
    theirs, ours = (each["parameters"] | each for each in (theirs, ours))
    # a chat without adapters has no value for them
    every = dict.fromkeys([*ours, "lora"])
    names = [name for name in every if name != "parameters" and theirs.get(name) != ours.get(name)]
    first = [name for name in ("model_sha256", "lora", "policy", "budget") if name in names][:1]
    return [(_typed(name, theirs.get(name)), _typed(name, ours.get(name))) for name in first or names]


def _typed(name: str, value: object) -> str:
    text = "nothing" if value is None else str(value).removeprefix(_ROTATED)
    if isinstance(value, list):
        # the SHA-256 of each adapter, in short, and its scale
        text = ", ".join(f"{its[:12]}{its[64:]}" for its in value)
    return _FLAGS.get(name, f"-o {name}={{}}").format(text)
