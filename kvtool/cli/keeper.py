"""What keeps a chat on the disk: its session and its transcript."""

from __future__ import annotations

import os
import re
import time
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

import typer

import kvtool
from kvtool.cli.opening import SAMPLING
from kvtool.cli.progress import bytes_progress
from kvtool.errors import InputError, SessionError

if TYPE_CHECKING:
    from kvtool.chats.conversation import Conversation

_SAVED = (
    *("budget", "options", "evict_every", "positions", "n_ctx", "n_batch", "type_k", "type_v", "flash"),
    *("prefill", *SAMPLING),
)
"""The options that a session stands for where they are not typed."""


class Keeper:
    """Keeps a chat: its session after every turn, where there is a path for one, and its transcript."""

    def __init__(self, context: typer.Context, chat: Conversation, path: Path | None) -> None:
        self.context = context
        self.chat = chat
        self.path = path
        self.transcript: TextIO | None = None
        self.unsaved: SessionError | None = None
        self._is_kept = False
        chat.kept = self._kept

    def save(self, path: Path) -> None:
        """Writes the chat. Raises SessionError."""
        from kvtool.chats import session

        saved, arrays = self.chat.save()
        engine, params = self.chat.writer.engine, self.context.params
        meta = {
            "kvtool": kvtool.__version__,
            "saved": time.strftime("%Y-%m-%d %H:%M:%S"),
            "n_turn": self.chat.n_turn,
            "n_past": engine.n_past,
            "cells": engine.mean_kv,
            "kv_bytes": engine.cache_bytes,
            "fixed": self._fixed,
            "options": {name: params[name] for name in _SAVED}
            | {"model": str(engine.model.path.resolve()), "policy": self._fixed["policy"]},
        }
        session.write(path, meta | saved, arrays)

    def load(self, path: Path) -> None:
        """Goes on with the chat in the file. Raises SessionError, with this chat as it was."""
        from kvtool.chats import session

        meta, arrays = session.read(path)
        for name, value in self._fixed.items():
            if (theirs := meta["fixed"].get(name)) != value:
                raise SessionError(
                    f"{path} has {name.replace('_', ' ')} {_brief(theirs)}, not {_brief(value)}; "
                    "go on as it began, or name another file"
                )
        self.chat.restore(meta, arrays)

    def resume(self, path: Path) -> None:
        """Loads its own session. Raises SessionError where what was typed does not go with it."""
        system, seed = self.chat.system, self.context.params["seed"]
        self.load(path)
        self._is_kept = seed is None
        if system and system != self.chat.system:
            raise SessionError(
                f"{path} has another system prompt; leave --system out, or use /system in the chat"
            )
        if seed is not None:
            self.chat.writer.sampler.seed = seed

    def keep(self) -> None:
        """After a turn. What cannot be written is told by `check`."""
        self.keep_session()
        if self.transcript:
            from kvtool.chats.conversation import transcript

            try:
                self.transcript.write(transcript(self.chat.messages[-2:]))
                self.transcript.flush()
            except OSError as error:
                self.unsaved = SessionError(f"cannot write {self.transcript.name}: {error.strerror}")

    def keep_session(self) -> None:
        """Writes the session, where there is one."""
        self.unsaved = None
        self._is_kept = False
        if self.path:
            try:
                self.save(self.path)
                self._is_kept = True
            except SessionError as error:
                self.unsaved = error

    def _kept(self) -> BinaryIO | None:
        """The session as it is between two turns; open, it outlives the next one's. None: write a copy."""
        # elsewhere an open file cannot be replaced
        return self.path.open("rb") if self.path and self._is_kept and os.name == "posix" else None

    def check(self) -> None:
        """Raises the SessionError of the last turn, if there was one."""
        if self.unsaved:
            raise self.unsaved

    @cached_property
    def _fixed(self) -> dict[str, Any]:
        """What must be the same to go on. Found when it is needed: to hash a large model takes its time."""
        from dataclasses import asdict

        from kvtool import policies
        from kvtool.llama.devices import library_info
        from kvtool.models.download import sha256

        engine, policy = self.chat.writer.engine, self.context.params["policy"]
        path, settings = engine.model.path.resolve(), engine.settings
        with bytes_progress(f"hashing {path.name}", piped=False) as progress:
            digest = sha256(path, progress)
        return {
            "model_sha256": digest,
            "policy": str(Path(policy).resolve()) if policy.endswith(".py") else policy,
            "policy_package": policies.package(policy),
            "parameters": asdict(engine.policy),
            "positions": settings.positions,
            "context": engine.n_ctx,
            "key_type": settings.type_k,
            "value_type": settings.type_v,
            "llama_cpp": library_info()["version"],
        }


def open_transcript(path: Path) -> TextIO:
    """Raises InputError where it cannot be."""
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def _brief(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}={part}" for name, part in value.items())
    text = str(value)
    # a hash
    return text[:12] if re.fullmatch("[0-9a-f]{64}", text) else text
