"""Continues chats from their longest stored beginning, and stores them after each answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from kvtool.chats import session
from kvtool.chats.archive_file import Listing
from kvtool.chats.conversation import Conversation
from kvtool.errors import ModelError, SessionError
from kvtool.serve.api.messages import Message
from kvtool.serve.rendering import Rendering
from kvtool.serve.store.chats import ChatStore, ReplyEnd, Snapshot, n_equal
from kvtool.serve.store.history import History

_LEAST_START = 256
"""Tokens of a beginning that are worth a snapshot of their own, or to load another chat's."""


class _Way(NamedTuple):
    """How the engine may come to a part of a chat.

    Attributes
    ----------
    n
        The chat's tokens that the stream begins with, as far as they count.
    snapshot
        The stream's; None: that of the engine, which is not stored.
    tokens, first, n_pinned
        As `_after` gives them.
    turns
        The chat's replies that the stream has.
    """

    n: int
    snapshot: Snapshot | None
    tokens: np.ndarray
    first: int
    n_pinned: int | None
    turns: list[ReplyEnd]


class Resumer:
    """Continues one chat after another in the engine, and stores each after its answer.

    Parameters
    ----------
    chats
        What is stored.
    meta
        What a session says of a chat, besides what `Conversation.save` has.
    pins
        Whether a chat's system prompt and tools are pinned.

    Attributes
    ----------
    n_cached
        Tokens that the engine had of the chat that was begun last.
    unsaved
        Why the last turn could not be stored, or None.
    """

    def __init__(
        self,
        conversation: Conversation,
        rendering: Rendering,
        chats: ChatStore,
        meta: Callable[[Conversation], session.Meta],
        pins: bool,
    ) -> None:
        self.conversation = conversation
        self.rendering = rendering
        self.chats = chats
        self._meta = meta
        self._pins = pins
        self._engine = conversation.writer.engine
        # the snapshot that the chat goes on from, and the one that the engine is at
        self._before: Snapshot | None = None
        self._at: Snapshot | None = None
        # where earlier replies of the chat end
        self._turns: list[ReplyEnd] = []
        # whether the engine has the beginning of a prompt whose rest nobody waited for
        self._is_cut = False
        # tokens of the system prompt and the tools of the chat that was rendered last
        self._n_start = 0
        self.n_cached = 0
        self.unsaved: str | None = None

    def leave(self) -> None:
        """Something else will take the engine: the next chat starts from its file, or anew."""
        self._at, self._is_cut = None, False

    def use(self, rendering: Rendering) -> None:
        """Render by this from now on, as a request asks for."""
        if rendering is not self.rendering:
            self.rendering = rendering
            self.conversation.use_template(rendering.template, rendering.header)

    def n_shared(self, messages: list[Message], tools: list[Any], name: str | None) -> int:
        """How many of a chat's tokens the engine has, as far as it can go on from there."""
        if self._engine.goes_back:
            return n_equal(self._had, self._whole(messages, tools)[0])
        is_at = self._at and self._at.digest in self.rendering.history(name, messages, tools).digests
        return self._engine.n_past if is_at else 0

    def begin(self, messages: list[Message], tools: list[Any], history: History) -> np.ndarray:
        """Brings the engine to the longest stored beginning. Returns the tokens i32[n] that follow."""
        at, self._at = self._at, None
        if self._engine.goes_back:
            for way in self._ways(at, messages, tools, history):
                if (tokens := self._go(way, at, history)) is not None:
                    # what is read now stays in the engine, even if nobody waits for the answer any more
                    self._at = self._before
                    return tokens
                # it may have loaded another stream
                at = None
            at = None
        elif (rest := self._rest_of_cut(messages, tools, history)) is not None:
            return rest
        # what is read now has the beginning of this chat alone
        self._is_cut = True
        # a reply that comes last is not the one that is asked for
        digests = history.digests[: -1 if messages[-1]["role"] == "assistant" else None]
        while found := self.chats.find(digests):
            i, self._before = found
            try:
                if self._before is not at:
                    # a request has a seed of its own
                    seed = self.conversation.writer.sampler.seed
                    self.conversation.restore(*self.chats.load(self._before), seed=seed)
                self._turns = [turn for turn in self._before.line.turns if turn.n_message <= i]
                self.n_cached = self._engine.n_past
                return self._following(messages, i, tools)
            except (SessionError, ModelError):
                # damaged, or the template cannot say what follows
                at, digests = None, digests[:i]
        tokens, n_pinned = self._whole(messages, tools)
        self.conversation.start_over(n_pinned)
        self._before, self._turns, self.n_cached = None, [], 0
        return tokens

    def _ways(
        self, at: Snapshot | None, messages: list[Message], tools: list[Any], history: History
    ) -> list[_Way]:
        """Streams that begin as the chat does, the one with most of its tokens first.

        A chat of the same messages has their replies as they were written, token by token. Any other stream
        may have more: that of the engine, which nothing has to be loaded for, or a stored one.
        """
        ways: list[_Way] = []
        if shared := self.chats.find_shared(history.beginnings, at):
            i, snapshot = shared
            had = self._had if snapshot is at else self.chats.tokens(snapshot)
            turns = [turn for turn in snapshot.line.turns if turn.n_message <= i and turn.n_token <= len(had)]
            tokens, first, n_pinned = self._after(turns, messages, tools)
            ways.append(_Way(first + n_equal(had[first:], tokens), snapshot, tokens, first, n_pinned, turns))
            if ways[0].n == len(had):
                return ways
        whole, n_pinned = self._whole(messages, tools)
        ways.append(_Way(n_equal(self._had, whole), at, whole, 0, n_pinned, []))
        if alike := self.chats.find_similar(whole):
            # to load it takes longer than to read a few tokens
            ways.append(_Way(alike[0] - _LEAST_START, alike[1], whole, 0, n_pinned, []))
        return sorted((way for way in ways if way.n > 0), key=attrgetter("n"), reverse=True)

    @property
    def _had(self) -> np.ndarray:
        """The tokens i32[n] of the stream that is in the engine."""
        writer = self.conversation.writer
        return np.concatenate([writer.tokens, writer.unread])

    def _go(self, way: _Way, at: Snapshot | None, history: History) -> np.ndarray | None:
        """Goes back in a stream to the first token that differs, and returns what follows there.

        at: the snapshot that the engine has gone on from. Returns None where the engine cannot go back there.
        """
        writer = self.conversation.writer
        seed, snapshot = writer.sampler.seed, way.snapshot
        if snapshot is not at and snapshot is not None:
            try:
                self.conversation.restore(*self.chats.load(snapshot), seed=seed)
            except SessionError:
                return None
        had, first, n_pinned = self._had, way.first, way.n_pinned
        # one token at least is read: its logits are needed
        most = len(way.tokens) - max(self.conversation.header.n_opening, 1)
        n = first + n_equal(had[first:], way.tokens[:most])
        if n_pinned is not None:
            n_pinned = self._engine.eviction.pinnable(n_pinned)
        is_start = n_pinned is not None and (n_pinned != self._engine.n_pinned or n < max(n_pinned, 1))
        # another system prompt: all of it may be stored, and what is pinned cannot change behind an eviction
        if is_start and (n > self._engine.policy.n_live or self.chats.find(history.digests[:2])):
            return None
        # a stream that keeps all of the snapshot goes on from it
        is_kept = snapshot is not None and bool(snapshot.line.turns) and n >= snapshot.line.turns[-1].n_token
        self._before = snapshot if is_kept else None
        if n < len(had):
            n = min(n, self._engine.n_past)
            recent = way.turns[-1].recent if way.turns else []
            if not writer.go_back(n, {"recent": recent, "unread": [], "seed": seed}):
                return None
        if is_start and n_pinned is not None:
            self._engine.pin(n_pinned)
        self._turns, self.n_cached = way.turns, self._engine.n_past
        # a stop may have left what is before `first` to be read
        return np.concatenate([had[n:first], way.tokens[max(n - first, 0) :]])

    def _whole(self, messages: list[Message], tools: list[Any]) -> tuple[np.ndarray, int]:
        """The tokens i32[n] of the whole chat, and how many of them are pinned."""
        tokens, self._n_start = self.rendering.whole(messages, tools)
        return tokens, self._n_start if self._pins else 0

    def _after(
        self, turns: list[ReplyEnd], messages: list[Message], tools: list[Any]
    ) -> tuple[np.ndarray, int, int | None]:
        """The tokens i32[n] behind the last of these turns, where that is, and None.

        Where there is no turn, or the template cannot say what follows: the whole chat, 0, and how many of
        its tokens are pinned. `turns` is then empty.
        """
        if turns:
            last = turns[-1]
            try:
                return self.rendering.following(messages, last.n_message, tools), last.n_token, None
            except ModelError:
                turns.clear()
        tokens, n_pinned = self._whole(messages, tools)
        return tokens, 0, n_pinned

    def _following(self, messages: list[Message], i: int, tools: list[Any]) -> np.ndarray:
        """The tokens behind the first i messages, which the cache has. Raises ModelError."""
        if messages[i - 1]["role"] == "assistant":
            return self.rendering.following(messages, i, tools)
        # a prompt without its reply header, or the beginning of a system prompt
        tokens, first, _ = self._after(self._turns, messages, tools)
        had = self.conversation.writer.tokens[first:]
        if n_equal(had, tokens) < len(had):
            raise ModelError("the template has changed what was read")
        return tokens[len(had) :]

    def _rest_of_cut(self, messages: list[Message], tools: list[Any], history: History) -> np.ndarray | None:
        """The tokens behind a prompt's beginning that is in the engine; None where this is another prompt."""
        if not self._is_cut:
            return None
        writer = self.conversation.writer
        had = writer.tokens
        whole, n_pinned = self._whole(messages, tools)
        if n_pinned != self._engine.n_pinned or not 0 < n_equal(had, whole) == len(had) < len(whole):
            return None
        if self._before and self._before.digest not in history.digests:
            self._before, self._turns = None, []
        recent = self._turns[-1].recent if self._turns else []
        writer.restore({"recent": recent, "unread": [], "seed": writer.sampler.seed}, had)
        self.n_cached = len(had)
        return whole[len(had) :]

    def read_start(self, tokens: np.ndarray, messages: list[Message], history: History) -> np.ndarray:
        """Of a new chat, reads whole batches of its system prompt and tools, and stores them.

        Returns what is left. The batches are those in which the whole chat would be read: what follows does
        not depend on it.
        """
        # a stream that goes back needs no copy
        pins = self._engine.n_pinned if self._engine.policy.recall else 0
        n = pins if self._engine.goes_back else self._n_start
        n_batch = self._engine.settings.n_batch
        n = n // n_batch * n_batch
        is_new = self._engine.n_past == 0 and messages[0]["role"] == "system"
        if n < _LEAST_START or not is_new or self._engine.reads_whole(len(tokens)):
            return tokens
        if not self.conversation.writer.read(tokens[:n]):
            return tokens[:0]
        self.conversation.set_messages(messages[:1])
        self._store(None, history.digests[1], [])
        return tokens[n:]

    def read_prompt(
        self, tokens: np.ndarray, messages: list[Message], history: History, *, keeps_thought: bool
    ) -> np.ndarray:
        """Of a cache that cannot go back, reads a long prompt up to the reply header, and stores it.

        A client may repeat the request, or change the reply to it. Returns the tokens that are left.

        keeps_thought: True if the reply's thought may stay until the user's next message. Then the template
        drops it, and the chat is read again from here, however short the prompt is.
        """
        n = len(tokens) - max(self.conversation.header.n, 1)
        is_first = keeps_thought and messages[-1]["role"] == "user"
        least = 1 if is_first else _LEAST_START
        if self._engine.goes_back or n < least or self._engine.reads_whole(len(tokens)):
            return tokens
        if not self.conversation.writer.read(tokens[:n]):
            return tokens[:0]
        self.conversation.set_messages(messages)
        self._before = self._store(self._before, history.now, history.beginnings) or self._before
        return tokens[n:]

    def keep(self, history: History, messages: list[Message], reply: Message, tools: list[Any]) -> None:
        """Stores the chat with the reply to these messages, where there is room for it.

        The reply's thought stays in the cache if the template will show it. reply: see `Rendering.later`.
        """
        later = self.rendering.later(messages, reply, tools)
        self.conversation.finish_reply(later.start)
        self.conversation.messages.append(reply)
        history.add(later.message)
        self._is_cut = False
        writer = self.conversation.writer
        n_token = self._engine.n_past + len(writer.unread)
        self._turns.append(ReplyEnd(len(history.digests) - 1, n_token, list(writer.sampler.recent)))
        self._at = self._store(self._before, history.now, history.beginnings)

    def _store(self, before: Snapshot | None, digest: bytes, beginnings: list[bytes]) -> Snapshot | None:
        talk = self.conversation
        turns = list(self._turns) if beginnings else []

        def saved(listed: Listing) -> tuple[session.Meta, Iterator[tuple[str, np.ndarray]]]:
            own, arrays = talk.save(listed)
            return self._meta(talk) | own, arrays

        self.unsaved = None
        try:
            return self.chats.add(
                before,
                digest,
                talk.writer.tokens,
                talk.archive,
                saved,
                beginnings=beginnings,
                turns=turns,
                # a system prompt alone is not a beginning to go back to
                is_enough=talk.goes_back and before is not None and bool(before.line.turns),
            )
        except SessionError as error:
            self.unsaved = str(error)
            return None
