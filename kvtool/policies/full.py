"""Full: nothing is ever evicted; the text must fit into the budget.

What the other policies are measured against.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvtool.policy import Plan, Signal, View


@dataclass(frozen=True, slots=True)
class Full:
    """No parameters. slack is 0: there is never an eviction to make room for."""

    budget: int
    slack: int

    reads: ClassVar[Signal] = Signal.NONE
    paper: ClassVar[str] = ""

    @classmethod
    def fit(cls, budget: int, slack: int, **params: object) -> Full:
        return cls(budget, 0, **params)

    def start(self, n_row: int, n_cell: int) -> tuple[np.ndarray, ...]:
        return ()

    def plan(self, view: View, state: tuple[np.ndarray, ...]) -> Plan:
        return Plan(np.ones(view.pos.shape, np.bool_))


POLICY = Full
