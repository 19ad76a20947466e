"""`Merging`, a policy for tests that merges values, and its twin `keep_and_merge`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvtool import policies
from kvtool.policy import Merge, Plan, Policy, Signal
from tests.reference import h2o


@dataclass(frozen=True, slots=True)
class Merging(Policy):
    """H2O that merges: a kept value becomes the mean of itself and the evicted values directly before it."""

    budget: int
    slack: int

    reads: ClassVar[Signal] = Signal.ATTENTION
    merges: ClassVar[bool] = True

    def _h2o(self):
        return policies.fit("h2o", self.budget, self.slack)

    def start(self, n_row, n_cell, n_dim):
        return self._h2o().start(n_row, n_cell, n_dim)

    def observe(self, view, state):
        self._h2o().observe(view, state)

    def plan(self, view, state):
        keep = self._h2o().plan(view, state).keep
        terms = []
        for row, order in enumerate(view.pos.argsort(axis=1)):
            run = []
            for cell in order.tolist():
                run.append(cell)
                if keep[row, cell]:
                    if len(run) > 1:
                        terms += [(row, cell, src, 1 / len(run)) for src in run]
                    run = []
        row, dst, src, weight = zip(*terms, strict=True)
        index = (np.array(column, np.int32) for column in (row, dst, src))
        return Plan(keep, Merge(*index, np.array(weight, np.float32)))


def keep_and_merge(rows, *, next, pinned, budget, slack):
    window = max((budget - slack) // 2, 1)
    positions = h2o.keep(rows, next=next, pinned=pinned, budget=budget, slack=slack, window=window, sinks=0)
    merges = []
    for row, stay in zip(rows, positions, strict=True):
        merges.append({})
        run = []
        for pos in [token["pos"] for token in row]:
            run.append(pos)
            if pos in stay:
                if len(run) > 1:
                    merges[-1][pos] = [(src, 1 / len(run)) for src in run]
                run = []
    return positions, merges
