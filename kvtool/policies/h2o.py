"""H2O: the newest tokens and the heavy hitters stay (Zhang et al. 2023, arXiv:2306.14048, Algorithm 1).

A heavy hitter is a token with a high attention sum since it came. The paper's `recent` is our window.

Differs from the paper: one decision a KV head, on the sum over its group of query heads (the paper
has no grouped queries); the window is exempt from eviction, as in the authors' code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvtool.kernels import keep_highest
from kvtool.policy import Plan, Policy, Signal, State, View, check_kept, protected


@dataclass(frozen=True, slots=True)
class H2O(Policy):
    """window: newest tokens, never evicted; half of what is kept unless given. sinks: first tokens, too."""

    budget: int
    slack: int
    window: int
    sinks: int = 0

    reads: ClassVar[Signal] = Signal.ATTENTION
    paper: ClassVar[str] = "arXiv:2306.14048"

    def __post_init__(self) -> None:
        check_kept(self.budget, self.slack, self.sinks, self.window)

    @classmethod
    def fit(cls, budget: int, slack: int, **params: object) -> H2O:
        return cls(budget, slack, **{"window": max((budget - slack) // 2, 1), **params})

    def start(self, n_row: int, n_cell: int, n_dim: int) -> State:
        return (np.zeros((n_row, n_cell), np.float32),)

    def observe(self, view: View, state: State) -> None:
        (mass,) = state
        mass[:, : view.n_kv] += view.attn

    def plan(self, view: View, state: State) -> Plan:
        (mass,) = state
        n_keep = self.budget - self.slack
        keep = np.empty(view.pos.shape, np.bool_)
        keep_highest(view.pos, mass, *protected(view, n_keep, self.sinks, self.window), n_keep, keep)
        return Plan(keep)


POLICY = H2O
