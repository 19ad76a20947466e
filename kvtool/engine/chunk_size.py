"""Split a prompt's steps into parts that take about equal time, so that other threads wait only briefly."""

from __future__ import annotations

_MIN_TOKENS = 32
"""Minimum tokens of a part. In smaller parts, each token takes longer."""


class ChunkSize:
    """Number of tokens in a part of a step, adapted so that decoding a part takes about `seconds`.

    n: tokens of a part. `note` doubles or halves it if that brings the part's time closer to `seconds`.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.n = _MIN_TOKENS

    def part(self, at: int, end: int) -> slice:
        """Return the slice of tokens to decode next. It begins at `at` and has about `self.n` tokens.

        end: the end of the step. Near this end, the slice may be a little longer or shorter, so that the
        step's last part is not very short.
        """
        n = end - at
        return slice(at, end if n <= self.n * 5 // 4 else at + min(self.n, -(-n // 2)))

    def note(self, n: int, seconds: float) -> None:
        """Record the time in which n tokens were decoded."""
        if n < self.n:
            # ignore a short part, because its time says little about the time of a whole part
            return
        took = seconds * self.n / n / self._seconds
        if took > 1.25:
            self.n = max(self.n // 2, _MIN_TOKENS)
        elif took < 0.625:
            self.n *= 2
