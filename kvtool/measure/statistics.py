"""How sure a mean is, and a difference of two.

Tokens of a text are not independent: what a policy forgot costs several in a row. So a text's tokens are
taken in blocks, and blocks are what is drawn and what errors are computed from; items of a task are blocks
of one. All is seeded: the same numbers give the same interval.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

_N_AT_ONCE = 100
"""Draws of the bootstrap that are in memory together."""


def block_size(n: int) -> int:
    """How many tokens of a text of n make a block: 256 where that gives 32 blocks or more, fewer else."""
    return int(np.clip(n // 32, 1, 256))


def block_sums(values: np.ndarray) -> np.ndarray:
    """f64[n] -> f64[block]: the sums over blocks; the last takes what is left over as well."""
    size = block_size(len(values))
    starts = np.arange(0, max(len(values) // size, 1) * size, size)
    return np.add.reduceat(values, starts)


def block_counts(n: int) -> np.ndarray:
    """f64[block]: how many tokens each block of a text of n has."""
    return block_sums(np.ones(n))


def interval(
    sums: np.ndarray, counts: np.ndarray, level: float = 0.95, n_draw: int = 10_000
) -> tuple[float, float]:
    """The mean's interval of that level by the percentile block bootstrap (Efron 1979, Carlstein 1986).

    sums, counts f64[block]: of each block. Blocks are drawn with replacement, n_draw times.
    """
    rng, means = np.random.default_rng(0), np.empty(n_draw)
    # all at once would take gigabytes where there are thousands of items
    for part in np.array_split(means, -(-n_draw // _N_AT_ONCE)):
        drawn = rng.integers(len(sums), size=(len(part), len(sums)))
        part[:] = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def mean_error(sums: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """The mean and its standard error, from the residuals of blocks (the ratio estimator's).

    sums, counts f64[block]. The error of a single block's mean is not known: nan. Of differences, pass the
    differences of the two sums: what both have in common goes out.
    """
    n_block, n = len(sums), counts.sum()
    mean = sums.sum() / n
    if n_block < 2:
        return float(mean), float("nan")
    residuals = sums - mean * counts
    return float(mean), float(np.sqrt((residuals**2).sum() * n_block / (n_block - 1)) / n)


def item_interval(scores: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """The interval of the mean of independent items' scores f64[n].

    Of hits and misses Wilson's (1927), which has a width where all are hits as well; else the bootstrap's.
    """
    n, mean = len(scores), scores.mean()
    if not np.isin(scores, (0, 1)).all():
        return interval(scores, np.ones(n), level)
    z = NormalDist().inv_cdf((1 + level) / 2)
    middle, half = mean + z * z / (2 * n), z * np.sqrt(mean * (1 - mean) / n + (z / (2 * n)) ** 2)
    return float(max(middle - half, 0) / (1 + z * z / n)), float(min((middle + half) / (1 + z * z / n), 1))
