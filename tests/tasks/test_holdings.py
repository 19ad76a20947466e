"""`holdings` reports which tokens each row holds. Compare with a plain count, or with a known answer."""

from __future__ import annotations

import numpy as np
import pytest

from kvtool import policies
from kvtool.measure import holdings
from tests.engine.exact_engines import open_engine, random_tokens


def rows_of(engine):
    """Return the set of tokens that each row holds."""
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
def test_shares_and_forgotten_tokens_equal_a_plain_count(tiny_model, name):
    with open_engine(tiny_model(), POLICIES[name]) as engine:
        for part in np.array_split(random_tokens(210), 3):
            engine.read(part)
            expected = brute_share(engine)
            assert engine.cells().share().tolist() == expected
            assert holdings.n_forgotten(engine) == expected.count(0)
        assert 0 < holdings.n_forgotten(engine) < 210
        # rows must hold different tokens, or an error that mixes up rows would not be seen
        assert len({share for share in expected if 0 < share < 1}) > 1


@pytest.mark.parametrize("name", POLICIES)
def test_snapshots_equal_the_tokens_held_at_that_time(tiny_model, name):
    positions = {}
    with open_engine(tiny_model(), POLICIES[name]) as engine:
        watched = holdings.watch(
            engine, random_tokens(210), 9, lambda n: positions.update({n: rows_of(engine)})
        )
        assert engine.n_past == 210
        assert watched.layer.tolist() == [0, 0, 1, 1]
        assert watched.head.tolist() == [0, 1, 0, 1]
    # a snapshot is taken at the first end of a batch in each ninth of the text
    assert watched.ends[-1] == 210
    assert all(end in positions for end in watched.ends.tolist())
    assert np.unique(watched.ends * 9 // 210).tolist() == (watched.ends * 9 // 210).tolist()
    for snapshot, end in enumerate(watched.ends.tolist()):
        is_held = watched.held(snapshot)
        assert [set(np.flatnonzero(row).tolist()) for row in is_held] == positions[end]
        assert watched.share(snapshot).tolist() == is_held.mean(axis=0).tolist()


@pytest.mark.parametrize(("name", "n_sinks"), [("streamingllm", 4), ("local", 0)])
def test_streamingllm_and_local_hold_only_sinks_and_newest_tokens(tiny_model, name, n_sinks):
    with open_engine(tiny_model(), policies.fit(name, 32, 8)) as engine:
        watched = holdings.watch(engine, random_tokens(100), 10)
    # the cache is full after 32, 40, ... 96 tokens. Each eviction leaves 24 tokens. The last 4 tokens follow
    n_new = 28 - n_sinks
    expected = np.zeros(100)
    expected[:n_sinks] = expected[-n_new:] = 1
    assert watched.share().tolist() == expected.tolist()
    # snapshot 0 is taken after 32 tokens: nothing has been evicted. Snapshot 1 is taken after 40 tokens: 8
    # tokens were evicted when 32 tokens had been read
    assert watched.share(0).tolist() == [1.0] * 32 + [0.0] * 68
    assert np.flatnonzero(watched.share(1)).tolist() == [*range(n_sinks), *range(8 + n_sinks, 40)]


def test_a_text_read_whole_has_one_snapshot(tiny_model):
    n_read = []
    with open_engine(tiny_model(), policies.fit("h2o", 32, 8), prefill="whole") as engine:
        watched = holdings.watch(engine, random_tokens(150), 32, n_read.append)
        assert [set(np.flatnonzero(row).tolist()) for row in watched.held()] == rows_of(engine)
    assert watched.ends.tolist() == [150]
    assert watched.held().sum(axis=1).tolist() == [24] * 4
    assert n_read[0] == 0
    assert n_read[-1] < 150


@pytest.mark.parametrize("name", POLICIES)
def test_snapshots_do_not_change_the_batches(tiny_model, name):
    steps = {1: [], 32: []}
    for n_snapshot, ends in steps.items():
        with open_engine(tiny_model(), POLICIES[name]) as engine:
            holdings.watch(engine, random_tokens(210), n_snapshot, ends.append)
    assert steps[1] == steps[32]


def test_character_of_several_tokens_is_shown_at_its_last_token(tiny_model):
    with open_engine(tiny_model(), policies.fit("local", 32, 8)) as engine:
        model = engine.model
        tokens = model.tokenize("a€</s>", special=True)
        assert holdings.texts(model, tokens) == ["a", "", "", "€", "</s>"]
        assert holdings.texts(model, tokens[:2]) == ["a", "\ufffd"]
        assert holdings.texts(model, tokens[:0]) == []


def test_attended_sums_attention_and_records_the_largest_share():
    attended = holdings.Attended.none(np.array([2, 1]), 9)
    none = np.full((2, 2), -1), np.zeros((2, 2), np.float32)
    attended.add(*none, slice(0, 8))
    # queries are not counted while nothing is archived
    assert attended.n_query == 0
    attended.add(np.array([[2, 3], [3, -1]]), np.array([[0.5, 0.25], [0.5, 0]], np.float32), slice(10, 12))
    attended.add(np.array([[2, 3], [2, 5]]), np.array([[0.25, 0.25], [0.25, 0.5]], np.float32), slice(12, 13))
    attended.add(np.array([[2, 3], [2, 5]]), np.array([[0.25, 0.25], [0.25, 0.5]], np.float32), slice(13, 14))
    assert attended.attn.tolist() == [[0, 0, 1, 0.75, 0, 0, 0, 0, 0], [0, 0, 0.5, 0.5, 0, 1, 0, 0, 0]]
    # A share is attention divided by (number of query heads * number of queries). There are 3 heads. The last
    # three steps have 2, 1 and 1 queries.
    assert attended.query.tolist() == [-1, -1, 12, 10, -1, 12, -1, -1, -1]
    assert (attended.query_share * 6).round(9).tolist() == [0, 0, 1, 0.75, 0, 1, 0, 0, 0]
    assert (attended.share() * 12).round(9).tolist() == [0, 0, 1.5, 1.25, 0, 1, 0, 0, 0]
    assert (attended.row_share() * 8).tolist() == [
        [0, 0, 1, 0.75, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 2, 0, 0, 0],
    ]


@pytest.mark.parametrize(
    ("arch", "options", "k"),
    [
        ("llama", [], holdings.N_TRACED),
        ("llama", ["search=all", "chunk=1"], holdings.N_TRACED),
        # with MLA, recall copies 7 archived tokens into cells, and makes no synthetic cells
        ("deepseek2", ["recalled=7"], 7),
    ],
)
def test_attended_equals_the_sum_of_the_engines_steps(tiny_model, arch, options, k):
    shape = {"n_head_kv": 2} if arch == "llama" else {}
    notes, ends = [], [0]

    def note(n):
        notes.append(engine.context.archive.attended(engine.context.n_row, k))
        ends.append(n)

    with open_engine(tiny_model(arch, **shape), policies.fit("recall", 48, 8, options)) as engine:
        attended = holdings.watch(engine, random_tokens(210), 6, note).attended
        n_head = engine.context.n_head
        archived = holdings.is_archived(engine)
    steps = np.zeros((len(notes), 210))
    rows, n_query = np.zeros((len(n_head), 210)), 0
    for step, (pos, attn) in enumerate(notes):
        for row, (tokens, actual) in enumerate(zip(pos.tolist(), attn.tolist(), strict=True)):
            for token, attention in zip(tokens, actual, strict=True):
                if token >= 0:
                    rows[row, token] += attention
                    steps[step, token] += attention
        n = ends[step + 1] - ends[step]
        n_query += n * bool((pos >= 0).any())
        steps[step] /= n * n_head.sum()
    assert 0 < n_query < 210 - 40
    assert attended.n_query == n_query
    assert np.abs(attended.row_share() - rows / n_head[:, None] / n_query).max() < 1e-6
    share = rows.sum(axis=0) / n_head.sum() / n_query
    assert np.abs(attended.share() - share).max() < 1e-6
    assert 0.1 < share.sum() < 1
    assert (archived >= (share > 0)).all()
    assert np.abs(attended.query_share - steps.max(axis=0)).max() < 1e-6
    first = np.array(ends)[steps.argmax(axis=0)]
    assert attended.query.tolist() == np.where(share > 0, first, -1).tolist()


def test_attended_is_none_if_nothing_is_archived(tiny_model):
    with open_engine(tiny_model(), policies.fit("h2o", 48, 8)) as engine:
        assert holdings.watch(engine, random_tokens(210), 6).attended is None
    with open_engine(tiny_model(), policies.fit("recall", 48, 8)) as engine:
        assert holdings.watch(engine, random_tokens(40), 6).attended is None


def test_archived_tokens_are_neither_held_nor_forgotten(tiny_model):
    with open_engine(tiny_model(n_head_kv=2), policies.fit("recall", 48, 8), archive=40) as engine:
        watched = holdings.watch(engine, random_tokens(210), 6)
        archived = holdings.is_archived(engine)
        assert archived.sum() == engine.n_archived == 40
        assert holdings.n_forgotten(engine) == int(((watched.share() == 0) & ~archived).sum()) > 0
    assert not (archived & (watched.share() > 0)).any()
    # the archive has the newest 40 tokens between sinks and window. At the first snapshot, it is empty
    assert watched.archived[0].tolist() == [0, 0]
    for snapshot, (begin, end) in enumerate(watched.archived.tolist()[1:], 1):
        positions = np.flatnonzero(watched.held(snapshot)[0])
        assert end == positions[4]
        assert begin == max(4, end - 40)
    assert np.flatnonzero(archived).tolist() == [*range(begin, end)]
