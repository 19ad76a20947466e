"""Going back: a stream is cut to its first tokens, and is what it was after these."""

from __future__ import annotations

import numpy as np
import pytest

from kvtool import policies
from kvtool.errors import UsageError
from tests.running import TOLERANCE, open_engine, text

pytestmark = pytest.mark.engine

SEARCHES = ({}, {"index": "q4"}, {"search": "all"}, {"search": "clusters", "exact": 40})
"""How recall looks into its archive; the first chooses by the keys themselves."""


def fit(budget=48, evict_every=16, **params):
    if "search" not in params:
        params = {"index": "keys"} | params
    return policies.fit("recall", budget, evict_every, [f"{key}={value}" for key, value in params.items()])


def opened(path, policy, archive_type="f32", n_batch=16, **settings):
    return open_engine(path, policy, archive_type=archive_type, n_batch=n_batch, **settings)


def state(engine):
    """What a stream is besides keys and values: numbers and tables, where the archive's are exact."""
    cells, archive = engine.cells(), engine.context.archive
    own = {
        name: getattr(engine, name)
        for name in ("n_past", "n_kv", "n_pinned", "n_held", "n_restart", "n_evicted", "n_archived")
    }
    own |= {"due": engine.n_until_plan, "planned": engine.eviction.n_planned, "room": engine.room()}
    own |= {"next": engine.rows.next_rot, "pos": cells.pos.tolist(), "rot": cells.rot.tolist()}
    return own | {"archive": dict(archive.save(tokens=False))["archive"].tolist() if archive.n else []}


def logits(engine, tokens):
    """f32[n, n_vocab]: what each of these tokens gives, read one by one."""
    found = []
    for token in tokens:
        engine.step(np.array([token]))
        found.append(engine.context.logits()[-1].copy())
    return np.array(found)


def check_back(engine, fresh, n, n_later, tolerance):
    """Reads n tokens and n_later others, goes back, and compares with who has read the n alone."""
    tokens = text(n + 40)
    for each in (engine, fresh):
        each.reset()
        # a step shares its choice: both read these in the same ones
        each.read(tokens[:n])
    wanted = state(fresh)
    engine.read(text(n_later, seed=2))
    assert engine.n_past == n + n_later
    assert engine.go_back(n)
    assert not engine.context.has_logits
    assert state(engine) == wanted
    got, wanted = (logits(each, tokens[n:]) for each in (engine, fresh))
    assert np.abs(got - wanted).max() < tolerance
    assert state(engine) == state(fresh)


@pytest.mark.parametrize("search", SEARCHES, ids=str)
@pytest.mark.parametrize("n_later", [3, 30, 500])
def test_a_stream_that_went_back_is_one_that_has_read_no_more(tiny_model, search, n_later):
    policy = fit(**search)
    path = tiny_model(n_head_kv=2, n_ctx_train=1024)
    with opened(path, policy) as engine, opened(path, policy) as fresh:
        for n in (899, 700, 513, 512, 300, policy.n_live + 1, policy.n_live, 20, 3):
            check_back(engine, fresh, n, n_later, TOLERANCE)


@pytest.mark.parametrize("search", SEARCHES, ids=str)
@pytest.mark.parametrize("n_later", [40, 200, 1500])
def test_a_stream_goes_back_behind_positions_that_started_over(tiny_model, search, n_later):
    policy = fit(**search)
    path = tiny_model(n_head_kv=2, n_ctx_train=256)
    with opened(path, policy) as engine, opened(path, policy) as fresh:
        for n in (690, 470, 463, 258, 257, 256, 255, 250, 120, 20):
            check_back(engine, fresh, n, n_later, TOLERANCE)


def test_nobody_goes_where_there_is_nothing(tiny_model):
    with opened(tiny_model(), fit()) as engine:
        engine.read(text(100))
        for n in (-1, 101):
            with pytest.raises(UsageError, match=r"n must be in 0\.\.100"):
                engine.go_back(n)
        assert engine.go_back(0)
        assert engine.n_past == engine.n_kv == engine.n_archived == 0
