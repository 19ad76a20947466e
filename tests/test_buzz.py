"""BUZZ after a prompt that was compressed whole."""

import numpy as np

from kvtool import policies
from kvtool.policies.buzz import BUZZ
from kvtool.policy import View


def view_of(pos, next_pos, pinned=0):
    pos = np.array([pos], np.int32)
    return View(pos, np.zeros(1, np.int32), next_pos, pinned, attn=np.ones(pos.shape, np.float32))


def adopted(policy, view):
    """The state's mass, and the positions that are old."""
    state = policy.start(1, view.n_kv + 5, 0)
    policy.adopt(view, state)
    assert not any(array[:, view.n_kv :].any() for array in state)
    return state[0][0, : view.n_kv].tolist(), sorted(view.pos[0][state[1][0, : view.n_kv] == 1].tolist())


def test_what_a_compressed_prompt_leaves_in_the_middle_is_old():
    policy = BUZZ(10, 1, window=2, threshold=3, sinks=4, stride=3)
    prompt = view_of(range(46), 46)
    kept = prompt.pos[0][policy.compress(prompt).keep[0]].tolist()
    assert kept == [0, 1, 2, 3, 4, 28, 44, 45]
    # in any order of the cells
    for cells in (kept, kept[::-1]):
        mass, old = adopted(policy, view_of(cells, 46))
        assert mass == [1] * 8
        assert old == [4, 28]


def test_pinned_tokens_are_not_of_the_middle_and_the_window_gives_way_to_them():
    policy = BUZZ(10, 1, window=4, threshold=3, sinks=2, stride=3)
    assert adopted(policy, view_of([0, 1, 2, 3, 4, 30, 44, 45], 46, pinned=7))[1] == [30]


def test_a_prompt_that_fits_leaves_nothing_old():
    policy = policies.fit("buzz", 40)
    view = view_of(range(39), 39)
    assert policy.compress(view).keep.all()
    assert adopted(policy, view)[1] == []


def test_compressing_and_adopting_is_a_plan_of_the_stream():
    policy = policies.fit("buzz", 40)
    rng = np.random.default_rng(0)
    pos = rng.permutation(90).astype(np.int32)[None]
    attn = rng.integers(0, 4, (1, 90)).astype(np.float32)
    view = View(pos, np.zeros(1, np.int32), 90, attn=attn)
    state = policy.start(1, 90, 0)
    policy.observe(view, state)
    keep = policy.plan(view, state).keep
    np.testing.assert_array_equal(policy.compress(view).keep, keep)

    left = View(pos[keep][None], view.layer, 90, attn=attn[keep][None])
    fresh = policy.start(1, left.n_kv, 0)
    policy.adopt(left, fresh)
    for array, whole in zip(fresh, state, strict=True):
        np.testing.assert_array_equal(array[0], whole[0][keep[0]])
