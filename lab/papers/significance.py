"""Tests of differences by permuted signs, their power, and the correction for many tests."""

from __future__ import annotations

from functools import cache
from statistics import NormalDist

import numpy as np

from kvtool.measure import statistics

_MAX_EXACT = 16
"""Maximum number of differences for which all combinations of signs are tried."""

_N_FLIP = 20_000
"""Number of random draws of signs if there are more than `_MAX_EXACT` differences."""

_N_AT_ONCE = 100
"""Number of draws that are in memory at the same time."""


def sign_flip_test(differences: np.ndarray) -> float:
    """Return the two-sided p-value of the mean of differences f64[n], by a sign-flip test (Fisher 1935).

    For up to 16 differences other than 0 it tries all combinations of signs, for more it draws 20,000. The
    p-value is the share of combinations whose mean is at least as far from 0 as the measured one. If all
    differences have the same size, this is the sign test.
    """
    return _sign_flip(differences.astype(np.float64).tobytes())


@cache
def _sign_flip(raw: bytes) -> float:
    """Compute `sign_flip_test`. Cached, because a table, its verdict and the index need the same test."""
    differences = np.frombuffer(raw)
    sizes = np.abs(differences[differences != 0])
    if len(sizes) <= _MAX_EXACT:
        bits = np.arange(2 ** len(sizes))[:, None] >> np.arange(len(sizes))
        sums = (1 - 2 * (bits & 1)) @ sizes
        n_more = 0
    else:
        rng = np.random.default_rng(0)
        parts = [_N_AT_ONCE] * (_N_FLIP // _N_AT_ONCE)
        sums = np.concatenate([(1 - 2 * rng.integers(2, size=(n, len(sizes)))) @ sizes for n in parts])
        # count the measured signs as one more draw, so that p is not 0
        n_more = 1
    # a tolerance, because rounding makes equal sums differ
    is_far = np.abs(sums) >= abs(differences.sum()) - 1e-9 * sizes.sum()
    return float((is_far.sum() + n_more) / (len(sums) + n_more))


def holm(values: np.ndarray) -> np.ndarray:
    """Adjust the p-values f64[n] of n tests: at p <= 0.05 the chance of any error is then 5 % (Holm 1979)."""
    order = np.argsort(values, kind="stable")
    steps = np.maximum.accumulate(values[order] * np.arange(len(values), 0, -1))
    adjusted = np.empty(len(values))
    adjusted[order] = np.minimum(steps, 1)
    return adjusted


def not_worse_test(sums: np.ndarray, weights: np.ndarray, margin: float) -> float:
    """Return the one-sided p-value of a mean this high or higher, if the true mean is `margin` below 0.

    sums, weights: f64[n], the sum of differences and the weight of each unit.
    """
    shifted = sums + margin * weights
    p = sign_flip_test(shifted)
    # the sign-flip test is two-sided: halve its p-value
    return p / 2 if shifted.sum() > 0 else 1 - p / 2


def power(sums: np.ndarray, weights: np.ndarray, margin: float) -> float:
    """Return the chance that `not_worse_test` has p <= 0.05 if there is no difference at all.

    Uses the normal approximation, which gives too high a chance if there are few units.
    """
    _, error = statistics.mean_error(sums, weights)
    return NormalDist().cdf(margin / error - NormalDist().inv_cdf(0.95))
