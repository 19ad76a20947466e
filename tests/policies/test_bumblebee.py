"""BumbleBee: summaries of whole prompts, both forms of the function phi, and the policy's state.

test_policies.py compares its plans with the definition.
"""

import math
from itertools import combinations

import numpy as np
import pytest
from fake_cache import Cache, kept_positions
from reference import bumblebee as twin
from reference.random import splitmix64

from kvtool import policies
from kvtool.policies._bumblebee import _phi, _slope
from kvtool.policies.bumblebee import BumbleBee
from kvtool.policy import View

MODES = ["f32", "f16", "recompute"]


def fit(budget, slack, **params):
    return BumbleBee.fit(budget, slack, **{"sinks": 0, "window": 0, **params})


def picked(view, cells):
    """Return a view of the cells i[row, n]."""
    pos, attn = (np.take_along_axis(array, cells, axis=1) for array in (view.pos, view.attn))
    keys = np.take_along_axis(view.keys, cells[..., None], axis=1)
    return View(pos, view.layer, view.next, attn=attn, keys=keys)


def prompt(n, seed, *, n_row=1, n_value=4, n_dim=4, shuffled=True):
    """Return a prompt of n tokens in two forms: as a view with shuffled rows, and as rows for a twin."""
    rng = np.random.default_rng(seed)
    pos = np.tile(np.arange(n, dtype=np.int32), (n_row, 1))
    if shuffled:
        pos = rng.permuted(pos, axis=1)
    attn = rng.integers(0, n_value, (n_row, n)).astype(np.float32) / 4
    keys = rng.integers(-2, 3, (n_row, n, n_dim)).astype(np.float32)
    view = View(pos, np.zeros(n_row, np.int32), n, attn=attn, keys=keys)
    return view, [records(view, row) for row in range(n_row)]


def records(view, row):
    cells = np.argsort(view.pos[row])
    columns = (view.pos[row, cells], view.attn[row, cells], view.keys[row, cells])
    names = ("pos", "mass", "key")
    return [
        dict(zip(names, values, strict=True))
        for values in zip(*(column.tolist() for column in columns), strict=True)
    ]


