"""WeightedKV's rule: which token merges into which, and with which weights."""

import numpy as np
import pytest
from fake_cache import view_of
from test_policies import make, merges_of, stream

from kvtool import policies
from kvtool.policies.weightedkv import WeightedKV


def merged(average, policy, pinned=0):
    """Return the merges {dst: {src: weight}} of a row, and the positions that stay.

    average: average attention of each token.
    """
    n = len(average)
    view = view_of(n, pinned=pinned, attn=[mean * (n - pos) for pos, mean in enumerate(average)])
    state = policy.start(1, n, 0)
    policy.observe(view, state)
    plan = policy.plan(view, state)
    return merges_of(view.pos, plan)[0], np.flatnonzero(plan.keep[0]).tolist()


def test_merge_weights_match_figure_3_of_the_paper():
    merges, positions = merged([0.7, 0.1, 0.5, 0.6, 0.8], WeightedKV(5, 1, window=1, sinks=0))
    assert positions == [0, 2, 3, 4]
    assert merges == {2: pytest.approx({1: 1 / 6, 2: 5 / 6})}


def test_merges_include_earlier_merges():
    # token 2 merges into 3, then 3 into 4. Token 1 merges last, into token 4, which is its neighbour by then
    merges, positions = merged([9, 3, 1, 2, 4, 9], WeightedKV(6, 3, window=1, sinks=1))
    assert positions == [0, 4, 5]
    third = {2: 1 / 3 * 2 / 6, 3: 2 / 3 * 2 / 6, 4: 4 / 6}
    assert merges == {4: pytest.approx({1: 3 / 7, **{src: weight * 4 / 7 for src, weight in third.items()}})}


def test_values_without_attention_get_equal_weights():
    merges, _ = merged([1, 0, 0, 1], WeightedKV(4, 1, window=1, sinks=0))
    assert merges == {2: {1: 0.5, 2: 0.5}}


def test_the_average_decides_not_the_sum():
    # all averages are equal, so the oldest token is evicted, although it has the largest sum
    _, positions = merged([1, 1, 1, 1, 1], WeightedKV(5, 1, window=1, sinks=0))
    assert positions == [1, 2, 3, 4]


def test_the_weights_of_a_merged_value_add_up_to_one():
    _, cache = make("weightedkv", [], 60, 30, seed=4, n_value=4096)
    for _ in range(4):
        cache.grow(60 - cache.n_kv)
        view, plan = cache.plan()
        for row in merges_of(view.pos, plan):
            for sources in row.values():
                assert sum(sources.values()) == pytest.approx(1, abs=1e-6)
                assert min(sources.values()) >= 0
        cache.apply(plan.keep)


@pytest.mark.large
def test_many_merges_at_once_match_the_definition(share_of):
    budget, evict_every, n_plan = share_of((110, 50, 5), (150, 60, 7))
    stream("weightedkv", [], budget, evict_every, seed=1, n_plan=n_plan)


def test_merge_false_evicts_without_merging():
    _, cache = make("weightedkv", ["merge=false"], 20, 4, seed=0)
    cache.grow(20)
    assert cache.plan()[1].merge is None


def test_value_of_an_evicted_newest_token_is_lost():
    # more tokens are pinned than may stay. The engine never makes such a view
    merges, positions = merged([1, 1, 1, 1, 1], WeightedKV(5, 3, window=1, sinks=0), pinned=3)
    assert positions == [0, 1, 2]
    assert merges == {}


def test_sinks_and_window_are_half_of_the_kept_tokens():
    assert policies.fit("weightedkv", 257, 1).window == 124
    assert policies.fit("weightedkv", 1025, 1).window == 508
    assert policies.fit("weightedkv", 257, 1, ["sinks=8"]).window == 120
