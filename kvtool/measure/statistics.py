"""Intervals and standard errors of means.

Tokens of a text are not independent: a forgotten fact affects several tokens in a row. Errors are therefore
computed from blocks of tokens. If blocks still depend on each other, `joined` joins them into longer blocks.
In a task, each item is one block. The random numbers have a fixed seed, so the same values always give the
same interval.

SciPy is not used. Its bootstrap and its Wilson interval give the same numbers, but SciPy needs 143 MB on the
disk, 75 MiB of memory, and 1 s for its import. Its bootstrap of 5,000 blocks takes four times as long.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

_N_AT_ONCE = 100
"""Maximum number of bootstrap samples in memory at the same time."""

_MIN_BLOCKS = 8
"""Minimum number of blocks for an estimate of their spread."""


def perplexity_of(nll: float) -> float:
    """Perplexity of a mean nll in nats. It is infinite if it is too large for a number."""
    try:
        return math.exp(nll)
    except OverflowError:
        return math.inf


def block_size(n: int) -> int:
    """Number of tokens of a block in a text of n tokens: 256, or fewer if there would be under 32 blocks."""
    return int(np.clip(n // 32, 1, 256))


def block_sums(values: np.ndarray) -> np.ndarray:
    """Sum values f64[n] by block. Return f64[block]. The last block includes the remaining values."""
    size = block_size(len(values))
    starts = np.arange(0, max(len(values) // size, 1) * size, size)
    return np.add.reduceat(values, starts)


def block_counts(n: int) -> np.ndarray:
    """Number of tokens of each block, f64[block], in a text of n tokens."""
    return block_sums(np.ones(n))


def block_length(values: np.ndarray) -> float:
    """Optimal number of consecutive values in a bootstrap block, given their autocorrelation.

    values: f64[n] in the order of the text, n > 8. The method is that of Politis and White 2004, section 3.3,
    for the circular block bootstrap, with the correction of Patton, Politis and White 2009.
    """
    n = len(values)
    centred = values - values.mean()
    n_lag = max(5, int(np.ceil(np.sqrt(np.log10(n)))))
    most = min(int(np.ceil(np.sqrt(n))) + n_lag, n - 1)
    covariance = np.correlate(centred, centred, "full")[n - 1 : n + most] / n
    if not covariance[0]:
        return 1.0
    # find the smallest lag after which n_lag correlations in a row are small
    is_small = np.abs(covariance[1:] / covariance[0]) < 2 * np.sqrt(np.log10(n) / n)
    last = next((m for m in range(most - n_lag + 1) if is_small[m : m + n_lag].all()), None)
    reach = most if last is None else min(2 * max(last, 1), most)
    lag = np.arange(-reach, reach + 1)
    weighted = np.clip(2 * (1 - np.abs(lag) / reach), 0, 1) * covariance[np.abs(lag)]
    spread, bias = weighted.sum(), (np.abs(lag) * weighted).sum()
    if not spread:
        return 1.0
    length = (2 * bias**2 / (4 / 3 * spread**2)) ** (1 / 3) * n ** (1 / 3)
    return float(np.clip(length, 1, np.ceil(min(3 * np.sqrt(n), n / 3))))


def joined(sums: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Join adjacent blocks of a text to the length that `block_length` recommends. Return (sums, counts).

    sums, counts: f64[block]. To compare two runs, pass the differences of their sums. At least 8 blocks
    remain. If there are 8 or fewer, they are not joined.
    """
    n = len(sums)
    if n <= _MIN_BLOCKS:
        return sums, counts
    length = block_length(sums - sums.sum() / counts.sum() * counts)
    n_block = int(np.clip(n / length, _MIN_BLOCKS, n))
    starts = np.arange(n_block) * n // n_block
    return np.add.reduceat(sums, starts), np.add.reduceat(counts, starts)


def interval(
    sums: np.ndarray, counts: np.ndarray, level: float = 0.95, n_draw: int = 10_000
) -> tuple[float, float]:
    """Confidence interval of the mean, from the percentile block bootstrap (Efron 1979, Carlstein 1986).

    sums, counts: f64[block]. level: 0.95 for the 95 % interval. n_draw: number of bootstrap samples. For
    each sample, blocks are drawn with replacement.
    """
    rng, means = np.random.default_rng(0), np.empty(n_draw)
    # draw only some samples at a time: with thousands of items, all of them would take gigabytes
    for part in np.array_split(means, -(-n_draw // _N_AT_ONCE)):
        sampled = rng.integers(len(sums), size=(len(part), len(sums)))
        part[:] = sums[sampled].sum(axis=1) / counts[sampled].sum(axis=1)
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def mean_error(sums: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """Mean and its standard error, from the ratio estimator over blocks.

    If there is only one block, the error is nan. To compare two runs, pass the differences of their sums:
    variation that both runs have in common then cancels.

    sums, counts: f64[block].
    """
    n_block, n = len(sums), counts.sum()
    mean = sums.sum() / n
    if n_block < 2:
        return float(mean), float("nan")
    residuals = sums - mean * counts
    return float(mean), float(np.sqrt((residuals**2).sum() * n_block / (n_block - 1)) / n)


def mean_of_text(sums: np.ndarray, n: int) -> tuple[float, float | None]:
    """Mean per token of a text of n tokens, and the standard error of this mean.

    sums: f64[block], sum of each block. Blocks that depend on each other are joined first. If there is only
    one block, the error is None.
    """
    mean, error = mean_error(*joined(sums, block_counts(n)))
    return mean, None if np.isnan(error) else error


def item_interval(
    scores: np.ndarray, *, are_hits: bool, level: float = 0.95
) -> tuple[float, float] | tuple[None, None]:
    """Confidence interval of the mean of independent scores f64[n]. (None, None) for a single score.

    are_hits: True if each score is 1 for a hit, 0 for a miss, or the share of several hits. The result is
    then Wilson's interval (1927). It has a width even if all scores are equal. For shares, it is wider than
    necessary. For other scores, the result is the interval of the bootstrap.
    """
    n, mean = len(scores), scores.mean()
    if n < 2:
        return None, None
    if not are_hits:
        return interval(scores, np.ones(n), level)
    z = NormalDist().inv_cdf((1 + level) / 2)
    middle, half = mean + z * z / (2 * n), z * np.sqrt(mean * (1 - mean) / n + (z / (2 * n)) ** 2)
    return float(max(middle - half, 0) / (1 + z * z / n)), float(min((middle + half) / (1 + z * z / n), 1))
