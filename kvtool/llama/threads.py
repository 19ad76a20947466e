"""How many threads decode: as many as are fastest beside what else runs just now.

The threads of a step meet after every operation. Where another program has one of their cores, all wait for
the thread that lacks it, hundreds of times a token: two threads on two cores may take ten times as long as
one. Shorter or longer spinning does not help, as the scheduler decides when a thread goes on.
"""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

_N_TRIAL = 3
"""Steps of a trial; the first, in which threads start or end, does not count."""

_N_LEAST, _N_RECENT = 2, 6
"""The fewest steps that a trial is compared with, and the most."""

_SOONEST_S, _LATEST_S = 0.3, 10.0
"""Seconds of decoding from one trial to the next: doubled by each that changes nothing."""

_GAIN = 0.96
"""A trial is faster if its steps take at most this share of the time: less may be chance."""

_SLOWER = 1.4
"""Steps that take this many times as long as after the last trial ask for another one at once."""

_HOPELESS = 2.0
"""A trial ends at a step that takes this many times as long as usual: such steps are what a trial costs."""


class Threads:
    """The number of threads for the next step, from the times of those before.

    Now and then it tries fewer threads or more for a few steps, and keeps what is faster.

    Attributes
    ----------
    n
        Threads for the next step.
    """

    def __init__(self, most: int) -> None:
        counts = {most, most * 3 // 4, *(most >> i for i in range(1, most.bit_length()))}
        self._counts = sorted(filter(None, counts))
        self._at = self._home = len(self._counts) - 1
        self._is_up = False
        self._wait_s = _SOONEST_S
        self._since_s = 0.0
        # by tokens of a step: steps of different lengths do not compare
        self._recent: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_N_RECENT))
        self._before: dict[int, float] = {}
        # of each step, what it took in shares of what such steps usually take
        self._trial: list[float] = []

    @property
    def n(self) -> int:
        return self._counts[self._at]

    def took(self, n_tokens: int, seconds: float) -> None:
        """A step of n_tokens has taken so long with `n` threads."""
        if self._at != self._home:
            self._try(n_tokens, seconds)
            return
        recent = self._recent[n_tokens]
        recent.append(seconds)
        self._since_s += seconds
        if len(recent) < _N_LEAST or len(self._counts) == 1:
            return
        usual = self._before.setdefault(n_tokens, median(recent))
        if self._since_s >= self._wait_s or (len(recent) == _N_RECENT and median(recent) > _SLOWER * usual):
            self._begin()

    def _begin(self) -> None:
        """Tries the next number of threads in one of the two directions, in turns."""
        self._trial = []
        self._is_up = self._home == 0 or (not self._is_up and self._home < len(self._counts) - 1)
        self._at = self._home + (1 if self._is_up else -1)

    def _try(self, n_tokens: int, seconds: float) -> None:
        if len(recent := self._recent[n_tokens]) >= _N_LEAST:
            self._trial.append(seconds / median(recent))
            is_hopeless = self._trial[-1] > _HOPELESS
            if len(self._trial) < _N_TRIAL and not is_hopeless:
                return
            is_faster = not is_hopeless and median(self._trial[1:]) <= _GAIN
        else:
            # the text has ended, or steps are of a new length now
            is_faster = False
        if is_faster:
            self._home = self._at
            self._recent.clear()
            self._before.clear()
            self._wait_s = _SOONEST_S
        else:
            self._wait_s = min(2 * self._wait_s, _LATEST_S)
            self._before[n_tokens] = median(self._recent[n_tokens] or [seconds])
        self._at = self._home
        self._since_s = 0.0
