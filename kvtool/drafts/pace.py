"""How many guesses a step takes: as many as make a token cheapest, by what came true and what steps took."""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

_EDGES = (3, 4, 6, 9, 17)
"""Guesses are judged with others that as many tokens before them support: from each of these on."""

_PRIOR_TRUE, _PRIOR_ALL = 2.0, 3.0
"""What is taken to have come true before anything has, and of how many: enough for guesses to be tried."""

_DECAY = 0.97
"""What was judged before counts so much for each guess since."""

_N_TIME = 9
"""Steps of each length whose times are known; their median counts."""

_SLOPE = 0.1
"""What a token more in a step is taken to cost, of a step of one, until such steps have been made."""

_GAIN = 1.05
"""A step with guesses must be so much cheaper a token: what it costs and gives is only estimated."""

_TRY_EVERY = 32
"""Steps from one with guesses that seem not to pay to the next: they may by now."""


class Pace:
    """Chooses the number of guesses of each step.

    A guess comes true with a probability that goes by how many tokens before it support it, the guesses
    before it included, and only behind those that came true. So n guesses give p1 + p1 p2 + ... tokens.
    """

    def __init__(self) -> None:
        self._true = [_PRIOR_TRUE] * len(_EDGES)
        self._all = [_PRIOR_ALL] * len(_EDGES)
        self._times: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_N_TIME))
        self._since = 0

    def choose(self, n_same: int, most: int) -> int:
        """How many guesses to make, at most `most`, which n_same tokens before them support."""
        best, least = 0, self._cost(1) / _GAIN
        expected, all_true = 1.0, 1.0
        for n in range(1, most + 1):
            at = _group(n_same + n - 1)
            all_true *= self._true[at] / self._all[at]
            expected += all_true
            if (cost := self._cost(n + 1) / expected) < least:
                best, least = n, cost
        self._since += 1
        if not best and most and self._since >= _TRY_EVERY:
            best = min(2, most)
        if best:
            self._since = 0
        return best

    def judge(self, n_same: int, n_true: int, n: int) -> None:
        """Of n guesses, which n_same tokens before them supported, the first n_true came true."""
        for i in range(min(n_true + 1, n)):
            at = _group(n_same + i)
            self._true[at] = self._true[at] * _DECAY + (i < n_true)
            self._all[at] = self._all[at] * _DECAY + 1

    def took(self, n: int, seconds: float) -> None:
        """A step of n tokens took so long."""
        self._times[n].append(seconds)

    def _cost(self, n: int) -> float:
        """What a step of n tokens costs, in steps of one: by the lengths that were measured."""
        if not (one := self._times.get(1)):
            return 1 + _SLOPE * (n - 1)
        base = median(one)
        known = sorted((length, median(took) / base) for length, took in self._times.items() if len(took) > 1)
        below = max((each for each in known if each[0] <= n), default=(1, 1.0))
        above = min((each for each in known if each[0] >= n), default=None)
        if above and above[0] == n:
            return above[1]
        if above:
            share = (n - below[0]) / (above[0] - below[0])
            return below[1] + share * (above[1] - below[1])
        return below[1] + _SLOPE * (n - below[0])


def _group(n_same: int) -> int:
    """The group of guesses that so many tokens support."""
    return sum(n_same >= edge for edge in _EDGES[1:])
