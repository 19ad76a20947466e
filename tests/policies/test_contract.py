"""Guarantees of every policy. The tests find policies by their names, never by their types."""

import math
import re
from dataclasses import fields, replace
from functools import partial

import numpy as np
import pytest
from fake_cache import Cache, kept_positions
from test_policies import CASES

from kvtool import policies
from kvtool.errors import UsageError
from kvtool.parameters import explained

every_policy = pytest.mark.parametrize("name", policies.names())
# all policies but full, which never evicts
EVICTING = [name for name in policies.names() if policies.load(name).evicts]
every_evicting_policy = pytest.mark.parametrize("name", EVICTING)
# tests of state run only for policies that have state
every_policy_with_state = pytest.mark.parametrize(
    "name", [name for name in EVICTING if policies.fit(name, 512).start(1, 512, 8)]
)


def make(name, budget, seed=0):
    policy = policies.fit(name, budget)
    return policy, Cache(3, 2, 3 * budget, policy, seed, twin=False)


def plans(name, budget, pinned=0, n_plan=5, held=0):
    """Yield (policy, cache, view, plan) for each plan of a stream, before the plan is applied."""
    policy, cache = make(name, budget)
    for step in range(n_plan):
        cache.grow(max(policy.n_live - cache.n_kv + (0, 0, 1, budget)[step % 4], 1))
        view, plan = cache.plan(pinned, held)
        yield policy, cache, view, plan
        cache.apply(plan.keep)


@pytest.mark.parametrize("budget", [16, 65])
@every_evicting_policy
def test_rows_keep_protected_tokens_and_fewer_than_the_budget(name, budget):
    n_keep, (sinks, _) = policies.fit(name, budget).n_keep, policies.fit(name, budget).exempt
    with_held = (0, min(6, n_keep - 4)), (0, n_keep - max(sinks, 1)), (5, n_keep - 5)
    for n_pinned, n_held in ((0, 0), (1, 0), (n_keep - 2, 0), (n_keep - 1, 0), *with_held):
        for policy, cache, view, plan in plans(name, budget, n_pinned, held=n_held):
            assert plan.keep.dtype == np.bool_
            assert plan.keep.shape == view.pos.shape
            protected = {*range(max(sinks, n_pinned)), *range(cache.next - max(n_held, 1), cache.next)}
            for row in kept_positions(view, plan):
                assert protected <= set(row)
                assert len(row) < policy.n_live
            assert policy.ragged or len(set(plan.keep.sum(axis=1).tolist())) == 1


@every_policy
def test_keeps_all_tokens_that_fit(name):
    policy, cache = make(name, 40)
    cache.grow(policy.n_keep)
    assert cache.plan()[1].keep.all()


def test_full_keeps_all_even_at_the_budget():
    policy, cache = make("full", 40)
    assert not policy.evicts
    assert policy.slack == 0
    for n_token in (40, 1):
        cache.grow(n_token)
        assert cache.plan()[1].keep.all()


@every_policy
def test_plans_the_same_for_the_same_input(name):
    for policy, cache, view, _ in plans(name, 40):
        states = [tuple(array.copy() for array in cache.state) for _ in range(2)]
        for state in states:
            policy.observe(view, state)
        first, second = (policy.plan(view, state) for state in states)
        np.testing.assert_array_equal(first.keep, second.keep)
        for one, other in zip(*states, strict=True):
            np.testing.assert_array_equal(one, other)


@every_policy
def test_does_not_change_the_view(name):
    policy, cache = make(name, 40)
    cache.grow(50)
    view = cache.view()
    arrays = [value for field in fields(view) if hasattr(value := getattr(view, field.name), "dtype")]
    before = [array.copy() for array in arrays]
    policy.observe(view, cache.state)
    policy.plan(view, cache.state)
    for array, copy in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_only_policies_that_count_queries_use_lived(name, options):
    policy = policies.fit(name, 40, 8, options)
    cache = Cache(2, 2, 60, policy, 0, twin=False)
    cache.grow(60)
    view = replace(cache.view(), in_segments=True)
    if policy.counts_queries and not policy.request().needs_t:
        with pytest.raises(ValueError, match="has no view.lived"):
            policy.compress(view)
    else:
        policy.compress(view)


@every_policy_with_state
def test_writes_to_the_state_of_live_cells_only(name):
    policy, cache = make(name, 40)
    cache.grow(50)
    cache.plan()
    assert not any(array[:, cache.n_kv :].any() for array in cache.state)


