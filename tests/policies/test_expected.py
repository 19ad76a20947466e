"""Expected Attention: expected logits, norms of values, and the queries that the policy asks for."""

import numpy as np
import pytest
from fake_cache import kept_at_first, view_of

from kvtool import policies
from kvtool.policies.expected import Expected
from kvtool.policy import Signal


def kept_positions(mean, n_keep, variance=None, norms=None, n_head=1, **params):
    """Return the tokens that stay. Token i is in cell i.

    mean, variance: mean and variance of the future logits, [head][token].
    """
    mean = np.array([mean], np.float32)
    variance = np.zeros_like(mean) if variance is None else np.array([variance], np.float32)
    n, future = mean.shape[2], {"future_mean": mean, "future_variance": variance}
    view = view_of(n, n_head=np.full(1, n_head, np.int32), value_norms=norms or [1] * n, **future)
    return kept_at_first(Expected.fit(n_keep + 1, 1, window=1, **params), view)


def test_half_of_the_variance_is_added_to_the_mean():
    mean, variance = [[0, 3, 1, 1, 0]], [[0, 0, 4.1, 3.9, 0]]
    assert kept_positions(mean, 2, variance, sinks=0) == [2, 4]
    assert kept_positions(mean, 3, variance, sinks=0) == [1, 2, 4]
    assert kept_positions(mean, 2, variance, sinks=0, covariance=False) == [1, 4]


def test_each_head_distributes_the_same_total_attention():
    # four tokens share the attention of the first head, and two tokens share that of the second head
    mean = [[9, 9, 9, 9, -99, -99], [-99, -99, -99, -99, -0.1, 0]]
    assert kept_positions(mean, 2, n_head=2, sinks=0) == [4, 5]
    # with n_head=1, the second head does not belong to the group
    assert kept_positions(mean, 2, n_head=1, sinks=0) == [3, 5]


def test_sinks_take_no_share_of_the_attention():
    # with sinks=0, token 0 takes all attention. The attention of the rest is below epsilon, so the lengths of
    # values decide
    mean, lengths = [[90, 2, 0, 0, 0]], [1, 1, 2, 1, 1]
    assert kept_positions(mean, 3, None, lengths, sinks=1, epsilon=0.02) == [0, 1, 4]
    assert kept_positions(mean, 2, None, lengths, sinks=0, epsilon=0.02) == [0, 4]
    assert kept_positions(mean, 3, None, lengths, sinks=0, epsilon=0.02) == [0, 2, 4]


def test_shares_are_multiplied_by_the_lengths_of_values():
    mean, lengths = [[1, 0.5, 0, 0]], [1, 2, 1, 1]
    assert kept_positions(mean, 2, None, lengths, sinks=0) == [1, 3]
    assert kept_positions(mean, 2, None, lengths, sinks=0, lengths=False) == [0, 3]
    # a long value that gets no attention stays only because of epsilon
    mean, lengths = [[5, -20, 5, 0]], [1, 90, 1, 1]
    assert kept_positions(mean, 2, None, lengths, sinks=0, epsilon=0.0) == [2, 3]
    assert kept_positions(mean, 2, None, lengths, sinks=0, epsilon=0.02) == [1, 3]


def test_requests_the_given_queries_and_skips_those_of_sinks():
    policy = policies.fit("expected", 512, None, ["queries=20", "ahead=7", "sinks=3"])
    request = policy.request()
    assert (request.n_query, request.n_future, request.n_skip) == (20, 7, 3)
    assert policy.reads == Signal.FUTURE | Signal.VALUE_NORMS
    assert policies.fit("expected", 512, None, ["lengths=false"]).reads == Signal.FUTURE
    assert policy.start(2, 512, 64) == ()


@pytest.mark.parametrize("options", [[], ["heads=adaptive"]], ids=["equal", "adaptive"])
def test_prompts_are_read_whole_by_default(options):
    assert policies.fit("expected", 512, None, options).prefill == "whole"
