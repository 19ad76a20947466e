"""Random: the newest tokens and a uniformly random choice of the others stay.

The baseline that a score must beat. The choice is drawn afresh at every plan and for every row; it is a
hash of (seed, row, token, step), so that a stream can be repeated and nothing has to be remembered.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtool.kernels import keep_highest, splitmix64
from kvtool.policy import Plan, Policy, State, View, check_kept, protected


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
    def fit(cls, budget: int, slack: int, **params: object) -> Random:
        return cls(budget, slack, **{"window": max((budget - slack) // 2, 1), **params})

    def plan(self, view: View, state: State) -> Plan:
        n_keep = self.budget - self.slack
        keep = np.empty(view.pos.shape, np.bool_)
        score = _draw(self.seed, view.next, view.pos)
        keep_highest(view.pos, score, *protected(view, n_keep, self.sinks, self.window), n_keep, keep)
        return Plan(keep)


def _draw(seed: int, step: int, pos: np.ndarray) -> np.ndarray:
    """pos i32[row, n] -> f32[row, n]: whole numbers below 2**24, which a float32 holds exactly."""
    # arrays throughout: NumPy warns of the overflow that a hash lives on in scalars only
    hashed = splitmix64(np.array([seed % 2**64], np.uint64))
    hashed = splitmix64(hashed + np.uint64(step))
    hashed = splitmix64(hashed + np.arange(pos.shape[0], dtype=np.uint64))
    hashed = splitmix64(hashed[:, None] + pos.astype(np.uint64))
    return (hashed >> np.uint64(40)).astype(np.float32)


POLICY = Random