@every_policy
def test_plan_does_not_depend_on_the_order_of_cells(name):
    policy, cache = make(name, 40)
    for n_token in (50, 30):
        cache.grow(n_token)
        before = tuple(array.copy() for array in cache.state)
        once = kept_positions(*cache.plan())
        for array, copy in zip(cache.state, before, strict=True):
            array[:] = copy
        cache.shuffle()
        view, plan = cache.plan()
        assert kept_positions(view, plan) == once
        cache.apply(plan.keep)


@every_policy_with_state
def test_initial_state_is_zero_and_has_an_entry_per_cell(name):
    for array in policies.fit(name, 40).start(6, 70, 8):
        assert array.shape[:2] == (6, 70)
        assert array.flags.c_contiguous
        assert not array.any()


@every_policy
def test_parameters_are_listed_explained_and_settable(name):
    policy = policies.load(name)
    listed = policies.params(policy)
    assert list(listed) == [field.name for field in fields(policy)][2:]
    assert list(listed.keys() - explained(policy).keys()) == []
    fitted = policies.fit(name, 64, 8)
    for param, default in listed.items():
        assert default is None or default == getattr(fitted, param)
    options = [f"{param}={getattr(fitted, param)}" for param in listed]
    assert policies.fit(name, 64, 8, options) == fitted


REFUSED = {
    "bumblebee": [
        ({"mixture": 1.5}, r"mixture must be in 0\.\.1, got 1\.5"),
        ({"mixture": math.nan}, r"mixture must be in 0\.\.1, got nan"),
        ({"phi": "sqrt"}, "phi must be one of log, power, got 'sqrt'"),
        ({"grow": -1.0}, "grow must be 0 or more, and finite, got -1"),
        ({"window": 53}, r"window must be in 0\.\.52 .*, got 53"),
    ],
    "buzz": [
        ({"sinks": -1}, "sinks must not be negative, got -1"),
        ({"stride": 2}, "stride must be 3 or more .*, got 2"),
        ({"window": 0}, "window must be 1 or more, got 0"),
        ({"window": 58}, r"threshold must be 2 or more, got 1 \(the budget of 64 less 4 sinks, 58 window"),
        ({"window": 5, "threshold": 9}, r"sinks 4 \+ window 5 \+ threshold 9 .* the budget of 64, got 19"),
    ],
    "cam": [
        ({"merge": 0}, "merge must be 1 or more, got 0"),
        ({"score": "mean"}, "score must be one of last, sum, average, got 'mean'"),
        ({"denominator": "min"}, "denominator must be one of mean, targets, max, got 'min'"),
        ({"sinks": 56}, "a budget of 64 is too small for 56 sinks, a window of 1 and 8 slack"),
    ],
    "expected": [
        ({"queries": 0}, "queries must be 1 or more, got 0"),
        ({"epsilon": math.nan}, "epsilon must not be negative, got nan"),
        ({"window": 0}, r"window must be in 1\.\.52 .*, got 0"),
    ],
    "h2o": [
        ({"score": "max"}, "score must be one of sum, mean, got 'max'"),
        ({"per": "head"}, "per must be one of row, layer, all, got 'head'"),
        ({"group": "last"}, "group must be one of sum, mean, max, first, got 'last'"),
        ({"decay": 1.5}, r"decay must be in 0\.\.1, got 1\.5"),
        ({"decay_beyond": -1.0}, r"decay_beyond must be in 0\.\.1, got -1\.0"),
        ({"heads": "uneven"}, "heads must be one of equal, adaptive, got 'uneven'"),
        ({"heads": "adaptive", "per": "layer"}, "heads=adaptive needs per=row, got per=layer"),
        ({"heads": "adaptive", "window": 57}, r"window must be in 0\.\.56 \(the budget of 64 less"),
    ],
    "keydiff": [({"window": 0}, r"window must be in 1\.\.52 .*, got 0")],
    "knorm": [({"window": 0}, r"window must be in 1\.\.52 .*, got 0")],
    "kvzip": [({"chunk": 0}, "chunk must be at least 1, got 0")],
    "rkv": [
        ({"mixture": 1.5}, r"mixture must be in 0\.\.1, got 1\.5"),
        ({"kernel": 4}, "kernel must be odd, 1 or more, got 4"),
        ({"threshold": 2.0}, r"threshold must be in -1\.\.1, got 2\.0"),
        ({"similar": -1}, "similar must not be negative, got -1"),
        ({"window": 0}, r"window must be in 1\.\.56 .*, got 0"),
    ],
    "roco": [
        ({"keep_std": 47}, r"keep_std must be in 0\.\.42 .* 8 slack, 4 sinks and 10 window\), got 47"),
    ],
    "scissorhands": [({"window": 1, "history": 0}, "history must be 1 or more, got 0")],
    "snapkv": [
        ({"kernel": 4}, "kernel must be odd, 1 or more, got 4"),
        ({"kernel": -1}, "kernel must be odd, 1 or more, got -1"),
        ({"pool": "min"}, "pool must be one of avg, max, got 'min'"),
        ({"window": 0}, r"window must be in 1\.\.56 .*, got 0"),
        ({"layers": "uneven"}, "layers must be one of equal, adaptive, got 'uneven'"),
        ({"floor": 1.2}, r"floor must be in 0\.\.1, got 1\.2"),
        ({"floor": 0.5}, "floor needs heads=adaptive: the rows of a layer keep the same number of cells"),
    ],
    "tova": [({"per": "head"}, "per must be one of layer, row, got 'head'")],
    "weightedkv": [
        ({"window": 60}, r"window must be in 1..52 \(the budget of 64 less 8 slack and 4 sinks\), got 60"),
        ({"sinks": -1}, "sinks must not be negative, got -1"),
    ],
}


