"""Random: the newest tokens and a uniformly random choice of the others stay.

The baseline that a score must beat. The choice is drawn afresh at every plan and for every row; it is a
hash of (seed, row, token, step), so that a stream can be repeated and nothing has to be remembered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvtool.kernels.draw import draw
from kvtool.policy import Plan, Policy, State, View, check_kept, keep_ranked


@dataclass(frozen=True, slots=True)
class Random(Policy):
    """window: newest tokens, never evicted; half of what is kept unless given. sinks: first tokens, too.

    seed: another seed, another choice.
    """

    budget: int
    slack: int
    window: int
    sinks: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_kept(self.budget, self.slack, self.sinks, self.window)

    @classmethod
    def fit(cls, budget: int, slack: int, **params: Any) -> Random:
        return cls(budget, slack, **{"window": max((budget - slack) // 2, 1), **params})

    def plan(self, view: View, state: State) -> Plan:
        n_keep = self.budget - self.slack
        score = draw(self.seed, view.next, view.pos)
        return Plan(keep_ranked(view, score, n_keep, self.sinks, self.window))


POLICY = Random
