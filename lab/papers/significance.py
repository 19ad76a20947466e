"""Tests of differences: chances that they are none, by signs; and many tests at once."""

from __future__ import annotations

from functools import cache
from statistics import NormalDist

import numpy as np

from kvtool.measure import statistics

_MOST_EXACT = 16
"""Differences of which all signs are tried."""

_N_FLIP = 20_000
"""Draws of signs for more differences than that."""

_N_AT_ONCE = 100
"""Draws that are in memory at the same time."""


def sign_flip_test(differences: np.ndarray) -> float:
    """The chance, without a true difference, that the mean of differences f64[n] is as far from 0 as it is.

    By changing signs (Fisher 1935): all of them for up to 16 differences that are not 0, else 20,000 draws.
    Where all differences are equal, that is the exact sign test.
    """
    return _sign_flip(differences.astype(np.float64).tobytes())


@cache
def _sign_flip(raw: bytes) -> float:
    """Of the same differences once: a table asks for them, its verdict, and the index."""
    differences = np.frombuffer(raw)
    sizes = np.abs(differences[differences != 0])
    if len(sizes) <= _MOST_EXACT:
        bits = np.arange(2 ** len(sizes))[:, None] >> np.arange(len(sizes))
        sums = (1 - 2 * (bits & 1)) @ sizes
        n_more = 0
    else:
        rng = np.random.default_rng(0)
        parts = [_N_AT_ONCE] * (_N_FLIP // _N_AT_ONCE)
        sums = np.concatenate([(1 - 2 * rng.integers(2, size=(n, len(sizes)))) @ sizes for n in parts])
        # the signs that were found count as a draw
        n_more = 1
    # rounding must not tell equal sums apart
    is_far = np.abs(sums) >= abs(differences.sum()) - 1e-9 * sizes.sum()
    return float((is_far.sum() + n_more) / (len(sums) + n_more))


def holm(values: np.ndarray) -> np.ndarray:
    """The p-values f64[n] of n tests, adjusted so that 5 % stands for the chance of any error (Holm 1979)."""
    order = np.argsort(values, kind="stable")
    steps = np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1))
    found = np.empty(len(values))
    found[order] = np.minimum(steps, 1)
    return found


def not_worse_test(sums: np.ndarray, weights: np.ndarray, margin: float) -> float:
    """The chance of a mean this high if the true one were a margin below 0: one-sided, by signs.

    sums, weights: f64[n], of each unit the sum of its differences and its weight.
    """
    shifted = sums + margin * weights
    p = sign_flip_test(shifted)
    # the other half of the signs are as far on the other side
    return p / 2 if shifted.sum() > 0 else 1 - p / 2


def power(sums: np.ndarray, weights: np.ndarray, margin: float) -> float:
    """How often `not_worse_test` would say so with p <= 0.05 if there were no difference at all.

    By the normal approximation, which flatters tests of few units.
    """
    _, error = statistics.mean_error(sums, weights)
    return NormalDist().cdf(margin / error - NormalDist().inv_cdf(0.95))
