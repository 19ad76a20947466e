"""RoCo's rule: tokens that stay because of their deviation, and refused parameters."""

import numpy as np
import pytest

from kvtool.policies.roco import RoCo
from kvtool.policy import View


def evicted(attention, **params):
    """attention[query][token] of a stream in which every token sees itself and all before it."""
    attention = np.tril(np.array(attention, np.float32))
    n = len(attention)
    policy = RoCo.fit(n, 1, sinks=0, **params)
    state = policy.start(1, n, 0)
    attn, squares = attention.sum(axis=0)[None], (attention**2).sum(axis=0)[None]
    view = View(np.arange(n, dtype=np.int32)[None], np.zeros(1, np.int32), n, attn=attn, squares=squares)
    policy.observe(view, state)
    return np.flatnonzero(~policy.plan(view, state).keep[0]).tolist()


# means of the first three: 1, 2/3, 1; deviations: 0, high, 0
UNSTEADY = [[1, 0, 0, 0], [1, 2, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]


def test_the_lowest_mean_goes_unless_its_deviation_is_high():
    assert evicted(UNSTEADY, window=1, keep_std=0) == [1]
    # of the equal means the older goes
    assert evicted(UNSTEADY, window=1, keep_std=1) == [0]


def test_a_mean_is_over_the_steps_lived():
    # sums 4, 3, 3: the first has lived longest
    attention = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1.5, 0], [1, 1, 1.5, 0]]
    assert evicted(attention, window=1, keep_std=0) == [0]


def test_three_tenths_stay_for_deviation_or_age_unless_given():
    policy = RoCo.fit(216, 16)
    assert (policy.window, policy.keep_std) == (10, 50)
    assert RoCo.fit(216, 16, window=60).keep_std == 0
    assert RoCo.fit(216, 16, window=20).keep_std == 40
    assert RoCo.fit(20, 4, sinks=12, window=2).keep_std == 2


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"keep_std": 47}, r"keep_std must be in 0\.\.42 .* 8 slack, 4 sinks and 10 window\), got 47"),
        ({"keep_std": -1}, r"keep_std must be in 0\.\.42 .*, got -1"),
        ({"window": 53}, r"window must be in 0\.\.52 .*, got 53"),
    ],
)
def test_refuses_what_cannot_work(params, message):
    with pytest.raises(ValueError, match=message):
        RoCo.fit(64, 8, **params)
