"""BUZZ: keep sinks, a window, and one token per segment between them (Zhao et al. 2024, arXiv:2410.23079).

Section 3.3. The tokens between sinks and window are the middle. A token that has survived an eviction in the
middle is old, and the other tokens of the middle are new. An eviction cuts the new tokens into segments of
`stride` tokens. In each segment it keeps the token with the highest attention sum, the oldest among equals
(Algorithm 2). It cuts the old tokens into groups of half that length, and keeps the first token of each
group, regardless of attention (Algorithm 1). If too many tokens are left, for example after a long prompt, it
thins the middle again (Remark 2). The paper's k, w, T and s are our sinks, window, threshold and stride.

An eviction is due when the middle has more than `threshold` tokens, so the budget is sinks + window +
threshold + 1. `slack` is ignored. In a stream, an eviction of BUZZ leaves about 40 % of the budget. An
eviction of other policies leaves the budget minus the slack.

With `-o kept=true`, the requested budget is the number of cells that an eviction leaves. Rows grow further
before the next eviction, up to a real budget that is about 2.7 times as large. BUZZ then holds as many tokens
as other policies after a prompt, but more on average in a long stream. Window and threshold are chosen
for a steady state, in which each eviction leaves the same number of middle tokens. With the proportions of
Theorem 3.1, this number equals the window.

With `-o logn=true`, attention logits are multiplied by log_512(n), where n is the number of tokens that the
query has seen (section 3.5, equation 8). In the authors' code, this is commented out, and n is the number of
cells (`-o logn_n=cells`). The paper's two ablations (section 4.3, Figure 8) are `-o swap=true` and `-o
local_max=false`.

Differs from the paper: each KV head makes one decision, based on the attention summed over its group of query
heads; the paper has no grouped queries. The threshold counts old and new tokens together, as in Figure 3,
equation 10, Remark 2 and the authors' code. Lines 7 to 12 of Algorithm 1 count only the new tokens. With that
count, the same budget has a smaller window and a longer middle. For 256 cells, the window is 38 instead of 47
tokens, and the perplexity is 27.7 instead of 27.8 (wikitext-2, SmolLM2-135M, 4,096 tokens). This difference
in perplexity is within the noise.

kept=true is not in the paper. If an eviction then leaves too many tokens, it thins the middle again, from the
oldest token on, until exactly the requested number of tokens is left. This happens after a long prompt or
step, and in a stream from about the third eviction on. The first eviction of a stream leaves about 7 % less
than requested.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from kvtool.kernels.kernel import kernel
from kvtool.policy import Plan, Policy, Signal, State, View, check_choice, protected, split_budget

_SINKS = 4
_STRIDE = 5


@dataclass(frozen=True, slots=True)
class BUZZ(Policy):
    """Keep one token per segment.

    Attributes
    ----------
    window
        Newest tokens, kept if pinned tokens leave room. Default: a share of the budget by Theorem 3.1. If a
        threshold is given, the default is the rest of the budget.
    threshold
        Maximum number of tokens between sinks and window.
    stride
        Number of tokens in a segment of new tokens. A group of old tokens has half as many.
    swap
        Swap the two lengths: half the stride for new tokens, the full stride for old ones.
    local_max
        Keep the token with the highest attention sum of each segment. If false, keep the first token.
    logn
        Multiply attention logits by log_512(n).
    logn_n
        Meaning of n: "seen" for the tokens that the query has seen, or "cells" for live cells.
    kept
        Interpret the requested budget as the number of cells that an eviction leaves. The real budget is then
        larger.
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
    kept: bool = False

    reads: ClassVar[Signal] = Signal.ATTENTION
    # the state also has a mark for old tokens, which `start` adds
    sums: ClassVar[tuple[str, ...]] = ("attn",)
    paper: ClassVar[str] = "arXiv:2410.23079"

    def __post_init__(self) -> None:
        check_choice("logn_n", self.logn_n, ("seen", "cells"))
        if self.sinks < 0:
            raise ValueError(f"sinks must not be negative, got {self.sinks}")
        if self.stride < 3:
            raise ValueError(f"stride must be 3 or more (or old tokens are never thinned), got {self.stride}")
        if self.window < 1:
            raise ValueError(f"window must be 1 or more, got {self.window}")
        # refuse threshold 1: the middle may then have one old and one new token, and an eviction would keep
        # both of them
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
    def fit(cls, budget: int, slack: int, **params: Any) -> BUZZ:
        sinks, stride = params.get("sinks", _SINKS), params.get("stride", _STRIDE)
        window, threshold = params.get("window"), params.get("threshold")
        if params.get("kept"):
            # the constructor raises the error for a stride below 3; until then, compute with 3
            strides = _strides(max(stride, 3), params.get("swap", False))
            window, threshold = _sizes_kept(budget - sinks, window, threshold, *strides)
            budget = sinks + window + threshold + 1
        else:
            rest = budget - 1 - sinks
            if window is None:
                window = _best_window(rest, stride) if threshold is None else rest - threshold
            if threshold is None:
                threshold = rest - window
        return cls(budget, slack, **params | {"window": window, "threshold": threshold})

    @property
    def n_asked(self) -> int:
        if not self.kept:
            return self.budget
        return self.sinks + self.window + _n_left(self.threshold, *self._strides)

    @property
    def n_keep(self) -> int:
        return self.n_asked if self.kept else self.budget - self.slack

    def split(self, pinned: int = 0) -> dict[str, int]:
        """Return the parts of the budget (see `Policy.split`).

        `rest` is the threshold, minus pinned tokens that are not sinks. `slack` is 1, for the token that is
        being decoded.
        """
        return split_budget(self.budget, 1, self.sinks, self.window, pinned)

    def start(self, n_row: int, n_cell: int, n_dim: int) -> State:
        """Return the attention sum f32, and a mark u1: 1 for an old token, 0 for a new token."""
        return np.zeros((n_row, n_cell), np.float32), np.zeros((n_row, n_cell), np.uint8)

    def plan(self, view: View, state: State) -> Plan:
        if view.n_kv < self.budget:
            return Plan(np.ones(view.pos.shape, np.bool_))
        return self._sampled(view, state)

    def compress(self, view: View) -> Plan:
        """Compress a prompt. With `kept`, also compress some prompts that are shorter than the budget."""
        if view.n_kv <= self._n_most:
            return Plan(np.ones(view.pos.shape, np.bool_))
        n_row, n_kv = view.pos.shape
        state = self.start(n_row, n_kv, 0)
        self.observe(view, state)
        return self._sampled(view, state)

    def adopt(self, view: View, state: State) -> None:
        """Mark the tokens between sinks and window as old if the prompt was compressed."""
        self.observe(view, state)
        _, old = state
        first, recent = protected(view, self._n_most, self.sinks, self.window)
        # a prompt that fits was not compressed
        if view.n_kv < view.next:
            old[:, : view.n_kv] = (first <= view.pos) & (view.pos < recent)

    def _sampled(self, view: View, state: State) -> Plan:
        mass, old = state
        keep = np.ones(view.pos.shape, np.bool_)
        first = max(self.sinks, view.pinned)
        sizes = (first, max(self.window, view.held), self._n_most, *self._strides, self.local_max, self.kept)
        _sample(view.order, view.pos, mass, *sizes, old, keep)
        return Plan(keep)

    @property
    def t(self) -> str:
        return "cells" if self.logn_n == "cells" else "stream"

    @property
    def _strides(self) -> tuple[int, int]:
        return _strides(self.stride, self.swap)

    @property
    def _n_most(self) -> int:
        """Maximum number of cells left by an eviction."""
        return self.n_asked if self.kept else self.budget - 1


