"""CORM: what the newest queries found important stays, however much (Dai et al. 2024, arXiv:2404.15949).

Section 4.2, Algorithm 1. A key is important to a query that has seen t tokens where its attention is at
least 1 / t (definition 3.1). It goes once none of the last `history` queries (the paper's w) found it
important. The newest `window` tokens (the paper's r) always stay. Nothing is evicted before there are
`history` queries. Rows keep different numbers of tokens.

With grouped query heads a key is important to a query if it is to any head of the group: so has the paper,
which evicts what is minor to all recent queries within the group (section 5.3, LLaMA3-8B-Instruct).

Instead of the paper's w x n matrix of marks, each cell remembers the last step at which it was important.

Differs from the paper: the budget is a cap that the paper does not have: a row above it keeps the tokens that
were important last, the newest among equals. It looks every `slack` tokens (--evict-every 1 for the
paper's). Sinks are an option. With `-o t=cells`, t counts the tokens that the longest row still has:
otherwise the threshold falls without end in an endless stream.
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
    """What any of the newest queries found important.

    Attributes
    ----------
    window
        Newest tokens, never evicted. Default: as many as `history`, or half of what is kept if that is less.
    history
        Number of queries that count.
    sinks
        First tokens, never evicted.
    t
        What t counts: tokens of the "stream" or live "cells".
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
        check_kept(self.budget, self.slack, self.sinks, self.window, least=1)

    @classmethod
    def fit(cls, budget: int, slack: int, **params: Any) -> CORM:
        window = min(params.get("history", _HISTORY), max((budget - slack) // 2, 1))
        return cls(budget, slack, **{"window": window, **params})

    def start(self, n_row: int, n_cell: int, n_dim: int) -> State:
        """The last step i32 at which each token was important; 0: never."""
        return (np.zeros((n_row, n_cell), np.int32),)

    def observe(self, view: View, state: State) -> None:
        (step,) = state
        np.maximum(step[:, : view.n_kv], view.important, out=step[:, : view.n_kv])

    def plan(self, view: View, state: State) -> Plan:
        (step,) = state
        keep = np.empty(view.pos.shape, np.bool_)
        first = max(self.sinks, view.pinned)
        # all tokens are important as long as there are fewer than `history` queries
        oldest = view.next - self.history + 1 if view.next >= self.history else 0
        recent = view.next - max(self.window, view.held)
        _keep_important(view.pos, view.live, step, first, recent, oldest, self.n_keep, keep)
        return Plan(keep)


@kernel("i8(i4, i4, i8, i8)")
def _rank(pos, step, first, recent):
    """Orders what may stay: the sinks highest, then the window, then by step, then by position."""
    rank = np.int64(step)
    if pos >= recent:
        rank = np.int64(1) << 30
    if pos < first:
        rank = np.int64(1) << 31
    return (rank << 31) | pos


@kernel("void(i4[:,::1], i4[::1], i4[:,::1], i8, i8, i8, i8, b1[:,::1])")
def _keep_important(pos, live, step, first, recent, oldest, n_max, keep):
    """pos i32[row, n], live i32[row], step i32[row, n or more] -> keep b1[row, n].

    Positions before `first` and from `recent` on stay, and steps from `oldest` on: of these only as many as
    n_max leaves room for, the latest steps first, then the newest tokens. Where the protected tokens alone
    are too many, they give way too, the oldest of the window first.
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
