"""What a writer asks for guesses."""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np

from kvtool.drafts.pace import Pace

MOST = 15
"""The most guesses of a step."""


class Source(Protocol):
    """Where guesses come from. It follows the stream by `cut` and `add`."""

    @property
    def n(self) -> int:
        """Tokens of the stream that it has."""

    def cut(self, n: int) -> None:
        """The stream has only its first n tokens now, if it had more."""

    def add(self, tokens: np.ndarray) -> None:
        """The next tokens i32[n] of the stream."""

    def look(self) -> int:
        """By how much the guesses are supported that `guess` would make now; 0 if there are none."""

    def guess(self, n: int) -> np.ndarray:
        """At most n tokens i32[n] that may come next. Called behind `look`."""


class Drafter:
    """Guesses for a stream, as many as pay.

    Attributes
    ----------
    n_drafted, n_accepted
        Guesses that were made so far, and those that came true.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self.n_drafted = self.n_accepted = 0
        self._pace = Pace()
        self._support = self._n = 0
        self._started = 0.0

    def guess(self, most: int) -> np.ndarray:
        """At most that many tokens i32[n] that may come behind the source's, for the step that comes now."""
        self._started = time.perf_counter()
        self._support = self.source.look() if most > 0 else 0
        n = self._pace.choose(self._support, most) if self._support else 0
        found = self.source.guess(n) if n else np.empty(0, np.int32)
        self._n = len(found)
        return found

    def stepped(self) -> None:
        """The step with these guesses is done."""
        self._pace.took(self._n + 1, time.perf_counter() - self._started)

    def judge(self, n_true: int) -> None:
        """The first n_true of the last guesses came true, and the next one did not."""
        if self._n:
            self._pace.judge(self._support, n_true, self._n)
            self.n_drafted += self._n
            self.n_accepted += n_true
            self._n = 0
