"""RoCo: keep the newest tokens, and tokens of high or unsteady attention (Ren & Zhu 2024, arXiv:2402.06262).

A token's score is its mean attention over the steps that it has lived. Tokens whose attention has the highest
standard deviation are kept. Among the other tokens, the lowest scores are evicted.

Differs from the paper: each KV head makes one decision, based on the attention summed over its group of query
heads. EasyKV, the authors' code, uses the mean of the group, which gives the same order. `keep_std` tokens
are kept for their high deviation. The default is three tenths of the kept tokens, minus the window, as in
EasyKV during generation. An eviction makes room for `slack` tokens. During generation, EasyKV makes room for
one token, as --evict-every 1 does, and it does not evict tokens of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvtool.kernels.selection import keep_highest
from kvtool.policy import Ranked, Signal, State, View, protected

_SINKS = 4


@dataclass(frozen=True, slots=True)
class RoCo(Ranked):
    """Keep the highest deviations, then the highest means.

    Attributes
    ----------
    window
        Newest tokens, kept if pinned tokens leave room. Default: 10, but at most half of the kept tokens that
        are not sinks.
    keep_std
        Number of tokens outside sinks and window that are kept because the standard deviation of their
        attention is high. Default: three tenths of the kept tokens, minus the window.
    """

    budget: int
    slack: int
    window: int
    keep_std: int
    sinks: int = _SINKS

    reads: ClassVar[Signal] = Signal.ATTENTION | Signal.SQUARES
    sums: ClassVar[tuple[str, ...]] = ("attn", "squares")
    counts_queries: ClassVar[bool] = True
    paper: ClassVar[str] = "arXiv:2402.06262"

    def __post_init__(self) -> None:
        Ranked.__post_init__(self)
        room = self.n_keep - self.sinks - self.window
        if not 0 <= self.keep_std <= room:
            raise ValueError(
                f"keep_std must be in 0..{room} (the budget of {self.budget} less {self.slack} slack, "
                f"{self.sinks} sinks and {self.window} window), got {self.keep_std}"
            )

    @classmethod
    def fit(cls, budget: int, slack: int, **params: Any) -> RoCo:
        n_keep, sinks = budget - slack, params.get("sinks", _SINKS)
        window = params.get("window", max(min(10, (n_keep - sinks) // 2), 1))
        keep_std = max(min(3 * n_keep // 10, n_keep - sinks) - window, 0)
        return cls(budget, slack, **{"window": window, "keep_std": keep_std, **params})

    def scores(self, view: View, state: State) -> np.ndarray:
        mass, squares = (array[:, : view.n_kv] for array in state)
        # float64, because the variance is a small difference of two large numbers
        lived = view.lived.astype(np.float64)
        mean = mass / lived
        variance = (squares / lived - mean * mean).astype(np.float32)
        first, recent = protected(view, self.n_keep, self.sinks, self.window)
        stays = np.empty(view.pos.shape, np.bool_)
        n_stay = min(first + view.next - recent + self.keep_std, self.n_keep)
        keep_highest(view.pos, variance, first, recent, n_stay, stays)
        return np.where(stays, np.float32(np.inf), mean.astype(np.float32))


POLICY = RoCo
