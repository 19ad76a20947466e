"""BUZZ: sinks, a window, and between them one token per segment stay (Zhao et al. 2024, arXiv:2410.23079).

Section 3.3. The tokens between sinks and window are the middle. An eviction cuts the middle's new tokens
(those that came since the last eviction) into segments of `stride`, and the one with the highest attention
sum stays, the oldest among equals (Algorithm 2). Its old tokens are thinned by half that stride, whatever
their attention: the first of each group stays (Algorithm 1). If too many are left, after a long prompt, the
middle is thinned again (Remark 2). The paper's k, w, T and s are our sinks, window, threshold and stride.

It evicts when the middle has more than `threshold` tokens: the budget is sinks + window + threshold + 1.
The threshold plays slack's part; slack is ignored.

With `-o logn=true` attention logits are multiplied by log_512(n), n being the tokens that the query has
seen (section 3.5, equation 8). In the authors' code, where it is commented out, n is the number of cells
(`-o logn_n=cells`). Its two ablations (section 4.3, Figure 8) are `-o swap=true` and `-o local_max=false`.

Differs from the paper: one decision per KV head, on the sum over its group of query heads (the paper has no
grouped queries). The threshold counts old and new tokens together, as Figure 3, equation 10, Remark 2 and
the authors' code have it; lines 7 to 12 of Algorithm 1 count the new ones alone. That would be a smaller
window and a longer middle in the same budget: for 256 cells a window of 38 instead of 47, with a perplexity
of 27.7 instead of 27.8 (wikitext-2, SmolLM2-135M, 4,096 tokens), which is within the noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvtool.kernels.kernel import kernel
from kvtool.policy import Plan, Policy, Signal, State, View, check_choice, protected, split_budget

_SINKS = 4
_STRIDE = 5


@dataclass(frozen=True, slots=True)
class BUZZ(Policy):
    """One token per segment.

    Attributes
    ----------
    window
        Newest tokens, never evicted. Default: window and threshold share the budget by Theorem 3.1; if one of
        them is given, the other takes the rest.
    threshold
        Most tokens between sinks and window.
    sinks
        First tokens, never evicted.
    stride
        Tokens in a segment of new tokens. A group of old tokens has half as many.
    swap
        Whether it is the other way round: half the stride for new tokens, all of it for old ones.
    local_max
        Whether the token with the highest attention sum of a segment stays, or the first.
    logn
        Whether attention logits are multiplied by log_512(n).
    logn_n
        What n counts: the tokens "seen" by the query, or the live "cells".
    """

    budget: int
    slack: int
    window: int
    threshold: int
    sinks: int = _SINKS
    stride: int = _STRIDE
    swap: bool = False
    local_max: bool = True
    logn: bool = False
    logn_n: str = "seen"

    reads: ClassVar[Signal] = Signal.ATTENTION
    paper: ClassVar[str] = "arXiv:2410.23079"

    def __post_init__(self) -> None:
        check_choice("logn_n", self.logn_n, ("seen", "cells"))
        if self.sinks < 0:
            raise ValueError(f"sinks must not be negative, got {self.sinks}")
        if self.stride < 3:
            raise ValueError(f"stride must be 3 or more (or old tokens are never thinned), got {self.stride}")
        if self.window < 1:
            raise ValueError(f"window must be 1 or more, got {self.window}")
        # of 2 tokens, one old and one new, sampling frees none
        if self.threshold < 2:
            raise ValueError(
                f"threshold must be 2 or more, got {self.threshold} (the budget of {self.budget} less "
                f"{self.sinks} sinks, {self.window} window and the token being decoded)"
            )
        if (total := self.sinks + self.window + self.threshold + 1) != self.budget:
            raise ValueError(
                f"sinks {self.sinks} + window {self.window} + threshold {self.threshold} + 1 for the token "
                f"being decoded must be the budget of {self.budget}, got {total}"
            )

    @classmethod
    def fit(
        cls,
        budget: int,
        slack: int,
        *,
        window: int | None = None,
        threshold: int | None = None,
        sinks: int = _SINKS,
        stride: int = _STRIDE,
        **others: Any,
    ) -> BUZZ:
        rest = budget - 1 - sinks
        if window is None:
            window = _best_window(rest, stride) if threshold is None else rest - threshold
        if threshold is None:
            threshold = rest - window
        return cls(budget, slack, window, threshold, sinks, stride, **others)

    def split(self, pinned: int = 0) -> dict[str, int]:
        """The rest is the threshold's; the slack is the token that is being decoded."""
        return split_budget(self.budget, 1, self.sinks, self.window, pinned)

    def start(self, n_row: int, n_cell: int, n_dim: int) -> State:
        """Attention sum f32, and u1: 1 for a token that has survived an eviction in the middle."""
        return np.zeros((n_row, n_cell), np.float32), np.zeros((n_row, n_cell), np.uint8)

    def observe(self, view: View, state: State) -> None:
        state[0][:, : view.n_kv] += view.attn

    def plan(self, view: View, state: State) -> Plan:
        mass, old = state
        keep = np.ones(view.pos.shape, np.bool_)
        if view.n_kv >= self.budget:
            # no two positions of a row are equal: the sort need not be stable
            order = np.argsort(view.pos, axis=1)
            first = max(self.sinks, view.pinned)
            strides = (self._small_stride, self.stride) if self.swap else (self.stride, self._small_stride)
            sizes = (first, max(self.window, view.held), self.budget - 1, *strides, self.local_max)
            _sample(order, view.pos, mass, *sizes, old, keep)
        return Plan(keep)

    def adopt(self, view: View, state: State) -> None:
        """What is left in the middle of a compressed prompt is old."""
        self.observe(view, state)
        _, old = state
        first, recent = protected(view, self.budget - 1, self.sinks, self.window)
        # a prompt that fits is left as it is
        if view.n_kv < view.next:
            old[:, : view.n_kv] = (first <= view.pos) & (view.pos < recent)

    @property
    def t(self) -> str:
        return "cells" if self.logn_n == "cells" else "stream"

    @property
    def _small_stride(self) -> int:
        return (self.stride + 1) // 2


