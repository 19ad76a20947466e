"""Recall: keep sinks and a window; each step also attends to an archive of the evicted tokens.

Sinks and window are the same as in StreamingLLM. Evicted tokens move to an archive in host memory, where
tokens with similar keys form clusters. Each step attends to the archive in place. It attends exactly to the
clusters that matter most to its queries, and to the remaining clusters by their means. The result enters the
model's attention through synthetic cells, which do not belong to a token. A row has one synthetic cell for
each query head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from kvtool.policy import Ranked, RecallSettings, State, View, check_choice, check_kept, check_whole


@dataclass(frozen=True, slots=True)
class Recall(Ranked):
    """Keep sinks and window live, and recall the rest from an archive.

    Attributes
    ----------
    recalled
        Only for models whose values are a part of their keys (MLA): number of archived tokens that a step
        copies back. Default: half of the budget minus the slack, or as many as there is room for.
    chunk
        Maximum number of tokens of a step. A prompt is read in steps of this size. All tokens of a step
        attend exactly to the same archived tokens.
    search
        "clusters": a step attends exactly to the clusters that matter most, and to the rest by their means.
        "all": a step attends exactly to all archived tokens.
    exact
        With search=clusters: number of archived tokens that a step attends to exactly. For a step of several
        tokens, the number is up to five times as large; in an archive of 131,072 tokens, up to ten times. 0
        or not given: 128 for each query head of a row, but at least 256 and at most 1,024 in all.
    """

    adjustable: ClassVar[tuple[str, ...]] = ("recalled", "chunk", "search", "exact")
    has_rest: ClassVar[bool] = False

    budget: int
    slack: int
    recalled: int
    exact: int
    sinks: int = 4
    chunk: int = 16
    search: str = "clusters"

    def __post_init__(self) -> None:
        for name in ("budget", "slack", "recalled", "sinks", "chunk", "exact"):
            check_whole(name, getattr(self, name), ValueError)
        check_choice("search", self.search, ("clusters", "all"))
        if self.chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {self.chunk}")
        if self.exact < 0:
            raise ValueError(f"exact must not be negative, got {self.exact}")
        most = self._max_recalled
        if most < 1:
            raise ValueError(
                f"a budget of {self.budget} is too small for {self.sinks} sinks, the newest token, "
                f"a cell for what is recalled and {self.slack} slack"
            )
        check_kept(self.budget, self.slack, self.sinks)
        if not 0 <= self.recalled <= most:
            raise ValueError(
                f"recalled must be in 1..{most} (the budget of {self.budget} less {self.slack} slack, "
                f"{self.sinks} sinks and the newest token), got {self.recalled}"
            )

    @classmethod
    def fit(cls, budget: int, slack: int, **params: Any) -> Recall:
        if params.get("search") == "all" and "exact" in params:
            raise ValueError("exact goes with search=clusters; leave out -o exact or -o search=all")
        # 0 is a placeholder; the method `for_model` replaces it by a value that suits the model
        return cls(budget, slack, **{"recalled": 0, "exact": 0, **params})

    def for_model(self, n_group: int, has_values: bool) -> Recall:
        # 128 for each query head of a row, because each head needs different archived tokens
        exact = self.exact or min(max(128 * n_group, 256), 1024)
        if not has_values:
            half = max(min((self.budget - self.slack) // 2, self._max_recalled), 1)
            return replace(self, recalled=self.recalled or half, exact=exact)
        if self.recalled not in (0, n_group):
            raise ValueError(
                "recalled is for models whose values are a part of their keys (MLA); in this one each step "
                f"makes {n_group} cells of what it recalls: leave out -o recalled"
            )
        if n_group > self._max_recalled:
            raise ValueError(
                f"a budget of {self.budget} is too small for {self.sinks} sinks, the newest token, "
                f"{n_group} cells for what is recalled in this model and {self.slack} slack"
            )
        return replace(self, recalled=n_group, exact=exact)

    @property
    def recall(self) -> RecallSettings:
        n_exact = 0 if self.search == "all" else self.exact or 256
        return RecallSettings(self.recalled or 1, self.chunk, n_exact)

    @property
    def _max_recalled(self) -> int:
        """Maximum of `recalled`: larger values leave no room for the sinks and the newest token."""
        return self.budget - self.slack - self.sinks - 1

    def scores(self, view: View, state: State) -> np.ndarray:
        # all scores are equal, so the newest tokens stay
        return np.zeros(view.pos.shape, np.float32)


POLICY = Recall
