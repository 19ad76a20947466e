"""A chat through one cache: only new tokens are decoded, whatever the policy has evicted."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from kvtool.chats.marks import tokens_of
from kvtool.chats.prompt import prefix_tokens, system_prefix
from kvtool.chats.template import Message, Template
from kvtool.chats.thinking import Splitter, control_tokens, without_thought
from kvtool.chats.undo import Before, of_turn
from kvtool.chats.undoable import Undoable
from kvtool.chats.writer import Writer
from kvtool.errors import UsageError


def transcript(messages: list[Message]) -> str:
    """A chat as plain text: "> " before what the user said, "# " before a system prompt."""
    start = {"user": "> ", "system": "# "}
    return "".join(f"{start.get(m['role'], '')}{m['content']}\n\n" for m in messages)


class Conversation(Undoable):
    """Turns of one user and the model. A reply that is stopped stays in the chat as far as it went.

    Attributes
    ----------
    n_held
        Tokens of the reply header, which are held in the cache.
    n_opening
        Those of it that open a thought. They are left out with it.
    shown
        Control tokens whose text tells thoughts from what is said.

    The others as in `Undoable`.
    """

    def __init__(
        self, writer: Writer, template: Template, system: str | None = None, *, undoable: bool = False
    ) -> None:
        super().__init__(writer, undoable=undoable)
        self.template = template
        model = writer.engine.model
        # what is said needs them, to be told from thoughts
        self.shown = writer.shown = control_tokens(model, template.tags)
        self.n_held = len(model.tokenize(template.reply_start(), special=True))
        self.n_opening = 0
        if template.drops_thoughts and template.opens_thought:
            self.n_opening = len(model.tokenize(template.opening, special=True))
        self.reset(system)

    @property
    def n_turn(self) -> int:
        """How many messages of the user the chat has."""
        return sum(message["role"] == "user" for message in self.messages)

    def reset(self, system: str | None = None) -> None:
        """Starts another chat with an empty cache under this system prompt. `remember` makes it undoable."""
        self.writer.reset()
        self.version += 1
        self.id = secrets.token_hex(8)
        self._put(system)

    def _put(self, system: str | None) -> None:
        self.system = (system or "").strip() or None
        self.is_pinned = True
        self.messages: list[Message] = []
        if self.system:
            self.messages.append({"role": "system", "content": self.system})

    def pin_system(self) -> None:
        """Pins the system prompt of a new chat, as its first turn will.

        Raises UsageError where the prompt leaves no room in the cache, and ModelError where the template
        does not take it.
        """
        if self.writer.is_new:
            self._start("x")

    def check(self, system: str) -> None:
        """Raises what `pin_system` would raise in a chat under this system prompt; changes nothing."""
        engine, own = self.writer.engine, (self.messages, self.system, self.is_pinned)
        try:
            self._put(system)
            engine.eviction.check_pin(self._first("x")[1])
        finally:
            self.messages, self.system, self.is_pinned = own

    def reply(self, text: str, n_max: int | None = None) -> Iterator[str]:
        """Yields the model's answer piece by piece. Raises as Writer.write, Engine.pin and Template do.

        A turn that is stopped while it is read stays; the rest of it is read first the next time.
        """
        if self.hear(text):
            yield from self.answer(n_max)

    def hear(self, text: str) -> bool:
        """Reads a turn of the user; returns False if stopped before its end. Raises as `reply` does."""
        self.writer.stop = False
        tokens = self._tokens_of_turn(text)
        self.remember(of_turn(text), text)
        self.version += 1
        self.messages.append({"role": "user", "content": text})
        is_read = False
        try:
            is_read = self.take(tokens)
        finally:
            if not is_read:
                self.messages.append({"role": "assistant", "content": ""})
        return is_read

    def take(self, tokens: np.ndarray) -> bool:
        """Reads i32[n] tokens that end with the reply header; returns False if stopped before their end.

        What opens a thought is read by `answer`.
        """
        n = len(tokens) - self.n_opening
        self._opening = tokens[n:]
        return self.writer.read(tokens[:n])

    def open(self, n_pinned: int) -> None:
        """Starts over with an empty cache for a chat whose first n_pinned tokens will stay.

        Raises UsageError for too many.
        """
        self.writer.reset()
        self._pin(n_pinned)

    def follow(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Takes over the messages of a chat that a client keeps; the cache holds their tokens."""
        self.version += 1
        self.messages = [*map(dict, messages)]
        self.n_reply = sum(message["role"] == "assistant" for message in messages)

    def answer(self, n_max: int | None = None) -> Iterator[str]:
        """Yields the reply to the turn that was heard last, piece by piece. Raises as `reply` does.

        Where the template drops the thoughts of earlier replies, so does the cache: it goes back to the start
        of the reply, and reads the reply without its thoughts.
        """
        self.writer.sampler.start(self.n_reply)
        self.n_reply += 1
        said: list[str] = []
        before = self._copy_of_now() if self.template.drops_thoughts else None
        try:
            if self.writer.read(self._opening):
                for piece in self.writer.write(n_max):
                    said.append(piece)
                    yield piece
        finally:
            text = "".join(said)
            # templates with such a header put it there themselves
            content = without_thought(text, self.splitter()) if self.template.tags.plain else text
            self.messages.append({"role": "assistant", "content": content})
            if before:
                with closing(before):
                    self._drop_thought(before, text)

    def splitter(self) -> Splitter:
        """Tells the thought of the next reply from what it says."""
        return Splitter(self.template.tags, is_open=self.template.opens_thought)

    def _drop_thought(self, before: Before, said: str) -> None:
        """Goes back there and reads what was said after the thought, if there was one."""
        splitter = self.splitter()
        spoken = without_thought(said, splitter)
        if not splitter.had_thought:
            return
        messages, sampler = self.messages, self.writer.sampler
        recent, seed = list(sampler.recent), sampler.seed
        try:
            self._go_to(before)
        except UsageError:
            # the reply was longer than the archive: the thought stays
            return
        self.messages = messages
        sampler.resume(recent, seed)
        model, header = self.writer.engine.model, self.template.tags.plain
        self.writer.read(np.concatenate([model.tokenize(header, special=True), model.tokenize(spoken)]))

    def _tokens_of_turn(self, text: str) -> np.ndarray:
        if self.writer.is_new:
            return self._start(text)
        return tokens_of(self.writer.engine.model, self.template.turn(self.messages[:-1], text))

    def _start(self, text: str) -> np.ndarray:
        """The tokens of a first turn; pins the system prompt and holds the reply header."""
        tokens, n = self._first(text)
        self._pin(n)
        return tokens

    def _pin(self, n: int) -> None:
        """Pins the first n tokens and holds the reply header."""
        self.writer.engine.pin(n)
        self.writer.engine.hold(self.n_held)

    def _first(self, text: str) -> tuple[np.ndarray, int]:
        """The tokens of a first turn, and how many of them are the system prompt's."""
        whole = self.template.render([*self.messages, {"role": "user", "content": text}])
        prefix = (system_prefix(self.template, self.system) if self.system else "") or ""
        self.is_pinned = not self.system or (bool(prefix) and whole.startswith(prefix))
        return prefix_tokens(self.writer.engine.model, whole, len(prefix) if self.is_pinned else 0)