@pytest.mark.parametrize(
    ("name", "params", "message"), [(name, *case) for name, cases in REFUSED.items() for case in cases]
)
def test_refuses_parameters_that_cannot_work(name, params, message):
    with pytest.raises(ValueError, match=message):
        policies.load(name).fit(64, 8, **params)


@every_evicting_policy
def test_refusal_of_a_small_budget_names_the_smallest_that_works(name):
    fit = partial(policies.fit, name)
    with pytest.raises(UsageError) as caught:
        fit(1)
    matched = re.fullmatch(rf"a budget of 1 is too small for {name}; use at least (\d+)", str(caught.value))
    smallest = int(matched[1])
    # the message does not mention a window, since the caller gave none
    with pytest.raises(
        UsageError, match=f"^a budget of .* is too small for {name}; use at least {smallest}$"
    ):
        fit(smallest - 1)
    assert fit(smallest).budget == smallest


@pytest.mark.parametrize(
    ("policy", "how", "message"),
    [
        (("keydiff", 5), (), "a budget of 5 is too small for keydiff; use at least 6"),
        (
            ("h2o", 64),
            (None, ["window=63"]),
            "h2o: window must be in 0..56 (the budget of 64 less 8 slack and 0 sinks), got 63; "
            "with these parameters use a budget of at least 71",
        ),
        (
            ("h2o", 64),
            (None, ["sinks=60"]),
            "h2o: a budget of 64 is too small for 60 sinks and 8 slack; "
            "with these parameters use a budget of at least 69",
        ),
        (
            ("streamingllm", 64),
            (None, ["sinks=60"]),
            "streamingllm: a budget of 64 is too small for 60 sinks, a window of 1 and 8 slack; "
            "with these parameters use a budget of at least 69",
        ),
        (
            ("streamingllm", 64),
            (63,),
            "a budget of 64 is too small for streamingllm with --evict-every 63; use at least 68",
        ),
        # no budget would help, so the message does not name one
        (
            ("corm", 64),
            (None, ["window=0"]),
            "corm: window must be in 1..56 (the budget of 64 less 8 slack and 0 sinks), got 0",
        ),
    ],
)
def test_refusal_names_the_options_that_the_user_typed(policy, how, message):
    with pytest.raises(UsageError) as caught:
        policies.fit(*policy, *how)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "name", [name for name in EVICTING if {"sinks", "window"} <= policies.params(policies.load(name)).keys()]
)
def test_default_window_leaves_room_for_the_sinks(name):
    for sinks in (5, 20, 30):
        # a window of 1 needs the smallest budget
        least = policies.spec(name, options=[f"sinks={sinks}", "window=1"]).smallest_budget()
        for budget in range(least, 2 * least):
            assert policies.fit(name, budget, None, [f"sinks={sinks}"]).sinks == sinks


@every_evicting_policy
def test_smallest_budget_keeps_sinks_and_newest_token(name):
    budget = policies.spec(name).smallest_budget()
    for policy, cache, view, plan in plans(name, budget):
        for row in kept_positions(view, plan):
            assert set(row) >= {*range(getattr(policy, "sinks", 0)), cache.next - 1}
            assert len(row) < budget


def test_unknown_policy_error_suggests_similar_names():
    with pytest.raises(UsageError) as caught:
        policies.load("h20")
    assert str(caught.value) == "unknown policy 'h20'. Did you mean h2o? See `kvtool policies`."


def test_evict_every_above_the_budget_is_refused():
    with pytest.raises(UsageError) as caught:
        policies.fit("h2o", 512, 900)
    assert str(caught.value) == "--evict-every must be less than the budget (512), got 900"
