"""The object that gives a writer its draft tokens."""

from __future__ import annotations

import time
from typing import Protocol

import numpy as np

from kvtool.drafts.draft_length import DraftLength
from kvtool.drafts.lookup import Lookup
from kvtool.llama.grammar.constraint import Constraint


class Source(Protocol):
    """Source of draft tokens. It holds a copy of the stream, which `cut` and `add` keep up to date."""

    @property
    def n(self) -> int:
        """Number of the stream's tokens that the source holds."""

    def cut(self, n: int) -> None:
        """Drop all but the stream's first n tokens."""

    def add(self, tokens: np.ndarray) -> None:
        """Append the stream's next tokens i32[n]."""

    def guess(self, n: int) -> np.ndarray:
        """Return at most n draft tokens i32[n]."""


class Drafter:
    """Provides draft tokens, which are copied from an earlier place of the stream.

    `DraftLength` chooses their number. If no tokens are copied and there is a draft model, the draft model
    makes the draft tokens.
    """

    def __init__(self, lookup: Lookup, model: Source | None = None) -> None:
        self._lookup, self._model = lookup, model
        self._sources: list[Source] = [lookup, model] if model else [lookup]
        self.n_drafted = self.n_accepted = 0
        self._pace = DraftLength()
        # support (see `DraftLength`) of the last draft's first token, which is 0 if the draft was not copied;
        # and length of the last draft
        self._support = self._n = 0
        self._started = 0.0

    @property
    def n(self) -> int:
        """Number of the stream's tokens that the sources hold."""
        return self._lookup.n

    def cut(self, n: int) -> None:
        """Drop all but the stream's first n tokens."""
        for source in self._sources:
            source.cut(n)

    def add(self, tokens: np.ndarray) -> None:
        """Append the stream's next tokens i32[n]."""
        for source in self._sources:
            source.add(tokens)

    def guess(self, most: int, constraint: Constraint | None = None) -> np.ndarray:
        """Return at most `most` draft tokens i32[n] for the next step.

        constraint: the text's constraint, which has accepted the stream so far. If it forces the next tokens,
        these are the draft tokens. Draft tokens from other sources end before the first token that violates
        the constraint.
        """
        self._support = 0
        found = self._find(most, constraint) if most > 0 else np.empty(0, np.int32)
        if constraint and len(found):
            found = found[: constraint.n_fitting(found.tolist())]
        self._n = len(found)
        # if `most` is 0, do not measure the step, because it may also decode tokens of other streams
        self._started = time.perf_counter() if most > 0 else 0.0
        return found

    def _find(self, most: int, constraint: Constraint | None) -> np.ndarray:
        """Return draft tokens from the first source that has any. Sets `_support`."""
        if constraint and (forced := constraint.forced()[:most]):
            return np.array(forced, np.int32)
        support = self._lookup.look()
        if support and (n := self._pace.choose(support, most)):
            self._support = support
            return self._lookup.guess(n)
        return self._model.guess(most) if self._model else np.empty(0, np.int32)

    def stepped(self) -> None:
        """Record the time of the step that decoded the last draft tokens."""
        if self._started:
            self._pace.took(self._n + 1, time.perf_counter() - self._started)

    def judge(self, n_true: int) -> None:
        """Record that only the first n_true of the last draft tokens were accepted."""
        if self._n:
            if self._support:
                self._pace.judge(self._support, n_true, self._n)
            self.n_drafted += self._n
            self.n_accepted += n_true
            self._n = 0
