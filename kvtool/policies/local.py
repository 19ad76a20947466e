"""Local: keep only the newest tokens.

Baseline that evicts everything outside its window, even the first tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvtool.policy import Ranked, State, View


@dataclass(frozen=True, slots=True)
class Local(Ranked):
    """Policy without parameters: only the window is kept."""

    budget: int
    slack: int

    has_rest: ClassVar[bool] = False

    def scores(self, view: View, state: State) -> np.ndarray:
        # all scores are equal, so the newest tokens stay
        return np.zeros(view.pos.shape, np.float32)


POLICY = Local
