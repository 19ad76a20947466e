"""Scissorhands' rule: its counts of low scores, their limit, and refused parameters."""

import numpy as np
from fake_cache import view_of

from kvtool.policies.scissorhands import Scissorhands


def counts_after(policy, n_tokens, low_of, n_head=1):
    """Return the first token's number of low scores after each step.

    n_tokens: number of tokens of each step. low_of(step): number of low scores that the step adds.
    """
    state = policy.start(1, sum(n_tokens), 0)
    counts, next_pos = [], 0
    for step, n_token in enumerate(n_tokens):
        next_pos += n_token
        hits = np.zeros((1, next_pos), np.float32)
        hits[0, 0] = n_head * n_token - low_of(step)
        heads = np.full(1, n_head, np.int32)
        policy.observe(view_of(next_pos, n_new=n_token, n_head=heads, hits=hits), state)
        counts.append(int(state[0][0, 0].sum()))
    return counts


def test_queries_before_a_token_give_it_no_low_scores():
    # the newest token is in the first cell. Token 0 was important to 2 of 6 queries, token 1 to 1 of 5, and
    # token 2 to 0 of 4, so each of the three has 4 low scores
    policy = Scissorhands(6, 1, window=1)
    hits = [1, 2, 3, 0, 1, 2]
    view = view_of(range(5, -1, -1), n_new=6, n_head=np.ones(1, np.int32), hits=hits)
    state = policy.start(1, 6, 0)
    policy.observe(view, state)
    assert policy.scores(view, state).tolist() == [[0, 0, 0, -4, -4, -4]]
    assert policy.plan(view, state).keep.tolist() == [[True, True, True, True, True, False]]


def test_each_head_of_the_group_is_counted_separately():
    policy = Scissorhands(100, 1, window=1, history=16)
    assert counts_after(policy, [1, 1], lambda step: 2, n_head=3) == [2, 4]


def test_low_score_is_forgotten_when_its_part_of_the_history_ends():
    # a history of 16 queries is kept as 8 counts, each for 2 queries. When the 17th query comes, the count of
    # the first 2 queries is dropped
    policy = Scissorhands(100, 1, window=1, history=16)
    assert counts_after(policy, [1] * 20, lambda step: step == 0) == [1] * 16 + [0] * 4
    assert counts_after(policy, [1] * 20, lambda step: step == 1) == [0] + [1] * 15 + [0] * 4


def test_remembers_no_less_than_seven_eighths_of_the_history(share_of):
    n = share_of(80, 400)
    policy = Scissorhands(1000, 1, window=1, history=n)
    ones = counts_after(policy, [1] * (9 * n // 4), lambda step: 1)
    assert ones[:n] == list(range(1, n + 1))
    assert set(ones[n:]) == set(range(7 * n // 8 + 1, n + 1))


def test_long_batch_replaces_the_whole_history():
    policy = Scissorhands(100, 1, window=1, history=16)
    assert counts_after(policy, [4, 50, 1], lambda step: (4, 9, 1)[step]) == [4, 9, 10]


def test_counts_saturate_at_65535():
    policy = Scissorhands(100, 1, window=1, history=1_000_000)
    assert counts_after(policy, [60_000, 6_000], lambda step: (60_000, 6_000)[step]) == [60_000, 65_535]


def test_batch_with_too_many_scores_is_scaled_down():
    policy = Scissorhands(100, 1, window=1, history=16)
    assert counts_after(policy, [40_000], lambda step: 120_000, n_head=3) == [65_535]
    assert counts_after(policy, [40_000], lambda step: 60_000, n_head=3) == [32_767]


def test_state_takes_16_bytes_per_cell_and_less_if_plans_are_rare():
    def n_bytes(slack):
        return sum(array.nbytes for array in Scissorhands(1000, slack, window=1).start(1, 1, 64))

    assert n_bytes(1) == n_bytes(16) == 16
    assert n_bytes(200) == 4
    assert n_bytes(500) == 2
