"""Recall: sinks and a window stay; what leaves the window comes back in the step that asks for it.

The window is StreamingLLM's. Evicted tokens go to an archive in host memory. In every step each layer
chooses, with its own queries, the archived tokens of each row that they attend to most, and attends to them
beside the live cells.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvtool.policy import Ranked, Recalls, State, View, check_choice, check_kept, check_whole


@dataclass(frozen=True, slots=True)
class Recall(Ranked):
    """The window is all that is live besides the sinks; the rest of the budget is for recalled tokens.

    Attributes
    ----------
    recalled
        Cells of the budget that a step may fill from the archive. Unless given, half of what the slack leaves
        of the budget, or fewer where sinks and the newest token need the room.
    sinks
        First tokens, never evicted.
    chunk
        The most queries that share a choice: a prompt is read in steps of so many tokens.
    index
        What archived tokens are chosen by: their "keys", or these in 8 or 4 bits, "q8" or "q4".
    search
        "tokens": the archived tokens that a step attends to most come back. "clusters": each step attends to
        the archive where it lies, and a row's made cells, one a query head, bring what it finds; `recalled`
        is their number then, and the model says it. "all": the same without clusters: to each token.
    exact
        With search=clusters: tokens that a step looks into, those of the clusters that it attends to most. A
        step of more than one token looks into more, up to four times as many.
    """

    budget: int
    slack: int
    recalled: int
    sinks: int = 4
    chunk: int = 16
    index: str = "q4"
    search: str = "tokens"
    exact: int = 512

    def __post_init__(self) -> None:
        for name in ("budget", "slack", "recalled", "sinks", "chunk", "exact"):
            check_whole(name, getattr(self, name), ValueError)
        check_choice("index", self.index, ("keys", "q8", "q4"))
        check_choice("search", self.search, ("tokens", "clusters", "all"))
        for name in ("chunk", "exact"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        most = _most_recalled(self.budget, self.slack, self.sinks)
        if most < 1:
            raise ValueError(
                f"a budget of {self.budget} is too small for {self.sinks} sinks, the newest token, "
                f"a recalled one and {self.slack} slack"
            )
        check_kept(self.budget, self.slack, self.sinks)
        if not 1 <= self.recalled <= most:
            raise ValueError(
                f"recalled must be in 1..{most} (the budget of {self.budget} less {self.slack} slack, "
                f"{self.sinks} sinks and the newest token), got {self.recalled}"
            )

    @classmethod
    def fit(cls, budget: int, slack: int, **params: Any) -> Recall:
        if (search := params.get("search", cls.__dataclass_fields__["search"].default)) != "tokens":
            if "recalled" in params:
                raise ValueError(
                    f"with search={search} the model says how many cells are made; leave out recalled"
                )
            params["recalled"] = 1
        elif "recalled" not in params:
            sinks = params.get("sinks", cls.__dataclass_fields__["sinks"].default)
            params["recalled"] = max(min((budget - slack) // 2, _most_recalled(budget, slack, sinks)), 1)
        return cls(budget, slack, **params)

    @property
    def recall(self) -> Recalls:
        n_exact = self.exact if self.search == "clusters" else 0
        return Recalls(self.recalled, self.chunk, self.index, self.search != "tokens", n_exact)

    def on(self, n_group: int) -> Recall:
        return replace(self, recalled=n_group) if self.search != "tokens" else self

    def scores(self, view: View, state: State) -> np.ndarray:
        # among equal scores the newer token stays
        return np.zeros(view.pos.shape, np.float32)


def _most_recalled(budget: int, slack: int, sinks: int) -> int:
    """Cells that can be for recalled tokens: at least the newest token stays beside the sinks."""
    return budget - slack - sinks - 1


POLICY = Recall
