"""Local: the newest tokens stay, and nothing else.

The baseline that forgets everything outside its window, the first tokens too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtool.kernels import keep_highest
from kvtool.policy import Plan, Policy, State, View, check_kept


@dataclass(frozen=True, slots=True)
class Local(Policy):
    """No parameters: the window is all that is kept."""

    budget: int
    slack: int

    def __post_init__(self) -> None:
        check_kept(self.budget, self.slack)

    def plan(self, view: View, state: State) -> Plan:
        keep = np.empty(view.pos.shape, np.bool_)
        # among equal scores the newer token stays
        equal = np.zeros(view.pos.shape, np.float32)
        keep_highest(view.pos, equal, view.pinned, view.next, self.budget - self.slack, keep)
        return Plan(keep)


POLICY = Local
