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

    def guess(self, n: int) -> np.ndarray:
        """At most n tokens i32[n] that may come next."""


class Searched(Source, Protocol):
    """A source that makes as many guesses as it is asked for, and costs nothing."""

    def look(self) -> int:
        """By how much the guesses are supported that `guess` would make now; 0 if there are none."""


class Drafter:
    """Guesses for a stream: what is found in it, as many as pay, else what a model thinks.

    Attributes
    ----------
    n_drafted, n_accepted
        Guesses that were made so far, and those that came true.
    """

    def __init__(self, lookup: Searched, model: Source | None = None) -> None:
        self._lookup, self._model = lookup, model
        self._sources: list[Source] = [lookup, model] if model else [lookup]
        self.n_drafted = self.n_accepted = 0
        self._pace = Pace()
        # 0 where the guesses are a model's
        self._support = self._n = 0
        self._started = 0.0

    @property
    def n(self) -> int:
        """Tokens of the stream that it has."""
        return self._lookup.n

    def cut(self, n: int) -> None:
        """The stream has only its first n tokens now, if it had more."""
        for source in self._sources:
            source.cut(n)

    def add(self, tokens: np.ndarray) -> None:
        """The next tokens i32[n] of the stream."""
        for source in self._sources:
            source.add(tokens)

    def guess(self, most: int) -> np.ndarray:
        """At most that many tokens i32[n] that may come next, for the step that comes now."""
        found = np.empty(0, np.int32)
        self._support = self._lookup.look() if most > 0 else 0
        if self._support and (n := self._pace.choose(self._support, most)):
            found = self._lookup.guess(n)
        elif self._model and most > 0:
            self._support = 0
            found = self._model.guess(most)
        self._n = len(found)
        # a step without room for guesses may be several streams' one: its time says nothing
        self._started = time.perf_counter() if most > 0 else 0.0
        return found

    def stepped(self) -> None:
        """The step with these guesses is done."""
        if self._started:
            self._pace.took(self._n + 1, time.perf_counter() - self._started)

    def judge(self, n_true: int) -> None:
        """The first n_true of the last guesses came true, and the next one did not."""
        if self._n:
            if self._support:
                self._pace.judge(self._support, n_true, self._n)
            self.n_drafted += self._n
            self.n_accepted += n_true
            self._n = 0
