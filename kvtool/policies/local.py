"""Local: the newest tokens stay, and nothing else.

The baseline that forgets everything outside its window, the first tokens too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtool.policy import Plan, Policy, State, View, check_kept, keep_ranked


@dataclass(frozen=True, slots=True)
class Local(Policy):
    """No parameters: the window is all that is kept."""

    budget: int
    slack: int

    def __post_init__(self) -> None:
        check_kept(self.budget, self.slack)

    def plan(self, view: View, state: State) -> Plan:
        # among equal scores the newer token stays
        equal = np.zeros(view.pos.shape, np.float32)
        return Plan(keep_ranked(view, equal, self.budget - self.slack, sinks=0, window=0))


POLICY = Local
