"""Local: the newest tokens stay, and nothing else.

The baseline that forgets everything outside its window, the first tokens too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvtool.kernels import keep_highest
from kvtool.policy import Plan, Signal, View, check_kept


@dataclass(frozen=True, slots=True)
class Local:
    """No parameters: the window is all that is kept."""

    budget: int
    slack: int

    reads: ClassVar[Signal] = Signal.NONE
    paper: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_kept(self.budget, self.slack)

    @classmethod
    def fit(cls, budget: int, slack: int, **params: object) -> Local:
        return cls(budget, slack, **params)

    def start(self, n_row: int, n_cell: int) -> tuple[np.ndarray, ...]:
        return ()

    def plan(self, view: View, state: tuple[np.ndarray, ...]) -> Plan:
        keep = np.empty(view.pos.shape, np.bool_)
        # among equal scores the newer token stays
        equal = np.zeros(view.pos.shape, np.float32)
        keep_highest(view.pos, equal, view.pinned, view.next, self.budget - self.slack, keep)
        return Plan(keep)


POLICY = Local
