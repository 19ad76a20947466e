"""Policies that rank: keep sinks, window, and the highest scores of the rest.

With `heads=adaptive`, the rows of a layer share their budgets by need (Ada-KV, Feng et al. 2024,
arXiv:2407.11550). A layer keeps the highest scores of all its rows together, so some rows keep more tokens
than others, and the budget is only an average over rows. Each row keeps at least `floor` (the paper's alpha)
times an equal share, and at least one token.

With `layers=adaptive`, the layers share their budgets (LAVa, Shen et al. 2025, arXiv:2509.09754). Each layer
keeps its protected tokens. The remaining cells are divided among the layers in proportion to an entropy: the
entropy of the layer's scores, divided by the maximum possible entropy.

Differs from the papers: the floor is a share of all kept cells, including protected cells. kvpress does the
same, and an author of Ada-KV has reviewed its code. The code of Ada-KV's authors gives each row `floor` times
an equal share, plus (1 - `floor`) times the row's share by need. LAVa's scores are attention times the
largest value norm of a row; here they are the policy's scores. A row never holds more than twice the budget.
The papers compress a prompt once; kvtool compresses every `slack` tokens of a stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvtool.kernels.selection import keep_highest, keep_shared, layer_entropy
from kvtool.policy.base import Policy, State, split_budget
from kvtool.policy.checks import check_choice, check_kept, check_whole, checked_score
from kvtool.policy.plan import Plan
from kvtool.policy.view import View

if TYPE_CHECKING:
    from typing import Self

FLOOR = 0.2
"""Default of `floor`. A row that shares its budget keeps at least this fraction of an equal share."""

_MAX_SHARE = 2
"""Maximum cells of a row that shares its budget, as a multiple of an equal share."""


class Ranked(Policy):
    """Base of policies that define only `scores`.

    The dataclass's fields `sinks` and `window` are the numbers of sinks and of window tokens. Without such a
    field, the number is 0. If a policy has the fields `heads` and `floor`, the rows of a layer can share
    their budgets. If it has the field `layers`, the layers can share their budgets. A policy with shared
    budgets has to meet these conditions. The scores of all rows of a layer must be comparable. With `layers`,
    scores must not be negative. `scores` must handle rows with fewer live cells than n_kv. If the policy has
    a field `per`, heads=adaptive needs per=row.

    Attributes
    ----------
    min_window
        Smallest window that works.
    heads
        "equal": each row keeps the same number of tokens. "adaptive": the rows of a layer share their budgets
        by need.
    layers
        "equal": each layer keeps the same number of tokens. "adaptive": layers share their budgets, and a
        layer gets more if its scores are spread more evenly.
    floor
        Minimum share of its budget that each row keeps with heads=adaptive.
    """

    __slots__ = ()

    min_window: ClassVar[int] = 0

    # values for policies that do not define these fields
    heads: str = "equal"
    layers: str = "equal"
    floor: float = FLOOR

    def __post_init__(self) -> None:
        check_choice("heads", self.heads, ("equal", "adaptive"))
        check_choice("layers", self.layers, ("equal", "adaptive"))
        if not 0 <= self.floor <= 1:
            raise ValueError(f"floor must be in 0..1, got {self.floor}")
        if self.heads == "equal" and self.floor != FLOOR:
            raise ValueError("floor needs heads=adaptive: the rows of a layer keep the same number of cells")
        if self.heads == "adaptive" and (per := getattr(self, "per", "row")) != "row":
            raise ValueError(f"heads=adaptive needs per=row, got per={per}")
        check_kept(self.n_asked, self.slack, *self.exempt, self.min_window)

    @property
    def ragged(self) -> bool:
        return "adaptive" in (self.heads, self.layers)

    @property
    def n_asked(self) -> int:
        return self.budget // _MAX_SHARE if self.ragged else self.budget

    @property
    def n_keep(self) -> int:
        """Number of cells that an eviction leaves in a row; if rows share budgets, their average."""
        return self.n_asked - self.slack if self.ragged else super().n_keep

    @classmethod
    def fit(cls, budget: int, slack: int, **params: Any) -> Self:
        if "adaptive" not in (params.get("heads"), params.get("layers")):
            return super().fit(budget, slack, **params)
        others = {name: value for name, value in params.items() if name not in ("heads", "layers", "floor")}
        equal = super().fit(budget, slack, **others)
        if "window" in cls.__dataclass_fields__:
            params["window"] = equal.exempt[1]
        return cls(budget * _MAX_SHARE, slack, **params)

    def split(self, pinned: int = 0) -> dict[str, int]:
        if self.ragged:
            return split_budget(self.n_asked, self.slack, *self.exempt, pinned)
        return super().split(pinned)

    def scores(self, view: View, state: State) -> np.ndarray:
        """Return f32[row, n_kv or more]: the score of each cell. Among equal scores the newer token stays."""
        raise NotImplementedError

    def plan(self, view: View, state: State) -> Plan:
        return Plan(self.highest(view, self.scores(view, state)))

    def highest(self, view: View, scores: np.ndarray) -> np.ndarray:
        """Return b1[row, n_kv]: True for the cells that stay if tokens are ranked by these scores."""
        if not self.ragged:
            return keep_ranked(view, scores, self.n_keep, *self.exempt)
        scores = checked_score(scores, view.pos)
        first, recent = protected(view, self.n_keep, *self.exempt)
        n_keep = self._shares(view, scores, first, recent)
        floor = self.floor if self.heads == "adaptive" else 1.0
        # a row must not become empty
        n_floor = np.maximum((n_keep * floor).astype(np.int64), 1)
        keep = np.empty(view.pos.shape, np.bool_)
        most = self.budget - self.slack
        keep_shared(view.pos, view.live, view.layer, scores, first, recent, n_keep, n_floor, most, keep)
        return keep

    def _shares(self, view: View, scores: np.ndarray, first: int, recent: int) -> np.ndarray:
        """Return the number of tokens that each row keeps: i64[row].

        If the rows of a layer share their budgets, each row of the layer gets the layer's average.
        """
        if self.layers == "equal":
            return np.full(len(view.pos), self.n_keep, np.int64)
        entropy = np.empty(len(view.pos))
        layer_entropy(view.pos, view.live, view.layer, scores, first, recent, entropy)
        n_protected = first + view.next - recent
        most = np.minimum(view.live, self.budget - self.slack) - n_protected
        return n_protected + apportion(entropy, most, len(entropy) * (self.n_keep - n_protected))


def apportion(weight: np.ndarray, most: np.ndarray, total: int) -> np.ndarray:
    """Divide `total` in proportion to the weights. Return i64[n]: the shares, each at most `most`.

    Shares are rounded down. If `most` limits a share, the excess is divided among the other shares. weight:
    f64[n], 0 or more. most: i64[n].
    """
    share, most = np.zeros(len(weight), np.int64), np.maximum(most, 0)
    while True:
        may = np.where(share < most, weight, 0.0)
        more = np.floor((total - share.sum()) * may / max(may.sum(), 1e-300)).astype(np.int64)
        if not more.any():
            return share
        share = np.minimum(share + more, most)


def protected(view: View, n_keep: int, sinks: int, window: int) -> tuple[int, int]:
    """Return positions (first, recent): tokens before `first` and from `recent` on must stay.

    Pinned tokens count as sinks, and held tokens count as window. The window shrinks if sinks and window
    together do not fit into n_keep cells. Raises TypeError if an argument is not an integer.
    """
    for name, value in (("n_keep", n_keep), ("sinks", sinks), ("window", window)):
        check_whole(name, value)
    first = max(sinks, view.pinned)
    return first, view.next - min(max(window, view.held), n_keep - first)


def keep_ranked(view: View, score: np.ndarray, n_keep: int, sinks: int, window: int) -> np.ndarray:
    """Choose `n_keep` cells of each row: the protected tokens, and the highest scores of the rest.

    Return b1[row, n_kv]: True for the cells to keep. score: f32[row, n_kv or more], which `checked_score`
    checks. Among equal scores the newer token stays.
    """
    score = checked_score(score, view.pos)
    first, recent = protected(view, n_keep, sinks, window)
    keep = np.empty(view.pos.shape, np.bool_)
    keep_highest(view.pos, score, first, recent, n_keep, keep)
    return keep


def sum_rows(view: View, score: np.ndarray, per: str) -> np.ndarray:
    """Return f32[row, n_kv or more]: each token's score, summed over the rows that decide together.

    score: f32[row, n_kv or more], which `checked_score` checks. per: "row" (no sum), "layer" (the rows of a
    layer) or "all". Rows that decide together must hold the same tokens.
    """
    check_choice("per", per, ("row", "layer", "all"))
    score = checked_score(score, view.pos)
    if per == "row":
        return score
    first_rows = np.flatnonzero(np.diff(view.layer, prepend=-1)) if per == "layer" else np.zeros(1, np.intp)
    n_rows = np.diff(first_rows, append=len(view.layer))
    if (view.pos == np.repeat(view.pos[first_rows], n_rows, axis=0)).all():
        # usual case: the rows hold the same tokens in the same cells, so no sort is needed
        return np.repeat(np.add.reduceat(score[:, : view.n_kv], first_rows, axis=0), n_rows, axis=0)
    order = view.order
    total = np.add.reduceat(np.take_along_axis(score, order, axis=1), first_rows, axis=0)
    summed = np.empty(view.pos.shape, np.float32)
    np.put_along_axis(summed, order, np.repeat(total, n_rows, axis=0), axis=1)
    return summed