def _strides(stride: int, swap: bool) -> tuple[int, int]:
    """Return the number of tokens in a segment of new tokens, and in a group of old tokens."""
    small = (stride + 1) // 2
    return (small, stride) if swap else (stride, small)


def _threshold(n: int, stride: int, old_stride: int) -> int:
    """Return the threshold for a steady state, in which each eviction leaves n middle tokens.

    Before an eviction, n middle tokens are old. One in `old_stride` old tokens stays. Each evicted old token
    must be replaced by a new token. This takes `stride` new tokens, because one in `stride` new tokens stays.
    """
    return n - 1 + stride * (n - -(-n // old_stride))


def _n_left(threshold: int, stride: int, old_stride: int) -> int:
    """Return the number of middle tokens in the steady state: the least n with `_threshold` >= threshold."""
    sizes = range(1, max(threshold, 0) + 2)
    return sizes[bisect_left(sizes, threshold, key=lambda n: _threshold(n, stride, old_stride))]


def _best_window(rest: int, stride: int) -> int:
    """Return the window if `rest` tokens are divided between window and threshold by equation 6."""
    if stride % 2:
        return max(rest * (stride + 1) // (stride * stride + stride + 2), 1)
    return max(rest // max(stride, 1), 1)


def _sizes_kept(
    n: int, window: int | None, threshold: int | None, stride: int, old_stride: int
) -> tuple[int, int]:
    """Return a window and a threshold with which each eviction leaves n cells in addition to the sinks.

    If the caller gives no window and no threshold, the window is half of n. By Theorem 3.1, the window is as
    large as the middle in the steady state. Raises ValueError for sizes that do not fit together.
    """
    if threshold is not None:
        left = _n_left(threshold, stride, old_stride)
        if window is None:
            window = n - left
        if window + left != n:
            raise ValueError(
                f"kept=true: window {window} + {left} of a threshold of {threshold} must be the budget less "
                f"sinks, {n}, got {window + left}"
            )
        return window, threshold
    if window is None:
        window = n // 2
    if n - window < 2:
        raise ValueError(f"kept=true: the budget less sinks and window must be 2 or more, got {n - window}")
    return window, _threshold(n - window, stride, old_stride)


@kernel("void(i8[:,::1], i4[:,::1], f4[:,::1], i8, i8, i8, i8, i8, b1, b1, u1[:,::1], b1[:,::1])")
def _sample(order, pos, mass, first, window, n_max, stride, old_stride, local_max, exact, old, keep):
    """Thin the middle of each row: order i64[row, n], pos i32, mass f32[row, n or more] -> keep b1[row, n].

    order: the cells, oldest token first. At most n_max tokens stay. The tokens before position `first` stay.
    The newest `window` tokens stay, or fewer if there is no room for all of them. In the middle, one in
    `stride` new tokens and one in `old_stride` old tokens stay. Old tokens come before new tokens. Sets old
    u1[row, n or more] to 1 for the middle tokens that stay. exact: if the middle has to be thinned again,
    begin at its oldest token and stop as soon as the tokens fit.
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
            spare = n_stay - room if exact else n_stay
            n_left = i = 0
            while i < n_stay:
                stays[n_left] = stays[i]
                n_left += 1
                n_group = min(old_stride, spare + 1, n_stay - i)
                spare -= n_group - 1
                i += n_group
            n_stay = n_left
        for i in range(min(n_stay, room)):
            keep[row, stays[i]] = True
            old[row, stays[i]] = 1


POLICY = BUZZ
