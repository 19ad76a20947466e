"""What keeps a chat on the disk: its session and its transcript."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TextIO

import typer

from kvtool.errors import InputError, SessionError

SAMPLING = ("temp", "top_k", "top_p", "min_p", "repeat_penalty")
"""The sampler's options; the seed goes its own way."""


class Keeper:
    """Keeps a chat: its session after every turn, where there is one, and its transcript."""

    def __init__(self, context: typer.Context, chat, opened, path: Path | None) -> None:
        self.context = context
        self.chat = chat
        self.opened = opened
        self.path = path
        self.transcript: TextIO | None = None
        self.unsaved: SessionError | None = None

    @cached_property
    def session(self):
        """Made when it is needed: the hash of a large model takes its time."""
        from dataclasses import asdict

        from kvtool import models
        from kvtool.cli.models import bytes_progress
        from kvtool.llama import library_info
        from kvtool.session import Session

        engine, params = self.opened.engine, self.context.params
        path, settings = engine.model.path.resolve(), engine.settings
        with bytes_progress(f"hashing {path.name}", piped=False) as progress:
            digest = models.sha256(path, progress)
        policy = params["policy"]
        policy = str(Path(policy).resolve()) if policy.endswith(".py") else policy
        fixed = {
            "model_sha256": digest,
            "policy": policy,
            "parameters": asdict(engine.policy),
            "positions": settings.positions,
            "context": engine.n_ctx,
            "key_type": settings.type_k,
            "value_type": settings.type_v,
            "llama_cpp": library_info()["version"],
        }
        names = ("budget", "options", "evict_every", "positions", "n_ctx", "n_batch", "type_k", "type_v")
        names += ("flash", "prefill", *SAMPLING)
        options = {name: params[name] for name in names} | {"model": str(path), "policy": policy}
        return Session(self.path, fixed, options)

    def resume(self) -> None:
        """Raises SessionError where what was typed does not go with what was saved."""
        system = self.chat.system
        self.session.resume(self.chat)
        if system and system != self.chat.system:
            raise SessionError(
                f"{self.path} has another system prompt; leave --system out, or use /system in the chat"
            )
        seed = self.context.params["seed"]
        if seed is not None:
            self.chat.writer.sampler.seed = seed

    def keep(self) -> None:
        """After a turn. What cannot be written is told by `check`."""
        self.keep_session()
        if self.transcript:
            from kvtool.conversation import transcript

            try:
                self.transcript.write(transcript(self.chat.messages[-2:]))
                self.transcript.flush()
            except OSError as error:
                self.unsaved = SessionError(f"cannot write {self.transcript.name}: {error.strerror}")

    def keep_session(self) -> None:
        """Writes the session, where there is one."""
        self.unsaved = None
        if self.path:
            try:
                self.session.save(self.chat)
            except SessionError as error:
                self.unsaved = error

    def check(self) -> None:
        """Raises the SessionError of the last turn, if there was one."""
        if self.unsaved:
            raise self.unsaved


def open_transcript(path: Path) -> TextIO:
    try:
        return path.open("a", encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None
