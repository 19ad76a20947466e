"""`PolicyCache` makes a policy's views of the cache, and applies the policy's plans."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from kvtool.engine.moves import deltas, fill_holes, moves_of
from kvtool.engine.plan_check import ask, check_archived, check_plan, check_state
from kvtool.engine.rows import Rows
from kvtool.engine.signals import Signals
from kvtool.errors import PlanError, UsageError
from kvtool.policy import Merge, Plan, Policy, Signal, State, View

if TYPE_CHECKING:
    from kvtool.llama.cache.full_context import AnyContext

_Answer = TypeVar("_Answer")

_NO_MOVES = np.empty((0, 4), np.int32)

_STEP = 64
"""Ragged layers are resized to multiples of this number of cells."""


class PolicyCache:
    """Cache that a policy manages: cells, signals and the policy's state. An eviction changes all of them.

    Attributes
    ----------
    layer_cells
        i32[layer]: number of cells that each layer has when the cache is empty.
    state
        The policy's state of each cell: arrays [row, cell, ...].
    n_planned
        Number of tokens in the stream (`Rows.n_past`) at the last plan.
    n_pinned, n_held
        Number of first tokens, and of newest tokens, that are never evicted.
    n_evicted
        Number of cells that all rows together have evicted so far.
    n_restart
        Number of times that all gaps between positions were closed at once.
    plan_s
        Seconds spent on plans, including the time to read signals.
    smallest_budget
        Function that returns the smallest budget with room for n pinned and n held tokens. Errors name this
        budget. None if it is unknown.
    """

    state: State
    n_pinned: int
    n_held: int
    n_planned: int
    n_evicted: int
    n_restart: int
    plan_s: float
    edit_s: float

    def __init__(self, policy: Policy, context: AnyContext, n_ctx: int, *, in_cache: bool) -> None:
        self.policy = policy
        self.context = context
        self.rows = Rows(context.row_layers, context.n_cell, ragged=policy.ragged)
        self.signals = Signals(policy.reads, context, self.rows)
        self.n_ctx = n_ctx
        self.in_cache = in_cache
        self.layer_cells = context.layer_cells
        self._reads = policy.reads
        self._name = type(policy).__name__
        self.smallest_budget: Callable[[int, int], int] | None = None
        self.reset()

    def reset(self) -> None:
        """Forget all tokens, and set `n_pinned` and `n_held` to 0."""
        # only for ragged rows: number of tokens that still fit into every layer
        self._n_fit = 0
        self.rows.clear(self.rows.pos.shape[1])
        self.n_pinned = self.n_held = self.n_planned = self.n_evicted = self.n_restart = 0
        if self.context.archive:
            self.context.archive.forget()
        self.plan_s = self.edit_s = 0.0
        self.edit(np.zeros(self.context.n_row, np.int32), 0)
        if (self.context.layer_cells != self.layer_cells).any():
            self.context.resize(self.layer_cells)
        self.rows.clear(self.context.n_cell)
        self.start()

    def empty(self) -> None:
        """Forget all tokens, but do not change `n_pinned` and `n_held`."""
        n_pinned, n_held = self.n_pinned, self.n_held
        self.reset()
        self.n_pinned, self.n_held = n_pinned, n_held

    def start(self) -> None:
        """Get the policy's initial state for all cells. Raises PlanError for a wrong type or shape."""
        shape = self.rows.pos.shape
        state = self.ask(self.policy.start, *shape, self.context.n_dim)
        check_state(self._name, state, shape)
        self.state = state

    def resize(self, n_cell: np.ndarray) -> None:
        """Set the number of cells of each layer to n_cell i32[layer].

        Also resize the arrays in `rows` and `state`, which have as many cells per row as the longest layer.
        """
        self.context.resize(n_cell)
        if self.context.n_cell == self.rows.pos.shape[1]:
            return
        self.rows.resize(self.context.n_cell)
        if old := self.state:
            self.start()
            for source, target in zip(old, self.state, strict=False):
                common = tuple(map(slice, map(min, source.shape, target.shape)))
                target[common] = source[common]

    def take_room(self, n: int) -> None:
        """Reserve cells of ragged rows for the next n tokens."""
        if n > self._n_fit:
            self.make_room(n)
        self._n_fit -= n

    def give_room(self, n: int) -> None:
        """Undo `take_room` after the n tokens were removed."""
        self._n_fit += n

    def make_room(self, n: int) -> None:
        """Resize the layers of ragged rows, so that each layer has room for n more tokens.

        Layers with much more room shrink.
        """
        most = self.rows.most_live()
        wanted = -(-(most + n) // _STEP) * _STEP
        cells = self.context.layer_cells
        is_unfit = (most + n > cells) | (cells - wanted > _STEP)
        if is_unfit.any():
            self.resize(np.where(is_unfit, wanted, cells))
        self._n_fit = int((self.context.layer_cells - most).min())

    def rot_without_gaps(self, n_kv: int, n: int) -> int:
        """Return the next token's position after all gaps between n_kv live cells are closed.

        Without sliding layers, the position is n_kv. A sliding layer may hold up to n_swa tokens, and it
        drops tokens whose position becomes negative. To keep these tokens, a lower position is raised to
        n_swa. It is not raised above n_ctx // 2, and not above n_ctx - n, because n more tokens need
        positions.
        """
        return max(n_kv, min(self.context.model.layers.n_swa, self.n_ctx // 2, self.n_ctx - n))

    @property
    def keeps_all(self) -> bool:
        """True if a rewind can restore the rows.

        This needs three conditions. Evicted tokens are archived, or nothing is evicted. The policy has no
        state and reads no signals, because earlier states and signals are not stored. Tokens can be removed
        from the model's cache.
        """
        archives = self.context.archive or not self.policy.evicts
        can_remove = not self.context.model.layers.only_full
        return bool(archives and can_remove and not self.state and self.policy.reads == Signal.NONE)

    @property
    def cell_bytes(self) -> list[int]:
        """Size of the K and V of a cell in each layer, in bytes."""
        return [self.context.cell_bytes(layer) for layer in range(len(self.layer_cells))]

    def ask(self, method: Callable[..., _Answer], *args: object) -> _Answer:
        """Call a method of the policy. Any error but KvtoolError becomes a PlanError."""
        return ask(self.policy, method, *args)

    def check_pin(self, n: int) -> None:
        """Raise UsageError if n tokens are too many to be pinned."""
        room = self.policy.n_keep - 1
        if self.policy.pinnable(n) > room:
            raise UsageError(
                f"the pinned text has {n:,} tokens, and a budget of {self.policy.n_asked:,} has room for "
                f"{room:,}; {self._more_room(n + self.policy.slack + 64)}, or a shorter text"
            )

    def pin(self, n: int) -> None:
        """Never evict the first `Policy.pinnable(n)` tokens of the stream.

        Raises UsageError for too many tokens. Also raises UsageError if the number of pinned tokens would
        change after tokens were archived: the archive would get a gap.
        """
        self.check_pin(n)
        n = self.policy.pinnable(n)
        if n != self.n_pinned and self.context.archive and self.context.archive.n:
            raise UsageError("tokens are archived already; pin before the first eviction")
        self.n_pinned = n

    def _more_room(self, budget: int | None) -> str:
        """Return the advice of an error. budget: a budget that is enough, or None if it is unknown."""
        if not self.policy.evicts:
            # the budget is the context, which may already be as long as the model was trained for
            return "choose another policy, such as --policy recall"
        return f"choose a larger budget ({budget:,} is enough)" if budget else "choose a larger budget"

    def hold(self, n: int) -> None:
        """Keep the newest n tokens at every eviction. Raises UsageError if n is too large."""
        policy, sinks, n_pinned = self.policy, self.policy.exempt[0], self.n_pinned
        if n > policy.n_keep - max(n_pinned + 1, sinks):
            # if this budget allows no more pinned tokens, a larger budget may pin more of the same text
            n_text = sys.maxsize if n_pinned == policy.pinnable(n_pinned + 1) else n_pinned
            raise UsageError(
                f"a budget of {policy.n_asked:,} is too small: the first {max(n_pinned, sinks):,} tokens and "
                f"the {n} tokens of the chat template before a reply must stay in the cache; "
                f"{self._more_room(self.smallest_budget and self.smallest_budget(n_text, n))}"
            )
        self.n_held = n

    def view(self, signals: dict[str, np.ndarray], n_new: int) -> View:
        """Return the policy's view. signals: arrays by their field in the view.

        Raises PlanError if a key is not finite.
        """
        rows = self.rows
        fields: dict[str, Any] = dict(signals)
        if Signal.KEYS in self._reads:
            # undo RoPE: rotate each key back by its position
            fields["keys"] = keys = self.context.read_keys(rows.live - n_new, -rows.new_rot(n_new))
            # minimum and maximum need no copy of the keys
            if not np.isfinite([keys.min(initial=0), keys.max(initial=0)]).all():
                raise PlanError(f"the model's keys are not finite; {self.context.suspect}")
        if self.context.queries:
            n_last = max(min(self.context.queries.n, rows.n_past - self.policy.n_skip), 1)
            future = self.context.queries.future(n_last, rows.next_rot, rows.n_kv)
            fields["future_mean"], fields["future_variance"] = future
        if Signal.VALUE_NORMS in self._reads:
            fields["value_norms"] = self.context.read_value_norms(rows.n_kv)
        if rows.ragged:
            fields["live"] = rows.live.copy()
        if self._reads & (Signal.HITS | Signal.FUTURE):
            fields["n_head"] = self.context.n_head
        return View(
            pos=rows.view_pos(),
            layer=rows.layer,
            next=rows.n_past,
            pinned=self.n_pinned,
            held=self.n_held,
            n_ctx=self.n_ctx,
            n_new=n_new,
            **fields,
        )

    def observe(self) -> View:
        """Return the view, after the policy has observed it. The policy observes each window only once."""
        view = self.view(self.signals.read(), self.signals.n_new)
        if not self.signals.is_observed:
            self.ask(self.policy.observe, view, self.state)
            self.signals.is_observed = True
        return view

    def close_gaps(self, n: int) -> None:
        """Rotate all keys to close the gaps between positions, so that n more tokens fit."""
        next_rot = self.rot_without_gaps(self.rows.n_kv, n)
        # let the policy observe the signals before the edit clears them
        self.observe()
        self.n_restart += 1
        self.apply(Plan(self.rows.is_live()), self.rows.live.copy(), next_rot, close=True)

    def check(self, view: View, plan: Plan) -> np.ndarray:
        """Return i32[row]: number of cells that the plan keeps. Raises the errors of `check_plan`."""
        policy = self.policy
        # `may_fill`: the policy never evicts, or its budget is only a cap (which may be as large as the
        # context)
        may_fill = policy.capped or not policy.evicts
        n_keep = check_plan(self._name, plan, view, policy.n_live, ragged=self.rows.ragged, may_fill=may_fill)
        if plan.merge is not None and not policy.merges:
            raise PlanError(f"{self._name}: plan merges values; set merges = True")
        if archive := self.context.archive:
            check_archived(self._name, view, plan.keep, archive.end if archive.n else None)
        return n_keep

    def apply(self, plan: Plan, n_keep: np.ndarray, next_rot: int, *, close: bool = False) -> np.ndarray:
        """Apply a plan: fill the holes of evicted cells, close gaps by rotating keys, and move the state.

        n_keep: i32[row], number of cells that the plan keeps. next_rot: `Rows.next_rot` after the plan.
        close: True to close gaps between positions. In-cache positions never have gaps.

        Returns i32[row, most], the result of `fill_holes`.
        """
        rows, n = self.rows, self.rows.n_kv
        source = np.empty((len(n_keep), int(n_keep.max())), np.int32)
        fill_holes(plan.keep, n_keep, source)
        delta = deltas(rows, source, n_keep, next_rot) if close or self.in_cache else None
        moves = moves_of(source, delta)
        if self.context.archive and not plan.keep[0].all():
            # with an archive, all rows evict the same tokens, so use the cells of row 0
            cells = np.flatnonzero(~plan.keep[0])
            pos = rows.pos[0, cells]
            self.context.archive.push(cells[np.argsort(pos)], int(pos.min()))
        self.edit(n_keep, next_rot, moves, plan.merge)
        self.n_evicted += int((rows.live - n_keep).sum())
        rows.move(moves, n_keep, next_rot)
        if self.context.archive:
            self.context.archive.rebase(rows.n_past - rows.next_rot)
        try:
            if self.state:
                self.ask(self.policy.move, self.state, source)
        finally:
            # clear the state of freed cells even after an error: a new token's state must be zero
            self.clear_dead(n)
        return source

    def clear_dead(self, n: int) -> None:
        """Set the state of empty cells among the first n cells to zero."""
        rows = self.rows
        for array in self.state:
            if rows.ragged:
                array[:, :n][np.arange(n) >= rows.live[:, None]] = 0
            else:
                array[:, rows.n_kv : n] = 0

    def edit(
        self,
        n_keep: np.ndarray,
        next_rot: int,
        moves: np.ndarray = _NO_MOVES,
        merge: Merge | None = None,
        *,
        n_hidden: int = 0,
    ) -> None:
        """Edit the cache, which clears the signals. The caller must update `rows`."""
        most = int(n_keep.max())
        n_keep_row = n_keep if self.rows.ragged else None
        start = time.perf_counter()
        self.context.apply(moves, most, next_rot - most, merge, n_keep_row=n_keep_row, n_hidden=n_hidden)
        self.edit_s += time.perf_counter() - start
        self.signals.begin()

    def hide(self) -> None:
        """Hide the live cells from later queries. This clears the signals."""
        self.context.hide(self.rows.n_past)
        self.signals.begin()
