"""Every policy and its twin in tests/reference keep the same tokens at every plan of a long stream."""

from importlib import import_module

import numpy as np
import pytest
from fake_cache import Cache, kept_at_first, kept_positions, view_of
from reference.random import splitmix64

from kvtool import policies
from kvtool.errors import UsageError
from kvtool.kernels.selection import keep_highest, nth_lowest
from kvtool.policies.buzz import BUZZ
from kvtool.policies.tova import TOVA

CASES = [(name, options) for name in policies.names() for options in import_module(f"reference.{name}").CASES]


def make(name, options, budget, evict_every, seed, shape=(2, 3), **kwargs):
    policy = policies.fit(name, budget, evict_every, options)
    return policy, Cache(*shape, 3 * budget, policy, seed, **kwargs)


def merges_of(pos, plan):
    """Return {dst pos: {src pos: weight}} for each row. pos i32[row, cell]: positions of the tokens."""
    merges = [{} for _ in pos]
    if plan.merge is not None:
        m = plan.merge
        for row, dst, src, weight in zip(m.row, m.dst, m.src, m.weight, strict=True):
            sources = merges[row].setdefault(int(pos[row, dst]), {})
            sources[int(pos[row, src])] = sources.get(int(pos[row, src]), 0) + float(weight)
    return merges


def by_twin(name, policy, cache, pinned=0):
    """Return the tokens that the twin keeps, and its merges in the form of `merges_of`."""
    twin = import_module(f"reference.{name}")
    stays, merges = [], []
    for layer in np.unique(cache.layer):
        rows = [cache.rows[row] for row in np.flatnonzero(cache.layer == layer)]
        common = {"next": cache.next, "pinned": pinned, "budget": policy.budget, "slack": policy.slack}
        answer = twin.keep(rows, **common, **policies.chosen(policy))
        stay, terms = answer if isinstance(answer, tuple) else (answer, [{}] * len(rows))
        stays += stay
        merges += [{dst: dict(sources) for dst, sources in row.items()} for row in terms]
    return stays, merges


def stream(name, options, budget, evict_every, seed, pinned=0, n_plan=7, **kwargs):
    """Compare the plans of a stream with the plans of the policy's twin.

    At a plan, the number of cells is smaller than the budget, equal to it, or larger.
    """
    policy, cache = make(name, options, budget, evict_every, seed, **kwargs)
    for step in range(n_plan):
        target = budget + (0, -1, 0, 1, budget // 2)[step % 5]
        cache.grow(max(target - cache.n_kv, 1))
        view, plan = cache.plan(pinned)
        stays, merges = by_twin(name, policy, cache, pinned)
        assert kept_positions(view, plan) == stays, f"plan {step}"
        for actual, expected in zip(merges_of(view.pos, plan), merges, strict=True):
            assert actual.keys() == expected.keys(), f"plan {step}"
            for dst, sources in expected.items():
                assert actual[dst] == pytest.approx(sources, abs=1e-5), f"plan {step}"
        cache.apply(plan.keep)


@pytest.mark.share(1)
@pytest.mark.parametrize("evict_every", [1, 5])
@pytest.mark.parametrize("budget", [14, 37])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_keeps_the_same_tokens_as_the_definition(name, options, budget, evict_every):
    stream(name, options, budget, evict_every, seed=budget)


@pytest.mark.large
@pytest.mark.share(3, "options")
@pytest.mark.parametrize(("name", "options"), CASES)
def test_keeps_the_same_tokens_with_hardly_any_ties(share_of, name, options):
    stream(name, options, 30, 4, seed=1, n_value=4096, n_plan=share_of(5, 7))


@pytest.mark.large
@pytest.mark.share(3, "options")
@pytest.mark.parametrize(("name", "options"), CASES)
def test_keeps_the_same_tokens_if_all_scores_tie(share_of, name, options):
    stream(name, options, 30, 4, seed=2, n_value=1, n_plan=share_of(5, 7))


@pytest.mark.share(1)
@pytest.mark.parametrize("pinned", [3, 9, 10, 11, 12])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_keeps_the_same_tokens_next_to_pinned_ones(share_of, name, options, pinned):
    stream(name, options, 14, 1, seed=pinned, pinned=pinned, n_plan=share_of(5, 7))


@pytest.mark.share(3)
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (1, 4)])
@pytest.mark.parametrize("name", policies.names())
def test_keeps_the_same_tokens_with_any_number_of_layers_and_heads(name, shape, group):
    stream(name, [], 20, 3, seed=3, shape=shape, group=group)


