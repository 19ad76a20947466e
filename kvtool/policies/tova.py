"""TOVA: the tokens that the newest query attends to most stay (Oren et al. 2024, arXiv:2401.06104).

The score is the last attention summed over all heads of a layer (the paper's mean, times a constant), so
that every KV head of the layer keeps the same tokens.

Differs from the paper: the newest token always stays, the paper's competes like any other (`-o window=0`);
an eviction makes room for `slack` tokens, the paper's for one (--evict-every 1). With `-o per=row` every KV
head decides on its own, on its group of query heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvtool.kernels import keep_highest
from kvtool.policy import Plan, Policy, Signal, State, View, check_kept, protected

_PER = ("layer", "row")


@dataclass(frozen=True, slots=True)
class TOVA(Policy):
    """per: whose attention decides, "layer" or "row".

    window: newest tokens, never evicted. sinks: first tokens, too.
    """

    budget: int
    slack: int
    per: str = "layer"
    window: int = 1
    sinks: int = 0

    reads: ClassVar[Signal] = Signal.LAST
    paper: ClassVar[str] = "arXiv:2401.06104"

    def __post_init__(self) -> None:
        if self.per not in _PER:
            raise ValueError(f"per must be one of {', '.join(_PER)}, got {self.per}")
        check_kept(self.budget, self.slack, self.sinks, self.window)

    def plan(self, view: View, state: State) -> Plan:
        score = view.last if self.per == "row" else _sum_over_layer(view)
        n_keep = self.budget - self.slack
        keep = np.empty(view.pos.shape, np.bool_)
        keep_highest(view.pos, score, *protected(view, n_keep, self.sinks, self.window), n_keep, keep)
        return Plan(keep)


def _sum_over_layer(view: View) -> np.ndarray:
    """f32[row, n_kv]: a token's last attention summed over its layer's rows, all of which hold the token."""
    # no two positions of a row are equal: the sort need not be stable
    order = np.argsort(view.pos, axis=1)
    first_rows = np.flatnonzero(np.diff(view.layer, prepend=-1))
    total = np.add.reduceat(np.take_along_axis(view.last, order, axis=1), first_rows, axis=0)
    n_rows = np.diff(first_rows, append=len(view.layer))
    score = np.empty_like(view.last)
    np.put_along_axis(score, order, np.repeat(total, n_rows, axis=0), axis=1)
    return score


POLICY = TOVA
