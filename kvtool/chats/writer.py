"""Reading tokens into an engine and sampling text from it, with draft tokens if there is a drafter."""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvtool.chats.loops import Loop
from kvtool.chats.stops import Stops
from kvtool.chats.thinking import Splitter
from kvtool.drafts.drafter import Drafter
from kvtool.engine.loop import Engine
from kvtool.errors import KvtoolError, UsageError
from kvtool.llama.sampler import Sampler
from kvtool.system.interrupt import delayed


class Writer:
    """Reads tokens into an engine, and samples text from it.

    If a stop leaves tokens unread, the next call reads them first.

    Attributes
    ----------
    stop
        Set to True, even in a signal handler, to end `read` or `write` after the current step.
    n_written
        Number of tokens that the last `write` sampled.
    is_cut
        True if the last `write` ended because it reached its maximum number of tokens.
    unfinished
        Text of the last reply, which a conversation sets and saves with the writer. None if the reply cannot
        be continued: the model or a stop string ended it, or a server wrote it.
    loop
        The loop that ended the last `write`, or None.
    ends_loops
        True if a loop ends `write`.
    ending
        The token that ended the last `write`; None if it ended for another reason.
    stopped_by
        The stop string that ended the last `write`, or "".
    shown
        Control tokens whose text `write` yields.
    ends
        Tokens that end `write`, in addition to the model's end-of-generation tokens.
    before_reading
        Called before a text is read, with its number of tokens.
    after_sampling
        Called with each sampled token. At this time the context still has the logits that gave the token.
    while_reading
        Called before each step with two numbers: tokens read so far, and all tokens of the text.
    """

    def __init__(self, engine: Engine, sampler: Sampler, drafter: Drafter | None = None) -> None:
        self.engine = engine
        self.drafter = drafter
        self.sampler = sampler
        self.stop = False
        self.n_written = 0
        self.is_cut = False
        self.unfinished: str | None = None
        self.loop: Loop | None = None
        self.ends_loops = False
        self.ending: int | None = None
        self.stopped_by = ""
        self.shown: frozenset[int] = frozenset()
        self.ends: frozenset[int] = frozenset()
        self.before_reading: Callable[[int], None] = lambda n: None
        self.after_sampling: Callable[[int], None] = lambda token: None
        self.while_reading: Callable[[int, int], None] = lambda done, n: None
        self._forget()

    def begin(
        self,
        sampler: Sampler,
        shown: frozenset[int],
        after_sampling: Callable[[int], None],
        while_reading: Callable[[int, int], None],
        ends: frozenset[int] = frozenset(),
    ) -> None:
        """Prepare for the next text. Closes the old sampler."""
        self.sampler.close()
        self.sampler, self.shown, self.stop = sampler, shown, False
        self.ends = ends
        self.after_sampling, self.while_reading = after_sampling, while_reading

    @contextmanager
    def showing(self, progress: Callable[[int, int], None]) -> Iterator[None]:
        """Inside the block, call `progress` as `while_reading`."""
        before, self.while_reading = self.while_reading, progress
        try:
            yield
        finally:
            self.while_reading = before

    @delayed
    def reset(self) -> None:
        self.engine.reset()
        self._forget()
        self.unfinished = None

    @delayed
    def postpone(self, tokens: np.ndarray) -> None:
        """Empty the cache, and store tokens i32[n] as unread. They are read before the next text."""
        self.reset()
        self._unread = tokens

    def _forget(self) -> None:
        if self.drafter:
            self.drafter.cut(0)
        self._unread = np.empty(0, np.int32)
        self._decoded = array("i")
        # `_drafts`: draft tokens of the last step that may still be sampled. `_n_sampled`: number of draft
        # tokens of the last step that were sampled
        self._drafts, self._n_sampled = np.empty(0, np.int32), 0
        # True after `restore`: a restored cache has no logits to sample from
        self._restored = False

    @property
    def tokens(self) -> np.ndarray:
        """Tokens i32[n_past] decoded since the reset."""
        return np.array(self._decoded, np.int32)

    @property
    def unread(self) -> np.ndarray:
        """Next tokens i32[n] of the stream, which are not decoded yet."""
        return self._unread

    @property
    def stream(self) -> np.ndarray:
        """All tokens i32[n] since the reset: the decoded tokens, followed by the unread tokens."""
        return np.concatenate([self.tokens, self._unread])

    @property
    def n_drafted(self) -> int:
        """Number of draft tokens since the drafter was made."""
        return self.drafter.n_drafted if self.drafter else 0

    @property
    def n_accepted(self) -> int:
        """Number of accepted draft tokens: the sampler chose the same tokens."""
        return self.drafter.n_accepted if self.drafter else 0

    @property
    def is_new(self) -> bool:
        """True if nothing was read since the reset."""
        return self.engine.n_past == 0 and not len(self._unread)

    def save(self) -> dict[str, Any]:
        """Return the writer's state without the engine, as values for JSON."""
        return {
            "seed": self.sampler.seed,
            "recent": list(self.sampler.recent),
            "unread": self._unread.tolist(),
            "unfinished": self.unfinished,
        }

    def restore(self, saved: Mapping[str, Any], tokens: np.ndarray, seed: int | None = None) -> None:
        """Continue after tokens i32[n_past] from the state of `save`. seed: None for the saved seed."""
        self._resume(saved, seed)
        if self.drafter:
            self.drafter.cut(n_equal(self.tokens, tokens))
        self._unread = np.array(saved["unread"], np.int32)
        self._decoded = array("i", tokens.tobytes())
        self._restored = True

    def _resume(self, saved: Mapping[str, Any], seed: int | None = None) -> None:
        self.sampler.resume(saved["recent"], saved["seed"] if seed is None else seed)
        # sessions of earlier versions do not have this value
        self.unfinished = saved.get("unfinished")

    @delayed
    def rewind(self, n: int, saved: Mapping[str, Any], *, again: bool = False) -> bool:
        """Rewind to the first n tokens.

        If the engine cannot keep all n tokens, it reads the missing tokens again before the next text.

        saved: the state that `save` returned after n tokens. The sampler's last tokens and seed, the unread
        tokens and `unfinished` become those of this state.
        again: what to do if the archive has dropped tokens that rewinding needs. If True, the cache is
        emptied, and all n tokens are read again. If False, nothing changes, and the result is False.
        """
        n_missing = n - self.engine.n_past
        if 0 < n_missing <= len(self._unread):
            # An earlier call was stopped while it read the stream again. Therefore some of the first n tokens
            # are unread, and they stay unread
            missing = self._unread[:n_missing]
            self.restore(saved, self.tokens)
            self._unread = np.concatenate([missing, self._unread])
            return True
        if (n_kept := self.engine.rewind(n)) is None:
            if not again:
                return False
            self.engine.empty()
            n_kept = 0
        tokens = self.tokens
        self.restore(saved, tokens[:n_kept])
        self._unread = np.concatenate([tokens[n_kept:n], self._unread])
        return True

    def put_back(self, tokens: np.ndarray, saved: Mapping[str, Any]) -> None:
        """Store tokens i32[n], which a rewind has removed, as unread. They are read before the next text.

        saved: the state that `save` returned after these tokens.
        """
        self._unread = np.concatenate([self._unread, tokens])
        self._resume(saved)

    @delayed
    def read(self, tokens: np.ndarray, after_step: Callable[[slice], None] | None = None) -> bool:
        """Decode i32[n] tokens, and wait for the devices. Return False if reading was stopped.

        after_step: called after each step with the slice of the tokens that the step decoded. If it is given,
        all tokens give logits, and a step ends when the policy's next plan is due, as in measurements of
        perplexity.
        """
        self._drop_drafts()
        self._unread = np.concatenate([self._unread, tokens])
        if len(tokens):
            self.before_reading(len(self._unread))
        is_read = self._read_unread(after_step)
        # wait here, so that the time of the last steps does not count as time of writing
        self.engine.context.wait()
        return is_read

    @delayed
    def _read_unread(self, after_step: Callable[[slice], None] | None = None) -> bool:
        """Read the unread tokens into the engine. Return False if reading was stopped."""
        before, n_all = self.engine.n_past, len(self._unread)

        def stopped() -> bool:
            # n_past may grow by more than n_all: kvzip's reconstruction pass repeats the prompt in the cache
            self.while_reading(min(self.engine.n_past - before, n_all), n_all)
            return self.stop or delayed.is_over

        try:
            if after_step is None:
                self.engine.read(self._unread, stopped)
            else:
                steps = self.engine.steps(self._unread)
                while self.engine.n_past - before < n_all and not stopped():
                    after_step(next(steps))
        finally:
            # some tokens may have been decoded even if a later step raised an error
            self._mark_decoded(self.engine.n_past - before)
        return not len(self._unread)

    def write(
        self, n_max: int | None = None, splitter: Splitter | None = None, before: str = ""
    ) -> Iterator[str]:
        """Sample until the model ends its turn, n_max tokens are written, `stop` is set, or the text loops.

        Reads unread tokens first. No piece ends in the middle of a character. The text also ends before a
        stop string of the sampler's settings. The stop string's tokens stay in the stream, because the tokens
        that the policy evicted for them cannot be restored.

        splitter, before: see `Stops`.

        Raises StreamEnd if the cache or the positions are used up. Raises UsageError if nothing has been
        read, or if no token fits the grammar.
        """
        stops = Stops(self.sampler.settings.stop, splitter, before)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.n_written = 0
        self.is_cut, self.stopped_by, self.ending, self.loop = n_max == 0, "", None, None
        if len(self._unread) and not self._read_unread():
            return
        if self.engine.n_past == 0 or self._restored or not self.engine.context.has_logits:
            raise UsageError("there is nothing to continue; read a text of at least one token first")
        try:
            yield from self._pieces(n_max, stops, decoder)
        finally:
            self._drop_drafts()

    def _pieces(self, n_max: int | None, stops: Stops, decoder: codecs.IncrementalDecoder) -> Iterator[str]:
        model, loop = self.engine.model, Loop()
        while not self.stop and self.n_written != n_max:
            token = self.sampler.sample(self.engine.context)
            if model.ends_turn(token) or token in self.ends:
                self.ending, self.unfinished = token, None
                break
            self.n_written += 1
            self.after_sampling(token)
            # if the caller takes no further pieces, this token stays unread, and the next `write` decodes it
            self._unread = np.array([token], np.int32)
            text = model.piece(token, special=token in self.shown)
            if piece := stops.feed(decoder.decode(text)):
                yield piece
            if stops.found:
                self.stopped_by, self.unfinished = stops.found, None
                return
            try:
                self._decode_sampled(len(self._decoded) if n_max is None else n_max - self.n_written)
            except KvtoolError:
                if rest := stops.rest():
                    yield rest
                raise
            self.is_cut = self.n_written == n_max
            if self.ends_loops and loop.add(token, text):
                self.loop = loop
                break
        if rest := stops.feed(decoder.decode(b"", final=True)) + stops.rest():
            yield rest

    @delayed
    def _decode_sampled(self, n_left: int) -> None:
        """Decode the sampled token, with draft tokens after it if the drafter expects them to save time.

        n_left: number of tokens that may still be sampled.
        """
        drafter, token = self.drafter, int(self._unread[0])
        if not drafter:
            self._read_unread()
        elif len(self._drafts) and self._drafts[0] == token:
            self._drafts = self._drafts[1:]
            self._n_sampled += 1
            self.engine.context.sample_from(self._n_sampled)
            self._mark_decoded(1)
        else:
            self._drop_drafts()
            self.while_reading(0, 1)
            if not self.stop:
                self._step_with_drafts(drafter, n_left)

    def _step_with_drafts(self, drafter: Drafter, n_left: int) -> None:
        """Decode the sampled token and at most n_left - 1 draft tokens in one step."""
        n = len(self._decoded)
        drafter.cut(n)
        drafter.add(np.concatenate([np.array(self._decoded[drafter.n :], np.int32), self._unread]))
        drafts = drafter.guess(min(self.engine.draft_room(), n_left - 1), self.sampler.constraint)
        if len(drafts):
            self.engine.draft(np.concatenate([self._unread, drafts]))
        else:
            self.engine.step(self._unread)
        drafter.stepped()
        self._drafts, self._n_sampled = drafts, 0
        self._mark_decoded(1)

    def _mark_decoded(self, n: int) -> None:
        """Move the first n unread tokens to the decoded tokens."""
        self._decoded.frombytes(self._unread[:n].tobytes())
        self._unread = self._unread[n:]
        self._restored &= not n

    @delayed
    def _drop_drafts(self) -> None:
        """Remove from the cache the draft tokens that were not sampled."""
        if self.drafter:
            self.drafter.judge(self._n_sampled)
        n, self._drafts, self._n_sampled = len(self._drafts), self._drafts[:0], 0
        self.engine.drop_drafts(n)


def checked_limit(n_max: int | None) -> int | None:
    """Check the maximum number of tokens of a text. -1 becomes None: no limit. Raises UsageError."""
    if n_max is None or n_max == -1:
        return None
    if not isinstance(n_max, (int, np.integer)) or n_max < 0:
        raise UsageError(f"n_max must be a whole number of at least -1 (no limit), got {n_max!r}")
    return int(n_max)


def n_equal(one: np.ndarray, other: np.ndarray) -> int:
    """Number of tokens that two streams i32[n] share at their start."""
    n = min(len(one), len(other))
    differ = np.flatnonzero(one[:n] != other[:n])
    return int(differ[0]) if len(differ) else n
