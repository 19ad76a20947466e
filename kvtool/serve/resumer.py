"""Continues chats from their longest stored beginning, and stores them after each answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvtool.chats import session
from kvtool.chats.conversation import Conversation
from kvtool.chats.segments import Listing
from kvtool.errors import ModelError, SessionError
from kvtool.serve.messages import History, Message
from kvtool.serve.rendering import Rendering
from kvtool.serve.store import Chats, Snapshot, Turn

_LEAST_START = 256
"""Tokens of a system prompt that are worth a snapshot of their own."""


class Resumer:
    """Continues one chat after another in the engine, and stores each after its answer.

    Parameters
    ----------
    chats
        What is stored.
    meta
        What a session says of a chat, besides what `Conversation.save` has.

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
        chats: Chats,
        meta: Callable[[Conversation], session.Meta],
    ) -> None:
        self.conversation = conversation
        self.rendering = rendering
        self.chats = chats
        self._meta = meta
        self._engine = conversation.writer.engine
        # the snapshot that the chat goes on from, and the one that the engine is at
        self._before: Snapshot | None = None
        self._at: Snapshot | None = None
        # where earlier replies of the chat end
        self._turns: list[Turn] = []
        self.n_cached = 0
        self.unsaved: str | None = None

    def leave(self) -> None:
        """Something else will take the engine: the next chat starts from its file, or anew."""
        self._at = None

    def begin(self, messages: list[Message], tools: list[Any], history: History) -> np.ndarray:
        """Brings the engine to the longest stored beginning. Returns the tokens i32[n] that follow."""
        at, self._at = self._at, None
        if self._engine.goes_back:
            if (tokens := self._go_back(at, messages, tools, history)) is not None:
                return tokens
            at = None
        digests = history.digests[:-1]
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
        tokens, n_pinned = self.rendering.whole(messages, tools)
        self.conversation.open(n_pinned)
        self._before, self._turns, self.n_cached = None, [], 0
        return tokens

    def _go_back(
        self, at: Snapshot | None, messages: list[Message], tools: list[Any], history: History
    ) -> np.ndarray | None:
        """Goes back in a stored chat to the first token that differs, and returns what follows there.

        Returns None where no stored chat begins alike, or the engine cannot go back in it.
        """
        if not (shared := self.chats.share(history.beginnings, at)):
            return None
        i, snapshot = shared
        writer = self.conversation.writer
        seed = writer.sampler.seed
        if snapshot is not at:
            try:
                self.conversation.restore(*self.chats.load(snapshot), seed=seed)
            except SessionError:
                return None
        had = np.concatenate([writer.tokens, writer.unread])
        turns = [turn for turn in snapshot.line.turns if turn.n_message <= i and turn.n_token <= len(had)]
        tokens, first, n_pinned = self._after(turns, messages, tools)
        # one token at least is read: its logits are needed
        most = len(tokens) - max(self.conversation.n_opening, 1)
        n = first + _n_equal(had[first:], tokens[:most])
        if n_pinned is not None:
            n_pinned = self._engine.eviction.pinnable(n_pinned)
        is_start = n_pinned is not None and (n_pinned != self._engine.n_pinned or n < max(n_pinned, 1))
        # another system prompt: all of it may be stored, and what is pinned cannot change behind an eviction
        if is_start and (n > self._engine.policy.n_live or self.chats.find(history.digests[:2])):
            return None
        self._before = snapshot
        if n < len(had):
            n, self._before = min(n, self._engine.n_past), None
            recent = turns[-1].recent if turns else []
            if not writer.go_back(n, {"recent": recent, "unread": [], "seed": seed}):
                return None
        if is_start and n_pinned is not None:
            self._engine.pin(n_pinned)
        self._turns, self.n_cached = turns, self._engine.n_past
        return tokens[n - first :]

    def _after(
        self, turns: list[Turn], messages: list[Message], tools: list[Any]
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
        tokens, n_pinned = self.rendering.whole(messages, tools)
        return tokens, 0, n_pinned

    def _following(self, messages: list[Message], i: int, tools: list[Any]) -> np.ndarray:
        """The tokens behind the first i messages, which the cache has. Raises ModelError."""
        if messages[i - 1]["role"] == "assistant":
            return self.rendering.following(messages, i, tools)
        # the beginning of a system prompt
        whole, _ = self.rendering.whole(messages, tools)
        if not np.array_equal(whole[: self.n_cached], self.conversation.writer.tokens):
            raise ModelError("the template has changed the system prompt")
        return whole[self.n_cached :]

    def read_start(self, tokens: np.ndarray, messages: list[Message], history: History) -> np.ndarray:
        """Of a new chat, reads whole batches of the pinned tokens and stores them; returns what is left.

        The batches are those in which the whole chat would be read: what follows does not depend on it.
        """
        # nothing is archived yet
        n_batch = self._engine.settings.n_batch
        n = self._engine.n_pinned // n_batch * n_batch
        is_new = self._engine.n_past == 0 and messages[0]["role"] == "system"
        if n < _LEAST_START or not is_new or self._engine.reads_whole(len(tokens)):
            return tokens
        if not self.conversation.writer.read(tokens[:n]):
            return tokens[:0]
        self.conversation.follow(messages[:1])
        self._store(None, history.digests[1], [])
        return tokens[n:]

    def keep(self, history: History) -> None:
        """Stores the chat as it is now, where there is room for it."""
        writer = self.conversation.writer
        n_token = self._engine.n_past + len(writer.unread)
        self._turns.append(Turn(len(history.digests) - 1, n_token, list(writer.sampler.recent)))
        self._at = self._store(self._before, history.now, history.beginnings)

    def _store(self, before: Snapshot | None, digest: bytes, beginnings: list[bytes]) -> Snapshot | None:
        talk = self.conversation
        turns = list(self._turns) if beginnings else []

        def saved(listed: Listing) -> tuple[session.Meta, Iterator[tuple[str, np.ndarray]]]:
            own, arrays = talk.save(listed)
            return self._meta(talk) | own, arrays

        self.unsaved = None
        try:
            return self.chats.put(
                before,
                digest,
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


def _n_equal(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two texts i32[n] have in common at their start."""
    n = min(len(one), len(other))
    differ = np.flatnonzero(one[:n] != other[:n])
    return int(differ[0]) if len(differ) else n
