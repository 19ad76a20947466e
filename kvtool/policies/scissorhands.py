"""Scissorhands: keep the newest and the recently important tokens (Liu et al. 2023, arXiv:2305.17118).

Algorithm 2. A query gives a low score to each token whose attention A is less than 1 / t, where t is the
number of tokens that the query has seen. An eviction counts the low scores that each token got
from the last `history` queries. It evicts the tokens with the highest counts; among equal counts, the oldest
first. The paper's r recent tokens are our window, and its w queries are our history.

Differs from the paper: each KV head makes one decision, but each query head of its group gives separate
scores; the paper has no grouped queries. Every layer has the same budget. The paper drops half of the cache
at once, but kvtool drops `slack` tokens. On wikitext-2 (SmolLM2-135M, 4,096 tokens, 256 cells), the
perplexity is 28.5 if half is dropped (--evict-every 128) and 26.6 if 16 tokens are dropped. The history is
divided into up to 8 parts with the same number of queries. It is forgotten part by part, so it is up to an
eighth shorter than requested. All queries between two plans are counted in the same part.

In an endless stream the threshold 1 / t keeps falling, so that hardly any score is low. With `-o t=cells` it
does not: t is then the number of live tokens in the longest row.

Option: with `heads=adaptive`, the rows of a layer share its budget as in Ada-KV (see
kvtool/policy/ranked.py).
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvtool.kernels.kernel import kernel
from kvtool.policy import FLOOR, Ranked, Signal, State, View, check_choice

_MAX_PARTS = 8
_MAX_HITS = 2**16 - 1


@dataclass(frozen=True, slots=True)
class Scissorhands(Ranked):
    """Keep the tokens with the fewest low scores.

    Attributes
    ----------
    window
        Newest tokens, kept if pinned tokens leave room. Default: the paper's 10, or half of the kept tokens
        if that is less.
    history
        Number of newest queries whose low scores are counted; 400 in the paper.
    t
        Count in the threshold 1 / t: "stream" counts tokens of the stream, "cells" counts live cells.
    """

    budget: int
    slack: int
    window: int
    history: int = 400
    sinks: int = 0
    t: str = "stream"
    heads: str = "equal"
    floor: float = FLOOR

    reads: ClassVar[Signal] = Signal.HITS
    paper: ClassVar[str] = "arXiv:2305.17118"
    max_window: ClassVar[int] = 10

    def __post_init__(self) -> None:
        Ranked.__post_init__(self)
        if self.history < 1:
            raise ValueError(f"history must be 1 or more, got {self.history}")
        check_choice("t", self.t, ("stream", "cells"))

    def start(self, n_row: int, n_cell: int, n_dim: int) -> State:
        """Return counts of low scores, for each cell and part of the history: at most 16 bytes per cell."""
        return (np.zeros((n_row, n_cell, self._parts()[0]), np.uint16),)

    def observe(self, view: View, state: State) -> None:
        n_part, n_query = self._parts()
        part = (view.next - 1) // n_query
        last_part = (view.next - view.n_new - 1) // n_query
        n_begun = min(part - last_part, n_part)
        _count_low(view.pos, view.hits, view.n_head, view.next, view.n_new, part, n_begun, state[0])

    def scores(self, view: View, state: State) -> np.ndarray:
        score = np.empty(view.pos.shape, np.float32)
        _minus_sum(state[0], score)
        return score

    def _parts(self) -> tuple[int, int]:
        """Return the number of parts of the history, and the number of queries in each part.

        Each plan adds to one part, so more parts than plans within the history would be useless.
        """
        n_part = min(_MAX_PARTS, -(-self.history // self.slack))
        return n_part, -(-self.history // n_part)


@kernel("void(i4[:,::1], f4[:,::1], i4[::1], i8, i8, i8, i8, u2[:,:,::1])")
def _count_low(pos, hits, n_head, next_pos, n_new, part, n_begun, low):
    """Add the low scores of the last `n_new` queries to the newest part of the history.

    low u2[row, n or more, n_part]: a ring buffer of counts. Part i of the history is stored at i modulo
    n_part. `part` is the newest part. `n_begun` parts have begun since the last plan; they are first set
    to 0. Counts are at most 65,535. If the new queries can give more low scores than that, their counts are
    scaled down.

    The newest query is at position next_pos - 1. pos i32[row, n], hits f32[row, n], n_head i32[row].
    """
    n_row, n = pos.shape
    n_part = low.shape[2]
    for row in range(n_row):
        scale = min(_MAX_HITS / max(n_head[row] * n_new, 1), 1.0)
        for cell in range(n):
            for begun in range(part - n_begun + 1, part + 1):
                low[row, cell, begun % n_part] = 0
            n_score = n_head[row] * min(next_pos - pos[row, cell], n_new)
            count = low[row, cell, part % n_part] + (n_score - hits[row, cell]) * scale
            low[row, cell, part % n_part] = np.uint16(min(max(count, 0), _MAX_HITS))


@kernel("void(u2[:,:,::1], f4[:,::1])")
def _minus_sum(low, score):
    n_row, n = score.shape
    for row in range(n_row):
        for cell in range(n):
            total = np.int64(0)
            for count in low[row, cell]:
                total += count
            score[row, cell] = -total


POLICY = Scissorhands