def _best_window(rest: int, stride: int) -> int:
    """The window where window + threshold = rest and threshold / window is that of equation 6."""
    if stride % 2:
        return max(rest * (stride + 1) // (stride * stride + stride + 2), 1)
    return max(rest // max(stride, 1), 1)


@kernel("void(i8[:,::1], i4[:,::1], f4[:,::1], i8, i8, i8, i8, i8, b1, u1[:,::1], b1[:,::1])")
def _sample(
    order: np.ndarray,
    pos: np.ndarray,
    mass: np.ndarray,
    first: int,
    window: int,
    n_max: int,
    stride: int,
    old_stride: int,
    local_max: bool,
    old: np.ndarray,
    keep: np.ndarray,
) -> None:
    """order i64[row, n]: cells, oldest first; pos i32[row, n], mass f32[row, n or more] -> keep b1[row, n].

    At most n_max stay: tokens before position `first`, the newest `window` (which gives way where both do not
    fit), and of the middle one of `stride` new tokens and one of `old_stride` old ones. Old tokens come
    before new ones. Sets old u1[row, n or more] for the tokens of the middle that stay.
    """
    n_row, n = order.shape
    stays = np.empty(n, np.int64)
    for row in range(n_row):
        begin = 0
        while begin < n and pos[row, order[row, begin]] < first:
            begin += 1
        n_window = max(min(window, n_max - begin), 0)
        room = max(n_max - begin - n_window, 0)
        n_stay = n_old = n_new = 0
        for i in range(begin, n - n_window):
            cell = order[row, i]
            keep[row, cell] = False
            if old[row, cell]:
                if n_old % old_stride == 0:
                    stays[n_stay] = cell
                    n_stay += 1
                n_old += 1
            else:
                if n_new % stride == 0:
                    stays[n_stay] = cell
                    n_stay += 1
                elif local_max and mass[row, cell] > mass[row, stays[n_stay - 1]]:
                    stays[n_stay - 1] = cell
                n_new += 1
        while n_stay > room > 0:
            for i in range(0, n_stay, old_stride):
                stays[i // old_stride] = stays[i]
            n_stay = (n_stay + old_stride - 1) // old_stride
        for i in range(min(n_stay, room)):
            keep[row, stays[i]] = True
            old[row, stays[i]] = 1


POLICY = BUZZ
