"""RoCo: tokens of high or unsteady attention stay, and the newest (Ren & Zhu 2024, arXiv:2402.06262).

What counts is a token's mean attention over the steps that it has lived. Those whose attention has the
highest standard deviation are left out of the eviction scope, and stay; of the rest those with the lowest
mean go.

Differs from the paper: one decision a KV head, on the sum over its group of query heads (EasyKV, the authors'
code, takes the group's mean: the same order). How many stay for their deviation is what EasyKV has when it
generates, three tenths of what is kept, less the window; it never evicts from the prompt then, we do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvtool.kernels.selection import keep_highest
from kvtool.policy import Plan, Policy, Signal, State, View, check_kept, protected

_SINKS = 4


@dataclass(frozen=True, slots=True)
class RoCo(Policy):
    """window: newest tokens, never evicted; 10, less for a small budget. sinks: first tokens, too.

    keep_std: how many of the others stay for the standard deviation of their attention; unless given, as many
    as make three tenths of what is kept together with the window.
    """

    budget: int
    slack: int
    window: int
    keep_std: int
    sinks: int = _SINKS

    reads: ClassVar[Signal] = Signal.ATTENTION | Signal.SQUARES
    paper: ClassVar[str] = "arXiv:2402.06262"

    def __post_init__(self) -> None:
        check_kept(self.budget, self.slack, self.sinks, self.window)
        room = self.budget - self.slack - self.sinks - self.window
        if not 0 <= self.keep_std <= room:
            raise ValueError(
                f"keep_std must be in 0..{room} (the budget of {self.budget} less {self.slack} slack, "
                f"{self.sinks} sinks and {self.window} window), got {self.keep_std}"
            )

    @classmethod
    def fit(
        cls,
        budget: int,
        slack: int,
        *,
        window: int | None = None,
        keep_std: int | None = None,
        sinks: int = _SINKS,
        **others: Any,
    ) -> RoCo:
        n_keep = budget - slack
        if window is None:
            window = max(min(10, (n_keep - sinks) // 2), 1)
        if keep_std is None:
            keep_std = max(min(3 * n_keep // 10, n_keep - sinks) - window, 0)
        return cls(budget, slack, window, keep_std, sinks, **others)

    def start(self, n_row: int, n_cell: int, n_dim: int) -> State:
        """Attention sum f32, and sum of its squares f32."""
        return np.zeros((n_row, n_cell), np.float32), np.zeros((n_row, n_cell), np.float32)

    def observe(self, view: View, state: State) -> None:
        mass, squares = state
        mass[:, : view.n_kv] += view.attn
        squares[:, : view.n_kv] += view.squares

    def plan(self, view: View, state: State) -> Plan:
        mass, squares = (array[:, : view.n_kv] for array in state)
        # in float64: a variance is the small difference of two numbers
        lived = (view.next - view.pos).astype(np.float64)
        mean = mass / lived
        variance = (squares / lived - mean * mean).astype(np.float32)
        n_keep = self.budget - self.slack
        first, recent = protected(view, n_keep, self.sinks, self.window)
        keep = np.empty(view.pos.shape, np.bool_)
        n_stay = min(first + view.next - recent + self.keep_std, n_keep)
        keep_highest(view.pos, variance, first, recent, n_stay, keep)
        score = np.where(keep, np.float32(np.inf), mean.astype(np.float32))
        keep_highest(view.pos, score, first, recent, n_keep, keep)
        return Plan(keep)


POLICY = RoCo
