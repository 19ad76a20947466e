"""H2O: the newest tokens and the heavy hitters stay (Zhang et al. 2023, arXiv:2306.14048, Algorithm 1).

A heavy hitter is a token with a high attention sum since it came. The paper's `recent` is our window; a grace
period of g steps for new tokens is a window of g - 1.

Differs from the paper: one decision a KV head, on the sum over its group of query heads (the paper
has no grouped queries); the window is exempt from eviction, as in the authors' code. Others do otherwise,
and the options are theirs: EasyKV divides by the steps a token has lived (`score=mean`) and lets the sums
fade (`decay`), TOVA has one decision a layer (`per=layer`), llama-recipes looks at the group's first head
(`group=first`).

The paper's sums grow with the stream, and beyond the context, where it does not go, old tokens can no longer
be overtaken: there sums fade (`decay_beyond=1`: never). docs/streams.md has what that is worth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvtool.policy import Plan, Policy, Signal, State, View, check_choice, check_kept, keep_ranked, sum_rows


@dataclass(frozen=True, slots=True)
class H2O(Policy):
    """window: newest tokens, never evicted; half of what is kept unless given. sinks: first tokens, too.

    score: "sum" of a token's attention, or "mean": the sum divided by the steps that it has lived.
    per: "row", or one decision on the sum over a "layer"'s rows, or over "all"; their rows then keep the
    same tokens. group: how the attention of a group's heads becomes one, "sum", "mean" (ranks as the sum does
    and becomes that), "max" or "first". decay: what the sums are multiplied by for every token that has come
    since the last plan, before the attention since then is added. decay_beyond: the same once the stream is
    longer than the context, if it is less; not for means.
    """

    budget: int
    slack: int
    window: int
    sinks: int = 0
    score: str = "sum"
    per: str = "row"
    group: str = "sum"
    decay: float = 1.0
    decay_beyond: float = 0.99

    reads: ClassVar[Signal] = Signal.ATTENTION
    paper: ClassVar[str] = "arXiv:2306.14048"

    def __post_init__(self) -> None:
        check_kept(self.budget, self.slack, self.sinks, self.window)
        check_choice("score", self.score, ("sum", "mean"))
        check_choice("per", self.per, ("row", "layer", "all"))
        check_choice("group", self.group, ("sum", "mean", "max", "first"))
        for name in ("decay", "decay_beyond"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in 0..1, got {getattr(self, name)}")
        if self.group == "mean":
            # what the engine is asked for
            object.__setattr__(self, "group", "sum")

    @classmethod
    def fit(cls, budget: int, slack: int, **params: Any) -> H2O:
        return cls(budget, slack, **{"window": max((budget - slack) // 2, 1), **params})

    def start(self, n_row: int, n_cell: int, n_dim: int) -> State:
        return (np.zeros((n_row, n_cell), np.float32),)

    def observe(self, view: View, state: State) -> None:
        (mass,) = state
        decay = self.decay
        if self.score == "sum" and 0 < view.n_ctx < view.next:
            decay = min(decay, self.decay_beyond)
        if decay < 1:
            mass[:, : view.n_kv] *= np.float32(decay**view.n_new)
        mass[:, : view.n_kv] += view.attn

    def plan(self, view: View, state: State) -> Plan:
        score = sum_rows(view, state[0], self.per)
        if self.score == "mean":
            score = score[:, : view.n_kv] / (view.next - view.pos).astype(np.float32)
        n_keep = self.budget - self.slack
        return Plan(keep_ranked(view, score, n_keep, self.sinks, self.window))


POLICY = H2O
