"""The one loop: decode, read signals, plan, apply."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from kvtool.engine import prefill, staged
from kvtool.engine.cached_prompt import CachedPrompt
from kvtool.engine.cells import Cells
from kvtool.engine.stream import Stream
from kvtool.errors import LibraryError, UsageError

_I32 = np.dtype(np.int32)

_N_ANEW = 8
"""A text that is this part of all, or more, is read with what is before it where a GPU reads that whole."""


class Engine(Stream):
    """A stream that evicts when its policy is due. Attributes as in `Stream`."""

    def cells(self) -> Cells:
        """Which tokens each row holds now."""
        return Cells.of(self.rows)

    def pin(self, n: int) -> None:
        """The first n tokens of the stream are never evicted. Raises UsageError for too many."""
        self.eviction.pin(n)

    def hold(self, n: int) -> None:
        """The newest n tokens stay at every eviction. Raises UsageError for too many."""
        self.eviction.hold(n)

    def room(self) -> int:
        """The largest step that fits beside the live cells. 0 if an eviction has to come first."""
        # n_cell is at most n_ctx
        return min(self.n_batch if self.n_archived else self.settings.n_batch, self.n_cell - self.rows.n_kv)

    @property
    def n_until_plan(self) -> int:
        """Tokens until the next plan; 0 or less if one is due."""
        rows = self.rows
        n = self._n_live - rows.n_kv
        if rows.ragged:
            n = min(n, self.eviction.n_planned + self.policy.slack - rows.n_past)
        return n

    def reads_whole(self, n: int) -> bool:
        """Whether a text of n tokens would now be decoded whole, then compressed once.

        What only the policy asks for gives way where it cannot be. What is recalled is read so unasked where
        a GPU has room for it.
        """
        evicts = n > self.policy.n_asked and self.policy.slack > 0
        if self.n_past or not evicts:
            return False
        if self.prefill != "whole":
            # a text that is read by chunks takes less memory and time
            return staged.n_readable(self, n) < n and prefill.has_room(self, n)
        has_to = self.settings.prefill == "whole" or self.policy.reconstruction is not None
        return has_to or prefill.fits_at_once(self, n)

    def reads_anew(self, n: int) -> bool:
        """Whether a text of n tokens behind others had better be read with these, as one prompt.

        A GPU then reads all of it, as `reads_whole` says unasked, before a CPU has looked into the archive
        for the text.
        """
        n_all = self.n_past + n
        if not self.n_past or n * _N_ANEW < n_all or n_all <= self.policy.n_asked:
            return False
        return staged.n_readable(self, n) < n and prefill.has_room(self, n_all)

    def evict_if_due(self, n: int = 1) -> None:
        """Lets the policy evict if the next n tokens do not fit before its next plan: all that ever evicts.

        A step begins with this for the token that comes, and ends with it for none. Raises PlanError, with
        the cache as it was, for a plan that breaks a rule, and StreamEnd if the cache is full and the policy
        keeps everything.
        """
        if self.n_until_plan < n:
            self.eviction.evict()
            if self.rows.ragged:
                self.eviction.make_room(self.policy.slack)

    def step(self, tokens: np.ndarray, n_output: int = 1) -> None:
        """Decodes i32[n] tokens in one batch; the last n_output give logits.

        Raises what `evict_if_due` raises, UsageError for too many tokens or for one that is not in the
        vocabulary, and StreamEnd if original positions end before them.
        """
        tokens = _checked(tokens, self.model.n_vocab)
        self.evict_if_due()
        n, room = len(tokens), self.room()
        if not 0 < n <= room:
            raise UsageError(f"a step takes 1 to {room} tokens here, got {n}; Engine.read takes any number")
        most = min(n, self.settings.n_output)
        if not 0 <= n_output <= most:
            raise UsageError(
                f"n_output must be in 0..{most}, got {n_output}; "
                "Settings(n_output=...) sets how many tokens of a step may give logits"
            )
        self._step(tokens, n_output)

    def steps(self, tokens: np.ndarray, *, late: bool = False, every: bool = True) -> Iterator[slice]:
        """Decodes a text i32[n] in as many steps as it takes. After each, yields which of the tokens it took.

        With a `chunk_size`, a late step yields after each of its chunks. The result is the same.

        late
            Whether a step may run past the next plan, so that a prompt is read in long steps. Otherwise every
            plan comes when it is due: exactly the policy's own schedule.
        every
            Whether each token gives logits. Otherwise only the last one of the text does.

        Raises what `step` raises.
        """
        tokens = _checked(tokens, self.model.n_vocab)
        most = self.settings.n_output if every else len(tokens)
        at = 0
        while at < len(tokens):
            self.evict_if_due()
            n = min(self.room(), most, len(tokens) - at)
            if not late:
                n = min(n, self.n_until_plan)
            self.make_way(n)
            end = at + n
            while at < end:
                part = self.part(at, end) if late else slice(at, end)
                at = part.stop
                self.decode(tokens[part], at - part.start if every else int(at == len(tokens)))
                if at == end:
                    # it may have gone over the budget
                    self.evict_if_due(0)
                yield part

    def read(
        self,
        tokens: np.ndarray,
        stopped: Callable[[], bool] = lambda: False,
        cached: CachedPrompt | None = None,
    ) -> int:
        """Decodes a text i32[n] of any length; its last token gives logits.

        The first text of a stream is read whole if policy or settings say so. `stopped` is asked before each
        step, or part of one, whether to end. cached: what another stream has read; where that is the same
        text with the same model and cache types, and nothing is evicted amid it, it is not read again.
        Returns how many tokens were read; of a text read whole all or none. Raises what `step` raises.
        """
        if self.reads_whole(len(tokens)):
            try:
                return prefill.read_whole(self, _checked(tokens, self.model.n_vocab), stopped, cached)
            except LibraryError:
                # nobody has asked for it where a GPU has less room than it says
                if self.prefill == "whole":
                    raise
                self.n_refused = len(tokens)
        if n := staged.n_readable(self, len(tokens)):
            tokens = _checked(tokens, self.model.n_vocab)
            done = staged.read(self, tokens[:n], stopped, lambda: self.evict_if_due(0))
            if done is None or (done == n and n < len(tokens)):
                # a device lacks memory, or keys further on lie at other distances
                return (done or 0) + self.read(tokens[done or 0 :], stopped)
            return done
        fits_in = self.n_past == 0 and not self.policy.evicts and len(tokens) <= self.n_cell
        if cached and fits_in and cached.fits(self.eviction, tokens):
            n = cached.put(self.eviction)
            return n + self.read(tokens[n:], stopped)
        steps, done = self.steps(tokens, late=True, every=False), 0
        while done < len(tokens) and not stopped():
            done = next(steps).stop
        if done < len(tokens):
            # a part of a step may have gone over the budget
            self.evict_if_due(0)
        return done

    def most_ahead(self) -> int:
        """How many guesses may follow the next token in its step: none has to be evicted for them.

        Evicts if that is due for the next token. Raises what `evict_if_due` raises.
        """
        self.evict_if_due()
        if self.joint_decoder and self.joint_decoder.is_several:
            return 0
        n_left = min(self.n_until_plan, self.room(), self.n_ctx - self.rows.next_rot)
        return max(min(self.settings.n_ahead, n_left - 1), 0)

    def step_ahead(self, tokens: np.ndarray) -> None:
        """Decodes i32[n] tokens in one step: the next one, and at most `most_ahead` guesses of what follows.

        All give logits, and the first one's are those that the next token is drawn from. Each guess is then
        confirmed by `context.look_from`, or `take_back` leaves it out. Raises what `step` raises.
        """
        tokens = _checked(tokens, self.model.n_vocab)
        self.context.guess(len(tokens) - 1)
        self.advance(tokens, len(tokens))
        self.context.look_from(0)

    def take_back(self, n: int) -> None:
        """The newest n guesses of the last step never came: no policy sees what they attended to."""
        if n:
            self.context.take_back(n)
            self.rows.take_back(n)
            self.eviction.give_room(n)

    @property
    def goes_back(self) -> bool:
        """Whether `go_back` can cut the stream anywhere, as long as nothing of it is forgotten."""
        from kvtool.engine import back

        return back.can_go_back(self.eviction)

    def go_back(self, n: int) -> bool:
        """Cuts the stream to its first n tokens; the archive's newest ones fill the window again.

        The next step reads on from there. Returns False, with all as it was, where that cannot be: the policy
        has no archive, this has forgotten tokens of the window, or the model keeps more than cells. Raises
        UsageError for more tokens than there are.
        """
        if not 0 <= n <= self.n_past:
            raise UsageError(f"n must be in 0..{self.n_past}, the tokens of the stream, got {n}")
        if n == self.n_past:
            return True
        if n == 0:
            self.empty()
            return True
        from kvtool.engine import back

        return back.go_back(self.eviction, n)

    def save(self, *, archived: bool = True) -> Iterator[tuple[str, np.ndarray]]:
        """What the next step depends on besides model, policy and settings: arrays by name, one at a time.

        archived: False leaves out the archive's tokens, which `restore` needs, too.
        """
        # here and below: what most chats do not need is not imported at their start
        from kvtool.engine import snapshot

        return snapshot.save(self.eviction, archived=archived)

    def restore(self, saved: Mapping[str, np.ndarray]) -> None:
        """Continues from what `save` gave. Raises SessionError if it does not fit."""
        from kvtool.engine import snapshot

        snapshot.restore(self.eviction, saved, self.n_cell)

    def _step(self, tokens: np.ndarray, n_output: int) -> None:
        self.advance(tokens, n_output)
        # it may have gone over the budget
        self.evict_if_due(0)


def _checked(tokens: np.ndarray, n_vocab: int) -> np.ndarray:
    """The tokens as i32[n]. Raises UsageError if they are none of this model."""
    # a reply comes token by token, and beside a decode every call of NumPy takes microseconds
    is_one = type(tokens) is np.ndarray and tokens.shape == (1,) and tokens.dtype is _I32
    if is_one and 0 <= tokens.item() < n_vocab:
        return tokens
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or (tokens.dtype.kind not in "iu" and len(tokens)):
        raise UsageError(f"tokens must be an array i32[n], got {tokens.dtype}{list(tokens.shape)}")
    outside = (tokens < 0) | (tokens >= n_vocab)
    if outside.any():
        at = int(outside.argmax())
        raise UsageError(f"token {tokens[at]} is not in the vocabulary, which is 0..{n_vocab - 1}")
    return tokens.astype(np.int32, copy=False)
