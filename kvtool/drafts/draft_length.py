"""Choose how many draft tokens a step has, to minimise the time per token."""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

import numpy as np

_EDGES = (3, 4, 6, 9, 17)
"""Draft tokens are grouped by support (see `DraftLength`). These are the lower bounds of the groups."""

_PRIOR_TRUE, _PRIOR_ALL = 2.0, 3.0
"""Initial counts: accepted draft tokens, and all draft tokens. The ratio is high enough to start drafting."""

_DECAY = 0.97
"""Factor by which the counts of a group are multiplied before a new draft token is counted."""

_N_TIME = 9
"""Number of recent step times that are kept for each step length. Their median is used."""

_SLOPE = 0.1
"""Assumed time that one more token adds to a step, as a share of the time of a one-token step.

Used for steps that are longer than all measured steps.
"""

_GAIN = 1.05
"""Minimum estimated speedup for which tokens are drafted. Above 1, because estimates are uncertain."""

_TRY_EVERY = 32
"""After this many steps without draft tokens, two tokens are drafted even if no speedup is expected."""


class DraftLength:
    """Choose the number of draft tokens of each step from their expected acceptance and the times of steps.

    A draft token is copied from an earlier place of the stream. The tokens before it, including draft tokens,
    are compared with the tokens before that place. The number of equal tokens is the draft token's support.
    Draft tokens are grouped by support, and each group has an estimated probability of acceptance. A draft
    token is accepted only if all draft tokens before it are accepted. If p1, p2, ... are the probabilities of
    the draft tokens, p1 + p1 p2 + ... of them are accepted on average.
    """

    def __init__(self) -> None:
        self._true = [_PRIOR_TRUE] * len(_EDGES)
        self._all = [_PRIOR_ALL] * len(_EDGES)
        self._times: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_N_TIME))
        self._since = 0

    def choose(self, n_same: int, most: int) -> int:
        """Choose the number of draft tokens of a step, 0..most. n_same: support of the first draft token."""
        costs = self._costs(most + 1)
        best, least = 0, costs[0] / _GAIN
        expected, all_true = 1.0, 1.0
        for n in range(1, most + 1):
            at = _group(n_same + n - 1)
            all_true *= self._true[at] / self._all[at]
            expected += all_true
            if (cost := costs[n] / expected) < least:
                best, least = n, cost
        self._since += 1
        if not best and most and self._since >= _TRY_EVERY:
            best = min(2, most)
        if best:
            self._since = 0
        return best

    def judge(self, n_same: int, n_true: int, n: int) -> None:
        """Record that the first n_true of n draft tokens were accepted. n_same: as for `choose`."""
        for i in range(min(n_true + 1, n)):
            at = _group(n_same + i)
            self._true[at] = self._true[at] * _DECAY + (i < n_true)
            self._all[at] = self._all[at] * _DECAY + 1

    def took(self, n: int, seconds: float) -> None:
        """Record the time of a step of n tokens."""
        self._times[n].append(seconds)

    def _costs(self, most: int) -> list[float]:
        """Return the times of steps of 1 .. most tokens, divided by the time of a one-token step.

        Times that were not measured are interpolated or extrapolated.
        """
        known = {1: 1.0}
        if one := self._times.get(1):
            base = median(one)
            known |= {n: median(took) / base for n, took in self._times.items() if len(took) > 1}
        lengths = sorted(known)
        wanted = np.arange(1, most + 1)
        costs = np.interp(wanted, lengths, [known[n] for n in lengths])
        costs += _SLOPE * np.maximum(wanted - lengths[-1], 0)
        return list(costs.tolist())


def _group(n_same: int) -> int:
    """Return the group of draft tokens with this support."""
    return sum(n_same >= edge for edge in _EDGES[1:])
