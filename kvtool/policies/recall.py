"""Recall: sinks and a window stay; what leaves the window comes back in the step that asks for it.

The window is StreamingLLM's. Evicted tokens go to an archive in host memory. In every step each layer
chooses, with its own queries, the archived tokens of each row that they attend to most, and attends to them
beside the live cells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtool.policy import Ranked, Recalls, State, View, check_choice, check_kept, check_whole


@dataclass(frozen=True, slots=True)
class Recall(Ranked):
    """The window is all that is live besides the sinks; the rest of the budget is for recalled tokens.

    Attributes
    ----------
    recalled
        Cells of the budget that a step may fill from the archive; half of the budget unless given.
    sinks
        First tokens, never evicted.
    chunk
        The most queries that share a choice: a prompt is read in steps of so many tokens.
    index
        What archived tokens are chosen by: their "keys", or these in 8 or 4 bits, "q8" or "q4".
    """

    budget: int
    slack: int
    recalled: int
    sinks: int = 4
    chunk: int = 16
    index: str = "q8"

    def __post_init__(self) -> None:
        for name in ("recalled", "chunk"):
            check_whole(name, getattr(self, name), ValueError)
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        check_choice("index", self.index, ("keys", "q8", "q4"))
        # at least the newest token stays beside the sinks
        check_kept(self.n_live, self.slack, self.sinks, window=1)

    @classmethod
    def fit(cls, budget: int, slack: int, **params: Any) -> Recall:
        return cls(budget, slack, **{"recalled": max((budget - slack) // 2, 1), **params})

    @property
    def recall(self) -> Recalls:
        return Recalls(self.recalled, self.chunk, self.index)

    def scores(self, view: View, state: State) -> np.ndarray:
        # among equal scores the newer token stays
        return np.zeros(view.pos.shape, np.float32)


POLICY = Recall
