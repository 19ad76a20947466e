"""Parts of a prompt's steps, which take about equal time, for when other threads wait."""

from __future__ import annotations

_LEAST = 32
"""Tokens of the smallest part: in smaller parts each token takes longer."""


class ChunkSize:
    """Number of tokens of a step that are decoded at once, adapted to their time.

    Parameters
    ----------
    seconds
        Time that a part should take, approximately.

    Attributes
    ----------
    n
        Tokens of a part. It is doubled or halved if that comes closer to the time.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.n = _LEAST

    def part(self, at: int, end: int) -> slice:
        """Return the part of the tokens at..end that is decoded next. A short rest is added to it."""
        n = end - at
        return slice(at, end if n <= self.n * 5 // 4 else at + min(self.n, -(-n // 2)))

    def note(self, n: int, seconds: float) -> None:
        """Record that decoding n tokens took so many seconds."""
        if n < self.n:
            # less than a part: its time says little about a whole part's
            return
        took = seconds * self.n / n / self._seconds
        if took > 1.25:
            self.n = max(self.n // 2, _LEAST)
        elif took < 0.625:
            self.n *= 2
