"""Scissorhands: the newest and the lately important tokens stay (Liu et al. 2023, arXiv:2305.17118).

Algorithm 2. A token is important to a query that gives it no less than an even share, A >= 1 / t with t
tokens seen. Those that were important least often in the last `history` queries go, the oldest first among
equals. The paper's r recent tokens are our window.

Differs from the paper: one decision a KV head, each head of its group counting on its own (the paper has no
grouped queries), and the same budget for every layer. The history is kept in up to 8 parts of equally many
queries and forgotten part by part, so that it is up to an eighth shorter than asked for; what comes between
two plans counts as of its last query, however much it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvtool.policy import Plan, Policy, Signal, State, View, check_kept, keep_ranked

_MAX_PARTS = 8


@dataclass(frozen=True, slots=True)
class Scissorhands(Policy):
    """window: newest tokens, never evicted; the paper's 10, less for a small budget.

    sinks: first tokens, too. history: how many queries are looked back on; 400 in the paper.
    """

    budget: int
    slack: int
    window: int
    history: int = 400
    sinks: int = 0

    reads: ClassVar[Signal] = Signal.HITS
    paper: ClassVar[str] = "arXiv:2305.17118"

    def __post_init__(self) -> None:
        check_kept(self.budget, self.slack, self.sinks, self.window)
        if self.history < 1:
            raise ValueError(f"history must be 1 or more, got {self.history}")

    @classmethod
    def fit(cls, budget: int, slack: int, **params: Any) -> Scissorhands:
        return cls(budget, slack, **{"window": max(min(10, (budget - slack) // 2), 1), **params})

    def start(self, n_row: int, n_cell: int, n_dim: int) -> State:
        """Hits u2 in each part of the history; 16 bytes a cell at most."""
        return (np.zeros((n_row, n_cell, self._parts()[0]), np.uint16),)

    def observe(self, view: View, state: State) -> None:
        (hits,) = state
        n_part, n_query = self._parts()
        part = (view.next - 1) // n_query
        last_part = (view.next - view.n_new - 1) // n_query
        n_begun = min(part - last_part, n_part)
        begun = (part - np.arange(n_begun)) % n_part
        hits[:, : view.n_kv, begun] = 0
        now = hits[:, : view.n_kv, part % n_part]
        now[...] = np.minimum(now + view.hits, np.iinfo(np.uint16).max)

    def plan(self, view: View, state: State) -> Plan:
        score = state[0][:, : view.n_kv].sum(axis=2, dtype=np.float32)
        n_keep = self.budget - self.slack
        return Plan(keep_ranked(view, score, n_keep, self.sinks, self.window))

    def _parts(self) -> tuple[int, int]:
        """How many parts the history has, no more than plans fall into it, and the queries in each."""
        n_part = min(_MAX_PARTS, -(-self.history // self.slack))
        return n_part, -(-self.history // n_part)


POLICY = Scissorhands
