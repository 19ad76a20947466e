"""R-KV's rule: importance, redundancy of keys, and which token of several similar tokens stays."""

import numpy as np
import pytest
from fake_cache import view_of
from reference.rkv import softmax

from kvtool import policies
from kvtool.policies.rkv import RKV


def kept_positions(keys, votes, n_keep, batches=None, **params):
    n = len(keys)
    keys = np.array([keys], np.float32)
    policy = RKV.fit(n_keep + 1, 1, **params)
    state = policy.start(1, n, keys.shape[2])
    end = 0
    for n_token in batches or [n]:
        end += n_token
        new = np.ascontiguousarray(keys[:, end - n_token : end])
        view = view_of(end, n_new=n_token, recent=votes[:end], keys=new)
        policy.observe(view, state)
    return np.flatnonzero(policy.plan(view, state).keep[0]).tolist()


# the keys of tokens 0, 2 and 4 are nearly equal, and the keys of tokens 1, 3 and 5 are unique. Token 5 is the
# window
KEYS = [
    [9, 0, 0, 0, 1],
    [0, 9, 0, 0, 0],
    [9, 0, 0, 0, 0],
    [0, 0, 9, 0, 0],
    [9, 0, 0, 0, -1],
    [0, 0, 0, 9, 0],
]


@pytest.mark.parametrize("batches", [[6], [2, 4], [1, 1, 1, 1, 1, 1]])
def test_newest_of_several_similar_tokens_stays(batches):
    assert kept_positions(KEYS, [0] * 6, 4, batches, window=1, mixture=0) == [1, 3, 4, 5]
    # with similar=0 all cosines are used. Token 2 is the most redundant, because its key is between the keys
    # of 0 and 4
    unspared = {"window": 1, "mixture": 0, "similar": 0}
    assert kept_positions(KEYS, [0] * 6, 5, batches, **unspared) == [0, 1, 3, 4, 5]
    assert kept_positions(KEYS, [0] * 6, 3, batches, **unspared) == [1, 3, 5]


def test_similar_option_sets_how_many_cosines_are_ignored():
    def stay(n_keep, **params):
        return kept_positions(KEYS, [0] * 6, n_keep, window=1, mixture=0, **params)

    # each token ignores its cosine with the newest token that is similar to it: tokens 0 and 2 ignore 4, and
    # token 4 ignores 2. So two high cosines count for token 0, one for token 2, and none for token 4
    assert stay(5) == [1, 2, 3, 4, 5]
    # therefore token 4 is not more redundant than tokens 1 and 3. On ties, the newer token stays
    assert stay(3) == [3, 4, 5]
    # with similar=2, every token's cosines with both similar tokens are ignored, so all tokens tie
    assert stay(3, similar=2) == [3, 4, 5]
    # no cosine exceeds a threshold of 1, so no cosine is ignored
    assert stay(3, threshold=1.0) == stay(3, similar=0) == [1, 3, 5]


def test_the_mixture_weighs_importance_against_redundancy():
    votes = [9, 0, 0, 0, 0, 0]
    only = {"window": 1, "kernel": 1}
    assert kept_positions(KEYS, votes, 2, mixture=1, **only) == [0, 5]
    assert kept_positions(KEYS, votes, 2, mixture=0, **only)[0] != 0
    # importance and redundancy each add up to 1. Token 0 has all the importance, so it stays even at a weight
    # of 0.1
    assert kept_positions(KEYS, votes, 2, **only) == [0, 5]


def test_importance_is_max_pooled_before_the_window():
    alike = [[1, 0]] * 10
    votes = [0, 0, 0, 5, 0, 0, 0, 0, 9, 9]
    assert kept_positions(alike, votes, 5, window=2, mixture=1, kernel=3) == [2, 3, 4, 8, 9]
    assert kept_positions(alike, votes, 3, window=2, mixture=1, kernel=1) == [3, 8, 9]


def test_redundancy_matches_the_published_code():
    """Compare with the published code.

    It sets the diagonal to zero. In each row, it also sets the newest cosine above the threshold to zero.
    Then it takes the mean of each column.
    """
    rng = np.random.default_rng(0)
    keys = rng.normal(size=(40, 8)) + rng.normal(size=8) / 3
    unit = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    cosines = unit @ unit.T
    np.fill_diagonal(cosines, 0)
    for row in cosines:
        if (above := np.flatnonzero(row > 0.5)).size:
            row[above[-1]] = 0
    redundancy = np.array(softmax(cosines.mean(axis=0)))
    least = set(np.argsort(redundancy[:32])[:12].tolist())
    assert set(kept_positions(keys.tolist(), [0] * 40, 20, mixture=0)) == least | set(range(32, 40))


def test_default_window_is_the_newest_eight_queries():
    policy = policies.fit("rkv", 512)
    assert policy.n_query == policy.window == 8
    assert policies.fit("rkv", 512, None, ["window=7"]).n_query == 7
    assert policies.fit("rkv", 12, 2).n_query == 5
    assert policy.request().group == "max"
    # generated tokens are compressed like the prompt
    assert policy.prefill == "stream"


def test_stored_keys_take_one_byte_per_dimension():
    assert RKV.fit(40, 1).start(2, 40, 64)[0].nbytes == 2 * 40 * 64
