"""CORM: what the newest queries found important stays, however much (Dai et al. 2024, arXiv:2404.15949).

Section 4.2, Algorithm 1. A key is important to a query that has seen t tokens where its attention is at least
1 / t (definition 3.1). It goes once none of the last `history` queries found it important, the paper's w;
the newest `window` tokens, the paper's r, always stay. Nothing is evicted before there are `history` queries.
Rows keep different numbers of tokens.

Instead of the paper's w x n matrix of marks, each cell remembers the last step at which it was important.
With grouped queries a key is important to a query if it is to any head of the group (the paper's code has one
head a row). The budget is a cap that the paper does not have: a row above it keeps those that were important
last, the newest among equals.

Differs from the paper: it looks every `slack` tokens (--evict-every 1 for the paper's); sinks are an option;
`-o t=cells` lets t count the tokens that the longest row still has, so that the threshold does not fall in an
endless stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvtool.kernels.kernel import kernel
from kvtool.kernels.selection import nth_lowest
from kvtool.policy import Plan, Policy, Signal, State, View, check_choice

_HISTORY = 256


@dataclass(frozen=True, slots=True)
class CORM(Policy):
    """history: the queries that count. window: newest tokens, never evicted; the same number unless given,
    and half of what is kept where the budget is too small for that.

    sinks: first tokens, never evicted. t: what t counts, the tokens of the "stream" or the live "cells".
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

    def __post_init__(self) -> None:
        if self.slack < 1:
            raise ValueError(f"slack must be 1 or more, got {self.slack}")
        if self.history < 1:
            raise ValueError(f"history must be 1 or more, got {self.history}")
        if self.sinks < 0:
            raise ValueError(f"sinks must not be negative, got {self.sinks}")
        check_choice("t", self.t, ("stream", "cells"))
        if not 1 <= self.window <= (most := self.budget - self.slack - self.sinks):
            raise ValueError(
                f"window must be in 1..{max(most, 0)} (the budget of {self.budget} less {self.slack} slack "
                f"and {self.sinks} sinks), got {self.window}"
            )

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
        # all are important as long as there are fewer queries than count
        oldest = view.next - self.history + 1 if view.next >= self.history else 0
        recent = view.next - max(self.window, view.held)
        _keep_important(view.pos, view.live, step, first, recent, oldest, self.budget - self.slack, keep)
        return Plan(keep)


@kernel("i8(i4, i4, i8, i8)")
def _rank(pos: int, step: int, first: int, recent: int) -> np.int64:
    """Orders what may stay: by step, then by position; above them the window, and above that the sinks."""
    rank = np.int64(step)
    if pos >= recent:
        rank = np.int64(1) << 30
    if pos < first:
        rank = np.int64(1) << 31
    return (rank << 31) | pos


@kernel("void(i4[:,::1], i4[::1], i4[:,::1], i8, i8, i8, i8, b1[:,::1])")
def _keep_important(
    pos: np.ndarray,
    live: np.ndarray,
    step: np.ndarray,
    first: int,
    recent: int,
    oldest: int,
    n_max: int,
    keep: np.ndarray,
) -> None:
    """pos i32[row, n], live i32[row], step i32[row, n or more] -> keep b1[row, n].

    Stay: positions before `first` and from `recent` on, and those whose step is `oldest` or later; of these
    last no more than n_max allows, the latest steps, then the newest. Protected ones give way, oldest window
    first, where they alone are too many.
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
