"""BUZZ: one compression of a whole prompt, and the evictions after it."""

import numpy as np
import pytest
from fake_cache import view_of
from reference import buzz as twin

from kvtool import policies
from kvtool.errors import UsageError
from kvtool.policies.buzz import BUZZ
from kvtool.policy import View

KEPT = [
    ["kept=true"],
    ["kept=true", "swap=true"],
    ["kept=true", "local_max=false", "stride=3"],
    ["kept=true", "stride=8", "sinks=0"],
    ["kept=true", "window=5"],
    ["kept=true", "logn=true", "stride=4"],
]


def positions(pos, next_pos=None, pinned=0):
    """Return a view of one row with these tokens, which all have the same attention."""
    return view_of(pos, next_pos, pinned, attn=[1.0] * len(pos))


def adopted(policy, view):
    """Let the policy adopt the tokens of a view, as it does after it has compressed a prompt.

    Return the state's mass, and the positions of the tokens that the state marks as old.
    """
    state = policy.start(1, view.n_kv + 5, 0)
    policy.adopt(view, state)
    assert not any(array[:, view.n_kv :].any() for array in state)
    return state[0][0, : view.n_kv].tolist(), sorted(view.pos[0][state[1][0, : view.n_kv] == 1].tolist())


def test_kept_middle_tokens_of_a_prompt_are_marked_old():
    policy = BUZZ(10, 1, window=2, threshold=3, sinks=4, stride=3)
    prompt = positions(range(46), 46)
    kept_pos = prompt.pos[0][policy.compress(prompt).keep[0]].tolist()
    # there are 40 tokens between sinks and window. The first sampling has a stride of 3 and leaves 14. Three
    # samplings with a stride of 2 leave 7, 4 and 2, so every 24th token stays
    assert kept_pos == [0, 1, 2, 3, 4, 28, 44, 45]
    # the order of the cells makes no difference
    for cells in (kept_pos, kept_pos[::-1]):
        mass, old = adopted(policy, positions(cells, 46))
        assert mass == [1] * 8
        assert old == [4, 28]


def test_pinned_tokens_are_not_marked_old_and_shorten_the_window():
    policy = BUZZ(10, 1, window=4, threshold=3, sinks=2, stride=3)
    assert adopted(policy, positions([0, 1, 2, 3, 4, 30, 44, 45], 46, pinned=7))[1] == [30]


def test_prompt_that_fits_marks_no_token_old():
    policy = policies.fit("buzz", 40)
    view = positions(range(39), 39)
    assert policy.compress(view).keep.all()
    assert adopted(policy, view)[1] == []


def test_compress_and_adopt_equal_observe_and_plan():
    policy = policies.fit("buzz", 40)
    rng = np.random.default_rng(0)
    pos = rng.permutation(90).astype(np.int32)[None]
    attn = rng.integers(0, 4, (1, 90)).astype(np.float32)
    view = View(pos, np.zeros(1, np.int32), 90, attn=attn)
    state = policy.start(1, 90, 0)
    policy.observe(view, state)
    keep = policy.plan(view, state).keep
    np.testing.assert_array_equal(policy.compress(view).keep, keep)

    after = View(pos[keep][None], view.layer, 90, attn=attn[keep][None])
    fresh = policy.start(1, after.n_kv, 0)
    policy.adopt(after, fresh)
    for array, whole in zip(fresh, state, strict=True):
        np.testing.assert_array_equal(array[0], whole[0][keep[0]])


def held_after(policy, n_plan, batch=1):
    """Yield the number of live cells after each eviction. The step before an eviction has `batch` tokens."""
    cells, following = np.empty(0, np.int32), 0
    state = policy.start(1, policy.budget + batch, 0)
    for _ in range(n_plan):
        n_new = policy.budget - len(cells) + batch - 1
        cells = np.append(cells, np.arange(following, following + n_new, dtype=np.int32))
        following += n_new
        view = positions(cells, following)
        policy.observe(view, state)
        keep = policy.plan(view, state).keep[0]
        cells = cells[keep]
        for array in state:
            kept_values = array[0, : len(keep)][keep]
            array[0] = 0
            array[0, : len(kept_values)] = kept_values
        yield len(cells)


