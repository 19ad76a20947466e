"""A chat in one cache: each turn decodes only its new tokens, and the last changes can be undone."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from functools import cached_property
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kvtool.chats import session
from kvtool.chats.after_thought import after_thought
from kvtool.chats.archive_file import ArchiveFile, Listing
from kvtool.chats.effort import Efforts
from kvtool.chats.header import Header
from kvtool.chats.prompt import prefix_tokens, system_prefix
from kvtool.chats.reply import Reply, message_of
from kvtool.chats.shields import shielded, tokens_of
from kvtool.chats.template import Message, Template
from kvtool.chats.thinking import THINK, Splitter, apart, control_tokens, without_thought
from kvtool.chats.undo import Copy, LastTurn, TurnEnd, UndoPoint, UndoStack, turn_label
from kvtool.chats.writer import Writer, checked_limit, n_equal
from kvtool.errors import SessionError, UsageError
from kvtool.llama.cache.archive import Archive
from kvtool.system.files import temporary
from kvtool.system.interrupt import delayed


def transcript(messages: Sequence[Message]) -> str:
    """Return a chat as plain text, with thoughts in tags.

    Each line of the user's messages begins with "> ", and each line of system prompts with "# ".
    """
    start = {"user": "> ", "system": "# "}

    def lines(message: Message) -> Iterator[str]:
        return (start.get(message["role"], "") + line for line in _with_thought(message).split("\n"))

    return "".join("\n".join(lines(message)) + "\n\n" for message in messages)


def _with_own_thought(message: Message) -> Message:
    """Return a message with its thought in a separate field, also if its own template reads no such field."""
    text = message["content"]
    splitter = Splitter.of_earlier(THINK, text)
    thought, answer = apart(text, splitter)
    is_thoughtful = message["role"] == "assistant" and splitter.had_thought
    return {**message, "content": answer, "reasoning_content": thought} if is_thoughtful else message


def _with_thought(message: Message) -> str:
    thought = message.get("reasoning_content", "").strip()
    return f"{THINK.start}\n{thought}\n{THINK.end}\n\n{message['content']}" if thought else message["content"]


class Conversation:
    """Turns of one user and the model. A stopped reply stays in the chat up to where it was stopped.

    Attributes
    ----------
    id
        Identifier of the chat; `reset` starts another chat with another id.
    version
        Number that increases with every change of the chat.
    first_version
        `version` when this chat began, was reset or was loaded. Undoing a reset or a load restores the number
        from before. A chat that is loaded again keeps its `id`, but has another `first_version`.
    system
        System prompt, which is never evicted.
    is_pinned
        False if the system prompt cannot be pinned, because the template omits, cuts or moves it. The value
        is known after `pin_system` or the first turn.
    messages
        Messages so far, in the form that templates take.
    n_reply
        Number of replies started. Undone replies stay counted, so that a second attempt samples other tokens.
    undoable
        True if `remember` may write copies of the chat for `undo`.
    open_saved
        Function that opens and returns the session file and the archive file. If these files do not hold the
        present chat, it returns None, and `remember` has to write a copy.
    template
        Chat template, with the variables for `effort`.
    effort
        How much replies think. None for the template's default.
    header
        Reply header. Its tokens are not evicted while they are the newest tokens. The part that the template
        omits from earlier replies is removed from the cache once the reply is finished.
    shown
        Control tokens that `write` yields as text, because they delimit thoughts.
    thought_budget
        Maximum tokens of a reply's thought, after which the end tag is forced. None for no limit.
    call_replaces_answer
        True if a tool call may take the place of the answer: see `AfterThought`.
    call_opening
        Text with which tool calls begin. "" if there are no tools.
    """

    id: str
    system: str | None
    is_pinned: bool
    messages: list[Message]

    def __init__(
        self, writer: Writer, template: Template, system: str | None = None, *, undoable: bool = False
    ) -> None:
        self.writer = writer
        self.undoable = undoable
        self.undo_stack = UndoStack()
        self.open_saved: Callable[[], tuple[BinaryIO, FileIO | None] | None] = lambda: None
        # holds archived tokens and checkpoints for the copies that `_files` makes
        self._archive_file = ArchiveFile()
        self.n_reply = self.version = 0
        self.thought_budget: int | None = None
        self.call_replaces_answer, self.call_opening = False, ""
        self.effort: str | None = None
        self._reply = Reply()
        # `version` after the last change of the effort that made the next turn read the chat again, and the
        # position before the last turn of that chat
        self._reread: tuple[int, TurnEnd | None] = -1, None
        self.use_template(template)
        self.shown = writer.shown = control_tokens(writer.engine.model, template.tags)
        self.reset(system)

    # template and effort

    def use_template(self, template: Template, header: Header | None = None) -> None:
        """Use another template from the next reply on, leaving the cache unchanged.

        header: reply header of the template; None to read it from the template.
        """
        self.template = template
        self.header = header or Header.of(self.writer.engine.model, template)

    def hold_header(self) -> None:
        """Protect the `Header.n_held` newest tokens from eviction.

        Raises UsageError if these tokens and the pinned tokens would fill the cache.
        """
        self.writer.engine.hold(self.header.n_held)

    def set_effort(self, effort: str | None, budget: int | None = None) -> None:
        """Set `effort` and `thought_budget` from now on.

        The template may render the chat so far differently with this effort or budget. Then the next turn
        reads the whole chat again: see `rereads`. Raises UsageError, leaving everything unchanged, if the
        template does not take the effort.
        """
        template, again, before = self._under(effort, budget), self.rereads(effort, budget), self.template
        self.use_template(template)
        try:
            if again:
                self._reread_last_turn()
            elif self.n_turn:
                self.hold_header()
            elif self.writer.engine.n_held:
                self.pin_system()
        except UsageError:
            # the header leaves no room in the cache
            self.use_template(before)
            raise
        if (effort, budget) != (self.effort, self.thought_budget):
            self.effort, self.thought_budget = effort, budget
            if not again:
                self.version += 1

    @cached_property
    def efforts(self) -> Efforts:
        return Efforts.of(self.template)

    def rereads(self, effort: str | None, budget: int | None = None) -> bool:
        """True if this effort or budget changes how the chat so far is rendered. Raises UsageError."""
        template = self._under(effort, budget)
        return bool(self.n_turn) and self._past(template) != self._past(self.template)

    def _under(self, effort: str | None, budget: int | None) -> Template:
        asks = effort is not None or budget is not None
        return self.template.under(self.efforts.exact(effort, budget) if asks else {})

    def _past(self, template: Template, n: int | None = None) -> str:
        """Text of the chat up to the end of its last reply, rendered by a template. Raises UsageError.

        n: number of messages, of which the last must be a reply; None for all messages.
        """
        messages = self.messages[:n]
        whole = template.render([*messages, {"role": "user", "content": "."}])
        turn = template.turn(messages[:-1], ".")
        if not whole.endswith(turn):
            raise UsageError("the model's chat template shows the last reply in another form; /reset first")
        return whole.removesuffix(turn)

    def _reread_last_turn(self) -> None:
        """Call `_postpone_past`, and remember where the last turn begins, so that it can be replaced."""
        unfinished = self.writer.unfinished
        self._postpone_past()
        self.writer.unfinished = unfinished
        self._reread = self.version, self._before_last_turn()

    @delayed
    def _postpone_past(self) -> None:
        """Empty the cache; the next turn then reads the whole chat first. Raises UsageError.

        Drops the ends of turns, because turns end at other tokens now.
        """
        tokens, n = self._with_prefix(self._past(self.template))
        self.writer.engine.cache.check_pin(n + self.header.n)
        self.writer.postpone(tokens)
        self._pin(n)
        self.undo_stack.drop_turn_ends()
        self.version += 1

    # the start of a chat

    @delayed
    def reset(self, system: str | None = None) -> None:
        """Start another chat with an empty cache. To make this undoable, call `remember` first."""
        self.writer.reset()
        self.version += 1
        self.first_version = self.version
        self.id = secrets.token_hex(8)
        self._set_system(system)

    def _set_system(self, system: str | None) -> None:
        self.system = (system or "").strip() or None
        self.is_pinned = True
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def pin_system(self) -> None:
        """Pin the system prompt of a new chat before its first turn.

        Raises UsageError if the prompt leaves no room in the cache, and ModelError if the template does not
        take the prompt.
        """
        if self.writer.is_new:
            self._start("x")

    def check_system(self, system: str) -> None:
        """Raise the errors that `pin_system` would raise with this system prompt, but change nothing."""
        saved = self.messages, self.system, self.is_pinned
        try:
            self._set_system(system)
            self.writer.engine.cache.check_pin(self._first("x")[1])
        finally:
            self.messages, self.system, self.is_pinned = saved

    def start_over(self, n_pinned: int) -> None:
        """Empty the cache, and pin the next n_pinned tokens. Raises UsageError if these are too many."""
        self.writer.reset()
        self._pin(n_pinned)

    def set_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Take over a client's messages. Their tokens must be in the cache already."""
        self.version += 1
        self.messages = [*map(dict, messages)]
        first = self.messages[0] if self.messages else {}
        self.system = (first.get("role") == "system" and first["content"]) or None
        # the penalties count these replies, not the tokens that the sampler has sampled
        replies = [message["content"] for message in self.messages if message["role"] == "assistant"]
        self.writer.sampler.remember(replies)
        self.n_reply = len(replies)

    def reread(self, messages: Sequence[Message], system: str | None = None) -> None:
        """Start with the messages of another chat, which another model may have written.

        `Writer.read` or the next turn reads their text. Thoughts stay in the messages, and the template
        decides if they are read. Raises UsageError if the system prompt leaves no room in the cache, and
        ModelError if the template does not take the messages.

        system: system prompt, or "" for none; None for that of the messages.
        """
        first, rest = list(messages[:1]), messages[1:]
        if not first or first[0]["role"] != "system":
            first, rest = [], messages
        self._set_system("".join(each["content"] for each in first) if system is None else system)
        self.set_messages([*self.messages, *map(_with_own_thought, rest)])
        if self.n_turn:
            self._postpone_past()
            if before := self._before_last_turn():
                self.undo_stack.push(before)

    def _before_last_turn(self) -> TurnEnd | None:
        """Return the position before the last turn of a postponed chat.

        Returns None if the tokens before the turn cannot be told from the tokens of the turn.
        """
        n_message = max(n for n, message in enumerate(self.messages) if message["role"] == "user")
        tokens, n_reply = np.empty(0, np.int32), 0
        if self.n_turn > 1:
            n_reply = sum(message["role"] == "assistant" for message in self.messages[:n_message])
            try:
                tokens = self._with_prefix(self._past(self.template, n_message))[0]
            except UsageError:
                return None
        if not np.array_equal(tokens, self.writer.unread[: len(tokens)]):
            return None
        saved = {**self.writer.save(), "unread": [], "unfinished": None}
        return TurnEnd(len(tokens), n_message, n_reply, saved)

    # turns

    @property
    def n_turn(self) -> int:
        """Number of the user's messages."""
        return sum(message["role"] == "user" for message in self.messages)

    def reply(self, text: str, n_max: int | None = None) -> Generator[str, None, None]:
        """Yield the model's answer piece by piece.

        If the user stops the reading of a turn, the turn stays in the chat. The next turn then begins by
        reading the tokens that were not read. Raises KvtoolError.
        """
        n_max = checked_limit(n_max)
        if self.read_turn(text):
            yield from self.answer(n_max)

    def unfinished_reply(self) -> str:
        """Return the last reply as the beginning of its continuation. Raises UsageError if it has ended."""
        text, start = self.writer.unfinished, self.template.tags.start
        if text is None:
            raise UsageError(
                "/continue needs a reply that you stopped or that reached its limit (-n); /retry writes "
                "another one"
            )
        # the last character may be incomplete. If only a part of a tag was written, begin again
        return "" if start.startswith(text.lstrip()) else text.removesuffix("\ufffd")

    def read_turn(self, text: str, replaced: LastTurn | None = None, begun: str = "") -> bool:
        """Read a turn of the user. Return False if reading was stopped.

        replaced: result of `last_turn` if this turn replaces the last turn. `put_back` restores the last
        turn, also after an error.
        begun: result of `unfinished_reply` if `answer` is to continue the last reply. `replaced` is then
        needed. If the cache has this reply as the model wrote it, nothing is read.
        """
        self.writer.stop = False
        before = replaced.before if replaced else None
        if before:
            self.messages = self.messages[: before.n_message]
        header = self.header.with_begun(self.writer.engine.model, self.template, begun)
        if begun and self._reply.version == self.version and not self._reply.text.endswith("\ufffd"):
            self._begin_reply(header)
            self.version += 1
            self.messages.append({"role": "user", "content": text})
            self._reply = self._reply.resumed(begun)
            return True
        tokens = self._tokens_of_turn(text, before, header)
        if begun:
            self._begin_reply(header)
        recent = list(self.writer.sampler.recent)
        start = before or self.turn_end()
        is_read = False
        try:
            with delayed:
                if start is not self.undo_stack.newest:
                    # Push it even if `undoable` is False. The session saves it, so that a later process can
                    # undo the turn
                    self.undo_stack.push(start)
                self.version += 1
                self.messages.append({"role": "user", "content": text})
                is_whole = self.read_prompt(tokens, before)
                if begun:
                    # the penalties also count the beginning
                    self.writer.sampler.resume(recent, self.writer.sampler.seed)
            # not after Ctrl-C, which is raised at the end of the block
            is_read = is_whole
        finally:
            if not is_read:
                self.messages.append({"role": "assistant", "content": ""})
                self.writer.unfinished = ""
        return is_read

    def _begin_reply(self, header: Header) -> None:
        """Use a header with a given beginning for the next reply. Raises UsageError: see `start_sampling`."""
        self.header = header
        self.start_sampling()

    def read_prompt(self, tokens: np.ndarray, before: TurnEnd | None = None) -> bool:
        """Read i32[n] tokens that end with the reply header. Return False if reading was stopped.

        The tokens after `header.kept` are not read here. `write` reads them: the lead, and the given
        beginning of the reply.

        before: position to go back to first; None to read the tokens at the present end of the chat.
        """
        self.writer.unfinished = None
        has_header = self.header.ends(tokens)
        n = len(tokens) - (self.header.n_lead if has_header else 0)
        self._reply = Reply(tokens[n:], has_header, self.header.begun)
        n_cached = self._rewind_for(tokens[:n], before) if before else 0
        return self.writer.read(tokens[n_cached:n])

    def answer(self, n_max: int | None = None) -> Generator[str, None, None]:
        """Yield the reply to the turn that was read last, piece by piece. It ends with `finish_reply`."""
        template, header = self.template, self.header
        try:
            before_text = without_thought(header.begun, self.splitter())
            may_change = template.drops_thoughts or header.n_left_out > 0
            # also if Ctrl-C stops the reading of the lead
            self.writer.unfinished = header.begun
            yield from self.write(n_max, may_change=may_change, before=before_text)
        finally:
            splitter, text = self.splitter(), self._reply.text
            unfinished = None if self.writer.unfinished is None else self.opening + text
            before, reply = self.messages, message_of(text, template, splitter, self.opening)
            self.messages = [*before, reply]
            stays = splitter.had_thought and not template.drops_thoughts
            # some models write control tokens after the answer, which must not stay
            stays = stays and text.endswith(without_thought(text, self.splitter()))
            self._reply.version = self.version
            self.finish_reply(None if stays else header.lead_of(template, before, reply))
            self.writer.unfinished = unfinished
            if header.begun:
                self.use_template(template)

    def write(self, n_max: int | None, *, may_change: bool, before: str = "") -> Generator[str, None, None]:
        """Yield the reply piece by piece. Its given beginning is not yielded.

        The caller must call `finish_reply` afterwards.

        may_change: True to let `finish_reply` change the reply in the cache. If False, or if the engine
        cannot be rewound, `finish_reply` leaves the reply unchanged.
        before: see `Stops`.
        """
        reply = self._reply
        self.start_sampling()
        self.n_reply += 1
        # leave the reply unchanged if the engine cannot be rewound: a change would require reading the whole
        # chat again
        can_change = may_change and reply.has_header and self.writer.engine.can_rewind
        if can_change and not reply.is_resumed:
            reply.before = self.turn_end()
        if self.writer.read(reply.lead):
            for piece in self.writer.write(n_max, self.splitter_after_begun(), before):
                reply.pieces.append(piece)
                yield piece

    @property
    def written(self) -> str:
        """The last reply without its stop string, and without its given beginning."""
        return "".join(self._reply.pieces)

    @property
    def has_written(self) -> bool:
        """True if the last reply has text, in its thought or its answer."""
        return bool(self._reply.text)

    def start_sampling(self) -> None:
        """Prepare the sampler.

        Raises UsageError if the given beginning of the reply violates the constraint.
        """
        model, begun = self.writer.engine.model, self.header.begun
        header = None if self._reply.has_header else ""
        around = after_thought(
            model,
            self.template,
            self.thought_budget,
            header,
            begun,
            call_replaces_answer=self.call_replaces_answer,
            call_opening=self.call_opening,
        )
        self.writer.sampler.start(self.n_reply, around)

    def finish_reply(self, lead: str | None) -> None:
        """Replace the reply in the cache by the form in which the template renders earlier replies.

        lead: lead of the reply in this form: see `Header`. None to leave the reply unchanged.

        If the reply in the cache already has this form, nothing is read. Otherwise the cache is rewound to
        the end of `header.kept`, and only `lead` and the answer are read.
        """
        before, text = self._reply.before, self._reply.text
        answer = without_thought(text, self.splitter())
        if before and lead is not None and lead + answer != self.header.lead + text:
            self._read_again(before, lead, answer)

    def splitter(self) -> Splitter:
        """Return a splitter that divides the next reply into thought and answer.

        Feed the given beginning of the reply to it first: see `splitter_after_begun`.
        """
        return Splitter(self.template.tags, is_open=bool(self.opening), call_opening=self.call_opening)

    def splitter_after_begun(self) -> Splitter:
        """Return a splitter for the part of the next reply after its given beginning."""
        begun = self.header.begun
        return self.splitter().after(begun) if begun else self.splitter()

    @property
    def opening(self) -> str:
        """Text with which the header of the next reply opens a thought. "" if it opens none."""
        return self.template.opening if self._reply.has_header and not self.header.begun else ""

    def splitter_of(self, content: str) -> Splitter:
        """Return a splitter that divides the content of an earlier reply into thought and answer."""
        template, tags = self.template, self.template.tags
        # `_reply` has removed the thought from the content, or the model writes no thoughts
        is_answer = template.takes_thoughts or tags.plain or not template.has_thoughts
        return Splitter(tags) if is_answer else Splitter.of_earlier(tags, content)

    @delayed
    def _read_again(self, before: TurnEnd, lead: str, answer: str) -> None:
        """Rewind the cache to `before`, and read `lead` and `answer`. Keep the messages and the sampler."""
        sampler = self.writer.sampler
        recent, seed = list(sampler.recent), sampler.seed
        if not self.writer.rewind(before.n_past, before.writer):
            # the archive has forgotten tokens that rewinding needs, so the thought stays in the cache
            return
        self.version += 1
        sampler.resume(recent, seed)
        text = lead + shielded(self.template.markers, answer)
        self.writer.read(tokens_of(self.writer.engine.model, text))

    def _tokens_of_turn(self, text: str, before: TurnEnd | None, header: Header) -> np.ndarray:
        """Return the tokens of a turn and its header.

        before: position before the turn that it replaces, or None.
        """
        if self.writer.is_new if before is None else before.n_token == 0:
            return self._start(text, before, header)
        turn = header.begin(self.template, self.template.turn(self.messages[:-1], text))
        return tokens_of(self.writer.engine.model, turn)

    def _start(self, text: str, before: TurnEnd | None = None, header: Header | None = None) -> np.ndarray:
        """Return the tokens of a first turn. Pins the system prompt, and calls `hold_header`."""
        tokens, n = self._first(text, header)
        engine = self.writer.engine
        if before and engine.policy.pinnable(n) != engine.n_pinned:
            # templates may omit the system prompt before some texts; an archive takes no change of the pins
            self._rewind_for(tokens[:0], before)
        self._pin(n)
        return tokens

    def _pin(self, n: int) -> None:
        self.writer.engine.pin(n)
        self.hold_header()

    def _first(self, text: str, header: Header | None = None) -> tuple[np.ndarray, int]:
        whole = self.template.render([*self.messages, {"role": "user", "content": text}])
        return self._with_prefix((header or self.header).begin(self.template, whole))

    def _with_prefix(self, whole: str) -> tuple[np.ndarray, int]:
        """Return the tokens of a rendered chat, and how many of them cover the system prompt."""
        prefix = (system_prefix(self.template, self.system) if self.system else "") or ""
        self.is_pinned = not self.system or (bool(prefix) and whole.startswith(prefix))
        return prefix_tokens(self.writer.engine.model, whole, len(prefix) if self.is_pinned else 0)

    # sessions

    @property
    def archive(self) -> Archive | None:
        """The policy's archive, or None. The arrays of `save` do not include the archived tokens."""
        return self.writer.engine.context.archive

    def save(self, listed: Listing) -> tuple[session.Meta, Iterator[tuple[str, np.ndarray]]]:
        """Return the whole chat in two parts: values for JSON, and an iterator over arrays.

        listed: the arrays that list the parts in the archive file, from `ArchiveFile.write`.
        """
        arrays = chain([("tokens", self.writer.tokens)], self.writer.engine.save(archived=False), listed)
        return {
            "id": self.id,
            "system": self.system,
            "messages": self.messages,
            "n_reply": self.n_reply,
            "writer": self.writer.save(),
            "marks": [end[:-1] for end in self.undo_stack.turn_ends],
            "effort": self.effort,
            "thought_budget": self.thought_budget,
        }, arrays

    def save_to(self, path: Path, archive_file: ArchiveFile, meta: session.Meta) -> Listing:
        """Write the chat to a session and its archive file; return the listing of the archive file.

        meta: other values for the session's JSON. Raises OSError and SessionError, leaving the old session
        and its archive readable.
        """
        with archive_file.write(self.archive, self.writer.engine.checkpoints.to_save()) as listed:
            saved, arrays = self.save(listed)
            session.write(path, saved | meta, arrays)
        return listed

    @delayed
    def restore(self, meta: session.Meta, arrays: session.Arrays, *, seed: int | None = None) -> None:
        """Continue from values of `save`. Raises SessionError, changing nothing, if the values do not fit.

        seed: seed of the sampler from now on; None for the saved seed.
        """
        self.writer.engine.restore(arrays)
        self.version += 1
        self.first_version = self.version
        self.writer.restore(meta["writer"], arrays["tokens"], seed)
        self.system, self.messages, self.n_reply = meta["system"], meta["messages"], meta["n_reply"]
        # sessions of earlier versions have no id
        self.id = meta.get("id") or secrets.token_hex(8)
        self.is_pinned = True

    def _restore_with_thinking(self, meta: session.Meta, arrays: session.Arrays) -> None:
        """Continue as `restore` does, with the saved thinking effort and thinking budget."""
        self.restore(meta, arrays)
        # sessions of earlier versions have the budget only among the options, and may have no effort
        budget = meta.get("thought_budget", meta.get("options", {}).get("think_budget"))
        effort = meta.get("effort")
        if (effort, budget) != (self.effort, self.thought_budget):
            self.use_template(self._under(effort, budget))
            self.effort, self.thought_budget = effort, budget

    def resume(self, meta: session.Meta, arrays: session.Arrays) -> None:
        """Continue as `restore` does, also with the saved thinking and the saved ends of turns, for `undo`.

        Sessions have no copies. Earlier changes for which `undo` needs a copy therefore cannot be undone.
        """
        self._restore_with_thinking(meta, arrays)
        # sessions of earlier versions have no "marks"
        for end in (TurnEnd(*saved) for saved in meta.get("marks", ())):
            # A server saves the end of every reply. Keep only those that a user's message follows, because
            # `undo` takes back one turn of the user
            following = self.messages[end.n_message : end.n_message + 1]
            if [message["role"] for message in following] == ["user"]:
                self.undo_stack.push(end)

    # undo

    def turn_end(self) -> TurnEnd:
        """Return the present end of the chat. Make a checkpoint if rewinding needs a checkpoint."""
        self.writer.engine.checkpoints.take()
        return TurnEnd(self.writer.engine.n_past, len(self.messages), self.n_reply, self.writer.save())

    def _go_to(self, before: UndoPoint) -> None:
        """Go back to a point. Raises SessionError, changing nothing, if it is a damaged copy."""
        if isinstance(before, Copy):
            saved = session.load(before.file, "the copy of the chat", before.archive)
            self._restore_with_thinking(*saved)
            self.first_version = before.first_version
            return
        self.writer.rewind(before.n_past, before.writer, again=True)
        self.version += 1
        self.messages, self.n_reply = self.messages[: before.n_message], before.n_reply

    def remember(self, command: str) -> bool:
        """Push the copy that `undo` needs to take back a command.

        Returns False if the chat is not undoable, or if the disk has no room for the copy after all older
        copies were dropped. Then nothing can be undone.
        """
        if self.undoable:
            with suppress(OSError):
                self.undo_stack.push(Copy(command, *self._files(), self.first_version))
                return True
            # the disk may have no room
            self.undo_stack.drop_copies()
            with suppress(OSError):
                self.undo_stack.push(Copy(command, *self._files(), self.first_version))
                return True
            self._archive_file.close()
        # without a copy, undo cannot reach the ends of turns
        self.undo_stack.close()
        return False

    def undo(self) -> str | None:
        """Take back the last change, and return its name; None if there is none.

        Raises SessionError if the copy is damaged. The copy is then dropped, and nothing else changes.
        """
        if (turn := self.undo_turn()) is not None:
            return turn_label(turn)
        copy = self.undo_stack.newest
        if not isinstance(copy, Copy):
            return None
        self._undo_last()
        return copy.command

    def undo_turn(self) -> str | None:
        """Take back the last turn if it is the last change, and return its text; otherwise return None."""
        if not isinstance(self.undo_stack.newest, TurnEnd):
            return None
        turn = self.newest_turn
        self._undo_last()
        return turn

    def last_turn(self) -> LastTurn | None:
        """Return what `read_turn` and `put_back` need, or None where `newest_turn` is None."""
        if not (before := self._newest_start):
            return None
        return LastTurn(before, self.writer.stream[before.n_token :], self.messages, self.writer.save())

    def put_back(self, turn: LastTurn) -> None:
        """Restore the turn that `read_turn` has replaced or was about to replace.

        The next turn first reads the tokens that are no longer in the cache.
        """
        if self.header.begun:
            self.use_template(self.template)
        n_cached = self._rewind_for(turn.tokens, turn.before)
        self.writer.put_back(turn.tokens[n_cached:], turn.writer)
        self.messages = turn.messages
        self.version += 1

    def _rewind_for(self, tokens: np.ndarray, before: TurnEnd) -> int:
        """Go back to `before` in order to read tokens i32[n] there. Return how many of them need no reading.

        If the engine can be rewound to any token, equal tokens of the present stream stay in the cache. The
        last token has to be read in any case, because sampling needs its logits.
        """
        writer, engine = self.writer, self.writer.engine
        n = n_equal(writer.stream[before.n_token :], tokens[:-1])
        n_past = min(before.n_token + n, engine.n_past)
        # the tokens that were unread at `before` come before those of the turn: they have been read since
        saved = {**before.writer, "unread": []}
        if engine.rewinds_anywhere and n_past > before.n_token and writer.rewind(n_past, saved):
            return n_past - before.n_token
        writer.rewind(before.n_past, before.writer, again=True)
        # later turns may need a checkpoint here: see `turn_end`
        engine.checkpoints.take()
        return 0

    @property
    def newest_turn(self) -> str | None:
        """Text of the user in the last turn. None if the turn cannot be replaced."""
        before = self._newest_start
        return self.messages[before.n_message]["content"] if before else None

    @property
    def _newest_start(self) -> TurnEnd | None:
        """Position before the last turn, if the last change was this turn or a change of the effort."""
        newest, (version, before) = self.undo_stack.newest, self._reread
        return newest if isinstance(newest, TurnEnd) else before if version == self.version else None

    @delayed
    def _undo_last(self) -> None:
        with closing(self.undo_stack.pop()) as before:
            n_reply = self.n_reply
            try:
                self._go_to(before)
            except SessionError:
                # Only the damaged copy held the stream from before the command. Drop the ends of turns in
                # that stream, because the engine cannot be rewound to them
                self.undo_stack.drop_turn_ends()
                raise
        self.n_reply = max(n_reply, self.n_reply)

    def close(self) -> None:
        """Drop all ends of turns and copies."""
        self.undo_stack.close()
        self._archive_file.close()

    def _files(self) -> tuple[BinaryIO, FileIO | None]:
        """Return a session file and its archive file that hold the present chat. Raises OSError."""
        if saved := self.open_saved():
            return saved
        with ExitStack() as stack:
            file = stack.enter_context(temporary())
            with self._archive_file.write(self.archive, self.writer.engine.checkpoints.to_save()) as listed:
                session.dump(file, *self.save(listed))
                file.flush()
            archive = self._archive_file.reopen()
            stack.pop_all()
            return file, archive
