"""The one loop: decode, read signals, plan, apply."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from kvtool.engine import prefill
from kvtool.engine.cells import Cells
from kvtool.engine.checks import check, how_read
from kvtool.engine.eviction import Eviction, ask
from kvtool.engine.rows import Rows
from kvtool.engine.settings import Settings
from kvtool.errors import LibraryError, StreamEnd, UsageError
from kvtool.llama.cache import Cache
from kvtool.llama.context import Context
from kvtool.llama.library import HOW_TO_BUILD, UNPATCHED, is_patched
from kvtool.llama.model import Model
from kvtool.policy import Policy, Request, State

_I32 = np.dtype(np.int32)

_STEP = 64
"""Ragged layers grow and shrink by this many cells."""


class Engine:
    """One stream of tokens through one cache under one policy.

    Attributes
    ----------
    model, policy, settings
        What it was made of.
    n_ctx
        Context length: the most positions that keys are rotated to.
    n_cell
        The most tokens that the cache takes before an eviction.
    n_batch
        The most tokens of a step; of a policy that recalls, once there is something to recall.
    context
        The cache in llama.cpp, whose `logits()` are those of the last step.
    rows
        What every row holds.
    eviction
        The policy at work: its state, and what it has evicted.
    layer_cells
        i32[layer]: the cells that each layer has at first.
    """

    _n_fit: int
    """Tokens that every layer of ragged rows has room for."""

    def __init__(self, model: Model, policy: Policy, settings: Settings | None = None) -> None:
        self.settings = settings = settings or Settings()
        self.model = model
        self.policy = policy
        self.n_ctx = min(settings.n_ctx or model.n_ctx_train, model.n_ctx_train)
        check(policy, settings, model.layers, self.n_ctx, model.n_ctx_train)
        self.n_cell = n_start = policy.n_live
        if policy.ragged:
            # llama.cpp's own table holds no more than the tokens between two plans
            n_start = policy.slack + settings.n_batch + 1
        elif policy.slack and settings.over_budget and not policy.recall:
            over = policy.budget - policy.slack + settings.n_batch
            self.n_cell = n_start = max(policy.budget, min(over, self.n_ctx))
        self.n_batch = min(settings.n_batch, policy.recall.chunk) if policy.recall else settings.n_batch
        self._request = ask(policy, "request")
        self._needs_t = self._request.needs_t
        n_start += policy.budget - policy.n_live
        self.context = _cache(model, policy, self._request, settings, prefill.pad(n_start), self.n_ctx)
        self.layer_cells = self.context.layer_cells
        self.rows = Rows(self.context.row_layers, self.context.n_cell, ragged=policy.ragged)
        in_cache = settings.positions == "in-cache"
        self.eviction = Eviction(policy, self.context, self.rows, self.n_ctx, in_cache=in_cache)
        self.reset()

    def reset(self) -> None:
        """Forgets everything: the next token is the first."""
        self._n_fit = 0
        self.rows.clear(self.rows.pos.shape[1])
        self.eviction.reset()
        if (self.context.layer_cells != self.layer_cells).any():
            self.context.resize(self.layer_cells)
        self.rows.clear(self.context.n_cell)
        self.eviction.start()

    def close(self) -> None:
        """Frees the cache."""
        self.context.close()

    @property
    def n_past(self) -> int:
        """Tokens decoded so far."""
        return self.rows.n_past

    @property
    def n_kv(self) -> int:
        """Live cells of each row; of the longest row if they are ragged."""
        return self.rows.n_kv

    @property
    def n_pinned(self) -> int:
        """First tokens that are never evicted."""
        return self.eviction.n_pinned

    @property
    def n_held(self) -> int:
        """Newest tokens that are never evicted."""
        return self.eviction.n_held

    @property
    def n_restart(self) -> int:
        """How often positions have started over behind the live cells."""
        return self.eviction.n_restart

    @property
    def n_evicted(self) -> int:
        """Cells evicted so far per row; the mean if rows are ragged."""
        return self.eviction.n_evicted // len(self.rows.live)

    @property
    def n_archived(self) -> int:
        """Evicted tokens that a step may recall."""
        return self.context.archive.n if self.context.archive else 0

    @property
    def mean_kv(self) -> float:
        """Cells per row that a query sees, live or recalled: the mean of all rows."""
        n_recalled = min(self.policy.recall.n_cell, self.n_archived) if self.policy.recall else 0
        return float(self.rows.live.mean()) + n_recalled

    @property
    def state(self) -> State:
        """What the policy remembers of each cell: arrays [row, cell, ...]."""
        return self.eviction.state

    @property
    def cache_bytes(self) -> int:
        """Bytes of K and V, whether their cells are live or not."""
        return self.context.cache_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes that the policy's state and the rows' table take on the host."""
        return self.rows.pos.nbytes + self.rows.rot.nbytes + sum(array.nbytes for array in self.state)

    @property
    def archive_bytes(self) -> int:
        """Bytes that the archive takes, in host memory or on disk."""
        return self.context.archive.n_bytes if self.context.archive else 0

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
        policy, rows = self.policy, self.rows
        n = policy.n_live - rows.n_kv
        if rows.ragged:
            n = min(n, self.eviction.n_planned + policy.slack - rows.n_past)
        return n

    def reads_whole(self, n: int) -> bool:
        """Whether a text of n tokens would now be decoded whole, then compressed once."""
        evicts = n > self.policy.n_asked and self.policy.slack > 0
        return how_read(self.policy, self.settings) == "whole" and self.n_past == 0 and evicts

    def evict_if_due(self) -> None:
        """Lets the policy evict, if a plan is due. Every step begins with this.

        Raises PlanError, with the cache as it was, for a plan that breaks a rule, and StreamEnd if the cache
        is full and the policy keeps everything.
        """
        if self.n_until_plan <= 0:
            self._evict()

    def step(self, tokens: np.ndarray, n_output: int = 1) -> None:
        """Decodes i32[n] tokens in one batch; the last n_output give logits.

        The policy evicts before it if a plan is due, and after it if the step went over the budget. Raises
        what `evict_if_due` raises, UsageError for too many tokens or for one that is not in the vocabulary,
        and StreamEnd if original positions end before them.
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
            part = slice(at, at + n)
            at += n
            self._step(tokens[part], n if every else int(at == len(tokens)))
            yield part

    def read(self, tokens: np.ndarray, stopped: Callable[[], bool] = lambda: False) -> int:
        """Decodes a text i32[n] of any length; its last token gives logits.

        The first text of a stream is read whole if policy or settings say so. `stopped` is asked before each
        step whether to end. Returns how many tokens were read; of a text read whole all or none. Raises what
        `step` raises.
        """
        if self.reads_whole(len(tokens)):
            return prefill.read_whole(self, _checked(tokens, self.model.n_vocab), stopped)
        steps, done = self.steps(tokens, late=True, every=False), 0
        while done < len(tokens) and not stopped():
            done = next(steps).stop
        return done

    def save(self, *, archived: bool = True) -> Iterator[tuple[str, np.ndarray]]:
        """What the next step depends on besides model, policy and settings: arrays by name, one at a time.

        archived: False leaves out the archive's tokens, which `restore` needs, too.
        """
        # here and below: what most chats do not need is not imported at their start
        from kvtool.engine import snapshot

        return snapshot.save(self, archived=archived)

    def restore(self, saved: Mapping[str, np.ndarray]) -> None:
        """Continues from what `save` gave. Raises SessionError if it does not fit."""
        from kvtool.engine import snapshot

        snapshot.restore(self, saved)

    def decode(self, tokens: np.ndarray, n_output: int) -> None:
        """Decodes i32[n] tokens behind the live cells, whatever the budget says: what a step is made of."""
        rows = self.rows
        if self.eviction.is_observed:
            # a step must not add to them
            self.eviction.clear_signals()
        if self._needs_t:
            self.context.see(rows.n_past if self._request.t == "stream" else rows.n_kv)
        self.context.decode(tokens, rows.next_rot, n_output)
        rows.append(len(tokens))

    def resize(self, n_cell: np.ndarray) -> None:
        """Gives each layer i32[layer] so many cells, and the host's arrays as many as the longest."""
        self.context.resize(n_cell)
        if self.context.n_cell != self.rows.pos.shape[1]:
            self.rows.resize(self.context.n_cell)
            if self.state:
                self.eviction.resize()

    def low_rot(self, n_kv: int, n: int) -> int:
        """Where positions start over behind n_kv cells, so that n more tokens fit into the context.

        Sliding layers need room for the tokens they see, which may be more than the cells.
        """
        return max(n_kv, min(self.model.n_swa, self.n_ctx // 2, self.n_ctx - n))

    def _step(self, tokens: np.ndarray, n_output: int) -> None:
        n, rows = len(tokens), self.rows
        if rows.next_rot + n > self.n_ctx:
            self._start_over(n)
        if rows.ragged:
            if n > self._n_fit:
                self._fit(n)
            self._n_fit -= n
        self.decode(tokens, n_output)
        if rows.n_kv > self.policy.n_live:
            self._evict()

    def _evict(self) -> None:
        self.eviction.evict()
        if self.policy.ragged:
            self._fit(self.policy.slack)

    def _fit(self, n: int) -> None:
        """Gives every layer of ragged rows room for n tokens; one that has much more gives it back."""
        most = self.rows.most_live()
        wanted = -(-(most + n) // _STEP) * _STEP
        cells = self.context.layer_cells
        wrong = (most + n > cells) | (cells - wanted > _STEP)
        if wrong.any():
            self.resize(np.where(wrong, wanted, cells))
        self._n_fit = int((self.context.layer_cells - most).min())

    def _start_over(self, n: int) -> None:
        """Closes all gaps between live cells; positions start over behind them, n tokens to come."""
        if self.settings.positions == "original":
            raise StreamEnd(
                f"the stream has reached the context of {self.n_ctx} tokens; "
                "continue with --positions auto or in-cache"
            )
        self.eviction.close_gaps(self.low_rot(self.n_kv, n))


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


def _check_index(model: Model, n_cell: int) -> None:
    """Raises UsageError for more cells than the model's index chooses."""
    if n_cell > (n_most := model.layers.most_cells):
        raise UsageError(
            f"{model.path.name} chooses {n_most:,} cells by an index, and kvtool keeps no more for it; "
            f"choose a smaller --budget, -b or -c: {n_cell:,} cells are needed"
        )


def _cache(
    model: Model, policy: Policy, request: Request, settings: Settings, n_cell: int, n_ctx: int
) -> Cache:
    """The cache. Raises UsageError where it is too long, and LibraryError for what needs the patch."""
    # ragged rows grow
    _check_index(model, max(n_cell, prefill.pad(policy.n_live)))
    how: dict[str, Any] = {
        "n_output": settings.n_output,
        "type_k": settings.type_k,
        "type_v": settings.type_v,
        "flash": settings.flash,
        "n_threads": settings.n_threads,
    }
    if is_patched():
        own: dict[str, Any] = {
            "ragged": policy.ragged,
            "archive_type": settings.archive_type,
            "n_archive": settings.archive,
            "archive_bytes": settings.archive_bytes,
            "archive_file": settings.archive_file,
            "n_near": n_ctx // 2,
        }
        return Context(model, n_cell, settings.n_batch, request, **own, **how)
    lacking = (
        (policy.needs_patch(), f"the policy {type(policy).__name__}"),
        (how_read(policy, settings) == "whole", "reading a prompt whole, without --prefill stream,"),
    )
    for is_asked, what in lacking:
        if is_asked:
            raise LibraryError(f"{UNPATCHED}, which {what} needs; {HOW_TO_BUILD}")
    from kvtool.llama.sequence import SequenceContext

    return SequenceContext(model, n_cell, settings.n_batch, **how)
