"""Prompt lookup: draft the tokens that followed an earlier occurrence of the stream's last n-gram.

Prompt lookup decoding (Saxena 2023), transformers and llama.cpp use the longest matching n-gram up to a given
length. Here the n-gram may have any length, and all of the stream is searched, including evicted tokens.
"""

from __future__ import annotations

import numpy as np

from kvtool.kernels.ngrams import N_BIT, best_place, link, unlink


class Lookup:
    """The n tokens of a stream, with an index of its n-grams."""

    def __init__(self) -> None:
        self.n = self._at = 0
        self._tokens = np.empty(1024, np.int32)
        # each place has a hash of the N_KEY tokens before it. `_newest` maps a hash to the newest place with
        # this hash, and `_before` maps a place to the previous place with the same hash. -1: no place
        self._newest = np.full(1 << N_BIT, -1, np.int32)
        self._before = np.empty(1024, np.int32)

    def cut(self, n: int) -> None:
        """Drop all but the stream's first n tokens."""
        if n < self.n:
            unlink(self._tokens, self._newest, self._before, self.n, n)
            self.n = n

    def add(self, tokens: np.ndarray) -> None:
        """Append the stream's next tokens i32[n]."""
        n = self.n + len(tokens)
        while n > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
            self._before = np.concatenate([self._before, np.empty_like(self._before)])
        self._tokens[self.n : n] = tokens
        link(self._tokens, self._newest, self._before, self.n, n)
        self.n = n

    def look(self) -> int:
        """Find an earlier place that matches the end of the stream. Return how many tokens match.

        The place with the longest match is used. Among equally long matches, the newest place is used.
        Returns 0 if fewer than N_KEY tokens match.
        """
        found = np.zeros(2, np.int64)
        best_place(self._tokens, self._newest, self._before, self.n, found)
        self._at, n_same = found.tolist()
        return int(n_same)

    def guess(self, n: int) -> np.ndarray:
        """Return the n tokens i32[n] that follow the match.

        If fewer than n tokens follow the match, these tokens are repeated.
        """
        tokens: np.ndarray = self._tokens[self._at + np.arange(n) % (self.n - self._at)]
        return tokens
