"""Confidence intervals and standard errors: compared with definitions, and tried on data of known mean."""

from __future__ import annotations

import numpy as np
import pytest

from kvtool.measure import statistics
from kvtool.measure.run import quality


@pytest.mark.parametrize(("n", "size"), [(1, 1), (31, 1), (64, 2), (8191, 255), (8192, 256), (10**6, 256)])
def test_blocks_cover_all_values_and_the_last_takes_the_rest(n, size):
    values = np.random.default_rng(n).random(n)
    sums, counts = statistics.block_sums(values), statistics.block_counts(n)
    assert statistics.block_size(n) == size
    assert len(sums) == len(counts) == max(n // size, 1)
    assert (counts[:-1] == size).all()
    assert size <= counts[-1] < 2 * size or n < size
    assert counts.sum() == n
    assert sums.sum() == pytest.approx(values.sum())
    assert sums[0] == pytest.approx(values[: int(counts[0])].sum())


def test_standard_error_of_equal_blocks_is_the_textbook_one():
    values = np.random.default_rng(0).normal(size=50)
    mean, error = statistics.mean_error(values, np.ones(50))
    assert mean == pytest.approx(values.mean())
    assert error == pytest.approx(values.std(ddof=1) / np.sqrt(50))


def test_mean_is_the_sum_divided_by_the_counts():
    mean, _ = statistics.mean_error(np.array([2.0, 9.0]), np.array([1.0, 3.0]))
    assert mean == 11 / 4


def test_constant_values_have_zero_error_and_no_interval():
    sums, counts = np.full(20, 3.0), np.full(20, 2.0)
    assert statistics.mean_error(sums, counts) == (1.5, 0)
    assert statistics.interval(sums, counts) == (None, None)


def _texts(n_text, n, reach):
    """Return moving means of noise over `reach` tokens.

    The values depend strongly on each other. Their expectation is 0.
    """
    rng = np.random.default_rng(1)
    noise = rng.normal(size=(n_text, n + reach - 1))
    return np.lib.stride_tricks.sliding_window_view(noise, reach, axis=1).mean(axis=2)


def test_intervals_contain_the_mean_about_95_percent_of_the_time():
    n_inside = errors = n_inside_alone = 0
    texts = _texts(300, 8192, 40)
    for text in texts:
        sums, counts = statistics.block_sums(text), statistics.block_counts(len(text))
        low, high = statistics.interval(sums, counts)
        n_inside += low <= 0 <= high
        mean, error = statistics.mean_error(sums, counts)
        errors += abs(mean) < 2 * error
        n_inside_alone += abs(mean) < 2 * text.std() / np.sqrt(len(text))
    assert 0.88 < n_inside / 300 < 0.98
    assert 0.90 < errors / 300 < 0.98
    # without blocks, an interval is far too narrow
    assert n_inside_alone / 300 < 0.5


# Fisher and Yates 1963, Table III
@pytest.mark.parametrize(
    ("df", "quantile"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (7, 2.365), (10, 2.228), (30, 2.042)],
)
def test_quantiles_are_those_of_students_table(df, quantile):
    assert statistics.t_quantile(df) == pytest.approx(quantile, abs=1e-3)
    assert statistics.t_quantile(10**6) == pytest.approx(1.96, abs=1e-3)


@pytest.mark.parametrize("n", [3, 4, 8])
def test_intervals_of_a_few_scores_contain_the_mean_95_percent_of_the_time(n):
    rng, n_inside = np.random.default_rng(0), 0
    for scores in rng.normal(size=(1000, n)):
        low, high = statistics.item_interval(scores, are_hits=False)
        n_inside += low <= 0 <= high
    assert 0.93 < n_inside / 1000 < 0.97


# Newcombe 1998, Table I, method 3 (81/263, 15/148, 0/20, 1/29)
@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_hits_and_misses_have_wilsons_interval(hits, n, low, high):
    scores = np.repeat([1.0, 0.0], [hits, n - hits])
    assert statistics.item_interval(scores, are_hits=True) == pytest.approx((low, high), abs=5e-5)
    missed = statistics.item_interval(1 - scores, are_hits=True)
    assert missed == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_other_scores_have_students_interval():
    low, high = statistics.item_interval(np.arange(1.0, 6), are_hits=False)
    half = 2.7764 * np.sqrt(2.5 / 5)
    assert (low, high) == pytest.approx((3 - half, 3 + half), abs=1e-3)


def test_equal_scores_have_no_interval():
    # in binary, the mean of three times 0.1 is not 0.1
    assert statistics.item_interval(np.full(3, 0.1), are_hits=False) == (None, None)


@pytest.mark.parametrize(("n", "are_hits"), [(1, True), (1, False), (2, False)])
def test_too_few_scores_have_no_interval(n, are_hits):
    scores = np.arange(n) / 2
    assert statistics.item_interval(scores, are_hits=are_hits) == (None, None)
    assert statistics.paired_interval(scores, are_hits=are_hits) == (None, None)


@pytest.mark.parametrize(("n", "gains", "losses"), [(10, 0, 0.2), (40, 0.05, 0.15), (100, 0.02, 0.02)])
def test_paired_intervals_of_hits_contain_the_mean_95_percent_of_the_time(n, gains, losses):
    rng, n_inside = np.random.default_rng(0), 0
    for draws in rng.random(size=(2000, n)):
        differences = (draws < gains) * 1.0 - (draws > 1 - losses)
        low, high = statistics.paired_interval(differences, are_hits=True)
        n_inside += low <= gains - losses <= high
    assert n_inside / 2000 > 0.94


def test_paired_interval_of_equal_hits_has_a_width():
    low, high = statistics.paired_interval(np.zeros(10), are_hits=True)
    assert (low, high) == pytest.approx((-1.96 * np.sqrt(2 / 12 / 12), 1.96 * np.sqrt(2 / 12 / 12)), abs=1e-4)
    assert statistics.paired_interval(-np.ones(10), are_hits=True)[0] == -1
    assert statistics.paired_interval(np.zeros(10), are_hits=False) == (None, None)
    assert statistics.paired_interval(np.zeros(1), are_hits=True) == (None, None)


def test_margin_of_a_difference_is_students_over_eight_blocks_of_the_text():
    difference = np.random.default_rng(0).normal(size=2048)
    error = difference.reshape(8, 256).mean(axis=1).std(ddof=1) / np.sqrt(8)
    expected = [difference.mean(), error, 2.3646 * error]
    assert [*statistics.mean_of_text(statistics.block_sums(difference), 2048)] == pytest.approx(
        expected, rel=1e-4
    )
    assert statistics.mean_of_text(np.arange(7.0), 7) == (3, None, None)
    assert statistics.mean_of_text(np.arange(8.0), 8)[1] == pytest.approx(np.sqrt(6 / 8))


@pytest.mark.parametrize("reach", [1, 40])
def test_differences_are_within_their_margin_about_95_percent_of_the_time(reach):
    n_inside = 0
    for text in _texts(1000, 2047, reach):
        mean, _, margin = statistics.mean_of_text(statistics.block_sums(text), len(text))
        n_inside += abs(mean) < margin
    assert 0.935 < n_inside / 1000 < 0.965


@pytest.mark.parametrize("n", [1504, 16384])
def test_interval_of_a_perplexity_is_students_over_eight_blocks(n):
    nll = np.random.default_rng(0).normal(3, 1, size=n)
    blocks = nll.reshape(8, -1)
    record, error = quality(nll), blocks.mean(axis=1).std(ddof=1) / np.sqrt(8)
    assert record["nll_stderr"] == pytest.approx(error, rel=0.02)
    assert record["perplexity_low"] == pytest.approx(np.exp(nll.mean() - 2.365 * error), rel=0.01)
    assert record["perplexity_high"] == pytest.approx(np.exp(nll.mean() + 2.365 * error), rel=0.01)


@pytest.mark.parametrize("n", [1, 2, 7])
def test_perplexity_of_less_than_eight_tokens_has_no_interval(n):
    record = quality(np.arange(n) * 10.0)
    assert {record[name] for name in ("perplexity_low", "perplexity_high", "nll_stderr")} == {None}
