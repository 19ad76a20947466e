"""Full: nothing is ever evicted; the text must fit into the budget.

What the other policies are measured against.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtool.policy import Plan, Policy, State, View


@dataclass(frozen=True, slots=True)
class Full(Policy):
    """No parameters. slack is 0: there is never an eviction to make room for."""

    budget: int
    slack: int

    @classmethod
    def fit(cls, budget: int, slack: int, **params: Any) -> Full:
        return cls(budget, 0, **params)

    def plan(self, view: View, state: State) -> Plan:
        return Plan(np.ones(view.pos.shape, np.bool_))


POLICY = Full
