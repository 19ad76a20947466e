"""Continue a chat after its longest stored beginning, and store the chat with the answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kvtool.chats import session
from kvtool.chats.conversation import Conversation
from kvtool.chats.undo import TurnEnd
from kvtool.chats.writer import n_equal
from kvtool.engine.loop import Engine
from kvtool.errors import ModelError, SessionError
from kvtool.serve.api.messages import Message
from kvtool.serve.rendering import Rendering
from kvtool.serve.store.chats import ChatStore, StoredChat
from kvtool.serve.store.history import History

_MIN_START = 256
"""Minimum number of tokens before a checkpoint. See `min_start` for an exception."""

_LOADS, _MAX_LOADS = 32, 256
"""Loading a stored chat of n tokens is assumed to take as long as reading n / 32 tokens, but not longer than
reading 256 tokens.

Measured times on CPUs were shorter. The server does not measure the time itself, because the same requests
should reuse the same tokens on every machine.
"""

_GAPS, _FAR_GAP = 32, 8192
"""Divisors for the minimum distance between neighboring stops: see `Resumer._stops`.

The distance must be above spacing / 32 tokens, and above n * spacing / 8192 tokens. Here, `spacing` is
`Checkpoints.spacing`, and n is the number of tokens from the earlier stop to the end of the prompt. With the
smallest spacing, 1024, these limits are 32 and n / 8 tokens.
"""


def min_start(engine: Engine) -> int:
    """Minimum number of tokens before a checkpoint. It is 1 for small checkpoints, which are fast."""
    return 1 if engine.checkpoints.are_small else _MIN_START


def n_before_checkpoint(engine: Engine, n: int) -> int:
    """Return how many of the first n tokens of a prompt to read before a checkpoint.

    Unless checkpoints are small, this is a number of full batches. Then the batches, and therefore the cache,
    are the same as if the whole prompt was read at once.
    """
    n_batch = engine.settings.n_batch
    return n if engine.checkpoints.are_small else n // n_batch * n_batch


class _Candidate(NamedTuple):
    """A stream that has a beginning in common with the requested chat.

    Attributes
    ----------
    n
        Number of tokens of the chat that need not be read if the stream is continued, minus the cost of
        loading the stream: see `_LOADS`. The cost is 0 for the engine's stream, and for streams that have
        replies of the chat.
    chat
        The stored chat to which the stream belongs. None for the engine's stream if it is not stored.
    tokens
        Tokens of the chat after the last reply that the stream also has. All tokens of the chat if there is
        no such reply: see `Resumer._after`.
    first
        Index in the stream at which `tokens` begins.
    n_pinned
        Number of pinned tokens; None if `tokens` begins after a reply.
    turn_ends
        Ends of those replies of the chat that are in the stream.
    """

    n: int
    n_stream: int
    chat: StoredChat | None
    tokens: np.ndarray
    first: int
    n_pinned: int | None
    turn_ends: list[TurnEnd]


class Resumer:
    """Continues chats in the engine, one after the other. Stores each chat after its answer.

    rendering: renders chats until `use` sets another rendering.
    meta: see `Slot`.

    Attributes
    ----------
    n_cached
        Number of tokens of the last chat that were in the cache when the request began.
    unsaved
        Reason why the last turn could not be stored, or None.
    """

    def __init__(
        self,
        conversation: Conversation,
        rendering: Rendering,
        chats: ChatStore,
        meta: Callable[[Conversation], session.Meta],
    ) -> None:
        self.conversation = conversation
        self.rendering = rendering
        self.chats = chats
        self._meta = meta
        self._engine = conversation.writer.engine
        # an archive keeps the system prompt and the tools of a chat, so they need no pins
        self._pins = not self._engine.policy.recall
        # the stored chat that the engine's chat continues
        self._continued: StoredChat | None = None
        # the stored chat whose stream the engine holds
        self._current: StoredChat | None = None
        # ends of earlier replies of the chat
        self._turn_ends: list[TurnEnd] = []
        # number of tokens of the system prompt and the tools of the last chat
        self._n_system = 0
        self.n_cached = 0
        self.unsaved: str | None = None
        chats.in_use.append(lambda: {chat for chat in (self._current, self._continued) if chat})

    def forget_chat(self) -> None:
        """Forget which chat the engine holds. Call this before another text uses the engine."""
        self._current = None

    def use(self, rendering: Rendering) -> None:
        if rendering is not self.rendering:
            self.rendering = rendering
            self.conversation.use_template(rendering.template, rendering.header)

    def prepare(
        self, rendering: Rendering, messages: list[Message], tools: list[Any], history: History
    ) -> None:
        """Tokenize the part of a chat that `begin` will probably ask for. Any thread may call this.

        This part follows the last reply that a stored chat also has. If other chats are stored by the time of
        `begin`, it may ask for another part, which is then tokenized.
        """
        known = {digest.hex() for digest in history.digests}
        ends = (end for chat in [*self.chats.chats] for end in chat.turn_ends if end.digest in known)
        if n_message := max((end.n_message for end in ends), default=0):
            with suppress(ModelError):
                rendering.following(messages, n_message, tools)

    def n_shared(self, messages: list[Message], tools: list[Any]) -> int:
        """Return how many tokens at the start of a chat need not be read, because the engine has them."""
        n = n_equal(self.conversation.writer.stream, self._whole(messages, tools)[0])
        return self._engine.n_kept(min(n, self._engine.n_past))

    def begin(
        self, messages: list[Message], tools: list[Any], history: History, *, reuses: bool
    ) -> np.ndarray:
        """Bring the engine to the longest stored beginning of a chat. Return the tokens after it, i32[n].

        reuses: False to empty the engine and return all tokens.
        """
        current, self._current = self._current, None
        for candidate in self._candidates(current, messages, tools, history) if reuses else ():
            if (tokens := self._rewind(candidate, current, history)) is not None:
                # remember the chat that the engine holds, so that it can be rewound even if the client leaves
                self._current = self._continued
                return tokens
            # the failed rewind may have loaded another stream, so the engine may no longer hold `current`
            current = None
        tokens, n_pinned = self._whole(messages, tools)
        self._turn_ends = []
        self._continued = self._load_system_prompt(history, tokens) if reuses else None
        if not self._continued:
            self.conversation.start_over(n_pinned)
        self.n_cached = self._engine.n_past
        return tokens[self.n_cached :]

    def _load_system_prompt(self, history: History, tokens: np.ndarray) -> StoredChat | None:
        """Load the system prompt and the tools of a chat, if they are stored. Otherwise return None.

        tokens: the tokens of the whole chat, i32[n].
        """
        system = self.chats.find(history.digests[1])
        if not system or not system.is_system_only:
            return None
        # use the request's seed instead of the stored seed
        writer = self.conversation.writer
        try:
            self.conversation.restore(*self.chats.load(system), seed=writer.sampler.seed)
        except SessionError:
            return None
        system.used = time.monotonic()
        # do not use the stored tokens if the template now gives other tokens
        return system if n_equal(writer.tokens, tokens) == self._engine.n_past < len(tokens) else None

    def _candidates(
        self, current: StoredChat | None, messages: list[Message], tools: list[Any], history: History
    ) -> list[_Candidate]:
        """Return up to three streams that have a beginning in common with the chat. The best stream is first.

        A stream is usually compared with the tokens of the chat from the first token on. If the model wrote
        some of the chat's replies in this stream, the tokenizer may split their text differently. So only the
        tokens after the last such reply are compared.

        One of the streams may be the engine's own, which does not have to be loaded.
        """
        known = {digest.hex() for digest in history.digests}
        ends_of: dict[StoredChat | None, list[TurnEnd]] = {current: []}
        for each in self.chats.chats:
            ends_of[each] = [end for end in each.turn_ends if end.digest in known]
        after = cache(lambda n_message: self._after(n_message, messages, tools))
        candidates: list[_Candidate] = []
        for chat in sorted(ends_of, key=lambda each: -len(ends_of[each])):
            is_here = chat is current
            stream = self.chats.tokens(chat) if chat and not is_here else self.conversation.writer.stream
            ends = [end for end in ends_of[chat] if end.n_token <= len(stream)]
            tokens, n_pinned = after(ends[-1].n_message if ends else 0)
            ends = ends if n_pinned is None else []
            first = ends[-1].n_token if ends else 0
            n = first + n_equal(stream[first:], tokens)
            if is_here:
                n = self._engine.n_kept(min(n, self._engine.n_past))
            elif chat and n < len(stream) and not self._engine.can_rewind:
                n = 0
            elif chat and n < len(stream) and self._engine.checkpoints.are_whole:
                n = max((place for place in chat.places if place <= n), default=0)
            less = 0 if is_here or ends else min(len(stream) // _LOADS, _MAX_LOADS)
            candidates.append(_Candidate(n - less, len(stream), chat, tokens, first, n_pinned, ends))
            if ends and n == len(stream):
                break
        usable = (candidate for candidate in candidates if candidate.n > 0)
        # if several are equally good, prefer the engine's stream, then the shortest stream, which loads
        # fastest
        ranked = sorted(usable, key=lambda each: (each.n, each.chat is current, -each.n_stream), reverse=True)
        return ranked[:3]

    def _rewind(
        self, candidate: _Candidate, current: StoredChat | None, history: History
    ) -> np.ndarray | None:
        """Rewind a stream to the first token that is different in the chat. Return the tokens to read next.

        Returns None if the engine cannot be rewound to this token.
        """
        writer = self.conversation.writer
        seed, chat = writer.sampler.seed, candidate.chat
        if chat is not current:
            # only the engine's own stream may have no stored chat, and then `current` is None
            assert chat
            try:
                self.conversation.restore(*self.chats.load(chat), seed=seed)
            except SessionError:
                return None
            # the next request may go back to the end of the chat's last reply, so make a checkpoint there
            self._engine.checkpoints.take()
        stream, tokens = writer.stream, candidate.tokens
        first, n_pinned = candidate.first, candidate.n_pinned
        # read at least one token, because its logits are needed
        most = len(tokens) - max(self.conversation.header.n_lead, 1)
        n = first + n_equal(stream[first:], tokens[:most])
        if n_pinned is not None:
            n_pinned = self._engine.policy.pinnable(n_pinned)
        # True if the pinned tokens must change, because the chat and the stream have different system prompts
        repins = n_pinned is not None and (n_pinned != self._engine.n_pinned or n < max(n_pinned, 1))
        # give up after an eviction, because pins cannot change then. Also give up if the chat's system prompt
        # is stored, because it can be loaded
        if repins and (n > self._engine.policy.n_live or self.chats.find(history.digests[1])):
            return None
        # the new chat replaces a stored chat of the same name if the rewind keeps all replies of that chat
        ends = chat.turn_ends if chat and chat.name == history.name else []
        self._continued = chat if ends and n >= ends[-1].n_token else None
        # go back to a token that the engine can keep. Then no tokens of the stream stay unread, so
        # `read_system_prompt` can stop at the end of the system prompt
        n = self._engine.n_kept(min(n, self._engine.n_past))
        # the slot sets the sampler's last tokens from the request
        if n < len(stream) and not writer.rewind(n, {"recent": [], "unread": [], "seed": seed}):
            return None
        if repins and n_pinned is not None:
            self._engine.pin(n_pinned)
        if chat:
            chat.used = time.monotonic()
        self._turn_ends, self.n_cached = candidate.turn_ends, self._engine.n_past
        # also return the tokens before `first` that the rewind did not keep
        return np.concatenate([stream[n:first], tokens[max(n - first, 0) :]])

    def _whole(self, messages: list[Message], tools: list[Any]) -> tuple[np.ndarray, int]:
        """Return the tokens i32[n] of the whole chat, and how many of them are pinned."""
        tokens, self._n_system = self.rendering.whole(messages, tools)
        return tokens, self._n_system if self._pins else 0

    def _after(
        self, n_message: int, messages: list[Message], tools: list[Any]
    ) -> tuple[np.ndarray, int | None]:
        """Return the tokens i32[n] of a chat after its first n_message messages, which must end with a reply.

        The second result is None. But if n_message is 0, or if `following` fails, return the tokens of the
        whole chat and the number of pinned tokens.
        """
        if n_message:
            with suppress(ModelError):
                return self.rendering.following(messages, n_message, tools), None
        return self._whole(messages, tools)

    def read_system_prompt(self, tokens: np.ndarray, messages: list[Message], history: History) -> np.ndarray:
        """Read the system prompt and the tools of a new chat, and store them. Return the unread tokens."""
        if self._engine.rewinds_anywhere:
            # a later chat with the same system prompt can continue from this chat
            return tokens
        n = n_before_checkpoint(self._engine, self._n_system)
        # if another system prompt begins with the same tokens, some of these n tokens may be in the cache
        n_unread = n - self._engine.n_past
        is_new = n_unread > 0 and messages[0]["role"] == "system"
        if n < min_start(self._engine) or not is_new or self._engine.reads_whole(len(tokens)):
            return tokens
        if not self.conversation.writer.read(tokens[:n_unread]):
            return tokens[:0]
        self._engine.checkpoints.take()
        # If a checkpoint is a copy of the whole cache, also store the system prompt as a chat. The engine
        # has room for only a few such checkpoints, so a long chat may drop the checkpoint that was just made
        if self._engine.checkpoints.are_whole or not self._engine.can_rewind:
            self.conversation.set_messages(messages[:1])
            self._store(None, history.digests[1], [], None)
        return tokens[n_unread:]

    def read_prompt(self, tokens: np.ndarray, messages: list[Message], *, keeps_thought: bool) -> np.ndarray:
        """Read a prompt up to the header of the reply, and make checkpoints. Return the unread tokens.

        If the client repeats the request or changes the reply, its next request continues after the last
        checkpoint. Prompts of fewer than `min_start` tokens get no checkpoint. Nothing is read if no
        checkpoint is made.

        keeps_thought: True if the template renders the reply's thought until the user's next message, and
        then leaves it out. The cache must then be rewound to a checkpoint before the thought. Therefore a
        prompt that ends with a user's message gets a checkpoint, even if it is short.
        """
        n = len(tokens) - max(self.conversation.header.n, 1)
        is_first = keeps_thought and messages[-1]["role"] == "user"
        least = 1 if is_first else min_start(self._engine)
        makes_any = self._engine.checkpoints.max_bytes > 0
        if not makes_any or n < least or self._engine.reads_whole(len(tokens)):
            return tokens
        done = 0
        for stop in self._stops(tokens[:n]) if self._engine.checkpoints.are_small else [n]:
            if not self.conversation.writer.read(tokens[done:stop]):
                return tokens[:0]
            self._engine.checkpoints.take()
            done = stop
        return tokens[n:]

    def _stops(self, tokens: np.ndarray) -> list[int]:
        """Return the stops of a prompt i32[n]: the numbers of tokens after which checkpoints are made.

        Stops are at the end of the prompt and between messages, because a client that edits a chat replaces
        whole messages. The newest messages change most often. Therefore stops are closer together near the
        end of the prompt.
        """
        piece, spacing = self._engine.model.piece, self._engine.checkpoints.spacing
        markers = [token for token in self.conversation.header.tokens.tolist() if not piece(token)]
        stops, least = [len(tokens)], spacing // _GAPS
        for at in np.flatnonzero(np.isin(tokens, markers)).tolist()[::-1]:
            if at > least and stops[-1] - at > max(least, (len(tokens) - at) * spacing // _FAR_GAP):
                stops.append(at)
        return stops[::-1]

    def store_reply(
        self, history: History, messages: list[Message], reply: Message, tools: list[Any]
    ) -> None:
        """Store the chat with the reply to these messages. If this fails, `unsaved` has the reason.

        The thought of the reply stays in the cache if the template will render it in later requests.

        reply: see `Rendering.earlier_reply`.
        """
        earlier, lead = self.rendering.earlier_reply(messages, reply, tools)
        self._drop_stop_string()
        self.conversation.finish_reply(lead)
        self.conversation.messages.append(reply)
        history.add(earlier)
        digest = history.now
        self._turn_ends.append(self.conversation.turn_end()._replace(digest=digest.hex()))
        self._current = self._store(self._continued, digest, self._turn_ends, history.name)

    def _drop_stop_string(self) -> None:
        """Remove the stop string that ended the reply from the stream: clients send the reply without it.

        It stays if the engine cannot be rewound to its start without reading other tokens again.
        """
        writer, model = self.conversation.writer, self._engine.model
        if not writer.stopped_by:
            return
        stream = writer.stream
        written = stream[-writer.n_written :].tolist()
        pieces = [model.piece(token, special=token in writer.shown) for token in written]
        text, reply = b"".join(pieces), self.conversation.written.encode()
        if not text.startswith(reply):
            # the reply was read again without its thought and the stop string, or it is not UTF-8
            return
        n, n_bytes = len(stream), len(text)
        while n_bytes > len(reply):
            n, n_bytes = n - 1, n_bytes - len(pieces.pop())
        # a token may have the end of the reply and the start of the stop string
        rest = reply[n_bytes:]
        tokens = model.tokenize(rest.decode(errors="replace"))
        # some tokenizers put a space before a text, and a full cache has no room for more tokens than before:
        # the stop string then stays
        fits = b"".join(map(model.piece, tokens.tolist())) == rest and n + len(tokens) <= len(stream)
        if fits and self._engine.n_kept(n) == n and writer.rewind(n, {**writer.save(), "unread": []}):
            writer.read(tokens)

    def _store(
        self, before: StoredChat | None, digest: bytes, turn_ends: list[TurnEnd], name: str | None
    ) -> StoredChat | None:
        chat = self.conversation
        self.unsaved = None
        try:
            return self.chats.add(before, digest, chat, self._meta(chat), turn_ends=[*turn_ends], name=name)
        except SessionError as error:
            self.unsaved = str(error)
            return None
