"""H2O's own: decisions over all rows, which its twin, given one layer at a time, cannot make."""

import numpy as np
import pytest
from fake_cache import Cache
from reference import h2o

from kvtool import policies
from kvtool.policies.h2o import H2O
from kvtool.policy import View


def kept(view, plan):
    return [sorted(pos[keep].tolist()) for pos, keep in zip(view.pos, plan.keep, strict=True)]


@pytest.mark.parametrize("options", [[], ["score=mean", "group=max"], ["decay=0.5", "window=3"]])
def test_one_decision_for_all_rows_is_that_on_their_sum(options):
    policy = policies.fit("h2o", 20, 3, ["per=all", *options])
    own = {param: getattr(policy, param) for param in policies.params(H2O)}
    cache = Cache(3, 2, 60, policy, seed=0)
    for step in range(10):
        cache.grow(max(20 + step % 3 - cache.n_kv, 1))
        view, plan = cache.plan()
        assert kept(view, plan) == h2o.keep(cache.rows, next=cache.next, pinned=0, budget=20, slack=3, **own)
        cache.apply(plan.keep)


@pytest.mark.parametrize(("per", "n_distinct"), [("row", 6), ("layer", 3), ("all", 1)])
def test_rows_that_decide_as_one_keep_the_same_tokens(per, n_distinct):
    options = ["score=mean", "window=1"]
    cache = Cache(3, 2, 60, policies.fit("h2o", 40, 20, [f"per={per}", *options]), seed=0, n_value=4096)
    cache.grow(40)
    assert len({tuple(row) for row in kept(*cache.plan())}) == n_distinct


def test_the_mean_over_a_group_is_asked_for_as_the_sum():
    assert policies.fit("h2o", 40, None, ["group=mean"]) == policies.fit("h2o", 40, None, ["group=sum"])


@pytest.mark.parametrize(("score", "evicted"), [("sum", 2), ("mean", 0)])
def test_a_mean_is_over_the_steps_that_a_token_has_lived(score, evicted):
    # the first token has the most, and has lived the longest
    attn = np.array([[4, 3.5, 3, 0]], np.float32)
    view = View(np.array([[0, 1, 2, 3]], np.int32), np.zeros(1, np.int32), 4, attn=attn)
    policy = H2O(4, 1, window=1, score=score)
    state = policy.start(1, 4, 0)
    policy.observe(view, state)
    assert np.flatnonzero(~policy.plan(view, state).keep[0]).tolist() == [evicted]


def test_sums_fade_with_every_token_that_comes_and_not_with_a_plan():
    policy = H2O(8, 1, window=1, decay=0.5)
    state = policy.start(1, 8, 0)

    def observe(n_kv, n_new, attention):
        pos = np.arange(n_kv, dtype=np.int32)[None]
        attn = np.full((1, n_kv), attention, np.float32)
        policy.observe(View(pos, np.zeros(1, np.int32), n_kv, n_new=n_new, attn=attn), state)
        return state[0][0, :n_kv].tolist()

    assert observe(2, 2, 8) == [8, 8]
    assert observe(5, 3, 1) == [2, 2, 1, 1, 1]
    assert observe(5, 0, 1) == [3, 3, 2, 2, 2]


@pytest.mark.parametrize(
    ("params", "n_ctx", "want"),
    [
        ({}, 4, [8, 8]),
        ({}, 3, [2, 2]),
        # the context is not known
        ({}, 0, [8, 8]),
        ({"decay": 0.25}, 3, [0.5, 0.5]),
        ({"score": "mean"}, 3, [8, 8]),
    ],
)
def test_sums_fade_beyond_the_context(params, n_ctx, want):
    policy = H2O(8, 1, window=1, decay_beyond=0.5, **params)
    state = policy.start(1, 8, 0)
    state[0][0, :2] = 8
    pos = np.arange(4, dtype=np.int32)[None]
    attn = np.zeros((1, 4), np.float32)
    policy.observe(View(pos, np.zeros(1, np.int32), 4, n_new=2, n_ctx=n_ctx, attn=attn), state)
    assert state[0][0, :2].tolist() == want


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"score": "max"}, "score must be one of sum, mean, got 'max'"),
        ({"per": "head"}, "per must be one of row, layer, all, got 'head'"),
        ({"group": "last"}, "group must be one of sum, mean, max, first, got 'last'"),
        ({"decay": 1.5}, r"decay must be in 0\.\.1, got 1\.5"),
        ({"decay": -0.5}, r"decay must be in 0\.\.1, got -0\.5"),
        ({"decay_beyond": -1.0}, r"decay_beyond must be in 0\.\.1, got -1\.0"),
        ({"decay": float("nan")}, r"decay must be in 0\.\.1, got nan"),
    ],
)
def test_refuses_what_cannot_work(params, message):
    with pytest.raises(ValueError, match=message):
        H2O.fit(64, 8, **params)
