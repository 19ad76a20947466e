"""Intervals and standard errors of means.

Tokens of a text are not independent: a forgotten fact affects several tokens in a row. Errors are therefore
computed from few long blocks of tokens. In a task, each item is one block.

SciPy is not used, because it needs 143 MB on the disk, 75 MiB of memory, and 1 s for its import.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

_N_BLOCK = 8
"""Number of blocks of a text. Fewer and longer blocks depend less on each other."""


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


def mean_error(sums: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """Mean and its standard error, from the ratio estimator over two or more blocks.

    To compare two runs, pass the differences of their sums: variation that both runs have in common then
    cancels. sums, counts: f64[block].
    """
    n_block, n = len(sums), counts.sum()
    mean = sums.sum() / n
    residuals = sums - mean * counts
    return float(mean), float(np.sqrt((residuals**2).sum() * n_block / (n_block - 1)) / n)


def mean_of_text(sums: np.ndarray, n: int) -> tuple[float, float | None, float | None]:
    """Mean per token of a text of n tokens, its standard error, and the margin: half of its 95 % interval.

    sums: f64[block], sum of each block. They are joined into eight blocks. In all runs of a text, these have
    the same tokens. If there are fewer than eight blocks, error and margin are None.
    """
    if len(sums) < _N_BLOCK:
        return float(sums.sum() / n), None, None
    starts = np.arange(_N_BLOCK) * len(sums) // _N_BLOCK
    sums, counts = np.add.reduceat(sums, starts), np.add.reduceat(block_counts(n), starts)
    mean, error = mean_error(sums, counts)
    return mean, error, t_quantile(_N_BLOCK - 1) * error


def t_quantile(df: int) -> float:
    """97.5 % quantile of Student's t with df degrees of freedom, df >= 1.

    From four degrees on, the result is the Cornish-Fisher expansion (Abramowitz and Stegun 1964, 26.7.5) at
    the normal quantile. Its error is below 0.04 %.
    """
    if df < 4:
        return (12.7062, 4.3027, 3.1824)[df - 1]
    return 1.95996 + 2.37227 / df + 2.82250 / df**2 + 2.55585 / df**3 + 1.58954 / df**4


def interval(sums: np.ndarray, counts: np.ndarray) -> tuple[float, float] | tuple[None, None]:
    """95 % interval of the mean, by Student's t. (None, None) if all blocks have the same mean.

    With few blocks, the percentiles of a bootstrap are too close to each other; Student's t is not. A single
    block has no interval. sums, counts: f64[block].
    """
    if not np.ptp(sums / counts):
        return None, None
    mean, error = mean_error(sums, counts)
    half = t_quantile(len(sums) - 1) * error
    return mean - half, mean + half


def item_interval(scores: np.ndarray, *, are_hits: bool) -> tuple[float, float] | tuple[None, None]:
    """95 % interval of the mean of independent scores f64[n]. (None, None) for too few scores.

    are_hits: True if each score is 1 for a hit, 0 for a miss, or the share of several hits. The result is
    then Wilson's interval (1927). It has a width even if all scores are equal. For shares, it is wider than
    necessary. It needs two scores. For other scores, the result is `interval`, with each score as a block. It
    needs three scores: with two, Student's t is 12.7 times the standard error.
    """
    n, mean = len(scores), scores.mean()
    if n < (2 if are_hits else 3):
        return None, None
    if not are_hits:
        return interval(scores, np.ones(n))
    z = NormalDist().inv_cdf(0.975)
    middle, half = mean + z * z / (2 * n), z * np.sqrt(mean * (1 - mean) / n + (z / (2 * n)) ** 2)
    return float(max(middle - half, 0) / (1 + z * z / n)), float(min((middle + half) / (1 + z * z / n), 1))


def paired_interval(differences: np.ndarray, *, are_hits: bool) -> tuple[float, float] | tuple[None, None]:
    """95 % interval of the mean of differences f64[n] between two runs' scores of the same items.

    are_hits: see `item_interval`. The interval of hits is that of Bonett and Price (2012): two items with the
    differences 1 and -1 are added, so the interval has a width even if all differences are equal. A single
    difference has no interval.
    """
    if len(differences) < 2 or not are_hits:
        return item_interval(differences, are_hits=False)
    added = np.append(differences, (1, -1))
    half = NormalDist().inv_cdf(0.975) * added.std() / np.sqrt(len(added))
    return float(max(added.mean() - half, -1)), float(min(added.mean() + half, 1))
