"""Choose the number of threads that decode fastest while other programs run.

The threads of a step synchronize after every operation. If another program occupies one of their cores, all
threads wait for the thread on that core, hundreds of times for each token. Two threads on two cores may then
take ten times as long as one thread. Shorter or longer spinning does not help, because the scheduler decides
when a thread resumes.
"""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

_N_TRIAL = 3
"""Number of steps in a trial. The first step is ignored, because threads start or end in it."""

_N_MIN, _N_RECENT = 2, 6
"""Minimum and maximum number of earlier steps that a trial is compared with."""

_SOONEST_S, _LATEST_S = 0.3, 10.0
"""Minimum and maximum seconds of decoding between trials. A trial without gain doubles the wait."""

_GAIN = 0.96
"""A trial counts as faster if its steps take at most this share of the usual time."""

_SLOWER = 1.4
"""A trial starts at once if steps have become slower by more than this factor since the last trial."""

_HOPELESS = 2.0
"""A trial ends early if one of its steps takes more than this factor times the usual time."""


class Threads:
    """Number n of threads for the next step, chosen from the times of earlier steps.

    From time to time there is a trial: a few steps run with fewer or more threads. If the trial is faster,
    later steps use its number of threads.
    """

    def __init__(self, most: int) -> None:
        counts = {most, most * 3 // 4, *(most >> i for i in range(1, most.bit_length()))}
        self._counts = sorted(filter(None, counts))
        self._at = self._home = len(self._counts) - 1
        self._is_up = False
        self._wait_s = _SOONEST_S
        self._since_s = 0.0
        # times of recent steps in seconds, by number of tokens, because the time depends on this number
        self._recent: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_N_RECENT))
        self._before: dict[int, float] = {}
        # time of each step of the trial, divided by the usual time for its number of tokens
        self._trial: list[float] = []

    @property
    def n(self) -> int:
        return self._counts[self._at]

    def record(self, n_tokens: int, seconds: float) -> None:
        """Record the time of a step that decoded n_tokens tokens with `n` threads."""
        if self._at != self._home:
            self._try(n_tokens, seconds)
            return
        recent = self._recent[n_tokens]
        recent.append(seconds)
        self._since_s += seconds
        if len(recent) < _N_MIN or len(self._counts) == 1:
            return
        usual = self._before.setdefault(n_tokens, median(recent))
        if self._since_s >= self._wait_s or (len(recent) == _N_RECENT and median(recent) > _SLOWER * usual):
            self._begin()

    def _begin(self) -> None:
        """Begin a trial with the next lower or next higher number of threads, alternately."""
        self._trial = []
        self._is_up = self._home == 0 or (not self._is_up and self._home < len(self._counts) - 1)
        self._at = self._home + (1 if self._is_up else -1)

    def _try(self, n_tokens: int, seconds: float) -> None:
        if len(recent := self._recent[n_tokens]) >= _N_MIN:
            self._trial.append(seconds / median(recent))
            is_hopeless = self._trial[-1] > _HOPELESS
            if len(self._trial) < _N_TRIAL and not is_hopeless:
                return
            is_faster = not is_hopeless and median(self._trial[1:]) <= _GAIN
        else:
            # end the trial as if it brought no gain: the usual time for this number of tokens is not known
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
