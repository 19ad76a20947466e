"""CaM's rule: how often an evicted value is added, and to which tokens."""

import numpy as np
import pytest
from fake_cache import view_of
from test_policies import make

from kvtool import policies
from kvtool.policies.cam import CaM
from kvtool.policy import Signal


def plan(last, policy, next_pos=None, pinned=0):
    """Return the plan for rows whose tokens got the attention `last` f32[row, n] from the newest query."""
    pos = np.tile(np.arange(len(last[0])), (len(last), 1))
    return policy.plan(view_of(pos, next_pos, pinned, last=last), ())


def terms(merge):
    return list(
        zip(*(getattr(merge, name).tolist() for name in ("row", "dst", "src", "weight")), strict=True)
    )


def test_adds_an_equal_part_to_each_of_the_next_tokens():
    # token 1 is evicted. Its attention is above the mean of the later tokens, so its value is always merged
    result = plan([[0, 9, 1, 1, 1]], CaM(5, 1, sinks=1, merge=2))
    assert np.flatnonzero(result.keep[0]).tolist() == [0, 2, 3, 4]
    assert terms(result.merge) == [(0, 2, 2, 1.0), (0, 2, 1, 0.5), (0, 3, 3, 1.0), (0, 3, 1, 0.5)]


def test_part_per_target_stays_the_same_if_fewer_tokens_follow():
    result = plan([[0, 9, 1]], CaM(3, 1, sinks=1))
    assert terms(result.merge) == [(0, 2, 2, 1.0), (0, 2, 1, 1 / 32)]


def test_keeps_all_tokens_far_below_the_budget():
    result = plan([[1] * 6], CaM(12, 1))
    assert result.keep.all()
    assert terms(result.merge) == []


def test_evicted_tokens_are_not_merged_into_each_other():
    result = plan([[9, 9, 1, 1]], CaM(4, 2, sinks=0, merge=2))
    from_both = [(0, 0.5), (1, 0.5)]
    assert terms(result.merge) == [
        (0, dst, src, weight) for dst in (2, 3) for src, weight in ((dst, 1.0), *from_both)
    ]


@pytest.mark.parametrize("n_evict", [1, 2, 3, 4, 100])
def test_long_batch_adds_no_more_than_one_value_to_a_token(n_evict):
    # every evicted token would be merged, because its attention is above the mean of the later tokens
    result = plan([[0] + [9] * n_evict + [1] * 4], CaM(n_evict + 5, n_evict, sinks=1, merge=3))
    kept, evicted = range(n_evict + 1, n_evict + 4), range(1, n_evict + 1)
    added = [(dst, src, pytest.approx(1 / 3)) for dst in kept for src in list(evicted)[-3:]]
    assert [term[1:] for term in terms(result.merge) if term[1] != term[2]] == added


def test_evicted_newest_token_is_not_merged():
    # more tokens are pinned than may stay. The engine never makes such a view
    result = plan([[1, 1, 1, 1]], CaM(4, 2, sinks=0), pinned=3)
    assert result.keep.tolist() == [[True, True, True, False]]
    assert terms(result.merge) == []


@pytest.mark.parametrize(("attention", "others", "share"), [(1, 4, 0.25), (3, 4, 0.75), (0, 0, 0), (1, 0, 1)])
def test_merge_probability_is_attention_over_the_mean_of_later_tokens(attention, others, share):
    n_row = 4000
    result = plan([[9, attention, 0, 2 * others]] * n_row, CaM(4, 1, sinks=1, merge=1))
    n_drawn = len(set(result.merge.row.tolist()))
    # allow 5 standard deviations
    assert abs(n_drawn - share * n_row) <= 5 * np.sqrt(share * (1 - share) * n_row)


def test_denominator_targets_uses_the_mean_of_the_targets():
    n_row = 4000
    # token 1 has an attention of 1. Its two targets have a mean attention of 4, so token 1 is merged with
    # probability 1/4. If the mean of all later tokens were used, which is 3, the probability would be 1/3
    policy = CaM(7, 1, sinks=1, merge=2, denominator="targets")
    result = plan([[9, 1, 8, 0, 0, 4, 3]] * n_row, policy)
    n_drawn = len(set(result.merge.row.tolist()))
    assert abs(n_drawn - n_row / 4) <= 5 * np.sqrt(n_row * 3 / 16)


def test_denominator_max_uses_the_largest_attention_of_kept_tokens():
    n_row = 4000
    policy = CaM(4, 1, sinks=1, merge=1, denominator="max")
    for last in ([8, 2, 0, 1], [0, 2, 1, 8]):
        n_drawn = len(set(plan([last] * n_row, policy).merge.row.tolist()))
        assert abs(n_drawn - n_row / 4) <= 5 * np.sqrt(n_row * 3 / 16)


def test_draws_change_with_step_and_seed():
    draws = {
        tuple(plan([[0, 1, 2, 2]] * 64, CaM(4, 1, sinks=1, merge=1, seed=seed), n).merge.row.tolist())
        for seed in (0, 1, -1)
        for n in (4, 5, 6)
    }
    assert len(draws) == 9


def test_keeps_the_same_tokens_as_streamingllm():
    _, cam = make("cam", [], 40, 7, seed=0)
    _, streaming = make("streamingllm", [], 40, 7, seed=0)
    for cache in (cam, streaming):
        for _ in range(3):
            cache.grow(40 - cache.n_kv)
            cache.apply(cache.plan()[1].keep)
    assert np.array_equal(np.sort(cam.live_pos()), np.sort(streaming.live_pos()))


@pytest.mark.parametrize("score", ["last", "sum", "average"])
def test_reads_no_more_than_its_score_needs(score):
    policy = policies.fit("cam", 40, options=[f"score={score}"])
    assert policy.reads == (Signal.LAST if score == "last" else Signal.ATTENTION)
