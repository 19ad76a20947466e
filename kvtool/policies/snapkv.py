"""SnapKV: the newest tokens and what they attend to stay, in clusters (Li et al. 2024, arXiv:2404.14469).

Algorithm 1. The window's queries vote with their attention, summed, for the tokens before the window; the
votes are pooled over `kernel` neighbours in the order of the stream, so that what stays comes with what is
around it. As in the authors' code the tokens of the window are nobody's neighbours, and an average counts
neighbours that are not there as zero.

Differs from the paper: one decision a KV head, on the sum over its group of query heads (the authors' code
keeps a cache for every query head). The paper compresses a prompt once; here the same is done again whenever
the cache is full, with the votes of the queries since the last time, at most as many as the window has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvtool.kernels.kernel import kernel
from kvtool.kernels.selection import keep_highest
from kvtool.policy import Plan, Policy, Signal, State, View, check_choice, check_kept, protected


@dataclass(frozen=True, slots=True)
class SnapKV(Policy):
    """window: newest tokens, never evicted, whose queries vote; 32, less for a small budget.

    kernel: how many tokens are pooled into one, an odd number, 1 for none. pool: "avg" or "max".
    sinks: first tokens, never evicted either.
    """

    budget: int
    slack: int
    window: int
    kernel: int = 5
    pool: str = "avg"
    sinks: int = 0

    reads: ClassVar[Signal] = Signal.RECENT
    paper: ClassVar[str] = "arXiv:2404.14469"
    prefill: ClassVar[str] = "whole"

    def __post_init__(self) -> None:
        check_kept(self.budget, self.slack, self.sinks, self.window, least=1)
        check_choice("pool", self.pool, ("avg", "max"))
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, 1 or more, got {self.kernel}")

    @classmethod
    def fit(cls, budget: int, slack: int, **params: Any) -> SnapKV:
        return cls(budget, slack, **{"window": max(min(32, (budget - slack) // 2), 1), **params})

    @property
    def n_query(self) -> int:
        return self.window

    def plan(self, view: View, state: State) -> Plan:
        n_keep = self.budget - self.slack
        first, recent = protected(view, n_keep, self.sinks, self.window)
        # no two positions of a row are equal: the sort need not be stable
        order = np.argsort(view.pos, axis=1)
        pooled = np.zeros(view.pos.shape, np.float32)
        _pool(order, view.pos, view.recent, recent, self.kernel // 2, self.pool == "max", pooled)
        keep = np.empty(view.pos.shape, np.bool_)
        keep_highest(view.pos, pooled, first, recent, n_keep, keep)
        return Plan(keep)


@kernel("void(i8[:,::1], i4[:,::1], f4[:,::1], i8, i8, b1, f4[:,::1])")
def _pool(
    order: np.ndarray,
    pos: np.ndarray,
    votes: np.ndarray,
    recent: int,
    reach: int,
    by_max: bool,
    pooled: np.ndarray,
) -> None:
    """order i64[row, n]: cells, oldest first; pos i32[row, n], votes f32[row, n] -> pooled f32[row, n].

    For each token before position `recent` the sum (ranks as the average) or the highest of its own vote and
    those of `reach` tokens on either side.
    """
    n_row, n = order.shape
    for row in range(n_row):
        end = 0
        while end < n and pos[row, order[row, end]] < recent:
            end += 1
        for i in range(end):
            begin = max(i - reach, 0)
            result = votes[row, order[row, begin]]
            for j in range(begin + 1, min(i + reach + 1, end)):
                vote = votes[row, order[row, j]]
                result = max(result, vote) if by_max else result + vote
            pooled[row, order[row, i]] = result


POLICY = SnapKV