def test_nth_lowest_equals_the_nth_value_of_a_sort():
    rng = np.random.default_rng(0)
    for n in (1, 2, 3, 10, 57):
        up = np.arange(n)
        for values in (up, up[::-1], np.abs(up - n // 2), rng.integers(0, 9, n)):
            for nth in range(n):
                padded = np.append(values, [-1, -1]).astype(np.int64)
                assert nth_lowest(padded, n, nth) == sorted(values)[nth]


def test_keep_highest_orders_negative_scores_and_both_zeros():
    pos = np.arange(7, dtype=np.int32)[None]
    score = np.array([[0.0, -2.0, 1.0, -0.0, -1.0, 0.0, -np.inf]], np.float32)
    leaves = [6, 1, 4, 0, 3, 5, 2]
    for n_keep in range(8):
        keep = np.empty((1, 7), np.bool_)
        keep_highest(pos, score, 0, 7, n_keep, keep)
        assert np.flatnonzero(~keep[0]).tolist() == sorted(leaves[: 7 - n_keep])


def test_keep_highest_keeps_the_number_asked_for_when_scores_are_nan():
    pos = np.arange(9, dtype=np.int32)[None]
    score = np.full((1, 9), np.nan, np.float32)
    score[0, ::2] = 1
    keep = np.empty((1, 9), np.bool_)
    keep_highest(pos, score, 1, 8, 4, keep)
    assert keep.sum() == 4
    assert keep[0, [0, 8]].all()


def test_keep_highest_keeps_only_protected_cells_if_there_are_too_many():
    # keep_highest uses the same buffer of scores for all rows. The second row has fewer unprotected tokens
    # than the first, and must not read the first row's scores from this buffer
    pos = np.array([[30, 31, 32, 33, 34, 35, 36, 37, 38], [0, 1, 2, 40, 41, 42, 43, 90, 91]], np.int32)
    score = np.repeat(np.array([[1], [2]], np.float32), 9, axis=1)
    keep = np.empty((2, 9), np.bool_)
    keep_highest(pos, score, 3, 90, 2, keep)
    assert np.flatnonzero(keep[0]).tolist() == [7, 8]
    assert np.flatnonzero(keep[1]).tolist() == [0, 1, 2, 7, 8]


def test_random_hashes_with_splitmix64():
    # the first two outputs of the generator from state 0, as its authors published them
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert splitmix64(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4


@pytest.mark.large
def test_random_keeps_every_token_about_equally_often_across_rows():
    n_row, n = 400, 24
    policy = policies.fit("random", 24, 12, ["window=0"])
    cache = Cache(1, n_row, n, policy, seed=0)
    cache.grow(n)
    view, plan = cache.plan()
    n_kept = np.bincount(view.pos[plan.keep], minlength=n)
    # allow 5 standard deviations of a fair choice
    assert np.abs(n_kept - n_row / 2).max() < 5 * np.sqrt(n_row / 4)


def test_random_choice_changes_with_step_and_seed():
    cache = Cache(1, 1, 64, policies.fit("random", 40), seed=0)
    cache.grow(40)
    draws = set()
    for seed in (0, 1, -1):
        policy = policies.fit("random", 40, 20, ["window=0", f"seed={seed}"])
        for later in range(3):
            view = view_of(cache.live_pos(), cache.next + later)
            draws.add(tuple(kept_positions(view, policy.plan(view, ()))[0]))
    assert len(draws) == 9


def test_tova_keeps_the_same_tokens_in_every_row_of_a_layer_unless_asked():
    def distinct(options):
        _, cache = make("tova", options, 40, 20, seed=0, shape=(2, 4), n_value=4096)
        cache.grow(40)
        rows = [tuple(row) for row in kept_positions(*cache.plan())]
        return [len({*rows[:4]}), len({*rows[4:]})]

    assert distinct([]) == [1, 1]
    assert distinct(["per=row"]) == [4, 4]


def test_refusal_names_no_budget_if_none_would_help():
    with pytest.raises(UsageError) as caught:
        policies.fit("tova", 20, None, ["per=head"])
    assert str(caught.value) == "tova: per must be one of layer, row, got 'head'"


def test_tova_of_the_paper_can_evict_the_newest_token():
    view = view_of(4, last=[3, 1, 2, 0])
    assert kept_at_first(TOVA(4, 1, window=0), view) == [0, 1, 2]
    assert kept_at_first(TOVA(4, 1), view) == [0, 2, 3]


def buzz_plan(mass, old, **params):
    n = len(mass)
    policy = BUZZ.fit(n, 1, **params)
    state = policy.start(1, n, 0)
    state[1][0] = old
    view = view_of(n, attn=mass)
    policy.observe(view, state)
    keep = policy.plan(view, state).keep[0]
    return np.flatnonzero(keep).tolist(), np.flatnonzero(state[1][0]).tolist()


def test_buzz_keeps_the_first_local_maximum_of_each_new_segment():
    # the row has one sink, then segments of 3 tokens with attention 1 5 2 | 7 7 0 | 9, then a window of one
    # token
    positions, old = buzz_plan([9, 1, 5, 2, 7, 7, 0, 9, 0], [0] * 9, sinks=1, window=1, stride=3)
    assert positions == [0, 2, 4, 7, 8]
    assert old == [2, 4, 7]


def test_buzz_thins_old_tokens_by_half_the_stride():
    # the row has one sink, then old tokens with attention 0 9 9 | 0 9, in segments of 3 tokens (half the
    # stride). Then it has new tokens with attention 1 2 3, and a window of one token
    was_old = [0, 1, 1, 1, 1, 1, 0, 0, 0, 0]
    positions, old = buzz_plan([9, 0, 9, 9, 0, 9, 1, 2, 3, 0], was_old, sinks=1, window=1, stride=5)
    assert positions == [0, 1, 4, 8, 9]
    assert {1, 4, 8} <= set(old)


def test_buzz_divides_the_budget_by_the_parameter_theorem():
    odd, even = BUZZ.fit(500, 16), BUZZ.fit(500, 16, stride=4)
    assert odd.threshold / odd.window == pytest.approx(26 / 6, rel=0.02)
    assert even.threshold / even.window == pytest.approx(3, rel=0.02)
    for policy in (odd, even, BUZZ.fit(500, 16, window=100), BUZZ.fit(500, 16, threshold=100)):
        assert policy.sinks + policy.window + policy.threshold + 1 == 500
    assert BUZZ.fit(500, 16, window=100).window == 100
    assert BUZZ.fit(500, 16, threshold=100).threshold == 100


@pytest.mark.parametrize("stride", [3, 4, 5, 8])
def test_buzz_frees_a_cell_with_one_sampling_per_eviction(stride):
    # each eviction may sample only once, because a second sampling would thin the old tokens again
    small_stride = (stride + 1) // 2
    for threshold in range(2, 20):
        for n_old in range(threshold + 1):
            n_new = threshold + 1 - n_old
            was_old = [1] * n_old + [0] * (n_new + 1)
            positions, _ = buzz_plan([0] * len(was_old), was_old, sinks=0, window=1, stride=stride)
            n_sampled = -(-n_old // small_stride) + -(-n_new // stride)
            assert len(positions) == n_sampled + 1 <= threshold + 1
