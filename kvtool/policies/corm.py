"""CORM: keep every token that the newest queries found important (Dai et al. 2024, arXiv:2404.15949).

Section 4.2, Algorithm 1. A key is important to a query that has seen t tokens if its attention is at least 1
/ t (definition 3.1). A token stays if it was important to at least one of the last `history` queries (the
paper's w). Otherwise it is evicted. The newest `window` tokens (the paper's r) always stay. Until the stream
has `history` tokens, a row evicts only if it exceeds the budget. Rows keep different numbers of tokens.

With grouped query heads, a key is important if it is important to any head of the group, as in the paper
(section 5.3, LLaMA3-8B-Instruct).

Instead of the paper's w x n matrix of marks, each cell remembers the last step at which it was important.

Differs from the paper: the budget limits the number of tokens in a row; the paper has no limit. A row with
too many tokens keeps the tokens that were important most recently, the newest among equals. kvtool evicts
every `slack` tokens; the paper evicts at every token, as --evict-every 1 does. Sinks are an option.

In an endless stream the threshold 1 / t keeps falling. With `-o t=cells` it does not: t is then the number of
live tokens in the longest row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvtool.kernels.kernel import kernel
from kvtool.kernels.selection import nth_lowest
from kvtool.policy import Plan, Policy, Signal, State, View, check_choice, check_kept

_HISTORY = 256


@dataclass(frozen=True, slots=True)
class CORM(Policy):
    """Keep tokens that any of the newest queries found important.

    Attributes
    ----------
    window
        Newest tokens, kept if pinned tokens leave room. Default: as many as `history`, or half of the kept
        tokens if that is less.
    history
        Number of newest queries that can make a token important.
    t
        Count in the threshold 1 / t: "stream" counts tokens of the stream, "cells" counts live cells.
    """

    budget: int
    slack: int
    window: int
    history: int = _HISTORY
    sinks: int = 0
    t: str = "stream"

    reads: ClassVar[Signal] = Signal.IMPORTANT
    paper: ClassVar[str] = "arXiv:2404.15949"
    ragged: ClassVar[bool] = True
    capped: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.history < 1:
            raise ValueError(f"history must be 1 or more, got {self.history}")
        check_choice("t", self.t, ("stream", "cells"))
        check_kept(self.budget, self.slack, self.sinks, self.window, min_window=1)

    @classmethod
    def fit(cls, budget: int, slack: int, **params: Any) -> CORM:
        n_keep = budget - slack
        window = max(min(n_keep // 2, n_keep - params.get("sinks", 0)), 1)
        window = min(params.get("history", _HISTORY), window)
        return cls(budget, slack, **{"window": window, **params})

    def start(self, n_row: int, n_cell: int, n_dim: int) -> State:
        """Return zeros: the last step at which each token was important, 0 for none."""
        return (np.zeros((n_row, n_cell), np.int32),)

    def observe(self, view: View, state: State) -> None:
        (step,) = state
        np.maximum(step[:, : view.n_kv], view.important, out=step[:, : view.n_kv])

    def plan(self, view: View, state: State) -> Plan:
        (step,) = state
        keep = np.empty(view.pos.shape, np.bool_)
        first = max(self.sinks, view.pinned)
        # until the stream has `history` tokens, all tokens count as important
        oldest = view.next - self.history + 1 if view.next >= self.history else 0
        recent = view.next - max(self.window, view.held)
        _keep_important(view.pos, view.live, step, first, recent, oldest, self.n_keep, keep)
        return Plan(keep)


@kernel("i8(i4, i4, i8, i8)")
def _rank(pos, step, first, recent):
    """Rank of a token: highest for sinks, then the window, then the latest `step`, then the newest token."""
    rank = np.int64(step)
    if pos >= recent:
        rank = np.int64(1) << 30
    if pos < first:
        rank = np.int64(1) << 31
    return (rank << 31) | pos


@kernel("void(i4[:,::1], i4[::1], i4[:,::1], i8, i8, i8, i8, b1[:,::1])")
def _keep_important(pos, live, step, first, recent, oldest, n_max, keep):
    """Choose the cells to keep.

    Tokens at positions before `first` (sinks) and from `recent` on (window) stay. Other tokens stay if they
    were important at step `oldest` or later. If more than `n_max` tokens would stay, those with the highest
    `_rank` stay. Tokens of the window are evicted only if sinks and window alone are more than `n_max`.

    pos i32[row, n], live i32[row], step i32[row, n or more] (the policy's state) -> keep b1[row, n].
    """
    n_row, n = pos.shape
    keys = np.empty(n, np.int64)
    for row in range(n_row):
        n_stay = 0
        for cell in range(n):
            keep[row, cell] = cell < live[row] and (
                pos[row, cell] < first or pos[row, cell] >= recent or step[row, cell] >= oldest
            )
            if keep[row, cell]:
                keys[n_stay] = _rank(pos[row, cell], step[row, cell], first, recent)
                n_stay += 1
        if n_stay > n_max:
            last_out = nth_lowest(keys, n_stay, n_stay - n_max - 1)
            for cell in range(live[row]):
                if keep[row, cell]:
                    keep[row, cell] = _rank(pos[row, cell], step[row, cell], first, recent) > last_out


POLICY = CORM
