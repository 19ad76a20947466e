"""H2O: decisions over all rows (test_policies.py tests one layer at a time), means, and decaying sums."""

import pytest
from fake_cache import Cache, kept_at_first, kept_positions, view_of
from reference import h2o

from kvtool import policies
from kvtool.policies.h2o import H2O


@pytest.mark.parametrize("options", [[], ["score=mean", "group=max"], ["decay=0.5", "window=3"]])
def test_per_all_decides_by_the_sum_over_all_rows(options):
    policy = policies.fit("h2o", 20, 3, ["per=all", *options])
    args = policies.chosen(policy)
    cache = Cache(3, 2, 60, policy, seed=0)
    for step in range(10):
        cache.grow(max(20 + step % 3 - cache.n_kv, 1))
        view, plan = cache.plan()
        assert kept_positions(view, plan) == h2o.keep(
            cache.rows, next=cache.next, pinned=0, budget=20, slack=3, **args
        )
        cache.apply(plan.keep)


@pytest.mark.parametrize(("per", "n_distinct"), [("row", 6), ("layer", 3), ("all", 1)])
def test_per_option_sets_which_rows_keep_the_same_tokens(per, n_distinct):
    options = ["score=mean", "window=1"]
    cache = Cache(3, 2, 60, policies.fit("h2o", 40, 20, [f"per={per}", *options]), seed=0, n_value=4096)
    cache.grow(40)
    assert len({tuple(row) for row in kept_positions(*cache.plan())}) == n_distinct


def test_group_mean_equals_group_sum():
    assert policies.fit("h2o", 40, None, ["group=mean"]) == policies.fit("h2o", 40, None, ["group=sum"])


@pytest.mark.parametrize(("score", "evicted"), [("sum", 2), ("mean", 0)])
def test_mean_score_divides_by_the_age_of_the_token(score, evicted):
    # token 0 has the largest sum, but it is also the oldest, so its mean is the lowest outside the window
    stays = kept_at_first(H2O(4, 1, window=1, score=score), view_of(4, attn=[4, 3.5, 3, 0]))
    assert {*range(4)} - {*stays} == {evicted}


def test_sums_decay_with_every_token_and_not_with_plans():
    policy = H2O(8, 1, window=1, decay=0.5)
    state = policy.start(1, 8, 0)

    def observe(n_kv, n_new, attention):
        policy.observe(view_of(n_kv, n_new=n_new, attn=[attention] * n_kv), state)
        return state[0][0, :n_kv].tolist()

    assert observe(2, 2, 8) == [8, 8]
    assert observe(5, 3, 1) == [2, 2, 1, 1, 1]
    assert observe(5, 0, 1) == [3, 3, 2, 2, 2]


@pytest.mark.parametrize(
    ("params", "n_ctx", "expected"),
    [
        ({}, 4, [8, 8]),
        ({}, 3, [2, 2]),
        # n_ctx is 0 if the trained context is not known
        ({}, 0, [8, 8]),
        ({"decay": 0.25}, 3, [0.5, 0.5]),
        ({"score": "mean"}, 3, [8, 8]),
    ],
)
def test_decay_beyond_applies_after_the_trained_context(params, n_ctx, expected):
    policy = H2O(8, 1, window=1, decay_beyond=0.5, **params)
    state = policy.start(1, 8, 0)
    state[0][0, :2] = 8
    policy.observe(view_of(4, n_new=2, n_ctx=n_ctx, attn=[0] * 4), state)
    assert state[0][0, :2].tolist() == expected
