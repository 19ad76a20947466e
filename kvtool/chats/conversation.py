"""A chat through one cache: only new tokens are decoded, whatever the policy has evicted."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any

import numpy as np

from kvtool.chats import session
from kvtool.chats.after_thought import after_thought
from kvtool.chats.archive_file import Listing
from kvtool.chats.effort import Efforts
from kvtool.chats.header import Header
from kvtool.chats.marks import marked, tokens_of
from kvtool.chats.prompt import prefix_tokens, system_prefix
from kvtool.chats.template import Message, Template
from kvtool.chats.thinking import THINK, Splitter, apart, control_tokens, without_thought
from kvtool.chats.undo import UndoPoint, turn_label
from kvtool.chats.undoable import Undoable
from kvtool.chats.writer import Writer
from kvtool.errors import UsageError


def transcript(messages: list[Message]) -> str:
    """A chat as plain text: "> " before what the user said, "# " before a system prompt, thoughts in tags."""
    start = {"user": "> ", "system": "# "}
    return "".join(f"{start.get(m['role'], '')}{_with_thought(m)}\n\n" for m in messages)


def _reply(text: str, template: Template, splitter: Splitter) -> Message:
    """A reply as a message. Its thought is apart if the template has a field for it."""
    if not (template.takes_thoughts or template.tags.plain):
        return {"role": "assistant", "content": text}
    thought, said = apart(text, splitter)
    more = {"reasoning_content": thought} if thought and template.takes_thoughts else {}
    return {"role": "assistant", "content": said, **more}


def _with_thought(message: Message) -> str:
    thought = message.get("reasoning_content", "").strip()
    opening, end, _ = THINK
    return f"{opening}\n{thought}\n{end}\n\n{message['content']}" if thought else message["content"]


class Conversation(Undoable):
    """Turns of one user and the model. A reply that is stopped stays in the chat as far as it went.

    Attributes
    ----------
    template
        The chat template, under the variables for `effort`.
    effort
        How much replies think, as `set_effort` takes it; None: as the template has it by default.
    header
        The reply header. Its tokens are held in the cache; its last part, with which earlier replies do not
        begin, is left out once the reply is written.
    shown
        Control tokens whose text tells thoughts from what is said.
    thought_budget
        Most tokens of a reply's thought: the end tag is then forced. None for no limit.

    The others as in `Undoable`.
    """

    effort: str | None

    def __init__(
        self, writer: Writer, template: Template, system: str | None = None, *, undoable: bool = False
    ) -> None:
        super().__init__(writer, undoable=undoable)
        self.thought_budget: int | None = None
        self.effort = None
        self._before: UndoPoint | None = None
        self._has_header = True
        self._written: list[str] = []
        self.use_template(template)
        # the text of these tokens tells thoughts from the rest of a reply
        self.shown = writer.shown = control_tokens(writer.engine.model, template.tags)
        self.reset(system)

    def use_template(self, template: Template, header: Header | None = None) -> None:
        """Take this template, with this reply header, from the next reply on; the cache stays."""
        self.template = template
        self.header = header or Header.of(self.writer.engine.model, template)

    def hold_header(self) -> None:
        """Hold the reply header in the cache. Raises UsageError for one that leaves no room in it."""
        self.writer.engine.hold(self.header.n - self.header.n_begun)

    def set_effort(self, effort: str | None, budget: int | None = None) -> None:
        """Let replies think so much from now on; None: as the template has it by default.

        budget: as in `thought_budget`. If the template then renders the chat so far differently, the next
        turn reads all of it again: see `rereads`. Raises UsageError, with nothing changed, for an effort that
        the template does not take.
        """
        template, again, before = self._under(effort, budget), self.rereads(effort, budget), self.template
        self.use_template(template)
        try:
            if again:
                self._postpone_past()
            elif self.n_turn:
                self.hold_header()
            elif self.writer.engine.n_held:
                self.pin_system()
        except UsageError:
            # the header leaves no room in the cache
            self.use_template(before)
            raise
        self.effort, self.thought_budget = effort, budget

    @cached_property
    def efforts(self) -> Efforts:
        """The efforts that the template takes."""
        return Efforts.of(self.template)

    def rereads(self, effort: str | None, budget: int | None = None) -> bool:
        """True if the template renders the chat so far differently under these. Raises as `set_effort`."""
        template = self._under(effort, budget)
        return bool(self.n_turn) and self._past(template) != self._past(self.template)

    def _under(self, effort: str | None, budget: int | None) -> Template:
        """Return the template under the variables for these. Raises UsageError."""
        asks = effort is not None or budget is not None
        return self.template.under(self.efforts.exact(effort, budget) if asks else {})

    def _past(self, template: Template) -> str:
        """The text of the chat so far, up to the end of its last reply, as this template renders it."""
        whole = template.render([*self.messages, {"role": "user", "content": "."}])
        turn = template.turn(self.messages[:-1], ".")
        if not whole.endswith(turn):
            raise UsageError("the model's chat template shows the last reply in another form; /reset first")
        return whole.removesuffix(turn)

    def _postpone_past(self) -> None:
        """Empty the cache, and let the next turn read the chat so far first. Raises UsageError."""
        tokens, n = self._with_prefix(self._past(self.template))
        self.writer.engine.eviction.check_pin(n + self.header.n)
        self.writer.postpone(tokens)
        self._pin(n)
        self.version += 1

    def save(self, listed: Listing) -> tuple[session.Meta, Iterator[tuple[str, np.ndarray]]]:
        """As `Undoable.save`, with the effort."""
        meta, arrays = super().save(listed)
        return meta | {"effort": self.effort}, arrays

    def restore(self, meta: session.Meta, arrays: session.Arrays, *, seed: int | None = None) -> None:
        """As `Undoable.restore`, with the effort."""
        super().restore(meta, arrays, seed=seed)
        # sessions of earlier versions have none
        if (effort := meta.get("effort")) != self.effort:
            self.use_template(self._under(effort, self.thought_budget))
            self.effort = effort

    def close(self) -> None:
        """Drops copies and marks."""
        self.finish_reply(None)
        super().close()

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

    def check_system(self, system: str) -> None:
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
        if self.read_turn(text):
            yield from self.answer(n_max)

    def read_turn(self, text: str) -> bool:
        """Reads a turn of the user; returns False if stopped before its end. Raises as `reply` does."""
        self.writer.stop = False
        tokens = self._tokens_of_turn(text)
        self.remember(turn_label(text), text)
        self.version += 1
        self.messages.append({"role": "user", "content": text})
        is_read = False
        try:
            is_read = self.read_prompt(tokens)
        finally:
            if not is_read:
                self.messages.append({"role": "assistant", "content": ""})
        return is_read

    def read_prompt(self, tokens: np.ndarray) -> bool:
        """Reads i32[n] tokens that end with the reply header; returns False if stopped before their end.

        The part of the header that earlier replies do not begin with is read by `write`, as is a beginning
        of the reply.
        """
        self._has_header = self.header.ends(tokens)
        n = len(tokens) - (self.header.n_opening if self._has_header else 0)
        self._opening = tokens[n:]
        return self.writer.read(tokens[:n])

    def start_over(self, n_pinned: int) -> None:
        """Starts over with an empty cache for a chat whose first n_pinned tokens will stay.

        Raises UsageError for too many.
        """
        self.writer.reset()
        self._pin(n_pinned)

    def set_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Takes over the messages of a chat that a client keeps; the cache holds their tokens."""
        self.version += 1
        self.messages = [*map(dict, messages)]
        self.n_reply = sum(message["role"] == "assistant" for message in messages)

    def answer(self, n_max: int | None = None) -> Iterator[str]:
        """Yields the reply to the turn that was heard last, piece by piece. Raises as `reply` does.

        Where the template drops the thoughts of earlier replies, so does the cache: see `finish_reply`.
        """
        template, header = self.template, self.header
        try:
            yield from self.write(n_max, may_change=template.drops_thoughts or header.n_left_out > 0)
        finally:
            splitter = self.splitter()
            before, reply = self.messages, _reply("".join(self._written), template, splitter)
            self.messages = [*before, reply]
            stays = splitter.had_thought and not template.drops_thoughts
            self.finish_reply(None if stays else header.start(template, before, reply))

    def write(self, n_max: int | None, *, may_change: bool) -> Iterator[str]:
        """Yields the reply behind its beginning, piece by piece. Call `finish_reply` behind it.

        may_change: True if `finish_reply` may get a text.
        """
        self.finish_reply(None)
        self._written = [self.header.begun]
        self.start_sampling()
        self.n_reply += 1
        self._before = self._copy_of_now() if may_change and self._has_header else None
        if self.writer.read(self._opening):
            for piece in self.writer.write(n_max):
                self._written.append(piece)
                yield piece

    def start_sampling(self) -> None:
        """Begin the reply's draws. Raises UsageError if its beginning does not fit its constraint."""
        model, begun = self.writer.engine.model, self.header.begun
        header = None if self._has_header else ""
        around = after_thought(model, self.template, self.thought_budget, header, begun)
        self.writer.sampler.start(self.n_reply, around)

    def finish_reply(self, start: str | None) -> None:
        """Make the reply in the cache that which the template shows once it is an earlier one.

        start: the text that the template then has between `header.kept` and the answer, such as a thought;
        None if the reply stays as it was written. If the cache has another text there, it goes back to the
        end of `header.kept` and reads this text and the answer: that is all that a dropped thought costs.
        """
        before, self._before = self._before, None
        if not before:
            return
        with closing(before):
            text = "".join(self._written)
            said = without_thought(text, self.splitter())
            if start is not None and start + said != self.header.left_out + text:
                self._read_again(before, start, said)

    def splitter(self) -> Splitter:
        """Tells the thought of the next reply, beginning included, from what it says."""
        is_open = self.template.opens_thought and self._has_header and not self.header.begun
        return Splitter(self.template.tags, is_open=is_open)

    def _read_again(self, before: UndoPoint, start: str, said: str) -> None:
        """Goes back there and reads these texts."""
        messages, sampler = self.messages, self.writer.sampler
        recent, seed = list(sampler.recent), sampler.seed
        try:
            self._go_to(before)
        except UsageError:
            # the reply was longer than the archive: the thought stays
            return
        self.messages = messages
        sampler.resume(recent, seed)
        text = start + marked(self.template.markers, said)
        self.writer.read(tokens_of(self.writer.engine.model, text))

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
        self.hold_header()

    def _first(self, text: str) -> tuple[np.ndarray, int]:
        """The tokens of a first turn, and how many of them are the system prompt's."""
        return self._with_prefix(self.template.render([*self.messages, {"role": "user", "content": text}]))

    def _with_prefix(self, whole: str) -> tuple[np.ndarray, int]:
        """The tokens of a rendered chat, and how many of them are the system prompt's."""
        prefix = (system_prefix(self.template, self.system) if self.system else "") or ""
        self.is_pinned = not self.system or (bool(prefix) and whole.startswith(prefix))
        return prefix_tokens(self.writer.engine.model, whole, len(prefix) if self.is_pinned else 0)