@pytest.mark.parametrize("options", KEPT, ids=str)
@pytest.mark.parametrize("budget", [20, 61, 200])
def test_kept_option_leaves_the_requested_number_of_cells(budget, options):
    policy = policies.fit("buzz", budget, None, options)
    assert policy.n_asked == policy.n_keep == budget < policy.budget
    n_held = list(held_after(policy, 12))
    assert max(n_held) == budget
    assert set(n_held[4:]) == {budget}
    # at the first eviction, all tokens are new. With swap=true, new tokens have the shorter stride, so more
    # of them stay
    assert n_held[0] >= (budget if policy.swap else 0.85 * budget)
    # the same number of cells stays after steps much longer than the threshold
    assert set(held_after(policy, 4, batch=20 * policy.budget)) == {budget}


@pytest.mark.parametrize("options", KEPT, ids=str)
def test_kept_option_leaves_the_requested_number_of_prompt_tokens(options):
    policy = policies.fit("buzz", 60, None, options)
    around = policy.sinks + policy.window
    stride = (policy.stride + 1) // 2 if policy.swap else policy.stride
    # the first sampling always goes over all tokens between sinks and window, even if fewer evictions would
    # be enough. Therefore a short prompt may keep fewer than 60 tokens
    for n in range(61, 2400, 83):
        sampled = around + -(-(n - around) // stride)
        assert policy.compress(positions(range(n), n)).keep.sum() == min(60, sampled), n
    assert policy.compress(positions(range(60), 60)).keep.all()


def test_kept_option_thins_the_middle_from_its_oldest_token():
    policy = policies.fit("buzz", 8, None, ["kept=true", "sinks=1", "window=2", "stride=3"])
    # one sampling leaves 10 of the 30 tokens in the middle. Then every second of the 10 is evicted
    keep = policy.compress(positions(range(33), 33)).keep[0]
    assert np.flatnonzero(keep).tolist() == [0, 1, 7, 13, 19, 25, 31, 32]


def test_kept_option_divides_the_budget_by_the_parameter_theorem():
    for stride in (3, 4, 5, 8):
        policy = policies.fit("buzz", 404, None, ["kept=true", f"stride={stride}"])
        assert policy.window == 200
        plain = BUZZ.fit(policy.budget, 1, stride=stride)
        assert policy.threshold / policy.window == pytest.approx(plain.threshold / plain.window, rel=0.02)


def test_kept_option_derives_the_window_from_the_threshold():
    for threshold in range(2, 60):
        policy = policies.fit("buzz", 90, None, ["kept=true", f"threshold={threshold}"])
        n_middle = twin.steady(threshold, 5, 3)
        assert (policy.threshold, policy.window) == (threshold, 86 - n_middle)
        assert max(held_after(policy, 9)) <= policy.n_asked == 90


@pytest.mark.parametrize(
    ("budget", "options", "words"),
    [
        (6, [], "must be 2 or more, got 1; .* a budget of at least 7$"),
        (20, ["window=15"], "the budget less sinks and window must be 2 or more, got 1; .* at least 21$"),
        (20, ["window=3", "threshold=9"], "window 3 . 3 of a threshold of 9 must be .* sinks, 16, got 6$"),
        (20, ["threshold=90"], r"window must be 1 or more, got -5; .* at least 26$"),
        (20, ["stride=2"], "stride must be 3 or more .*, got 2$"),
    ],
)
def test_kept_option_refuses_impossible_parameters(budget, options, words):
    with pytest.raises(UsageError, match=words) as caught:
        policies.fit("buzz", budget, None, ["kept=true", *options])
    assert "\n" not in str(caught.value)
