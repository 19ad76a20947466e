"""CaM: StreamingLLM that adds some evicted values to later ones (Zhang et al. 2024, ICML).

The first tokens and the newest tokens stay. When a token is evicted, a random draw decides whether its value
is merged. If so, the value is divided by `merge` and added to the values of the next `merge` kept tokens. The
probability of a merge is the token's attention divided by the mean attention of the kept tokens after it, at
most 1. Each KV head draws once for each token. The random number is a hash of (seed, row, token, step).

The authors have published three programs (github.com/zyxxmu/cam). The defaults follow the first program,
which uses the attention of the last query. The second program sums the attention over all queries, and
divides the sum by the mean sum of the tokens to which the value is added (score=sum, merge=16,
denominator=targets). The third program divides the sum by the steps that the token has lived, and then by the
highest such average of the kept tokens (score=average, denominator=max, merge as large as the window). The
denominator matters: with score=sum and merge=16, the perplexity is 27.7 for "targets" and 30.6 for "mean"
(wikitext-2, SmolLM2-135M, 4,096 tokens, 256 cells).

Differs from the paper: an eviction makes room for `slack` tokens. The paper makes room for one token, as
--evict-every 1 does. Tokens that are evicted together are not merged into each other. At most the newest
`merge` of them are merged, because the `merge` tokens after each older token are evicted with it. If a prompt
does not fit, the first program merges no evicted token, and the second only the newest. If fewer than `merge`
tokens follow an evicted token, each of them still gets 1 / `merge` of the value. The draw of a KV head uses
the attention summed over its group of query heads.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvtool.kernels.draw import draw
from kvtool.kernels.kernel import kernel
from kvtool.policy import Merge, Plan, Policy, Signal, State, View, check_choice, check_kept


@dataclass(frozen=True, slots=True)
class CaM(Policy):
    """Keep sinks and window; merge evicted values at random.

    Attributes
    ----------
    sinks
        First tokens, never evicted. The window gets the rest.
    merge
        Number of tokens that share an evicted value. An eviction merges at most this many values.
    score
        A token's score. "last": its attention from the newest query. "sum": the sum over all queries.
        "average": this sum divided by the steps that the token has lived.
    denominator
        Number that the score is divided by. "mean": mean score of the kept tokens after the token. "targets":
        mean score of the tokens that the value is added to. "max": highest score of all kept tokens.
    seed
        Seed of the draws.
    """

    budget: int
    slack: int
    sinks: int = 4
    merge: int = 32
    score: str = "last"
    denominator: str = "mean"
    seed: int = 0

    sums: ClassVar[tuple[str, ...]] = ("attn",)
    paper: ClassVar[str] = "openreview.net/forum?id=LCTmppB165"

    def __post_init__(self) -> None:
        if self.merge < 1:
            raise ValueError(f"merge must be 1 or more, got {self.merge}")
        check_choice("score", self.score, ("last", "sum", "average"))
        check_choice("denominator", self.denominator, ("mean", "targets", "max"))
        check_kept(self.budget, self.slack, self.sinks, window=1, min_window=1)

    @property
    def reads(self) -> Signal:
        return Signal.LAST if self.score == "last" else Signal.ATTENTION

    @property
    def merges(self) -> bool:
        return True

    @property
    def counts_queries(self) -> bool:
        return self.score == "average"

    def start(self, n_row: int, n_cell: int, n_dim: int) -> State:
        return () if self.score == "last" else Policy.start(self, n_row, n_cell, n_dim)

    def plan(self, view: View, state: State) -> Plan:
        # all rows hold the same tokens, because the choice depends only on positions; but a token's cell may
        # differ from row to row
        order = view.order
        begin = int(np.count_nonzero(view.pos[0] < max(self.sinks, view.pinned)))
        end = begin + max(view.n_kv - self.n_keep, 0)
        keep = np.ones(view.pos.shape, np.bool_)
        np.put_along_axis(keep, order[:, begin:end], False, axis=1)
        sampled = self._sampled(view, state, order, begin, end)
        # the values of a long batch would outweigh the targets' own values
        sampled[:, : -self.merge] = False
        target = order[:, end : end + self.merge]
        return Plan(keep, _merge(order[:, begin:end], target, sampled, 1 / self.merge))

    def _sampled(self, view: View, state: State, order: np.ndarray, begin: int, end: int) -> np.ndarray:
        """Draw which evicted values are merged: b1[row, n_evict]."""
        score = state[0][:, : view.n_kv] if state else view.last
        if self.score == "average":
            score = score / view.lived.astype(np.float64)
        score = np.take_along_axis(score, order, axis=1).astype(np.float64)
        chance = draw(self.seed, view.next, np.take_along_axis(view.pos, order[:, begin:end], axis=1)) / 2**24
        sampled: np.ndarray
        if self.denominator == "max":
            largest = [part.max(axis=1, initial=0) for part in (score[:, :begin], score[:, end:])]
            sampled = chance * np.maximum(*largest)[:, None] < score[:, begin:end]
        else:
            after = score[:, end:] if self.denominator == "mean" else score[:, end : end + self.merge]
            # the condition is chance < score / mean, written without a division, because the mean may be 0
            sampled = chance * after.sum(axis=1, keepdims=True) < score[:, begin:end] * after.shape[1]
        return sampled


def _merge(evicted: np.ndarray, target: np.ndarray, sampled: np.ndarray, weight: float) -> Merge:
    """Return the merge that adds `weight` times each sampled value to the values of all target cells.

    evicted i64[row, n_evict]: the evicted cells. sampled b1[row, n_evict]: True if the cell's value is
    merged. target i64[row, n_target]: the kept cells that get the values.
    """
    n_drawn = sampled.sum(axis=1)
    # the first term of each target is the target's own value
    n_term = int((n_drawn + (n_drawn > 0)).sum()) * target.shape[1]
    row, dst, src = (np.empty(n_term, np.int32) for _ in range(3))
    part = np.empty(n_term, np.float32)
    evicted, target = np.ascontiguousarray(evicted), np.ascontiguousarray(target)
    _add_sampled(evicted, target, sampled, weight, row, dst, src, part)
    return Merge(row, dst, src, part)


@kernel("void(i8[:,::1], i8[:,::1], b1[:,::1], f4, i4[::1], i4[::1], i4[::1], f4[::1])")
def _add_sampled(evicted, target, sampled, weight, row_of, dst_of, src_of, weight_of):
    """Write the terms of a `Merge`. `_merge` explains the first four arguments."""
    n_term = 0
    for row in range(len(evicted)):
        if not sampled[row].any():
            continue
        for dst in target[row]:
            row_of[n_term], dst_of[n_term], src_of[n_term], weight_of[n_term] = row, dst, dst, 1
            n_term += 1
            for i in range(evicted.shape[1]):
                if sampled[row, i]:
                    row_of[n_term], dst_of[n_term] = row, dst
                    src_of[n_term], weight_of[n_term] = evicted[row, i], weight
                    n_term += 1


POLICY = CaM
