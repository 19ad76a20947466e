"""Policies that rank: sinks and window stay, and of the rest the highest scores."""

from typing import ClassVar

import numpy as np

from kvtool.kernels.selection import keep_highest
from kvtool.policy.base import Policy, State
from kvtool.policy.checks import check_cells, check_choice, check_kept, check_whole
from kvtool.policy.plan import Plan
from kvtool.policy.view import View

_F32 = np.dtype(np.float32)


class Ranked(Policy):
    """A policy that writes `scores` alone: sinks and window stay, and of the rest the highest scores.

    Sinks and window are the fields `sinks` and `window` of its dataclass, 0 without such a field.

    Attributes
    ----------
    least_window
        The smallest window that works.
    """

    __slots__ = ()

    least_window: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_kept(self.budget, self.slack, *self.exempt, self.least_window)

    def scores(self, view: View, state: State) -> np.ndarray:
        """f32[row, n_kv or more]: the score of each cell. Among equal scores the newer token stays."""
        raise NotImplementedError

    def plan(self, view: View, state: State) -> Plan:
        return Plan(self.highest(view, self.scores(view, state)))

    def highest(self, view: View, scores: np.ndarray) -> np.ndarray:
        """keep b1[row, n_kv] of an eviction by these scores."""
        return keep_ranked(view, scores, self.n_keep, *self.exempt)


def protected(view: View, n_keep: int, sinks: int, window: int) -> tuple[int, int]:
    """Positions (first, recent): tokens before `first` and from `recent` on must stay.

    Pinned tokens count as sinks, held tokens as the window. The window gives way where both do not fit into
    n_keep cells. Raises TypeError for anything but whole numbers.
    """
    for name, value in (("n_keep", n_keep), ("sinks", sinks), ("window", window)):
        check_whole(name, value)
    first = max(sinks, view.pinned)
    return first, view.next - min(max(window, view.held), n_keep - first)


def keep_ranked(view: View, score: np.ndarray, n_keep: int, sinks: int, window: int) -> np.ndarray:
    """keep b1[row, n_kv]: what `protected` names, and the highest scores of the rest, n_keep cells in all.

    score: f32[row, n_kv or more]. Among equal scores the newer token stays. Raises TypeError or ValueError
    for another type or shape.
    """
    check_cells("the score", score, view.pos.shape, _F32)
    first, recent = protected(view, n_keep, sinks, window)
    keep = np.empty(view.pos.shape, np.bool_)
    keep_highest(view.pos, score, first, recent, n_keep, keep)
    return keep


def sum_rows(view: View, score: np.ndarray, per: str) -> np.ndarray:
    """f32[row, n_kv or more]: each token's score, summed over the rows that decide as one.

    score: f32[row, n_kv or more]. per: "row" (each row by itself), "layer" (the rows of a layer) or "all".
    Rows that decide as one must hold the same tokens. Raises TypeError or ValueError for another type or
    shape.
    """
    check_choice("per", per, ("row", "layer", "all"))
    check_cells("the score", score, view.pos.shape, _F32)
    if per == "row":
        return score
    first_rows = np.flatnonzero(np.diff(view.layer, prepend=-1)) if per == "layer" else np.zeros(1, np.intp)
    n_rows = np.diff(first_rows, append=len(view.layer))
    if (view.pos == np.repeat(view.pos[first_rows], n_rows, axis=0)).all():
        # rows that never decided by themselves hold their tokens in the same cells
        return np.repeat(np.add.reduceat(score[:, : view.n_kv], first_rows, axis=0), n_rows, axis=0)
    # no two positions of a row are equal: the sort need not be stable
    order = np.argsort(view.pos, axis=1)
    total = np.add.reduceat(np.take_along_axis(score, order, axis=1), first_rows, axis=0)
    summed = np.empty(view.pos.shape, np.float32)
    np.put_along_axis(summed, order, np.repeat(total, n_rows, axis=0), axis=1)
    return summed
