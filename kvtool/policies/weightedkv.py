"""WeightedKV: keys of low average attention go, their values merge (Yuan et al. 2025, arXiv:2503.01330).

Algorithm 1. A token's average is its attention sum divided by the steps that it has lived (the paper's
a / n). The token with the smallest average loses its key; its value goes into the next token that the row
still holds, the two weighted by their averages. The merged token keeps its own average.

Differs from the paper: an eviction makes room for `slack` tokens, the paper's for one (--evict-every 1). The
averages of that moment then serve for all of them, which go one after the other, the smallest first; each
merge sees those before it. One decision a KV head, on the sum over its group of query heads.

On a model with grouped queries merging was found to lose: docs/weightedkv.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvtool.kernels import kernel
from kvtool.policy import Merge, Plan, Policy, Signal, State, View, check_kept, keep_ranked, true_cells

_SINKS = 4


@dataclass(frozen=True, slots=True)
class WeightedKV(Policy):
    """window: newest tokens, never evicted; half of what is kept, sinks included, unless given.

    sinks: first tokens, never evicted. merge: whether a value outlives its key; false is the evicting variant
    of the paper's Figure 4.
    """

    budget: int
    slack: int
    window: int
    sinks: int = _SINKS
    merge: bool = True

    reads: ClassVar[Signal] = Signal.ATTENTION
    paper: ClassVar[str] = "arXiv:2503.01330"

    def __post_init__(self) -> None:
        # the newest token has no right neighbour
        if self.window < 1:
            raise ValueError(f"window must be 1 or more, got {self.window}")
        check_kept(self.budget, self.slack, self.sinks, self.window)

    @classmethod
    def fit(cls, budget: int, slack: int, *, sinks: int = _SINKS, **params: Any) -> WeightedKV:
        window = max((budget - slack) // 2 - sinks, 1)
        return cls(budget, slack, **{"window": window, "sinks": sinks, **params})

    def start(self, n_row: int, n_cell: int, n_dim: int) -> State:
        return (np.zeros((n_row, n_cell), np.float32),)

    def observe(self, view: View, state: State) -> None:
        (mass,) = state
        mass[:, : view.n_kv] += view.attn

    def plan(self, view: View, state: State) -> Plan:
        (mass,) = state
        average = mass[:, : view.n_kv] / (view.next - view.pos).astype(np.float32)
        n_keep = self.budget - self.slack
        keep = keep_ranked(view, average, n_keep, self.sinks, self.window)
        return Plan(keep, _merge(view.pos, average, keep) if self.merge else None)


def _merge(pos: np.ndarray, average: np.ndarray, keep: np.ndarray) -> Merge:
    """The evicted values' merges to the right: pos i32, average f32, keep b1, all [row, n]."""
    gone = true_cells(~keep)[1].reshape(len(pos), -1)
    # ascending by average; the oldest of equals goes first
    turn = np.lexsort([np.take_along_axis(values, gone, axis=1) for values in (pos, average)])
    n_most = 2 * gone.size
    row, dst, src = (np.empty(n_most, np.int32) for _ in range(3))
    weight = np.empty(n_most, np.float32)
    # no two positions of a row are equal: the sort need not be stable
    order = np.argsort(pos, axis=1)
    n_term = _merge_right(order, average, keep, np.take_along_axis(gone, turn, axis=1), row, dst, src, weight)
    return Merge(row[:n_term], dst[:n_term], src[:n_term], weight[:n_term])


@kernel("i8(i8[:,::1], f4[:,::1], b1[:,::1], i8[:,::1], i4[::1], i4[::1], i4[::1], f4[::1])")
def _merge_right(
    order: np.ndarray,
    average: np.ndarray,
    keep: np.ndarray,
    turn: np.ndarray,
    row_of: np.ndarray,
    dst_of: np.ndarray,
    src_of: np.ndarray,
    weight_of: np.ndarray,
) -> int:
    """Lets the tokens that do not stay go one by one, and says what each that stays is made of in the end.

    order i64[row, n]: cells, oldest first; average f32[row, n], keep b1[row, n]: of each cell's token;
    turn i64[row, n_evict]: the cells of those that go, in the order in which they go
    -> terms of a Merge, i32, i32, i32, f32[2 * row * n_evict or more], and how many there are.
    """
    n_row, n = order.shape
    n_evict = turn.shape[1]
    # place n: where the newest token's value would go, to be lost
    older, newer = np.empty(n + 1, np.int64), np.empty(n + 1, np.int64)
    into, share = np.empty(n_evict, np.int64), np.empty(n_evict, np.float32)
    place_of = np.empty(n, np.int64)
    weight = np.empty(n + 1, np.float32)
    n_term = 0
    for row in range(n_row):
        for place in range(n + 1):
            older[place], newer[place] = place - 1, place + 1
            weight[place] = 1
        for place in range(n):
            place_of[order[row, place]] = place
        for i in range(n_evict):
            gone = place_of[turn[row, i]]
            left, right = older[gone], newer[gone]
            older[right] = left
            if left >= 0:
                newer[left] = right
            own = average[row, turn[row, i]]
            total = own + (average[row, order[row, right]] if right < n else np.float32(0))
            into[i], share[i] = right, own / total if total > 0 else np.float32(0.5)
        # backwards, what a value counts for in the end is known of the token that it merges into
        for i in range(n_evict - 1, -1, -1):
            weight[place_of[turn[row, i]]] = weight[into[i]] * share[i]
            weight[into[i]] *= 1 - share[i]
        # the tokens that end in one that stays are those between it and the one before that stays
        begin = 0
        for place in range(n):
            if not keep[row, order[row, place]]:
                continue
            if begin < place:
                for source in range(begin, place + 1):
                    row_of[n_term], dst_of[n_term] = row, order[row, place]
                    src_of[n_term], weight_of[n_term] = order[row, source], weight[source]
                    n_term += 1
            begin = place + 1
    return n_term


POLICY = WeightedKV
