"""Rows that share a layer's budget (`heads=adaptive`), and layers that share budgets (`layers=adaptive`)."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from fake_cache import Cache, view_of

from kvtool import policies
from kvtool.errors import UsageError
from kvtool.kernels.selection import keep_shared, layer_entropy
from kvtool.policy import Ranked
from kvtool.policy.ranked import apportion

SHARING = ["expected", "h2o", "keydiff", "knorm", "kvzip", "rkv", "scissorhands", "snapkv", "tova"]
LAYERED = ["expected", "snapkv"]

ROW_OPTIONS = {"tova": ["per=row"]}
"""Additional parameters that a policy needs for these tests."""

every_sharing_policy = pytest.mark.parametrize("name", SHARING)


def kept_positions(score, n_keep, n_floor=0, n_most=99, first=0, recent=99, layer=None, live=None):
    """Return the cells that stay in each row. The cells hold the tokens 0, 1, ..."""
    score = np.array(score, np.float32)
    n_row, n = score.shape
    pos = np.tile(np.arange(n, dtype=np.int32), (n_row, 1))
    live = np.full(n_row, n, np.int32) if live is None else np.array(live, np.int32)
    pos[np.arange(n) >= live[:, None]] = -1
    layer = np.zeros(n_row, np.int32) if layer is None else np.array(layer, np.int32)
    keep = np.empty(pos.shape, np.bool_)
    sizes = np.full(n_row, n_keep), np.full(n_row, n_floor)
    keep_shared(pos, live, layer, score, first, recent, *sizes, n_most, keep)
    return [np.flatnonzero(row).tolist() for row in keep]


NEEDY = [[5, 6, 7, 8, 9], [1, 2, 3, 4, 0]]


def test_layer_keeps_its_highest_scores_from_any_row():
    assert kept_positions(NEEDY, 2) == [[1, 2, 3, 4], []]
    assert kept_positions(NEEDY, 3) == [[0, 1, 2, 3, 4], [3]]


def test_each_row_keeps_at_least_its_floor_and_at_most_its_limit():
    assert kept_positions(NEEDY, 2, n_floor=1) == [[2, 3, 4], [3]]
    assert kept_positions(NEEDY, 2, n_floor=2) == [[3, 4], [2, 3]]
    assert kept_positions(NEEDY, 3, n_most=4) == [[1, 2, 3, 4], [2, 3]]
    # both rows are at their limit, so the rest of the budget stays unused
    assert kept_positions(NEEDY, 4, n_most=3) == [[2, 3, 4], [1, 2, 3]]


def test_protected_tokens_stay_and_count_towards_floor_and_limit():
    ends = {"first": 1, "recent": 4}
    assert kept_positions(NEEDY, 3, **ends) == [[0, 2, 3, 4], [0, 4]]
    assert kept_positions(NEEDY, 3, n_floor=3, **ends) == [[0, 3, 4], [0, 3, 4]]
    assert kept_positions(NEEDY, 3, n_floor=2, **ends) == kept_positions(NEEDY, 3, **ends)
    assert kept_positions(NEEDY, 3, n_most=3, **ends) == [[0, 3, 4], [0, 3, 4]]


def test_layers_share_no_budget_and_dead_cells_are_ignored():
    assert kept_positions([*NEEDY, *NEEDY], 2, layer=[0, 0, 1, 1]) == [[1, 2, 3, 4], []] * 2
    assert kept_positions(NEEDY, 2, layer=[0, 1]) == [[3, 4], [2, 3]]
    assert kept_positions(NEEDY, 2, live=[2, 4]) == [[0, 1], [2, 3]]
    assert kept_positions(NEEDY, 2, live=[2, 2]) == [[0, 1], [0, 1]]


def test_ties_keep_the_newer_token_then_the_earlier_row():
    assert kept_positions(np.zeros((3, 4)), 2) == [[2, 3], [2, 3], [2, 3]]
    assert kept_positions(np.zeros((2, 5)), 1, n_floor=1) == [[4], [4]]
    assert kept_positions([[0, 0, 0], [0, 0, 0], [9, 9, 9]], 2) == [[1, 2], [2], [0, 1, 2]]
    assert kept_positions([[0] * 4] * 3 + [[9] * 4], 3) == [[1, 2, 3], [1, 2, 3], [2, 3], [0, 1, 2, 3]]


@every_sharing_policy
def test_layers_hold_their_budget_and_rows_stay_within_their_limits(name):
    policy = policies.fit(name, 40, 8, [*ROW_OPTIONS.get(name, []), "heads=adaptive", "window=2"])
    cache = Cache(3, 2, 120, policy, seed=0, n_value=4096, twin=False)
    # becomes True when the two rows of a layer hold different numbers of cells
    differ = False
    for _ in range(12):
        cache.grow(8)
        n_live = cache.live.reshape(3, 2).sum(axis=1)
        cache.apply(cache.plan()[1].keep)
        n_kept = cache.live.reshape(3, 2)
        assert n_kept.sum(axis=1).tolist() == np.minimum(n_live, 2 * 32).tolist()
        assert (n_kept >= np.minimum(6, cache.next)).all()
        assert (n_kept <= 2 * 40 - 8).all()
        differ |= bool((n_kept[:, 0] != n_kept[:, 1]).any())
    # kvzip scores tokens only in a reconstruction pass. Here it has no scores, so every row evicts its oldest
    # tokens
    assert differ == (name != "kvzip"), name


def test_row_with_the_lowest_scores_keeps_at_least_one_token():
    policy = policies.fit("h2o", 10, 2, ["heads=adaptive", "floor=0", "window=0"])
    attention = np.repeat(np.array([[1], [0]], np.float32), 20, axis=1)
    view = view_of([range(20)] * 2, live=np.full(2, 20, np.int32), attn=attention)
    assert policy.plan(view, (attention,)).keep.sum(axis=1).tolist() == [15, 1]


@every_sharing_policy
def test_requested_budget_is_the_mean_over_rows(name):
    equal, shared = (
        policies.fit(name, 64, 8, options) for options in ([], [*ROW_OPTIONS.get(name, []), "heads=adaptive"])
    )
    assert (equal.n_asked, equal.budget, equal.ragged) == (64, 64, False)
    assert (shared.n_asked, shared.budget, shared.ragged) == (64, 128, True)
    assert shared.n_keep == equal.n_keep == 56
    assert shared.window == equal.window
    assert shared.split() == equal.split()
    # `capped` is only for policies that work without a budget
    assert not policies.load(name).capped


@every_sharing_policy
def test_floor_of_one_keeps_the_tokens_of_separate_rows(name):
    runs = []
    for options in ([], ["heads=adaptive", "floor=1"]):
        policy = policies.fit(name, 40, 8, [*ROW_OPTIONS.get(name, []), *options])
        cache = Cache(2, 2, 120, policy, seed=0, n_value=4096, twin=False)
        rows = []
        for _ in range(8):
            cache.grow(8)
            if cache.n_kv >= 40:
                cache.apply(cache.plan()[1].keep)
            rows.append([sorted(pos[:n].tolist()) for pos, n in zip(cache.pos, cache.live, strict=True)])
        runs.append(rows)
    assert runs[0] == runs[1]


def entropy_of(values):
    """Return the entropy of the values' shares, divided by the largest possible entropy.

    The largest possible entropy is the logarithm of the number of values.
    """
    shares = [value / sum(values) for value in values]
    return -sum(share * math.log(share) for share in shares if share) / math.log(len(values))


def test_layer_entropy_covers_unprotected_tokens_of_all_its_rows():
    score = np.array([[9, 1, 2, 3, 9], [9, 4, 0, 6, 9], [9, 1, 1, 1, 9], [9, 0, 0, 0, 9]], np.float32)
    pos = np.tile(np.arange(5, dtype=np.int32), (4, 1))
    live, layer, entropy = np.array([5, 4, 5, 5], np.int32), np.array([0, 0, 1, 2], np.int32), np.empty(4)
    layer_entropy(pos, live, layer, score, 1, 4, entropy)
    assert entropy == pytest.approx([entropy_of([1, 2, 3, 4, 0, 6])] * 2 + [1, 1])
    # the second row's dead cell is not counted. A single token has no entropy
    layer_entropy(pos, np.array([5, 3, 5, 5], np.int32), layer, score, 1, 4, entropy)
    assert entropy[0] == pytest.approx(entropy_of([1, 2, 3, 4, 0]))
    layer_entropy(pos, live, layer, score, 3, 4, entropy)
    assert entropy.tolist()[2:] == [1, 1]


def test_layer_entropy_of_a_single_positive_score_is_not_negative():
    score = np.zeros((1000, 40), np.float32)
    score[:, 5] = np.random.default_rng(0).random(1000)
    pos = np.tile(np.arange(40, dtype=np.int32), (1000, 1))
    live, layer, entropy = np.full(1000, 40, np.int32), np.arange(1000, dtype=np.int32), np.empty(1000)
    layer_entropy(pos, live, layer, score, 0, 40, entropy)
    assert (entropy >= 0).all()
    assert (entropy < 1e-12).all()


def test_apportion_follows_weights_and_limits():
    share = lambda *args: apportion(*map(np.array, args[:2]), args[2]).tolist()  # noqa: E731
    assert share([1.0, 3.0], [99, 99], 8) == [2, 6]
    assert share([1.0, 3.0], [99, 4], 8) == [4, 4]
    assert share([1.0, 1.0, 1.0], [99, 99, 99], 8) == [2, 2, 2]
    assert share([1.0, 1.0], [3, 2], 8) == [3, 2]
    assert share([0.0, 1.0], [9, 9], 4) == [0, 4]
    assert share([0.0, 0.0], [9, 9], 4) == [0, 0]
    assert share([1.0, 1.0], [-1, 9], 4) == [0, 4]


@pytest.mark.parametrize("heads", ["equal", "adaptive"])
@pytest.mark.parametrize("name", LAYERED)
def test_layers_divide_the_budget_by_the_entropy_of_their_scores(name, heads):
    policy = policies.fit(name, 40, 8, ["layers=adaptive", f"heads={heads}", "window=2", "sinks=1"])
    assert (policy.n_asked, policy.budget, policy.ragged, policy.n_keep) == (40, 80, True, 32)
    cache = Cache(3, 2, 120, policy, seed=0, n_value=4096, twin=False)
    cache.grow(90)
    view, plan = cache.plan()
    scores, recent = policy.scores(view, {}), view.next - 2
    weights = []
    for layer in range(3):
        rows = np.flatnonzero(view.layer == layer)
        is_open = (view.pos[rows] >= 1) & (view.pos[rows] < recent)
        weights.append(entropy_of(scores[rows][is_open].tolist()))
    expected = [3 + math.floor(3 * 29 * weight / sum(weights)) for weight in weights]
    n_kept = plan.keep.sum(axis=1).reshape(3, 2)
    assert len(set(expected)) > 1
    # `expected` is rounded down for each row, so a layer of two rows may hold up to two tokens more
    assert set(n_kept.sum(axis=1) - 2 * np.array(expected)) <= {0, 1, 2}
    assert 6 * 32 - 6 <= n_kept.sum() <= 6 * 32
    assert (n_kept[:, 0] == n_kept[:, 1]).all() == (heads == "equal")
    if heads == "equal":
        for row, keep in enumerate(plan.keep):
            inner = np.flatnonzero((view.pos[row] >= 1) & (view.pos[row] < recent))
            stay = scores[row, inner][keep[inner]]
            assert stay.min() >= scores[row, inner][~keep[inner]].max()


@pytest.mark.parametrize("name", LAYERED)
def test_stream_with_shared_layers_stays_within_the_budget(name):
    policy = policies.fit(name, 40, 8, ["layers=adaptive", "window=2"])
    cache = Cache(3, 2, 120, policy, seed=0, n_value=4096, twin=False)
    for _ in range(12):
        cache.grow(8)
        before = cache.live.copy()
        cache.apply(cache.plan()[1].keep)
        assert cache.live.sum() <= 6 * 32
        if before.sum() > 6 * 32:
            assert cache.live.sum() >= 6 * 32 - 6
    assert len(set(cache.live.tolist())) > 1


def test_suggested_smallest_budget_works():
    with pytest.raises(UsageError, match="use a budget of at least 71"):
        policies.fit("h2o", 64, None, ["heads=adaptive", "window=63"])
    assert policies.fit("h2o", 71, None, ["heads=adaptive", "window=63"]).n_asked == 71


def test_policy_without_a_window_can_share_a_budget():
    @dataclass(frozen=True, slots=True)
    class Newest(Ranked):
        budget: int
        slack: int
        heads: str = "equal"
        floor: float = 0.2

    assert Newest.fit(64, 8, heads="adaptive") == Newest(128, 8, heads="adaptive")
