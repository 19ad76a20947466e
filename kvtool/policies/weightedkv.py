"""WeightedKV: evict keys of low average attention, merge their values (Yuan et al. 2025, arXiv:2503.01330).

Algorithm 1. A token's average is its attention sum divided by the steps that it has lived (the paper's a /
n). The token with the smallest average is evicted. Its key is lost, but its value is merged into the value of
the next live token in the row. The merged value is the mean of both values, weighted by the averages of the
two tokens. If both averages are 0, both weights are 1/2. The average of the token that stays does not
change.

Differs from the paper: an eviction makes room for `slack` tokens. The paper makes room for one token, as
--evict-every 1 does. All averages are computed before the eviction. Then the evicted tokens are merged one at
a time, the token with the smallest average first, so a value may be merged several times. Each KV head makes
one decision, based on the attention summed over its group of query heads.

On a model with grouped queries, merging gives worse results: lab/papers/merging.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvtool.kernels.kernel import kernel
from kvtool.kernels.selection import score_key
from kvtool.policy import Merge, Plan, Ranked, Signal, State, View

_SINKS = 4
_FEW = 32
"""Maximum number of evicted cells for which `_line_up` scans the kept cells instead of sorting them.

There is one scan for each evicted cell. A scan is vectorised, so a few scans are faster than a sort.
"""


@dataclass(frozen=True, slots=True)
class WeightedKV(Ranked):
    """Keep the tokens with the highest average attention.

    Attributes
    ----------
    window
        Newest tokens, kept if pinned tokens leave room; 1 or more. Default: half of the kept tokens, minus
        the sinks.
    merge
        Merge the values of evicted tokens. If false, drop the values, like the evicting variant in the
        paper's Figure 4.
    """

    budget: int
    slack: int
    window: int
    sinks: int = _SINKS
    merge: bool = True

    reads: ClassVar[Signal] = Signal.ATTENTION
    sums: ClassVar[tuple[str, ...]] = ("attn",)
    counts_queries: ClassVar[bool] = True
    paper: ClassVar[str] = "arXiv:2503.01330"
    # the newest token must stay, because there is no next token to merge its value into
    min_window: ClassVar[int] = 1

    @property
    def merges(self) -> bool:
        return self.merge

    @classmethod
    def fit(cls, budget: int, slack: int, *, sinks: int = _SINKS, **params: Any) -> WeightedKV:
        window = max((budget - slack) // 2 - sinks, 1)
        return cls(budget, slack, **{"window": window, "sinks": sinks, **params})

    def scores(self, view: View, state: State) -> np.ndarray:
        average: np.ndarray = state[0][:, : view.n_kv] / view.lived
        return average

    def plan(self, view: View, state: State) -> Plan:
        average = self.scores(view, state)
        keep = self.highest(view, average)
        return Plan(keep, _merge(view.pos, average, keep) if self.merge else None)


def _merge(pos: np.ndarray, average: np.ndarray, keep: np.ndarray) -> Merge:
    n_most = 2 * (keep.size - np.count_nonzero(keep))
    row, dst, src = (np.empty(n_most, np.int32) for _ in range(3))
    weight = np.empty(n_most, np.float32)
    n_term = _merge_right(pos, average, keep, row, dst, src, weight)
    return Merge(row[:n_term], dst[:n_term], src[:n_term], weight[:n_term])


@kernel("i8(i4[::1], b1[::1], i8[::1])")
def _line_up(pos, keep, line):
    """Write a row's evicted cells to `line`, oldest token first, and return the number of entries.

    Evicted tokens that follow each other form a run. After each run, `line` also has the cell of the next
    kept token, into which the run's values merge. If no kept token follows, `line` has n instead, and the
    run's values are lost. pos i32[n], keep b1[n], line i64[n + 1].
    """
    n = len(pos)
    # put the position into the upper 32 bits of each entry, and the cell into the lower 32 bits, so that the
    # lowest entry is the oldest token
    never = np.int64(2**63 - 1)
    goes, stays = np.empty(n, np.int64), np.empty(n, np.int64)
    n_gone = 0
    for cell in range(n):
        token = (np.int64(pos[cell]) << 32) | cell
        goes[n_gone] = token
        n_gone += not keep[cell]
        stays[cell] = token if keep[cell] else never
    if n_gone == 0:
        return 0
    goes = np.sort(goes[:n_gone])
    # Find the next kept token after each evicted token. If it comes before the next evicted token, a run ends
    stay = np.full(n_gone, never)
    if n_gone <= _FEW:
        for i in range(n_gone):
            for cell in range(n):
                stay[i] = min(stay[i], stays[cell] if stays[cell] > goes[i] else never)
    else:
        stays = np.sort(stays)
        at = 0
        for i in range(n_gone):
            while stays[at] < goes[i]:
                at += 1
            stay[i] = stays[at]
    n_line = 0
    for i in range(n_gone):
        line[n_line] = goes[i] & 0xFFFFFFFF
        n_line += 1
        if i == n_gone - 1 or stay[i] < goes[i + 1]:
            line[n_line] = stay[i] & 0xFFFFFFFF if stay[i] < never else n
            n_line += 1
    return n_line


@kernel("i8(i4[:,::1], f4[:,::1], b1[:,::1], i4[::1], i4[::1], i4[::1], f4[::1])")
def _merge_right(pos, average, keep, row_of, dst_of, src_of, weight_of):
    """Merge the evicted tokens one by one. Write the terms of a `Merge`, and return the number of terms.

    There are at most two terms for each evicted token. pos i32[row, n], average f32[row, n], keep b1[row, n].
    """
    n_row, n = pos.shape
    bits = average.view(np.int32)
    line, goes = np.empty(n + 1, np.int64), np.empty(n, np.int64)
    key, turn = np.empty(n, np.int64), np.empty(n, np.int64)
    older, newer = np.empty(n + 1, np.int64), np.empty(n + 1, np.int64)
    into, share = np.empty(n, np.int64), np.empty(n, np.float32)
    weight = np.empty(n + 1, np.float32)
    n_term = 0
    for row in range(n_row):
        n_line = _line_up(pos[row], keep[row], line)
        n_gone = 0
        for place in range(n_line):
            older[place], newer[place], weight[place] = place - 1, place + 1, 1
            cell = line[place]
            if cell < n and not keep[row, cell]:
                goes[n_gone], key[n_gone] = place, score_key(bits[row, cell], pos[row, cell])
                n_gone += 1
        # ascending by average, and the oldest first among equals
        order = np.argsort(key[:n_gone], kind="mergesort")
        for i in range(n_gone):
            turn[i] = goes[order[i]]
            left, right = older[turn[i]], newer[turn[i]]
            older[right] = left
            if left >= 0:
                newer[left] = right
            own_average = average[row, line[turn[i]]]
            total = own_average + (average[row, line[right]] if line[right] < n else np.float32(0))
            into[i], share[i] = right, own_average / total if total > 0 else np.float32(0.5)
        # compute the weights of values in reverse order, because the weight of a value depends on the final
        # weight of the token that it merges into
        for i in range(n_gone - 1, -1, -1):
            weight[turn[i]] = weight[into[i]] * share[i]
            weight[into[i]] *= 1 - share[i]
        begin = 0
        for place in range(n_line):
            cell = line[place]
            if cell == n or not keep[row, cell]:
                continue
            for source in range(begin, place + 1):
                row_of[n_term], dst_of[n_term] = row, cell
                src_of[n_term], weight_of[n_term] = line[source], weight[source]
                n_term += 1
            begin = place + 1
    return n_term


POLICY = WeightedKV
