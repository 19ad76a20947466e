"""Which tokens the rows hold, against a plain count, and for policies with a known answer."""

from __future__ import annotations

import numpy as np
import pytest

from kvtool import policies
from kvtool.measure import holdings
from tests.running import open_engine, text

pytestmark = pytest.mark.engine


def rows_of(engine):
    """The tokens that each row holds, one by one."""
    return [set(pos[:n].tolist()) for pos, n in zip(engine.rows.pos, engine.rows.live, strict=True)]


def brute_share(engine):
    rows = rows_of(engine)
    return [sum(pos in row for row in rows) / len(rows) for pos in range(engine.n_past)]


POLICIES = {
    "h2o": policies.fit("h2o", 48, 8),
    "buzz": policies.fit("buzz", 48, 8),
    "corm": policies.fit("corm", 80, 8, ["history=4"]),
}


@pytest.mark.parametrize("name", POLICIES)
def test_shares_and_what_is_forgotten_are_those_of_a_plain_count(tiny_model, name):
    with open_engine(tiny_model(), POLICIES[name]) as engine:
        for part in np.array_split(text(210), 3):
            engine.read(part)
            want = brute_share(engine)
            assert engine.cells().share().tolist() == want
            assert holdings.n_forgotten(engine) == want.count(0)
        assert 0 < holdings.n_forgotten(engine) < 210
        # otherwise the test says little
        assert len({share for share in want if 0 < share < 1}) > 1


@pytest.mark.parametrize("name", POLICIES)
def test_each_snapshot_is_what_the_rows_held_then(tiny_model, name):
    seen = {}
    with open_engine(tiny_model(), POLICIES[name]) as engine:
        found = holdings.watch(engine, text(210), 9, lambda n: seen.update({n: rows_of(engine)}))
        assert engine.n_past == 210
        assert found.layer.tolist() == [0, 0, 1, 1]
        assert found.head.tolist() == [0, 1, 0, 1]
    assert found.ends.tolist() == [24, 47, 70, 94, 117, 140, 164, 187, 210]
    for snapshot, end in enumerate(found.ends.tolist()):
        held = found.held(snapshot)
        assert [set(np.flatnonzero(row).tolist()) for row in held] == seen[end]
        assert found.share(snapshot).tolist() == held.mean(axis=0).tolist()


@pytest.mark.parametrize(("name", "n_sinks"), [("streamingllm", 4), ("local", 0)])
def test_sinks_and_the_newest_are_all_that_these_hold(tiny_model, name, n_sinks):
    with open_engine(tiny_model(), policies.fit(name, 32, 8)) as engine:
        found = holdings.watch(engine, text(100), 10)
    # full at 32, 40, .. 96 tokens; the next token finds 24 of them, which 4 more follow
    n_new = 28 - n_sinks
    want = np.zeros(100)
    want[:n_sinks] = want[-n_new:] = 1
    assert found.share().tolist() == want.tolist()
    # after 30 tokens nothing was evicted, after 40 the last eviction was at 32
    assert found.share(2).tolist() == [1.0] * 30 + [0.0] * 70
    assert np.flatnonzero(found.share(3)).tolist() == [*range(n_sinks), *range(8 + n_sinks, 40)]


def test_a_text_read_whole_has_one_snapshot(tiny_model):
    seen = []
    with open_engine(tiny_model(), policies.fit("h2o", 32, 8), prefill="whole") as engine:
        found = holdings.watch(engine, text(150), 32, seen.append)
        assert [set(np.flatnonzero(row).tolist()) for row in found.held()] == rows_of(engine)
    assert found.ends.tolist() == [150]
    assert found.held().sum(axis=1).tolist() == [24] * 4
    assert seen[0] == 0
    assert seen[-1] < 150


def test_a_short_text_has_no_snapshot_twice(tiny_model):
    with open_engine(tiny_model(), policies.fit("local", 32, 8)) as engine:
        found = holdings.watch(engine, text(5), 32)
    assert found.ends.tolist() == [1, 2, 3, 4, 5]
    assert found.share(1).tolist() == [1, 1, 0, 0, 0]


def test_a_character_of_several_tokens_is_the_text_of_the_last(tiny_model):
    with open_engine(tiny_model(), policies.fit("local", 32, 8)) as engine:
        model = engine.model
        tokens = model.tokenize("a€</s>", special=True)
        assert holdings.texts(model, tokens) == ["a", "", "", "€", "</s>"]
        assert holdings.texts(model, tokens[:2]) == ["a", "\ufffd"]
        assert holdings.texts(model, tokens[:0]) == []


def test_recalls_are_counted_where_there_was_a_choice():
    recalled = holdings.Recalled.none(2, 9)
    recalled.add(np.array([[2, 3, -1], [2, 3, -1]]), 10, 2)
    recalled.add(np.array([[2, 3, 4], [2, 3, 4]]), 12, 3)
    # nothing was chosen so far
    assert recalled.steps.sum() == 0
    assert (recalled.query == -1).all()
    recalled.add(np.array([[2, 3, 5], [2, 4, 5]]), 14, 4)
    recalled.add(np.array([[2, 5, 6], [2, 5, 7]]), 16, 6)
    recalled.add(np.array([[2, 5, 6], [2, 5, 7]]), 18, 6)
    assert recalled.steps.tolist() == [[0, 0, 3, 1, 0, 3, 2, 0, 0], [0, 0, 3, 0, 1, 3, 0, 2, 0]]
    # all rows recalled 2 and 5 at 14, too, but from a smaller archive; half of the rows are mere chance
    assert recalled.query.tolist() == [-1, -1, 16, -1, -1, 16, -1, -1, -1]
    assert recalled.rows.tolist() == [0, 0, 2, 0, 0, 2, 0, 0, 0]


def test_what_was_recalled_is_what_the_engine_recalled(tiny_model):
    steps = np.zeros((4, 210), int)

    def count(n):
        chosen = holdings.recalled_last(engine)
        for row, mine in enumerate(chosen):
            steps[row, mine[mine >= 0]] += engine.n_archived > chosen.shape[1]

    with open_engine(tiny_model(n_head_kv=2), policies.fit("recall", 48, 8, ["recalled=7"])) as engine:
        found = holdings.watch(engine, text(210), 6, count)
        assert holdings.recalled_last(engine).shape == (4, 7)
    assert found.recalled.steps.tolist() == steps.tolist()
    assert steps.sum() > 100
    with open_engine(tiny_model(), policies.fit("h2o", 48, 8)) as engine:
        assert holdings.watch(engine, text(210), 6).recalled is None
        assert holdings.recalled_last(engine).shape == (4, 0)


def test_what_is_archived_is_held_by_no_row_and_not_forgotten(tiny_model):
    with open_engine(tiny_model(n_head_kv=2), policies.fit("recall", 48, 8), archive=40) as engine:
        found = holdings.watch(engine, text(210), 6)
        archived = holdings.is_archived(engine)
        assert archived.sum() == engine.n_archived == 40
        assert holdings.n_forgotten(engine) == int(((found.share() == 0) & ~archived).sum()) > 0
    assert not (archived & (found.share() > 0)).any()
    # at each time the newest of those between sinks and window
    for snapshot, (begin, end) in enumerate(found.archived.tolist()):
        held = np.flatnonzero(found.held(snapshot)[0])
        assert end == held[4]
        assert begin == max(4, end - 40)
    assert np.flatnonzero(archived).tolist() == [*range(begin, end)]
