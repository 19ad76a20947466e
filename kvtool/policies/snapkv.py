"""SnapKV: keep the newest tokens, and clusters that they attend to (Li et al. 2024, arXiv:2404.14469).

Algorithm 1. The window's queries vote for the tokens before the window: their attention is their vote. The
votes for a token are summed, then pooled over `kernel` neighbours in the order of the stream, so that a token
is kept together with its neighbours. As in the authors' code, the window's tokens are not pooled, and an
average counts missing neighbours as tokens with zero votes.

Differs from the paper: each KV head makes one decision, based on the attention summed over its group of query
heads; the authors' code has a cache for every query head. The paper compresses a prompt once; kvtool
compresses whenever the cache is full.

Option: with `heads=adaptive`, the rows of a layer share its budget as in Ada-KV (see
kvtool/policy/ranked.py).
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvtool.kernels.kernel import kernel
from kvtool.policy import FLOOR, Ranked, Signal, State, View, check_choice, protected


@dataclass(frozen=True, slots=True)
class SnapKV(Ranked):
    """Keep the tokens with the highest pooled votes.

    Attributes
    ----------
    window
        Newest tokens, kept if pinned tokens leave room; their queries vote. Default: 32, or half of the kept
        tokens if that is less.
    kernel
        Number of neighbours that are pooled: an odd number, 1 for no pooling.
    pool
        How votes are pooled: "avg" or "max".
    """

    budget: int
    slack: int
    window: int
    kernel: int = 5
    pool: str = "avg"
    sinks: int = 0
    heads: str = "equal"
    layers: str = "equal"
    floor: float = FLOOR

    reads: ClassVar[Signal] = Signal.RECENT
    prefill: ClassVar[str] = "whole"
    paper: ClassVar[str] = "arXiv:2404.14469"
    min_window: ClassVar[int] = 1
    max_window: ClassVar[int] = 32

    def __post_init__(self) -> None:
        Ranked.__post_init__(self)
        check_choice("pool", self.pool, ("avg", "max"))
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, 1 or more, got {self.kernel}")

    @property
    def n_query(self) -> int:
        return self.window

    def scores(self, view: View, state: State) -> np.ndarray:
        _, recent = protected(view, self.n_keep, self.sinks, self.window)
        pooled = np.zeros(view.pos.shape, np.float32)
        _pool(view.order, view.pos, view.recent, recent, self.kernel // 2, self.pool == "max", pooled)
        return pooled


@kernel("void(i8[:,::1], i4[:,::1], f4[:,::1], i8, i8, b1, f4[:,::1])")
def _pool(order, pos, votes, recent, reach, by_max, pooled):
    """Pool the votes for the tokens before position `recent`, with `reach` tokens on each side.

    The result is the maximum or the sum. The sum ranks tokens in the same order as the average. order
    i64[row, n]: cells, oldest token first. pos i32[row, n], votes and pooled f32[row, n].
    """
    n_row, n = order.shape
    for row in range(n_row):
        end = 0
        while end < n and pos[row, order[row, end]] < 0:
            # skip a ragged row's dead cells
            end += 1
        oldest = end
        while end < n and pos[row, order[row, end]] < recent:
            end += 1
        for i in range(oldest, end):
            begin = max(i - reach, oldest)
            result = votes[row, order[row, begin]]
            for j in range(begin + 1, min(i + reach + 1, end)):
                vote = votes[row, order[row, j]]
                result = max(result, vote) if by_max else result + vote
            pooled[row, order[row, i]] = result


POLICY = SnapKV
