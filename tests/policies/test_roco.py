"""RoCo's rule: tokens that stay because of their deviation, and refused parameters."""

import numpy as np
from fake_cache import kept_at_first, view_of

from kvtool.policies.roco import RoCo


def evicted(attention, **params):
    """Return the tokens that are evicted after this attention[query][token].

    The attention of a query to later tokens is set to 0.
    """
    attention = np.tril(np.array(attention, np.float32))
    n = len(attention)
    view = view_of(n, attn=attention.sum(axis=0)[None], squares=(attention**2).sum(axis=0)[None])
    stays = kept_at_first(RoCo.fit(n, 1, sinks=0, **params), view)
    return [pos for pos in range(n) if pos not in stays]


# the first three tokens have means of 1, 2/3 and 1. The deviation of the second is high, and that of the
# first and the third is 0
UNSTEADY = [[1, 0, 0, 0], [1, 2, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]


def test_lowest_mean_is_evicted_unless_its_deviation_is_high():
    assert evicted(UNSTEADY, window=1, keep_std=0) == [1]
    # tokens 0 and 2 have equal means, so the older token is evicted
    assert evicted(UNSTEADY, window=1, keep_std=1) == [0]


def test_mean_divides_by_the_age_of_the_token():
    # the tokens have sums of 4, 3, 3, and have lived for 4, 3, 2 steps. Tokens 0 and 1 have equal means, so
    # the older token is evicted
    attention = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1.5, 0], [1, 1, 1.5, 0]]
    assert evicted(attention, window=1, keep_std=0) == [0]


def test_window_and_keep_std_are_three_tenths_by_default():
    policy = RoCo.fit(216, 16)
    assert (policy.window, policy.keep_std) == (10, 50)
    assert RoCo.fit(216, 16, window=60).keep_std == 0
    assert RoCo.fit(216, 16, window=20).keep_std == 40
    assert RoCo.fit(20, 4, sinks=12, window=2).keep_std == 2
