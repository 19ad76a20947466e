"""Blocks of a long text, joined until they hardly depend on each other."""

import numpy as np

_MIN_BLOCKS = 8
"""Minimum number of blocks for an estimate of their spread."""


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
