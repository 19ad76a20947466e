"""Tests of differences, against their definitions and against draws without a difference."""

from __future__ import annotations

import numpy as np
import pytest

from lab.papers import significance


def test_signs_tell_a_difference_only_where_enough_items_differ():
    # three differences are not 0, so there are 8 combinations of signs. In 2 of them the mean is as far from
    # 0 as measured
    assert significance.sign_flip_test(np.repeat([1.0, 0.0], [3, 5])) == 0.25
    assert significance.sign_flip_test(np.zeros(8)) == 1
    assert significance.sign_flip_test(np.ones(6)) == 2 / 2**6
    assert significance.sign_flip_test(np.array([3.0, -1.0])) == 1
    assert significance.sign_flip_test(np.array([0.1, 0.2, 0.3])) == 0.25


def test_signs_of_many_items_are_drawn_and_agree_with_all_of_them():
    rng = np.random.default_rng(1)
    for shift in (0.0, 0.4, 0.8):
        values = rng.normal(size=16) + shift
        exact = significance.sign_flip_test(values)
        # with one more difference, of almost 0, there are too many differences to try all signs
        drawn = significance.sign_flip_test(np.append(values, 1e-12))
        assert drawn == pytest.approx(exact, abs=0.015)


def test_without_a_difference_one_test_in_twenty_finds_one():
    rng = np.random.default_rng(2)
    is_significant = [significance.sign_flip_test(rng.normal(size=12)) <= 0.05 for _ in range(600)]
    assert 0.02 < np.mean(is_significant) < 0.08


def test_of_many_tests_holm_lets_chance_find_one_in_a_table_of_twenty():
    # Holm (1979) multiplies the sorted p-values: 4 x .005, 3 x .01, 2 x .03 and 1 x .04. The last product is
    # raised to .06, the product before it
    assert significance.holm(np.array([0.01, 0.04, 0.03, 0.005])) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert significance.holm(np.array([0.9, 0.8])).tolist() == [1, 1]
    assert significance.holm(np.array([])).tolist() == []
    rng = np.random.default_rng(3)
    tables = rng.random((2000, 20))
    assert np.mean([(significance.holm(table) <= 0.05).any() for table in tables]) == pytest.approx(
        0.05, abs=0.015
    )
