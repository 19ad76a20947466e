"""R-KV: keep tokens that get attention and are not redundant (Cai et al. 2025, arXiv:2505.24133).

A token's score is mixture * I - (1 - mixture) * R. The importance I is the attention of the last `window`
queries, normalised to sum to 1, then max-pooled over `kernel` neighbours in the order of the stream. The
redundancy R is the softmax of a mean: the mean cosine of the token's key with all keys of the row, where its
cosine with itself counts as 0.

If several tokens are similar, the newest of them must not count as redundant. Therefore some cosines are
replaced by 0 before the means are computed. For each key k, the code finds the keys whose cosine with k
exceeds `threshold`, and takes the newest `similar` of them. In the means of these keys, the cosine with k
counts as 0.
The paper's lambda, alpha, beta and T are our `mixture`, `window`, `similar` and `threshold`.

The paper leaves some details open. They follow the authors' code: the defaults of `kernel` and `similar` are
the same, and a group's attention is the maximum over its heads. The window's tokens are not ranked and not
pooled, but their keys are included in the mean cosines.

Differs from the paper: the paper compresses every 128 generated tokens (--evict-every 128). kvtool compresses
whenever the cache is full, also while it reads a prompt. Keys are rounded to eight bits, and compared before
RoPE; the authors' code compares them after RoPE. The attention of the window's queries is added up, then
divided by its sum over the tokens before the window. The authors' code instead takes the highest logit of a
group, then normalises the attention of each query separately. If no key is similar to a key k, the authors'
code still replaces a cosine by 0: the cosine with k in the mean of the first key. kvtool does not.

Option: with `heads=adaptive`, the rows of a layer share its budget as in Ada-KV (see
kvtool/policy/ranked.py).
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvtool.kernels.kernel import kernel
from kvtool.policies._keys import UnitKeys
from kvtool.policy import FLOOR, Signal, State, View, protected


@dataclass(frozen=True, slots=True)
class RKV(UnitKeys):
    """Keep important tokens whose keys are not redundant.

    Attributes
    ----------
    window
        Newest tokens, kept if pinned tokens leave room; their queries decide which tokens are important.
        Default: 8, or half of the kept tokens if that is less.
    mixture
        Weight of importance, from 0 to 1. Redundancy has the weight 1 - mixture.
    kernel
        Number of neighbours that are pooled: an odd number, 1 for no pooling.
    threshold
        Cosine above which two keys are similar.
    similar
        For each key k, the newest similar keys, up to this number, count their cosine with k as 0.
    """

    budget: int
    slack: int
    window: int
    mixture: float = 0.1
    kernel: int = 7
    threshold: float = 0.5
    similar: int = 1
    sinks: int = 0
    heads: str = "equal"
    floor: float = FLOOR

    reads: ClassVar[Signal] = Signal.RECENT | Signal.KEYS
    group: ClassVar[str] = "max"
    paper: ClassVar[str] = "arXiv:2505.24133"
    min_window: ClassVar[int] = 1
    max_window: ClassVar[int] = 8

    def __post_init__(self) -> None:
        UnitKeys.__post_init__(self)
        if not 0 <= self.mixture <= 1:
            raise ValueError(f"mixture must be in 0..1, got {self.mixture}")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel must be odd, 1 or more, got {self.kernel}")
        if not -1 <= self.threshold <= 1:
            raise ValueError(f"threshold must be in -1..1, got {self.threshold}")
        if self.similar < 0:
            raise ValueError(f"similar must not be negative, got {self.similar}")

    @property
    def n_query(self) -> int:
        return self.window

    def scores(self, view: View, state: State) -> np.ndarray:
        _, recent = protected(view, self.n_keep, self.sinks, self.window)
        order = view.order
        # dead cells of a ragged row come first
        dead = (view.pos < 0).sum(axis=1)
        likeness = np.zeros(view.pos.shape, np.float64)
        _likeness(order, dead, state[0], self.threshold * 127 * 127, self.similar, likeness)
        score = np.zeros(view.pos.shape, np.float32)
        _score(order, dead, view.pos, view.recent, likeness, recent, self.kernel // 2, self.mixture, score)
        return score


@kernel("void(i8[:,::1], i8[::1], i1[:,:,::1], f8, i8, f8[:,::1])", any_order=True)
def _likeness(order, dead, unit, threshold, n_spared, likeness):
    """Compute the mean cosine of each key with all keys of its row; the cosine with itself counts as 0.

    Two keys are similar if their dot product exceeds the threshold. For each key k, take the newest
    `n_spared` similar keys. In the means of these keys, the cosine with k counts as 0. Dot products are
    integers up to about 127 * 127, so float32 holds them exactly.

    order i64[row, n]: a row's dead cells, then its live cells with the oldest token first. dead i64[row]:
    number of dead cells. unit i8[row, n or more, n_dim]: the scaled keys. likeness f64[row, n]: the result,
    in the same order of cells as `order`.
    """
    n_row, n = order.shape
    n_dim = unit.shape[2]
    keys, total = np.empty((n, n_dim), np.float32), np.empty(n_dim, np.float64)
    for row in range(n_row):
        total[:] = 0
        begin = dead[row]
        for i in range(begin, n):
            for dim in range(n_dim):
                keys[i, dim] = unit[row, order[row, i], dim]
                total[dim] += keys[i, dim]
        for i in range(begin, n):
            product = 0.0
            for dim in range(n_dim):
                product += (total[dim] - keys[i, dim]) * keys[i, dim]
            likeness[row, i] = product
        for i in range(begin, n):
            n_left = n_spared
            j = n - 1
            while n_left > 0 and j >= begin:
                alike = np.float32(0)
                for dim in range(n_dim):
                    alike += keys[i, dim] * keys[j, dim]
                if alike > threshold and j != i:
                    likeness[row, j] -= alike
                    n_left -= 1
                j -= 1
        for i in range(begin, n):
            likeness[row, i] /= (n - begin) * 127.0 * 127.0


@kernel("void(i8[:,::1], i8[::1], i4[:,::1], f4[:,::1], f8[:,::1], i8, i8, f8, f4[:,::1])")
def _score(order, dead, pos, votes, likeness, recent, reach, mixture, score):
    """Score the tokens before position `recent`.

    Sums start at the oldest token, so they do not depend on the order of cells. order, dead and likeness: see
    `_likeness`. pos i32[row, n]. votes f32[row, n]: attention of the window's queries. reach: number of
    neighbours on each side that are pooled. score f32[row, n].
    """
    n_row, n = order.shape
    for row in range(n_row):
        begin = dead[row]
        end, all_votes, weight = begin, 0.0, 0.0
        while end < n and pos[row, order[row, end]] < recent:
            all_votes += votes[row, order[row, end]]
            end += 1
        for i in range(begin, n):
            weight += np.exp(likeness[row, i])
        for i in range(begin, end):
            highest = np.float32(0)
            for j in range(max(i - reach, begin), min(i + reach + 1, end)):
                highest = max(highest, votes[row, order[row, j]])
            importance = highest / all_votes if all_votes > 0 else 0.0
            redundancy = np.exp(likeness[row, i]) / weight
            score[row, order[row, i]] = mixture * importance - (1 - mixture) * redundancy


POLICY = RKV