@pytest.mark.share(1)
@pytest.mark.parametrize("phi", ["log", "power"])
@pytest.mark.parametrize("mixture", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("n_value", [4, 1, 400])
def test_lazy_greedy_keeps_the_tokens_of_plain_greedy(phi, mixture, n_value):
    for n, n_keep in ((1, 1), (9, 1), (9, 8), (30, 11), (47, 20)):
        policy = fit(n_keep + 1, 1, phi=phi, mixture=mixture)
        view, rows = prompt(n, seed=n, n_row=3, n_value=n_value)
        expected = [sorted(twin.summary(row, (), n_keep, mixture, phi)) for row in rows]
        assert kept_positions(view, policy.compress(view)) == expected


@pytest.mark.parametrize("cosine", ["shifted", "absolute"])
@pytest.mark.parametrize("greedy", ["lazy", "stochastic"])
def test_summary_uses_the_requested_similarity(greedy, cosine):
    view, rows = prompt(40, seed=3, n_row=4, n_value=400)
    # for such a small summary, stochastic greedy samples all remaining tokens, so it equals lazy greedy
    summaries = kept_positions(view, fit(12, 1, mixture=0.9, greedy=greedy, cosine=cosine).compress(view))
    assert summaries == [sorted(twin.summary(row, (), 11, 0.9, "log", cosine=cosine)) for row in rows]
    assert summaries != [sorted(twin.summary(row, (), 11, 0.9, "log")) for row in rows]


@pytest.mark.parametrize("cosine", ["relu", "shifted", "absolute"])
def test_similarities_match_their_formulas(cosine):
    angles = np.array([0, 50, 90, 140, 180])
    keys = np.stack([np.cos(np.radians(angles)), np.sin(np.radians(angles))], axis=1)
    cosines = np.cos(np.radians(angles))
    right = {"relu": np.maximum(cosines, 0), "shifted": (1 + cosines) / 2, "absolute": np.abs(cosines)}
    policy = fit(6, 1, cosine=cosine, similarity="f32")
    state = policy.start(1, 5, 2)
    pos = np.arange(5, dtype=np.int32)[None]
    new = keys[None].astype(np.float32)
    policy.observe(View(pos, np.zeros(1, np.int32), 5, attn=np.zeros((1, 5), np.float32), keys=new), state)
    np.testing.assert_allclose(state[4][0, 0, 1:], right[cosine][1:], atol=1e-4)
    pairs = twin.similarities(new[0].tolist(), cosine=cosine)
    np.fill_diagonal(pairs, 0)
    np.testing.assert_array_equal(state[4][0], pairs)


def test_growing_summary_is_logarithmic_up_to_the_budget():
    policy = BumbleBee.fit(64, 8, window=6, grow=4.5)
    sizes = []
    for n in (70, 200, 900, 9000, 10**6):
        view, _ = prompt(70, seed=1)
        pos = view.pos + np.where(view.pos >= 10, n - 70, 0).astype(np.int32)
        view = View(pos, view.layer, n, attn=view.attn, keys=view.keys)
        state = policy.start(1, 70, 4)
        policy.observe(view, state)
        sizes.append(int(policy.plan(view, state).keep.sum()))
        assert policy.compress(view).keep.sum() == sizes[-1]
    assert sizes == [min(56, 10 + math.ceil(4.5 * math.log(1 + n))) for n in (70, 200, 900, 9000, 10**6)]
    # after 70 tokens of a stream, a summary has 30 tokens; after a million, it has 56, the maximum
    assert sizes[::4] == [30, 56]


@pytest.mark.parametrize("pinned", [0, 5])
@pytest.mark.parametrize("greedy", ["lazy", "stochastic"])
def test_summary_starts_with_sinks_pinned_and_newest_tokens(greedy, pinned):
    policy = fit(17, 3, sinks=2, window=4, greedy=greedy)
    view, rows = prompt(40, seed=3, n_row=4, n_value=400)
    view = View(view.pos, view.layer, view.next, pinned, attn=view.attn, keys=view.keys)
    stays = {*range(max(2, pinned)), *range(36, 40)}
    # for such a small summary, stochastic greedy samples all remaining tokens, so it equals lazy greedy
    expected = [sorted(twin.summary(row, stays, 14, 0.3, "log")) for row in rows]
    assert kept_positions(view, policy.compress(view)) == expected
    assert all(stays <= set(row) for row in expected)
    # greedy starts with the tokens of `stays`. If it started with none, it would choose other tokens
    assert expected != [sorted(twin.summary(row, (), 14, 0.3, "log")) for row in rows]


def test_pinned_tokens_shorten_the_window_of_a_summary():
    policy = fit(17, 3, sinks=2, window=12)
    view, _ = prompt(40, seed=3, n_row=4)
    view = View(view.pos, view.layer, view.next, 9, attn=view.attn, keys=view.keys)
    assert kept_positions(view, policy.compress(view)) == [[*range(9), *range(35, 40)]] * 4


@pytest.mark.parametrize("mode", MODES)
def test_only_pinned_tokens_stay_if_there_are_too_many(mode):
    policy = fit(17, 3, window=4, similarity=mode)
    view, _ = prompt(40, seed=3, n_row=2)
    view = View(view.pos, view.layer, view.next, 20, attn=view.attn, keys=view.keys)
    state = policy.start(2, 40, 4)
    policy.observe(view, state)
    for plan in (policy.plan(view, state), policy.compress(view)):
        assert kept_positions(view, plan) == [[*range(20)]] * 2


def test_a_prompt_that_fits_is_kept_whole():
    for n in (10, 12):
        view, _ = prompt(n, seed=0)
        assert fit(14, 2).compress(view).keep.all()


def test_greedy_reaches_63_percent_of_the_best_summary():
    shares = []
    for n in (3, 7, 10, 12):
        for seed, mixture in enumerate((0.0, 0.3, 0.8, 1.0)):
            phi = ("log", "power")[n % 2]
            view, (row,) = prompt(n, seed, n_dim=2 + seed % 3)
            pairs = twin.similarities([token["key"] for token in row])
            for n_keep in range(1, n):
                (summary,) = kept_positions(view, fit(n_keep + 1, 1, mixture=mixture, phi=phi).compress(view))
                # the position of each token is its index in the row, because this is a prompt
                best = max(
                    twin.worth(subset, range(n), row, pairs, mixture, phi)
                    for subset in combinations(range(n), n_keep)
                )
                shares.append(twin.worth(summary, range(n), row, pairs, mixture, phi) / best if best else 1)
    assert min(shares) >= 1 - 1 / math.e
    # some summaries are worse than the best. Otherwise this test would say nothing about the bound
    assert min(shares) < 0.99


def draws(seed, step, row):
    """Return draw(pick, i) of stochastic greedy: a hash of seed, step, row, pick and i."""
    start = splitmix64(splitmix64(splitmix64(seed) + step & 2**64 - 1) + row & 2**64 - 1) >> 33

    def draw(pick, i):
        x = start
        for part in (pick, i):
            x = (x + part * 0x3C6EF372 + 0x1E3779B9) % 2**32
            x = (x ^ x >> 16) * 0x7FEB352D % 2**32
            x = (x ^ x >> 15) * 0x35A2D97B % 2**32
            x ^= x >> 16
        return x

    return draw


@pytest.mark.large
@pytest.mark.parametrize("seed", [0, 1, -7])
def test_stochastic_greedy_looks_at_a_sample_drawn_by_hash(seed):
    n, n_keep, n_row = 80, 40, 3
    view, rows = prompt(n, seed=11, n_row=n_row, n_value=400)
    expected, looked = [], []
    for number, row in enumerate(rows):
        draw, pick = draws(seed % 2**64, n, number), iter(range(n))

        def sample(rest, draw=draw, pick=pick):
            n_look = min(math.ceil(n / n_keep * math.log(1e5)), len(rest))
            number = next(pick)
            for i in range(n_look):
                j = i + draw(number, i) % (len(rest) - i)
                rest[i], rest[j] = rest[j], rest[i]
            looked.append(n_look / len(rest))
            return rest[:n_look]

        expected.append(sorted(twin.summary(row, (), n_keep, 0.3, "log", sample)))
    assert looked[0] < 0.5
    actual = kept_positions(view, fit(n_keep + 1, 1, greedy="stochastic", seed=seed).compress(view))
    assert actual == expected
    assert actual != kept_positions(view, fit(n_keep + 1, 1, greedy="stochastic", seed=5).compress(view))
    assert actual != kept_positions(view, fit(n_keep + 1, 1).compress(view))


@pytest.mark.large
@pytest.mark.parametrize("greedy", ["lazy", "stochastic"])
def test_summary_does_not_depend_on_the_order_of_cells(greedy):
    policy = fit(41, 1, greedy=greedy)
    view, _ = prompt(80, seed=5, n_row=3)
    in_order = picked(view, np.argsort(view.pos, axis=1))
    assert kept_positions(view, policy.compress(view)) == kept_positions(in_order, policy.compress(in_order))


@pytest.mark.parametrize("x", [0, 1e-9, 1e-3, 0.3, 1, 1.04, 7, 1e3, 1e7, 1e10])
def test_phi_functions_and_their_slopes_match_the_formulas(x):
    assert _phi(x, False) == pytest.approx(math.log(1 + x), rel=1e-6)
    y = _phi(x, True)
    assert 0.04 * y**25 + y == pytest.approx(x, rel=1e-12)
    assert y == pytest.approx(twin.power(x), rel=1e-12)
    if x < 1e6:
        for power in (False, True):
            step = 1e-5 * (1 + x)
            rise = (_phi(x + step, power) - _phi(x, power)) / step
            assert _slope(x, power) == pytest.approx(rise, rel=1e-3)


def corners(cache):
    """Return keys with four elements of 0 and four of 1 or -1: cosines are multiples of 1/4, exact in f16."""
    n_row, n_token, n_dim = cache.keys.shape
    order = cache.rng.random((n_row, n_token, n_dim)).argsort(axis=2)
    signs = cache.rng.choice(np.array([-1, 1], np.float32), (n_row, n_token, n_dim))
    return np.where(order < 4, signs, np.float32(0))


class CornerCache(Cache):
    def _reduce(self, attention, n_seen, steps):
        # replace the random keys of Cache.grow, before `rows` gets the keys of the new tokens
        self.keys = corners(self)
        super()._reduce(attention, n_seen, steps)


def stream(mode, seed=4, n_plan=14, **params):
    """Yield (cache, view, plan) for each plan of a stream, before the plan is applied."""
    policy = BumbleBee.fit(30, 5, similarity=mode, **params)
    cache = CornerCache(2, 2, 80, policy, seed, n_value=64, n_dim=8)
    for step in range(n_plan):
        cache.grow(max(30 + (0, 2, 9)[step % 3] - cache.n_kv, 1))
        view, plan = cache.plan()
        yield cache, view, plan
        cache.apply(plan.keep)


@pytest.mark.large
@pytest.mark.parametrize("params", [{}, {"mixture": 0.9, "phi": "power"}], ids=str)
def test_every_similarity_format_gives_the_same_plans(params):
    plans = {mode: [kept_positions(view, plan) for _, view, plan in stream(mode, **params)] for mode in MODES}
    assert plans["f16"] == plans["recompute"] == plans["f32"]


@pytest.mark.parametrize("mode", MODES)
def test_state_matches_one_computed_from_scratch(mode):
    n_known = n_bound = 0
    for cache, view, plan in stream(mode, mixture=0.9, window=2, sinks=0):
        units, mass, near, nearest, *rest = cache.state
        for row, records_of_row in enumerate(cache.rows):
            token_of = {token["pos"]: token for token in records_of_row}
            tokens = [token_of[pos] for pos in view.pos[row].tolist()]
            pairs = twin.similarities([token["key"] for token in tokens], half=mode == "f16")
            np.fill_diagonal(pairs, 0)
            n = len(tokens)
            assert units[row, :n].tolist() == [twin.normalized(token["key"]) for token in tokens]
            assert mass[row, :n].tolist() == [token["mass"] for token in tokens]
            for matrix in rest:
                live_pairs = matrix[row, :n, :n]
                np.testing.assert_array_equal(
                    live_pairs if mode == "f32" else live_pairs.view(np.float16), pairs
                )
            # `near` is the similarity of a kept token to its nearest neighbour. It is exact if `nearest`
            # names this neighbour. If the neighbour was evicted, `nearest` is -1, and `near` is an upper
            # bound
            cells = np.flatnonzero(plan.keep[row])
            cell_of = {int(view.pos[row, cell]): cell for cell in cells}
            for cell in cells:
                right = pairs[cell, cells].max()
                if nearest[row, cell] >= 0:
                    assert near[row, cell] == right == pairs[cell, cell_of[int(nearest[row, cell])]]
                    n_known += 1
                else:
                    assert near[row, cell] >= right
                    n_bound += near[row, cell] > 0
    assert n_known > 20
    assert n_bound > 20


@pytest.mark.large
@pytest.mark.parametrize("mode", MODES)
def test_similarities_are_cosines_of_keys_rounded_once(mode):
    rng = np.random.default_rng(2)
    n, n_dim = 300, 33
    keys = rng.standard_normal((1, n, n_dim)).astype(np.float32)
    # some keys are twice as long as others, some are opposite, one is zero, and the square of one overflows
    # float32
    keys[0, 20:40] = 2 * keys[0, :20]
    keys[0, 40:45] = -keys[0, :5]
    keys[0, 50] = 0
    keys[0, 51] *= 1e30
    policy = fit(n, 1, similarity=mode)
    state = policy.start(1, n, n_dim)
    pos, layer = np.arange(n, dtype=np.int32)[None], np.zeros(1, np.int32)
    for begin, end in ((0, 1), (1, 125), (125, n)):
        attn = np.zeros((1, end), np.float32)
        new = keys[:, begin:end].copy()
        policy.observe(View(pos[:, :end].copy(), layer, end, attn=attn, keys=new), state)
    right = twin.similarities(keys[0].tolist(), half=mode == "f16")
    np.fill_diagonal(right, 0)
    np.testing.assert_array_equal(state[2][0], right.max(axis=1))
    np.testing.assert_array_equal(right[np.arange(n), state[3][0]], right.max(axis=1))
    for matrix in state[4:]:
        np.testing.assert_array_equal(matrix[0].view(np.float16) if mode == "f16" else matrix[0], right)
    # the twin's similarities equal ReLU(cosine)
    length = np.sqrt((keys[0].astype(float) ** 2).sum(axis=1, keepdims=True))
    unit = np.divide(keys[0], length, where=length > 0, out=np.zeros((n, n_dim)))
    cosines = np.maximum(unit @ unit.T, 0)
    np.fill_diagonal(cosines, 0)
    np.testing.assert_allclose(right, cosines, atol=1e-3 if mode == "f16" else 2e-4)


@pytest.mark.parametrize("mode", MODES)
def test_move_reorders_all_arrays_of_the_state(mode):
    policy = fit(20, 4, similarity=mode)
    cache = Cache(1, 3, 30, policy, seed=0)
    cache.grow(20)
    cache.plan()
    before = [array.copy() for array in cache.state]
    rng = np.random.default_rng(1)
    for n_keep, dtype in ((20, np.int64), (13, np.int32)):
        source = np.array([rng.permutation(20)[:n_keep] for _ in range(3)])
        # the cells of row 0 do not move
        source[0] = np.arange(n_keep)
        source[1, :2] = np.setdiff1d(np.arange(20), source[1, 2:])[:2]
        state = tuple(array.copy() for array in before)
        policy.move(state, source.astype(dtype))
        for row in range(3):
            for array, old in zip(state[:4], before, strict=False):
                np.testing.assert_array_equal(array[row, :n_keep], old[row, source[row]])
            if mode != "recompute":
                expected = before[4][row][np.ix_(source[row], source[row])]
                np.testing.assert_array_equal(state[4][row, :n_keep, :n_keep], expected)


@pytest.mark.parametrize("mode", MODES)
def test_stream_continues_after_a_prompt_read_whole(mode):
    policy = policies.fit("bumblebee", 24, 4, [f"similarity={mode}"])
    cache = CornerCache(1, 3, 80, policy, seed=8, n_value=64, n_dim=8)
    cache.grow(60)
    view = cache.view()
    plan = policy.compress(view)
    stays = {*range(4), *range(50, 60)}
    expected = [sorted(twin.summary(row, stays, 20, 0.3, "log")) for row in cache.rows]
    assert kept_positions(view, plan) == expected

    view = picked(view, np.array([np.flatnonzero(keep) for keep in plan.keep]))
    cache.apply(plan.keep)
    cache.pos[:, :20] = view.pos
    cache.state = policy.start(3, 80, 8)
    policy.adopt(view, cache.state)
    params = policies.chosen(policy)
    for _ in range(4):
        cache.grow(24 - cache.n_kv)
        view, plan = cache.plan()
        expected = twin.keep(cache.rows, next=cache.next, pinned=0, budget=24, slack=4, **params)
        assert kept_positions(view, plan) == expected
        cache.apply(plan.keep)


@pytest.mark.large
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("phi", ["log", "power"])
def test_evicts_the_tokens_of_the_definition_if_few_have_most_attention(mode, phi):
    rng = np.random.default_rng(6)
    n, n_dim = 150, 16
    policy = BumbleBee.fit(n, 40, similarity=mode, phi=phi, window=5)
    centers = rng.standard_normal((20, n_dim))
    keys = (centers[rng.integers(0, 20, n)] + 0.3 * rng.standard_normal((n, n_dim))).astype(np.float32)
    # a key of zeros is not similar to any key
    keys[[30, 31, 90]] = 0
    attn = rng.pareto(0.7, (1, n)).astype(np.float32)
    attn[0, 60:75] = 0
    pos = rng.permutation(n).astype(np.int32)[None]
    view = View(pos, np.zeros(1, np.int32), n, attn=attn, keys=keys[None])
    state = policy.start(1, n, n_dim)
    policy.observe(view, state)
    params = policies.chosen(policy)
    expected = twin.keep([records(view, 0)], next=n, pinned=0, budget=n, slack=40, **params)
    assert kept_positions(view, policy.plan(view, state)) == expected
