"""Guesses from what a stream has said before: what followed the last tokens where they came earlier.

Prompt lookup decoding (Saxena 2023), as transformers and llama.cpp have it, takes a place of the longest
n-gram up to a length. Here it is the place that most tokens before agree with, however many these are, and
all of the stream is searched, what the cache has forgotten included.
"""

from __future__ import annotations

import numpy as np

from kvtool.kernels.ngrams import N_BIT, best_place, link, unlink


class Lookup:
    """A stream's tokens, and where its n-grams were before.

    Attributes
    ----------
    n
        Tokens of the stream.
    """

    def __init__(self) -> None:
        self.n = self._at = 0
        self._tokens = np.empty(1024, np.int32)
        # the newest place of each hash, and of each place the one before it: -1 is none
        self._newest = np.full(1 << N_BIT, -1, np.int32)
        self._before = np.empty(1024, np.int32)

    def cut(self, n: int) -> None:
        """The stream has only its first n tokens now."""
        if n < self.n:
            unlink(self._tokens, self._newest, self._before, self.n, n)
            self.n = n

    def add(self, tokens: np.ndarray) -> None:
        """The next tokens i32[n] of the stream."""
        n = self.n + len(tokens)
        while n > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
            self._before = np.concatenate([self._before, np.empty_like(self._before)])
        self._tokens[self.n : n] = tokens
        link(self._tokens, self._newest, self._before, self.n, n)
        self.n = n

    def look(self) -> int:
        """How many tokens before some earlier place agree with the stream's last ones; 0 if fewer than N_KEY.

        Of places where as many agree the newest counts.
        """
        found = np.zeros(2, np.int64)
        best_place(self._tokens, self._newest, self._before, self.n, found)
        self._at, n_same = found.tolist()
        return int(n_same)

    def guess(self, n: int) -> np.ndarray:
        """The n tokens i32[n] that came there; what ends with the stream is taken to repeat itself."""
        tokens: np.ndarray = self._tokens[self._at + np.arange(n) % (self.n - self._at)]
        return tokens
