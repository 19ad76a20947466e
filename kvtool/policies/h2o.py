"""H2O: keep the newest tokens and the heavy hitters (Zhang et al. 2023, arXiv:2306.14048, Algorithm 1).

A heavy hitter is a token with a high attention sum. The sum begins when the token is decoded. The paper's
`recent` is our window. For a grace period of g steps, in which new tokens are not evicted, set the window to
g - 1.

Differs from the paper: each KV head makes one decision, based on the attention summed over its group of query
heads; the paper has no grouped queries. An eviction makes room for `slack` tokens. The paper makes room for
one token, as --evict-every 1 does. The window is never evicted, as in the authors' code. The paper does not
cover streams that are longer than the context. In such a stream the sums decay, unless `decay_beyond` is 1.
Without decay, the sums of new tokens could no longer exceed the sums of old tokens; docs/measured.md shows
the effect.

Some options come from other work. EasyKV divides the sum by the steps that a token has lived (`score=mean`),
and decays the sums (`decay`). TOVA decides once per layer (`per=layer`). llama-recipes uses only the first
head of a group (`group=first`). In Ada-KV the rows of a layer share its budget (`heads=adaptive`; see
kvtool/policy/ranked.py).
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvtool.policy import FLOOR, Ranked, Signal, State, View, check_choice, sum_rows


@dataclass(frozen=True, slots=True)
class H2O(Ranked):
    """Keep the tokens with the highest attention sums.

    Attributes
    ----------
    window
        Newest tokens, kept if pinned tokens leave room. Default: half of the kept tokens.
    score
        "sum": the sum of a token's attention. "mean": this sum divided by the steps that the token has lived.
    per
        Unit that decides: "row", "layer" or "all". The rows of a unit add up their scores and keep the same
        tokens.
    group
        Reduction of attention over a group's heads: "sum", "mean", "max" or "first". "mean" gives the same
        order as "sum", and is stored as "sum".
    decay
        Factor by which the sums are multiplied, once for every token since the last plan, before the new
        attention is added.
    decay_beyond
        Upper limit of `decay` once the stream is longer than the context. Not used with score=mean.
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
    heads: str = "equal"
    floor: float = FLOOR

    reads: ClassVar[Signal] = Signal.ATTENTION
    sums: ClassVar[tuple[str, ...]] = ("attn",)
    paper: ClassVar[str] = "arXiv:2306.14048"

    def __post_init__(self) -> None:
        Ranked.__post_init__(self)
        check_choice("score", self.score, ("sum", "mean"))
        check_choice("per", self.per, ("row", "layer", "all"))
        check_choice("group", self.group, ("sum", "mean", "max", "first"))
        for name in ("decay", "decay_beyond"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in 0..1, got {getattr(self, name)}")
        if self.group == "mean":
            # the engine has no "mean", but "sum" gives the same order
            object.__setattr__(self, "group", "sum")

    @property
    def counts_queries(self) -> bool:
        return self.score == "mean"

    def observe(self, view: View, state: State) -> None:
        decay = self.decay
        if self.score == "sum" and 0 < view.n_ctx < view.next:
            decay = min(decay, self.decay_beyond)
        if decay < 1:
            state[0][:, : view.n_kv] *= np.float32(decay**view.n_new)
        Ranked.observe(self, view, state)

    def scores(self, view: View, state: State) -> np.ndarray:
        total = sum_rows(view, state[0], self.per)
        return total if self.score == "sum" else total[:, : view.n_kv] / view.lived


POLICY = H2O
