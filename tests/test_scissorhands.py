"""Scissorhands' own: what it forgets, and what it refuses."""

import numpy as np
import pytest

from kvtool.policies.scissorhands import Scissorhands
from kvtool.policy import View


def counts_after(policy, n_tokens, hit_of):
    """The counts of the first token after plans that are n_tokens apart; hit_of(step) its hits in each."""
    state = policy.start(1, sum(n_tokens), 0)
    counts, next_pos = [], 0
    for step, n_token in enumerate(n_tokens):
        next_pos += n_token
        hits = np.zeros((1, next_pos), np.float32)
        hits[0, 0] = hit_of(step)
        pos = np.arange(next_pos, dtype=np.int32)[None]
        policy.observe(View(pos, np.zeros(1, np.int32), next_pos, n_new=n_token, hits=hits), state)
        counts.append(int(state[0][0, 0].sum()))
    return counts


def test_forgets_a_hit_when_its_part_of_the_history_is_over():
    # 8 parts of 2 queries: a hit in the first query counts until the 16th, the last of the 8th part
    policy = Scissorhands(100, 1, window=1, history=16)
    assert counts_after(policy, [1] * 20, lambda step: step == 0) == [1] * 16 + [0] * 4
    assert counts_after(policy, [1] * 20, lambda step: step == 1) == [0] + [1] * 15 + [0] * 4


def test_remembers_no_less_than_seven_eighths_of_the_history():
    policy = Scissorhands(1000, 1, window=1, history=400)
    ones = counts_after(policy, [1] * 900, lambda step: 1)
    assert ones[:400] == list(range(1, 401))
    assert set(ones[400:]) == set(range(351, 401))


def test_a_long_batch_forgets_all_before_it():
    policy = Scissorhands(100, 1, window=1, history=16)
    assert counts_after(policy, [4, 50, 1], lambda step: (5, 9, 1)[step]) == [5, 9, 10]


def test_counts_do_not_wrap_around():
    policy = Scissorhands(100, 1, window=1, history=16)
    assert counts_after(policy, [1, 1], lambda step: 60_000) == [60_000, 65_535]


def test_takes_sixteen_bytes_a_cell_and_less_where_plans_are_rare():
    def n_bytes(slack):
        return sum(array.nbytes for array in Scissorhands(1000, slack, window=1).start(1, 1, 64))

    assert n_bytes(1) == n_bytes(16) == 16
    assert n_bytes(200) == 4
    assert n_bytes(500) == 2


def test_refuses_an_empty_history():
    with pytest.raises(ValueError, match="history must be 1 or more, got 0"):
        Scissorhands(64, 8, window=1, history=0)
