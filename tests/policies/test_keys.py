"""Policies that read only keys: the keys that stay, and the policies' state."""

import numpy as np
import pytest
from fake_cache import view_of

from kvtool import policies
from kvtool.errors import PlanError
from kvtool.policies.keydiff import KeyDiff
from kvtool.policies.knorm import Knorm
from tests.engine.exact_engines import open_engine, random_tokens


def state_and_plan(policy, keys, batches):
    """Return the state after batches of these sizes, and the cells that a plan then keeps."""
    keys = np.array([keys], np.float32)
    state = policy.start(1, keys.shape[1], keys.shape[2])
    end = 0
    for n_token in batches:
        end += n_token
        view = view_of(end, keys=np.ascontiguousarray(keys[:, end - n_token : end]))
        policy.observe(view, state)
    return state, np.flatnonzero(policy.plan(view, state).keep[0]).tolist()


@pytest.mark.parametrize("batches", [[5], [2, 3], [1, 1, 1, 1, 1]])
def test_longest_key_is_evicted(batches):
    keys = [[9, 9], [3, 4], [0, -6], [1, 1], [7, 0]]
    state, positions = state_and_plan(Knorm(5, 2, sinks=1), keys, batches)
    assert positions == [0, 3, 4]
    np.testing.assert_array_equal(state[0], [[-162, -25, -36, -2, -49]])


@pytest.mark.parametrize("batches", [[5], [2, 3], [1, 1, 1, 1, 1]])
def test_key_most_similar_to_the_average_is_evicted(batches):
    keys = [[1, 0], [100, 1], [0, 0.1], [-1, -1], [2, 0.5]]
    # the average points to about (2.3, 0.5). The last key is nearest, but the window keeps it. The second key
    # is next
    state, positions = state_and_plan(KeyDiff(5, 1, sinks=0), keys, batches)
    assert positions == [0, 2, 3, 4]
    _, farthest = state_and_plan(KeyDiff(5, 3, sinks=0), keys, batches)
    assert farthest == [3, 4]
    lengths = np.linalg.norm(state[0][0].astype(float), axis=1)
    np.testing.assert_allclose(lengths, 127, atol=1)


def test_keydiff_keeps_the_keys_with_the_lowest_cosine():
    rng = np.random.default_rng(0)
    keys = rng.normal(size=(40, 16))
    unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    anchor = unit.mean(axis=0)
    cosine = unit @ anchor / np.linalg.norm(anchor)
    _, positions = state_and_plan(KeyDiff(40, 20, sinks=0), keys.tolist(), [40])
    different = set(np.argsort(cosine[:39])[:19].tolist())
    assert set(positions) == different | {39}


def test_keydiff_compares_cosines_across_rows_that_share_a_budget():
    # the first row has every key of the second row twice, so it has the same cosines and keeps twice as many
    # tokens
    n, policy = 30, policies.fit("keydiff", 30, 6, ["heads=adaptive", "sinks=0", "floor=0"])
    keys = np.random.default_rng(0).normal(size=(n, 16)) + 2 * np.eye(16)[0]
    keys = np.stack([np.concatenate([keys, keys]), np.concatenate([keys, 0 * keys])]).astype(np.float32)
    pos = np.array([range(2 * n), [*range(n, 2 * n), *[-1] * n]], np.int32)
    state = policy.start(*keys.shape)
    policy.observe(view_of([range(2 * n)] * 2, keys=keys), state)
    assert np.array_equal(state[0][0, :n], state[0][1, :n])
    view = view_of(pos, live=np.array([2 * n, n], np.int32))
    score = policy.scores(view, state)
    np.testing.assert_allclose(score[0, :n], score[1, :n], rtol=1e-6)
    unit = keys[0] / np.linalg.norm(keys[0], axis=1, keepdims=True)
    cosine = unit @ unit.mean(axis=0) / np.linalg.norm(unit.mean(axis=0))
    np.testing.assert_allclose(score[0] / 127, -cosine, atol=0.01)
    kept = policy.plan(view, state).keep.sum(axis=1)
    assert kept.sum() == 48
    assert abs(kept[0] - 2 * kept[1]) <= 2


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_key_that_is_not_finite_ends_the_stream(tiny_model, monkeypatch, value):
    with open_engine(tiny_model(), policies.fit("keydiff", 48, 8)) as engine:
        read_keys = engine.context.read_keys

        def read(first, delta):
            keys = read_keys(first, delta)
            keys[1, 7, 3] = value
            return keys

        monkeypatch.setattr(engine.context, "read_keys", read)
        with pytest.raises(PlanError, match="the model's keys are not finite; the model file may be damaged"):
            engine.read(random_tokens(60))


def test_key_of_zeros_is_similar_to_no_key():
    state, positions = state_and_plan(KeyDiff(4, 1, sinks=0), [[0, 0], [1, 0], [1, 0], [1, 0]], [4])
    assert not state[0][0, 0].any()
    assert positions == [0, 2, 3]


def test_stored_keys_take_one_byte_per_dimension():
    assert KeyDiff(40, 1).start(2, 40, 64)[0].nbytes == 2 * 40 * 64
