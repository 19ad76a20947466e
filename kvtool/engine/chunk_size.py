"""Steps of a prompt that others wait for: in parts, each of which takes about as long."""

from __future__ import annotations

_LEAST = 32
"""Tokens of the smallest part: fewer take longer, each."""


class ChunkSize:
    """How many tokens of a step are decoded at once.

    Parameters
    ----------
    seconds
        What a part may take, about.

    Attributes
    ----------
    n
        The tokens of a part; twice or half as many, the next time, where that is closer.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.n = _LEAST

    def part(self, at: int, end: int) -> slice:
        """What is decoded next of the tokens at..end. A short rest is not left alone."""
        n = end - at
        return slice(at, end if n <= self.n * 5 // 4 else at + min(self.n, -(-n // 2)))

    def note(self, n: int, seconds: float) -> None:
        """So many tokens have taken so many seconds."""
        if n < self.n:
            # they say nothing of a part
            return
        took = seconds * self.n / n / self._seconds
        if took > 1.25:
            self.n = max(self.n // 2, _LEAST)
        elif took < 0.625:
            self.n *= 2
