"""Sessions: what is saved, is whole; what goes on from it, goes on as if it had never stopped."""

from __future__ import annotations

import numpy as np
import pytest
from running import open_engine, text

from kvtool import policies, session
from kvtool.errors import SessionError

pytestmark = pytest.mark.engine


def scores(engine, tokens):
    """The logits of tokens read one by one, as generating does."""
    rows = []
    for token in tokens:
        engine.read(np.array([token], np.int32))
        rows.append(engine.context.logits().copy())
    return np.concatenate(rows)


ENGINES = [
    ("h2o", [], {}),
    ("h2o", [], {"type_k": "q8_0", "type_v": "q8_0", "flash": "on"}),
    ("h2o", [], {"type_k": "f16", "type_v": "f16", "flash": "on", "positions": "in-cache"}),
    ("roco", [], {"n_ctx": 96}),
    ("tova", [], {"n_ctx": 96}),
    ("snapkv", [], {}),
    ("scissorhands", [], {}),
    ("buzz", ["logn=true"], {}),
    ("bumblebee", [], {}),
    ("bumblebee", ["similarity=f32"], {}),
    ("weightedkv", [], {}),
    ("keydiff", [], {}),
    ("random", [], {}),
    ("corm", ["history=24", "window=8"], {}),
    ("full", [], {}),
]


@pytest.mark.parametrize(("name", "options", "settings"), ENGINES)
@pytest.mark.parametrize("n_read", [0, 30, 101])
def test_a_restored_engine_goes_on_bit_by_bit(tiny_model, tmp_path, name, options, settings, n_read):
    path = tiny_model(n_head=4, n_head_kv=2)
    tokens = text(160)
    policy = policies.fit(name, 512 if name in ("full", "corm") else 48, None if name == "full" else 8, options)
    with open_engine(path, policy, **settings) as engine:
        if n_read:
            engine.read(tokens[:n_read])
        with (tmp_path / "saved").open("w+b") as file:
            session.dump(file, {"n": n_read}, engine.save())
        expected = scores(engine, tokens[n_read:])
        live = engine.live.copy()
    with open_engine(path, policy, **settings) as engine:
        # something else is in it before
        engine.read(tokens[:13])
        meta, saved = session.read(tmp_path / "saved")
        assert meta == {"n": n_read}
        engine.restore(saved)
        assert engine.n_past == n_read
        np.testing.assert_array_equal(scores(engine, tokens[n_read:]), expected)
        np.testing.assert_array_equal(engine.live, live)
