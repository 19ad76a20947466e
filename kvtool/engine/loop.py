"""The engine and its loop: decode, observe, plan, apply."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Protocol

import numpy as np

from kvtool.engine import snapshot
from kvtool.engine.cells import Cells
from kvtool.engine.checkpoints import Checkpoints
from kvtool.engine.checks import check, for_model, how_read
from kvtool.engine.chunk_size import ChunkSize
from kvtool.engine.exact_reader import ExactReader
from kvtool.engine.plan_check import ask
from kvtool.engine.policy_cache import PolicyCache
from kvtool.engine.residents import Residents
from kvtool.engine.settings import Settings
from kvtool.engine.sizes import Sizes, open_context
from kvtool.engine.whole_reader import WholeReader, batches
from kvtool.errors import KvtoolError, LibraryError, OutOfMemory, StreamEnd, UsageError
from kvtool.llama.cache.context import Context
from kvtool.llama.loaded.model import Model
from kvtool.policy import Policy, State
from kvtool.policy.checks import check_whole
from kvtool.system.interrupt import delayed

_I32 = np.dtype(np.int32)


class JointDecoder(Protocol):
    """Decodes the steps of several engines together."""

    @property
    def is_several(self) -> bool:
        """True if steps of several engines are decoded together now. Such steps have no draft tokens."""

    def decode(self, context: Context, tokens: np.ndarray, pos_0: int, n_output: int) -> None:
        """Decode tokens of one context. `Context.decode` explains the arguments."""


class Engine:
    """A stream of tokens that goes through one cache under one policy.

    Attributes
    ----------
    policy
        The constructor's policy. If it recalls, the result of its method `for_model`.
    prefill
        How a prompt is read: "stream", "whole" or "exact" (see `Settings`).
    n_ctx, n_cell, n_batch
        See `Sizes`.
    context
        The cache in llama.cpp, and the logits of the last step.
    cache
        The context, the rows, the signals and the policy's state. Evictions edit all of them together.
    joint_decoder
        Decodes the steps of several engines together; None if this engine is alone.
    chunk_size
        Size of the parts into which steps are divided, so that other threads do not wait long. None if steps
        are not divided.
    after_decode
        Function that is called after each decode, or None. Its arguments are the number of tokens in the
        stream before the decode and the number of tokens that were decoded.
    """

    def __init__(self, model: Model, policy: Policy, settings: Settings | None = None) -> None:
        self.settings = settings = settings or Settings()
        for value, kind in ((model, Model), (policy, Policy), (settings, Settings)):
            if not isinstance(value, kind):
                raise TypeError(f"Engine(model, policy, settings) needs a {kind.__name__}, got {value!r}")
        self.settings = settings = settings.for_model(model)
        self.model = model
        self.policy = policy = for_model(policy, model) if policy.recall else policy
        sizes = Sizes.of(policy, settings, model)
        self.n_ctx, self.n_cell, self.n_batch = sizes.n_ctx, sizes.n_cell, sizes.n_batch
        check(policy, settings, model.layers, self.n_ctx, model.n_ctx_train)
        self.prefill = how_read(policy, settings)
        # stored here, because computing a policy's property takes microseconds, which is too long for each
        # step
        self._n_live = policy.n_live
        self._request = ask(policy, policy.request)
        self._needs_t = self._request.needs_t
        self.context = open_context(model, policy, self._request, settings, sizes)
        in_cache = settings.positions == "in-cache"
        self.cache = PolicyCache(policy, self.context, self.n_ctx, in_cache=in_cache)
        self.rows, self.signals = self.cache.rows, self.cache.signals
        self.whole_reader = WholeReader(self.cache, settings)
        self.exact_reader = ExactReader(self.cache, settings, sizes.n_chunk)
        self.residents = Residents(self.cache, settings)
        self.checkpoints = Checkpoints(self.cache, settings.checkpoints)
        self.joint_decoder: JointDecoder | None = None
        self.chunk_size: ChunkSize | None = None
        self.after_decode: Callable[[int, int], None] | None = None

    def close(self) -> None:
        """Free the cache."""
        self.context.close()

    @delayed
    def reset(self) -> None:
        """Forget all tokens, and set `n_pinned` and `n_held` to 0."""
        self.checkpoints.cut(0)
        self.cache.reset()

    @delayed
    def empty(self) -> None:
        """Forget all tokens, but do not change `n_pinned` and `n_held`."""
        self.checkpoints.cut(0)
        self.cache.empty()

    def pin(self, n: int) -> None:
        """Never evict the first n tokens of the stream. Raises UsageError for too many."""
        self.cache.pin(n)

    def hold(self, n: int) -> None:
        """Keep the newest n tokens at every eviction. Raises UsageError for too many."""
        self.cache.hold(n)

    # the loop

    @delayed
    def step(self, tokens: np.ndarray, n_output: int = 1) -> None:
        """Decode tokens i32[n] in one step. The last n_output tokens give logits.

        Raises UsageError for too many tokens, or for a token that is not in the vocabulary. Raises StreamEnd
        if the context is full and positions are "original". Also raises the errors of `evict`.
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
        self._prepare(n)
        self._decode(tokens, n_output)
        self.evict_if_due(0)

    @delayed
    def _decode(self, tokens: np.ndarray, n_output: int, n_draft: int = 0) -> None:
        """Decode tokens i32[n] after the live cells, and do not check the budget.

        All other methods decode through this method. n_draft: number of draft tokens at the end of `tokens`.
        """
        rows = self.rows
        if self.checkpoints.is_due:
            self.checkpoints.take()
        if self.signals.is_observed:
            # the policy has observed these signals already: clear them, so that it does not add them twice
            self.signals.clear()
        if self._needs_t:
            self.context.see(rows.n_past if self._request.t == "stream" else rows.n_kv)
        began = time.perf_counter()
        if self.residents.n_token and len(tokens) == 1 + n_draft and not self.exact_reader.is_staged:
            self._decode_with_residents(tokens, n_output)
        else:
            self._decode_once(tokens, n_output)
        if self.chunk_size:
            self.chunk_size.note(len(tokens), time.perf_counter() - began)
        if self.after_decode:
            self.after_decode(rows.n_past, len(tokens))
        rows.append(len(tokens))

    def _decode_once(self, tokens: np.ndarray, n_output: int) -> None:
        if self.joint_decoder and self.joint_decoder.is_several:
            assert isinstance(self.context, Context)
            self.joint_decoder.decode(self.context, tokens, self.rows.next_rot, n_output)
        else:
            self.context.decode(tokens, self.rows.next_rot, n_output)

    def _decode_with_residents(self, tokens: np.ndarray, n_output: int) -> None:
        self.residents.prepare()
        self._decode_once(tokens, n_output)
        while self.residents.misses():
            self.context.drop(len(tokens))
            self.context.mark_drafts(len(tokens) - 1)
            self.context.decode(tokens, self.rows.next_rot, n_output)

    def evict_if_due(self, n: int = 1) -> None:
        """Evict if `n_until_plan` is less than n.

        Before a step, n is 1, so that the step has room for at least one token. After a step, n is 0: the
        method then evicts only if the cache has exceeded the budget, or if a plan is overdue.
        """
        if self.n_until_plan < n:
            self.evict()

    @delayed
    def evict(self) -> None:
        """Let the policy observe the signals and make a plan, then apply the plan.

        Raises PlanError for a plan that breaks a rule; the cache is then unchanged. Also raises PlanError if
        the policy fails to move its state; tokens are then evicted, but the state of the remaining tokens may
        belong to other tokens. Raises StreamEnd if the cache is full and the policy keeps everything.
        """
        cache = self.cache
        began = time.perf_counter()
        view = cache.observe()
        plan = cache.ask(self.policy.plan, view, cache.state)
        cache.plan_s += time.perf_counter() - began
        cache.apply(plan, cache.check(view, plan), self.rows.next_rot)
        cache.n_planned = self.rows.n_past
        if self.rows.ragged:
            cache.make_room(self.policy.slack)

    @property
    def n_until_plan(self) -> int:
        """Number of tokens until the next plan; 0 or less if the plan is due."""
        rows = self.rows
        n = self._n_live - rows.n_kv
        if rows.ragged:
            n = min(n, self.cache.n_planned + self.policy.slack - rows.n_past)
        return n

    def room(self) -> int:
        """Maximum number of tokens of the next step; 0 if an eviction has to come first."""
        # the context always has enough positions for this step, because n_cell is at most n_ctx
        return min(self.n_batch if self.n_archived else self.settings.n_batch, self.n_cell - self.rows.n_kv)

    @delayed
    def _prepare(self, n: int) -> None:
        """Make room for n tokens, in the context and in ragged rows."""
        if self.rows.next_rot + n > self.n_ctx:
            if self.settings.positions == "original":
                raise StreamEnd(
                    f"the stream has reached the context of {self.n_ctx:,} tokens; "
                    "continue with --positions auto or in-cache"
                )
            self.cache.close_gaps(n)
        if self.rows.ragged:
            self.cache.take_room(n)

    def _part(self, at: int, end: int) -> slice:
        """Return the slice of a step's tokens to decode next, from `at` to at most `end`."""
        # with an archive, do not divide the step: all tokens of a step attend to the same clusters
        return self.chunk_size.part(at, end) if self.chunk_size and not self.n_archived else slice(at, end)

    # texts

    @delayed
    def read(self, tokens: np.ndarray, stopped: Callable[[], bool] = lambda: False) -> int:
        """Decode a text i32[n] of any length; its last token gives logits.

        See `reads_whole` and `n_exact` for other ways of reading.

        stopped: called before each part of a step. Reading ends if it returns True.

        Returns the number of tokens that were read; with whole reading, n or 0. Raises the errors of `step`.
        """
        tokens, stopped = _checked(tokens, self.model.n_vocab), _or_interrupted(stopped)
        if self.reads_whole(len(tokens)):
            return self._read_whole(tokens, stopped)
        done = 0
        while (n := self.n_exact(len(tokens) - done)) and not stopped():
            done += self._read_exactly(tokens[done : done + n], stopped)
        steps, first = self.steps(tokens[done:], late=True, every=False), done
        while done < len(tokens) and not stopped():
            done = first + next(steps).stop
        if done < len(tokens):
            # evict if the budget is exceeded: this can happen if reading stopped between two parts of a step
            self.evict_if_due(0)
        return done

    def steps(self, tokens: np.ndarray, *, late: bool = False, every: bool = True) -> Iterator[slice]:
        """Decode a text i32[n] in steps. After each step, yield the slice of tokens that it decoded.

        If `late` is True and the engine has a `chunk_size`, each step is divided into parts, and the slice of
        each part is yielded. This does not change the results.

        late
            True if a step may continue although a plan is due. A prompt is then read in longer steps. If
            False, a step ends when the next plan is due.
        every
            True if each token gives logits. False if only the last token of the text does.

        Raises the errors of `step`.
        """
        tokens = _checked(tokens, self.model.n_vocab)
        most = self.settings.n_output if every else len(tokens)
        at = 0
        while at < len(tokens):
            self.evict_if_due()
            n = min(self.room(), most, len(tokens) - at)
            if not late:
                n = min(n, self.n_until_plan)
            self._prepare(n)
            end = at + n
            while at < end:
                part = self._part(at, end) if late else slice(at, end)
                at = part.stop
                self._decode(tokens[part], at - part.start if every else int(at == len(tokens)))
                if at == end:
                    self.evict_if_due(0)
                yield part

    def reads_whole(self, n: int) -> bool:
        """True if a text of n tokens would now be decoded without evictions, and then compressed once.

        Only the first text of a stream can be read in this way, and only if it is longer than the budget. One
        of these conditions must hold:

        - The settings require it.
        - The policy has a reconstruction pass.
        - The policy requests it, and the text fits.
        """
        evicts = self.policy.evicts and n > self.policy.n_asked
        if self.prefill != "whole" or self.n_past or not evicts:
            return False
        has_to = self.settings.prefill == "whole" or self.policy.reconstruction is not None
        return has_to or self.whole_reader.fits(n)

    def n_exact(self, n: int) -> int:
        """Return how many of the next n tokens are read in chunks that attend exactly to the archive."""
        return self.exact_reader.n_readable(n)

    def _read_whole(self, tokens: np.ndarray, stopped: Callable[[], bool]) -> int:
        """Decode a prompt i32[n] without an eviction, then compress it once. Returns n, or 0 if stopped."""
        # make no copies of the whole cache now: the policy has no state before the prompt is compressed
        self.checkpoints.is_paused = self.checkpoints.are_whole
        try:
            return self.whole_reader.read(tokens, partial(self._decode_text, stopped=stopped))
        finally:
            self.checkpoints.is_paused = False
            # after a stop or an error the cache is empty, so drop the checkpoints that were made until then
            self.checkpoints.cut(self.n_past)

    def _decode_text(self, tokens: np.ndarray, n_output: int, stopped: Callable[[], bool]) -> bool:
        """Decode a text i32[n] after the live cells, in batches; the last n_output tokens give logits.

        Calls `stopped` before each part of a batch, and returns False as soon as `stopped` returns True.
        """
        n_left = len(tokens)
        for step in batches(tokens, self.whole_reader.n_batch):
            at = 0
            while at < len(step):
                if stopped():
                    return False
                part = step[self._part(at, len(step))]
                at += len(part)
                n_left -= len(part)
                self._decode(part, 0 if n_left else n_output)
        return True

    def _read_exactly(self, tokens: np.ndarray, stopped: Callable[[], bool]) -> int:
        """Decode a text i32[n] in chunks that attend exactly to the archive. Return how many were decoded.

        If a device lacks memory, at most n/2 tokens at once are read exactly from now on. But if the settings
        ask for exact reading, the method raises LibraryError or OutOfMemory.
        """
        first, is_ready = self.n_past, False
        # there is room for only one chunk above the budget: evict now if the budget is exceeded already
        self.evict_if_due(0)
        try:
            with self.exact_reader.staged(first + len(tokens)):
                is_ready = True
                while (done := self.n_past - first) < len(tokens) and not stopped():
                    chunk = tokens[done : done + self.exact_reader.n_chunk]
                    self._prepare(len(chunk))
                    self._decode(chunk, int(done + len(chunk) == len(tokens)))
                    self.evict_if_due(0)
        except (LibraryError, OutOfMemory) as error:
            if self.settings.prefill == "exact" or (is_ready and isinstance(error, LibraryError)):
                raise
            self.exact_reader.n_max = len(tokens) // 2
        return self.n_past - first

    # draft tokens

    def draft_room(self) -> int:
        """Return how many draft tokens may follow the next token in the same step without an eviction.

        If a plan is due before the next token, this method evicts first.
        """
        self.evict_if_due()
        if self.joint_decoder and self.joint_decoder.is_several:
            return 0
        # With recall, the signals of a step would include its draft tokens, even if these are rejected later.
        # There are therefore no draft tokens if the policy reads signals
        if self.policy.recall and self.policy.reads:
            return 0
        n_left = min(self.n_until_plan, self.room(), self.n_ctx - self.rows.next_rot)
        return max(min(self.settings.n_draft, n_left - 1), 0)

    @delayed
    def draft(self, tokens: np.ndarray) -> None:
        """Decode tokens i32[n] in one step: the next token, then at most `draft_room` draft tokens.

        All tokens give logits. The sampler uses the logits of the first token until the caller accepts a
        draft token with `context.sample_from`. Then the caller calls `drop_drafts` to remove the draft tokens
        that it did not accept.
        """
        tokens = _checked(tokens, self.model.n_vocab)
        self._prepare(len(tokens))
        self.context.mark_drafts(len(tokens) - 1)
        try:
            self._decode(tokens, len(tokens), len(tokens) - 1)
        finally:
            # a decode that fails leaves the mark
            self.context.mark_drafts(0)
        self.context.sample_from(0)

    @delayed
    def drop_drafts(self, n: int) -> None:
        """Remove the newest n draft tokens of the last step. No policy sees their attention."""
        if n:
            self.context.drop(n)
            self.rows.drop(n)
            self.cache.give_room(n)

    # earlier states

    @property
    def can_rewind(self) -> bool:
        """True if `rewind` can keep some tokens, provided that the archive has dropped no tokens."""
        return self.rewinds_anywhere or self.checkpoints.max_bytes > 0

    @property
    def rewinds_anywhere(self) -> bool:
        """True if `rewind` needs no checkpoints."""
        return self.cache.keeps_all and not self.context.fixed_state

    def n_kept(self, n: int) -> int:
        """Return how many of the first n tokens `rewind` keeps, if the archive has dropped no tokens."""
        if n == self.n_past or self.rewinds_anywhere:
            return n
        return self.checkpoints.best(n)[0]

    @delayed
    def rewind(self, n: int) -> int | None:
        """Cut the stream to its first n tokens, or to fewer if no checkpoint allows that.

        The newest archived tokens move back into the window. Returns the number of tokens that are left. If
        this number is less than n, the caller reads the missing tokens again. The number is 0 if a checkpoint
        is needed but does not exist, or if an edit of the cache fails. Returns None and changes nothing if
        the archive has dropped tokens that the window needs. Raises UsageError if the stream has fewer than n
        tokens.
        """
        self.context.check_open()
        check_whole("n", n, UsageError)
        if not 0 <= n <= self.n_past:
            raise UsageError(f"n must be in 0..{self.n_past}, the tokens of the stream, got {n}")
        if n == self.n_past:
            return n
        n_kept, checkpoint = self.checkpoints.best(n)
        if n == 0 or not (checkpoint or self.rewinds_anywhere):
            self.empty()
            return 0
        n = n_kept if checkpoint else n
        try:
            if checkpoint and self.checkpoints.are_whole:
                self.checkpoints.put_back(checkpoint, self.n_cell)
            else:
                # imported here, because most chats do not need this module
                from kvtool.engine.rewind import rewind

                if not rewind(self.cache, n, checkpoint):
                    return None
        except KvtoolError:
            # a part of the state is rewound and the rest is not: forget all of it
            self.empty()
            return 0
        self.checkpoints.cut(n)
        return n

    def save(self, *, archived: bool = True) -> Iterator[tuple[str, np.ndarray]]:
        """Yield (name, array) for all that the next step depends on, except model, policy and settings.

        Later steps do not change the arrays. archived: False if the caller saves the archive's tokens itself.
        `restore` needs these tokens.
        """
        return snapshot.save(self.cache, archived=archived)

    @delayed
    def restore(self, saved: Mapping[str, np.ndarray]) -> None:
        """Continue from the arrays that `save` yielded, and from a session's checkpoints if it has any.

        Raises SessionError if the arrays do not fit.
        """
        try:
            snapshot.restore(self.cache, saved, self.n_cell)
        finally:
            # Drop the checkpoints beyond the end of the stream. If an error has left the engine empty, these
            # are all checkpoints
            self.checkpoints.cut(self.n_past)
        self.checkpoints.restore(saved, self.n_cell)

    # counts and bytes

    def first_plan(self, n_text: int = 0) -> int | None:
        """Return the number of tokens in a new stream before the first plan; None if there is never a plan.

        n_text: number of first tokens that are read as one text. Later tokens are decoded one by one.
        """
        policy, settings = self.policy, self.settings
        if not policy.evicts:
            return None
        if self.reads_whole(n_text):
            return n_text
        due = min(policy.budget, policy.slack) if policy.ragged else policy.n_live
        if not settings.over_budget or policy.recall:
            return due
        # A text is read in batches. When the plan becomes due during a batch, it is made at the end of that
        # batch, or earlier if the text ends or the cells are full
        n_batch = settings.n_batch
        return max(due, min(-(-due // n_batch) * n_batch, n_text, self.n_cell))

    def cells(self) -> Cells:
        """Return which tokens each row holds now."""
        return Cells.of(self.rows)

    @property
    def n_past(self) -> int:
        """Number of tokens decoded so far."""
        return self.rows.n_past

    @property
    def n_kv(self) -> int:
        """Number of live cells of a row; if rows are ragged, of the longest row."""
        return self.rows.n_kv

    @property
    def n_pinned(self) -> int:
        """Number of first tokens that are never evicted."""
        return self.cache.n_pinned

    @property
    def n_held(self) -> int:
        """Number of newest tokens that are never evicted."""
        return self.cache.n_held

    @property
    def n_restart(self) -> int:
        """Number of times that all gaps between positions were closed at once."""
        return self.cache.n_restart

    @property
    def n_evicted(self) -> int:
        """Number of cells that a row has evicted so far; if rows are ragged, the mean of all rows."""
        return self.cache.n_evicted // len(self.rows.live)

    @property
    def n_archived(self) -> int:
        """Number of evicted tokens that a step may recall."""
        return self.context.archive.n if self.context.archive else 0

    @property
    def mean_live(self) -> float:
        """Mean number of tokens that a row holds."""
        return float(self.rows.live.mean())

    @property
    def mean_kv(self) -> float:
        """Mean number of a row's cells that a query attends to, both live and recalled cells."""
        n_recalled = min(self.policy.recall.n_cell, self.n_archived) if self.policy.recall else 0
        return self.mean_live + n_recalled

    @property
    def state(self) -> State:
        """The policy's state of each cell: arrays [row, cell, ...]."""
        return self.cache.state

    @property
    def cache_bytes(self) -> int:
        """Size of K and V of all cells, live or not, in bytes."""
        return self.context.cache_bytes

    @property
    def host_bytes(self) -> int:
        """Size in bytes of the policy's state and of the table of rows. Both are in host memory."""
        return self.rows.pos.nbytes + self.rows.rot.nbytes + sum(array.nbytes for array in self.state)

    @property
    def signal_bytes(self) -> int:
        """Size of the signals and of stored queries in bytes, without the host's copies."""
        return self.context.signal_bytes(self.context.layer_cells)

    @property
    def state_bytes(self) -> int:
        """Bytes that a policy takes in addition to the cache."""
        return self.host_bytes + self.signal_bytes

    @property
    def archive_bytes(self) -> int:
        """Size of the archive in bytes, in host memory or on disk."""
        return self.context.archive.n_bytes if self.context.archive else 0


def _or_interrupted(stopped: Callable[[], bool]) -> Callable[[], bool]:
    """Return a function that is also true if Ctrl-C waits until the text is read."""
    return lambda: delayed.is_over or stopped()


def _checked(tokens: np.ndarray, n_vocab: int) -> np.ndarray:
    """Return the tokens as i32[n]. Raises UsageError if a token is not in the vocabulary."""
    # shortcut for the single tokens of a reply, because each call of NumPy takes microseconds
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
