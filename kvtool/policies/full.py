"""Full: never evict; the text must fit into the context.

Baseline for the other policies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvtool.policy import Plan, Policy, State, View


@dataclass(frozen=True, slots=True)
class Full(Policy):
    """Policy without parameters. Its slack is 0."""

    budget: int
    slack: int

    evicts: ClassVar[bool] = False

    @classmethod
    def fit(cls, budget: int, slack: int, **params: Any) -> Full:
        return cls(budget, 0, **params)

    def plan(self, view: View, state: State) -> Plan:
        return Plan(np.ones(view.pos.shape, np.bool_))


POLICY = Full
