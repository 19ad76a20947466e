"""A chat through one cache: only new tokens are decoded, whatever the policy has evicted."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from io import FileIO
from itertools import chain
from typing import Any, BinaryIO

import numpy as np

from kvtool.chats import session
from kvtool.chats.prompt import prefix_tokens, system_prefix
from kvtool.chats.segments import Listing, Store
from kvtool.chats.template import Message, Template
from kvtool.chats.thinking import Splitter, control_tokens, without_thought
from kvtool.chats.undo import Before, Copies, Copy, Mark
from kvtool.chats.writer import Writer
from kvtool.errors import UsageError
from kvtool.llama.archive import Archive
from kvtool.system.files import temporary


def transcript(messages: list[Message]) -> str:
    """A chat as plain text: "> " before what the user said, "# " before a system prompt."""
    start = {"user": "> ", "system": "# "}
    return "".join(f"{start.get(m['role'], '')}{m['content']}\n\n" for m in messages)


class Conversation:
    """Turns of one user and the model. A reply that is stopped stays in the chat as far as it went.

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
        Whether `reply` marks or copies the chat first, so that `undo` can take the turn back.
    copies
        Those marks and copies.
    n_held
        Tokens of the reply header, which are held in the cache.
    n_opening
        Those of it that open a thought. They are left out with it.
    shown
        Control tokens whose text tells thoughts from what is said.
    kept
        Opens the files that hold the chat as it is now, or returns None. It saves writing a copy.
    """

    def __init__(
        self, writer: Writer, template: Template, system: str | None = None, *, undoable: bool = False
    ) -> None:
        self.writer = writer
        self.template = template
        self.undoable = undoable
        self.copies = Copies()
        self.kept: Callable[[], tuple[BinaryIO, FileIO | None] | None] = lambda: None
        # where copies have their archive, if not in the session's
        self._store = Store()
        self.n_reply = self.version = 0
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
        self.remember(f'the turn "{_brief(text)}"', text)
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

    def _copy_of_now(self) -> Before | None:
        if self.goes_back:
            return self._mark("")
        try:
            return Copy("", *self._copy())
        except OSError:
            # without room the thought stays
            return None

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

    @property
    def archive(self) -> Archive | None:
        """What its policy has archived; `save` leaves that out."""
        return self.writer.engine.context.archive

    def save(self, listed: Listing) -> tuple[session.Meta, Iterator[tuple[str, np.ndarray]]]:
        """The whole chat: what JSON can hold, and arrays, one at a time. listed: as `Store.put` yields it."""
        arrays = chain([("tokens", self.writer.tokens)], self.writer.engine.save(archived=False), listed)
        return {
            "id": self.id,
            "system": self.system,
            "messages": self.messages,
            "n_reply": self.n_reply,
            "writer": self.writer.save(),
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

    @property
    def goes_back(self) -> bool:
        """Whether the cache itself can go back in the chat. A full archive forgets what it would need."""
        archive = self.archive
        return archive is not None and archive.n < archive.n_max and self.writer.engine.goes_back

    def _mark(self, change: str, turn: str | None = None) -> Mark:
        n = self.writer.engine.n_past, len(self.messages), self.n_reply
        return Mark(change, *n, self.writer.save(), turn)

    def _go_to(self, before: Before) -> None:
        """Makes the chat what it was. Raises SessionError for a damaged copy, and UsageError; then it stays."""
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
        if not self.undoable:
            return False
        if turn is not None and self.goes_back:
            self.copies.push(self._mark(change, turn))
            return True
        while True:
            try:
                self.copies.push(Copy(change, *(self.kept() or self._copy()), turn))
            except OSError:
                # copies without a gap, or none
                if not len(self.copies):
                    self._store.close()
                    return False
                self.copies.drop_oldest()
            else:
                return True

    def undo(self) -> str | None:
        """Takes the last change back; returns what it was, or None if there is no copy and no mark.

        Raises SessionError for a damaged copy, which is then dropped; nothing else changes. Raises UsageError
        likewise where the archive has forgotten what a mark needs.
        """
        return self._take_back().change if len(self.copies) else None

    def take_back(self) -> str | None:
        """Takes the last turn back, if that is the last change; returns what the user said, or None.

        Raises as `undo` does.
        """
        return self._take_back().turn if self.copies.newest_turn is not None else None

    def _take_back(self) -> Before:
        with closing(self.copies.pop()) as before:
            n_reply = self.n_reply
            self._go_to(before)
        self.n_reply = max(n_reply, self.n_reply)
        return before

    def close(self) -> None:
        """Drops copies and marks."""
        self.copies.close()
        self._store.close()

    def _copy(self) -> tuple[BinaryIO, FileIO | None]:
        with ExitStack() as stack:
            file = stack.enter_context(temporary())
            with self._store.put(self.archive) as listed:
                session.dump(file, *self.save(listed))
                file.flush()
            archive = self._store.share()
            stack.pop_all()
            return file, archive

    def _tokens_of_turn(self, text: str) -> np.ndarray:
        if self.writer.is_new:
            return self._start(text)
        return self.writer.engine.model.tokenize(self.template.turn(self.messages[:-1], text), special=True)

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


def _brief(text: str) -> str:
    """The first words of a text, on one line."""
    words = " ".join(text.split())
    return words if len(words) <= 40 else words[:39] + "\u2026"
