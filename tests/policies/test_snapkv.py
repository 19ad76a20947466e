"""SnapKV: how votes are pooled, which queries vote, and one compression of a whole prompt."""

import numpy as np
from fake_cache import Cache, kept_at_first, view_of
from reference.snapkv import pooled

from kvtool import policies
from kvtool.policies.snapkv import SnapKV


def kept_positions(votes, n_keep, **params):
    return kept_at_first(SnapKV.fit(n_keep + 1, 1, **params), view_of(len(votes), recent=votes))


def test_vote_also_keeps_neighbouring_tokens():
    votes = [0, 0, 0, 9, 0, 0, 0, 0, 0, 0]
    assert kept_positions(votes, 4, window=1, kernel=3) == [2, 3, 4, 9]
    assert kept_positions(votes, 4, window=1, kernel=3, pool="max") == [2, 3, 4, 9]
    # on ties, the newer token stays
    assert kept_positions(votes, 4, window=1, kernel=1) == [3, 7, 8, 9]


def test_avg_and_max_pooling_keep_different_tokens():
    votes = [0, 5, 0, 0, 3, 0, 3, 0, 0, 0]
    assert kept_positions(votes, 2, window=1, kernel=3) == [5, 9]
    assert kept_positions(votes, 2, window=1, kernel=3, pool="max") == [2, 9]


def test_votes_for_the_window_are_not_pooled():
    votes = [0, 1, 0, 0, 0, 0, 0, 0, 9, 9]
    assert kept_positions(votes, 4, window=2, kernel=3) == [1, 2, 8, 9]


def test_pooling_of_the_twin_matches_the_published_code():
    # the expected values are results of torch.nn.functional.avg_pool1d, times 5, and of max_pool1d, with
    # kernel_size=5, padding=2 and stride=1
    values = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    assert pooled(values, 5, "avg") == [7, 15, 31, 62, 60, 56]
    assert pooled(values, 5, "max") == [4, 8, 16, 32, 32, 32]


def test_number_of_voting_queries_is_the_window():
    assert policies.fit("snapkv", 512).n_query == policies.fit("snapkv", 512).window == 32
    assert policies.fit("snapkv", 512, None, ["window=7"]).n_query == 7
    assert policies.fit("snapkv", 20, 4).n_query == 8


def test_prompts_are_read_whole_and_compressed_like_a_plan():
    policy = policies.fit("snapkv", 24, 4)
    assert policy.prefill == "whole"
    cache = Cache(2, 2, 100, policy, seed=0)
    cache.grow(100)
    view = cache.view()
    keep = policy.compress(view).keep
    np.testing.assert_array_equal(keep, policy.plan(view, ()).keep)
    assert keep.sum(axis=1).tolist() == [20] * 4
