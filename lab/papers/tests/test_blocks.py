"""Joined blocks: their length by theory, and what they do to errors of strongly dependent texts."""

import numpy as np
import pytest

from kvtool.measure import statistics
from lab.benchmarks import blocks


@pytest.mark.parametrize("rho", [0.3, 0.6, 0.9])
def test_block_length_is_near_theory_for_an_autoregression(rho):
    n, rng, lengths = 4000, np.random.default_rng(0), []
    for _ in range(40):
        values = np.zeros(n)
        for i, noise in enumerate(rng.normal(size=n - 1), 1):
            values[i] = rho * values[i - 1] + noise
        lengths.append(blocks.block_length(values))
    # closed form for an autoregression of the first order
    spread, bias = (1 + rho) / (1 - rho), 2 * rho / (1 - rho) ** 2
    theory = (2 * bias**2 / (4 / 3 * spread**2)) ** (1 / 3) * n ** (1 / 3)
    assert np.median(lengths) == pytest.approx(theory, rel=0.15)


def test_block_length_of_independent_values_is_short():
    rng = np.random.default_rng(0)
    assert np.median([blocks.block_length(rng.normal(size=200)) for _ in range(50)]) < 3
    assert blocks.block_length(np.full(30, 2.0)) == 1


def test_joining_keeps_the_sums_and_at_least_eight_blocks():
    rng = np.random.default_rng(0)
    for n in (3, 8, 9, 32, 200):
        sums, counts = rng.normal(size=n).cumsum(), rng.integers(1, 9, size=n).astype(float)
        joined, numbers = blocks.joined(sums, counts)
        assert min(n, 8) <= len(joined) == len(numbers) <= n
        assert joined.sum() == pytest.approx(sums.sum())
        assert numbers.sum() == counts.sum()
        assert len(joined) < n or n < 9


def test_joined_blocks_widen_errors_of_strongly_dependent_texts():
    held = {"alone": 0, "joined": 0}
    # moving means of noise over 1,000 tokens; their expectation is 0
    noise = np.random.default_rng(1).normal(size=(200, 16384 + 999)).cumsum(axis=1)
    for text in (noise[:, 999:] - np.pad(noise, ((0, 0), (1, 0)))[:, :16384]) / 1000:
        sums, counts = statistics.block_sums(text), statistics.block_counts(len(text))
        for name, of in (("alone", (sums, counts)), ("joined", blocks.joined(sums, counts))):
            mean, error = statistics.mean_error(*of)
            held[name] += abs(mean) < 2 * error
    assert held["alone"] / 200 < 0.75
    assert held["joined"] / 200 > 0.85
