"""Text in, text out, through one cache."""

from __future__ import annotations

import codecs
from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from kvtool.chats.loops import Loop
from kvtool.chats.stops import Stops
from kvtool.drafts.drafter import Drafter
from kvtool.engine.loop import Engine
from kvtool.errors import KvtoolError, UsageError
from kvtool.llama.sampler import Sampler


class Writer:
    """Reads tokens into an engine, and samples text from it.

    What a stop leaves unread is read first the next time.

    Attributes
    ----------
    stop
        Setting this, even from a signal handler, ends `read` and `write` after the current step.
    n_written
        Tokens that the last `write` has sampled.
    n_anew
        Tokens that were read once more, with a text behind them, since `begin`.
    is_cut
        Whether the last `write` ended because it had written as many tokens as it may.
    ending
        The token that ended the last `write`; None where it ended for another reason.
    stopped_by
        The stop string that the last `write` has come to; "" if to none.
    shown
        Control tokens whose text `write` yields all the same.
    ends
        Tokens that end `write` as the model's end of a turn does.
    before_reading
        Called with the number of tokens of each text before it is read.
    after_sampling
        Called with each token that `write` has sampled, while its logits are the context's last.
    while_reading
        Called before each step with how many tokens of the text are read, and how many it has.
    drafter
        Guesses what is written, if there is one.
    """

    def __init__(self, engine: Engine, sampler: Sampler, drafter: Drafter | None = None) -> None:
        self.engine = engine
        self.drafter = drafter
        self.sampler = sampler
        self.stop = False
        self.n_written = 0
        self.n_reread = 0
        self.is_cut = False
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
        """Prepare the next text: another sampler, which replaces the present one, callbacks, and its ends."""
        self.sampler.close()
        self.sampler, self.shown, self.stop, self.n_reread = sampler, shown, False, 0
        self.ends = ends
        self.after_sampling, self.while_reading = after_sampling, while_reading

    def reset(self) -> None:
        """Starts over with an empty cache."""
        self.engine.reset()
        self._forget()

    def postpone(self, tokens: np.ndarray) -> None:
        """Starts over with an empty cache; the next text is read behind these tokens i32[n]."""
        self.reset()
        self._unread = tokens

    def _forget(self) -> None:
        self._unread = np.empty(0, np.int32)
        self._decoded = array("i")
        # guesses that the engine has decoded: those that did not come yet, and how many have come
        self._ahead, self._n_true = np.empty(0, np.int32), 0
        # a restored cache has no logits of its own
        self._restored = False

    @property
    def tokens(self) -> np.ndarray:
        """i32[n_past]: the tokens decoded since the reset."""
        return np.array(self._decoded, np.int32)

    @property
    def unread(self) -> np.ndarray:
        """i32[n]: what comes next in the stream, and is not decoded yet."""
        return self._unread

    @property
    def n_drafted(self) -> int:
        """Guesses made since it was made."""
        return self.drafter.n_drafted if self.drafter else 0

    @property
    def n_accepted(self) -> int:
        """Those of them that came true."""
        return self.drafter.n_accepted if self.drafter else 0

    @property
    def is_new(self) -> bool:
        """Whether nothing was read since the reset."""
        return self.engine.n_past == 0 and not len(self._unread)

    def save(self) -> dict[str, Any]:
        """What a later writer needs besides the engine, as JSON can hold it."""
        return {
            "seed": self.sampler.seed,
            "recent": list(self.sampler.recent),
            "unread": self._unread.tolist(),
        }

    def restore(self, saved: Mapping[str, Any], tokens: np.ndarray, seed: int | None = None) -> None:
        """Continues after tokens i32[n_past] from what `save` returned; by this seed, if one is given."""
        self.sampler.resume(saved["recent"], saved["seed"] if seed is None else seed)
        if self.drafter:
            self.drafter.cut(_n_equal(self.tokens, tokens))
        self._unread = np.array(saved["unread"], np.int32)
        self._decoded = array("i", tokens.tobytes())
        self._restored = True

    def go_back(self, n: int, saved: Mapping[str, Any], seed: int | None = None) -> bool:
        """Continues after the first n tokens, where `save` returned this; by this seed, if one is given.

        Returns False, with all as it was, where the engine cannot go back there.
        """
        n_lacking = n - self.engine.n_past
        if 0 < n_lacking <= len(self._unread):
            # a stop amid what is read anew
            lacking = self._unread[:n_lacking]
            self.restore(saved, self.tokens, seed)
            self._unread = np.concatenate([lacking, self._unread])
            return True
        if not self.engine.go_back(n):
            return False
        self.restore(saved, self.tokens[:n], seed)
        return True

    def read(self, tokens: np.ndarray, after_step: Callable[[slice], None] | None = None) -> bool:
        """Decodes i32[n] tokens in as many steps as it takes; returns False if stopped before the end.

        after_step: called after each step with which of the tokens it took. All of them then give logits, and
        each plan comes when it is due, as when a text is measured.
        """
        self._settle()
        self._unread = np.concatenate([self._unread, tokens])
        if len(tokens):
            self.before_reading(len(self._unread))
        return self._decode_unread(after_step)

    def _decode_unread(self, after_step: Callable[[slice], None] | None = None) -> bool:
        """Decodes what was given or sampled; returns False if stopped before the end."""
        # an engine may have read more than this writer
        knows_all = len(self._decoded) == self.engine.n_past
        if after_step is None and knows_all and not self.stop and self.engine.reads_anew(len(self._unread)):
            whole = np.concatenate([self.tokens, self._unread])
            self.engine.empty()
            self.n_reread += len(self._decoded)
            # a stop leaves all of it to be read
            self._unread, self._decoded = whole, array("i")
        before, n_all = self.engine.n_past, len(self._unread)

        def stopped() -> bool:
            # a prompt that is read twice is in the cache with what repeats it
            self.while_reading(min(self.engine.n_past - before, n_all), n_all)
            return self.stop

        try:
            if after_step is None:
                self.engine.read(self._unread, stopped)
            else:
                steps = self.engine.steps(self._unread)
                while self.engine.n_past - before < n_all and not stopped():
                    after_step(next(steps))
        finally:
            # after an error, what was decoded before it counts as read
            self._take(self.engine.n_past - before)
        return not len(self._unread)

    def write(self, n_max: int | None = None) -> Iterator[str]:
        """Samples until the model ends its turn, n_max tokens are written, `stop` is set, or the text loops.

        First reads what a stop left unread. No piece ends in the middle of a character. The text also ends
        before a stop string of the sampler's settings; the tokens of the stop string stay in the cache, since
        what the policy evicted for them is gone.

        Raises StreamEnd where the cache or the positions are used up, and UsageError where nothing has been
        read, or where no token fits the grammar.
        """
        stops = Stops(self.sampler.settings.stop)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.n_written = 0
        self.is_cut, self.stopped_by, self.ending, self.loop = n_max == 0, "", None, None
        if len(self._unread) and not self._decode_unread():
            return
        if self.engine.n_past == 0 or self._restored or not self.engine.context.has_logits:
            raise UsageError("there is nothing to continue; read a text of at least one token first")
        try:
            yield from self._pieces(n_max, stops, decoder)
        finally:
            self._settle()

    def _pieces(self, n_max: int | None, stops: Stops, decoder: codecs.IncrementalDecoder) -> Iterator[str]:
        """What `write` yields."""
        model, loop = self.engine.model, Loop()
        while not self.stop and self.n_written != n_max:
            token = self.sampler.sample(self.engine.context)
            if model.ends_turn(token) or token in self.ends:
                self.ending = token
                break
            self.n_written += 1
            self.after_sampling(token)
            # the next `write` reads it if the caller asks for no more pieces
            self._unread = np.array([token], np.int32)
            text = model.piece(token, special=token in self.shown)
            if piece := stops.feed(decoder.decode(text)):
                yield piece
            if stops.found:
                self.stopped_by = stops.found
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

    def _decode_sampled(self, n_left: int) -> None:
        """Decodes the token that was sampled, with guesses of what follows where that pays.

        n_left: how many tokens may still be sampled.
        """
        drafter, token = self.drafter, int(self._unread[0])
        if not drafter:
            self._decode_unread()
        elif len(self._ahead) and self._ahead[0] == token:
            self._ahead = self._ahead[1:]
            self._n_true += 1
            self.engine.context.look_from(self._n_true)
            self._take(1)
        else:
            self._settle()
            self.while_reading(0, 1)
            if not self.stop:
                self._step_ahead(drafter, n_left)

    def _step_ahead(self, drafter: Drafter, n_left: int) -> None:
        """Decodes the token that was sampled, and at most so many guesses less one."""
        n = len(self._decoded)
        drafter.cut(n)
        drafter.add(np.concatenate([np.array(self._decoded[drafter.n :], np.int32), self._unread]))
        guesses = drafter.guess(min(self.engine.most_ahead(), n_left - 1), self.sampler.constraint)
        if len(guesses):
            self.engine.step_ahead(np.concatenate([self._unread, guesses]))
        else:
            self.engine.step(self._unread)
        drafter.stepped()
        self._ahead, self._n_true = guesses, 0
        self._take(1)

    def _take(self, n: int) -> None:
        """The first n unread tokens are decoded."""
        self._decoded.frombytes(self._unread[:n].tobytes())
        self._unread = self._unread[n:]
        self._restored &= not n

    def _settle(self) -> None:
        """Leaves out the guesses that have not come."""
        if self.drafter:
            self.drafter.judge(self._n_true)
        n, self._ahead, self._n_true = len(self._ahead), self._ahead[:0], 0
        self.engine.take_back(n)


def _n_equal(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens i32[n] two streams have in common at their start."""
    n = min(len(one), len(other))
    differ = np.flatnonzero(one[:n] != other[:n])
    return int(differ[0]) if len(differ) else n
