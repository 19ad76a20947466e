"""Sessions: damaged files are refused, and a restored stream continues as if it had never stopped."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from kvtool import policies
from kvtool.chats import session
from kvtool.errors import LibraryError, OutOfMemory, PlanError, SessionError, StreamEnd
from tests.engine.exact_engines import live_positions, open_engine, random_tokens


def scores(engine, tokens):
    """Return the logits of tokens that are read one by one, as in generation."""
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
    ("rkv", [], {}),
    ("expected", ["queries=20"], {}),
    ("random", [], {}),
    ("corm", ["history=24", "window=8"], {}),
    ("full", [], {}),
    ("h2o", [], {"arch": "gemma3", "n_ctx": 96}),
    ("corm", ["history=24", "window=8"], {"arch": "gemma3"}),
    ("h2o", [], {"arch": "lfm2", "n_ctx": 96}),
    ("corm", ["history=24", "window=8"], {"arch": "lfm2"}),
    ("full", [], {"arch": "lfm2"}),
]


# before the first token and before the first eviction, an engine of each kind of rows and of layers
EARLY = [
    ("h2o", [], {}),
    ("corm", ["history=24", "window=8"], {}),
    ("h2o", [], {"arch": "lfm2", "n_ctx": 96}),
]


@pytest.mark.parametrize(("engine", "n_read"), [*product(ENGINES, [101]), *product(EARLY, [0, 30])], ids=str)
def test_restored_engine_continues_bit_for_bit(tiny_model, tmp_path, engine, n_read):
    name, options, settings = engine
    settings = dict(settings)
    path = tiny_model(arch=settings.pop("arch", "llama"))
    tokens = random_tokens(160)
    budget, evict_every = {"full": (512, None), "corm": (512, 8)}.get(name, (48, 8))
    policy = policies.fit(name, budget, evict_every, options)
    with open_engine(path, policy, **settings) as engine:
        if n_read:
            engine.read(tokens[:n_read])
        with (tmp_path / "saved").open("w+b") as file:
            session.dump(file, {"n": n_read}, engine.save())
        saved = dict(engine.save())
        expected = scores(engine, tokens[n_read:])
        live = engine.rows.live.copy()
        # the saved arrays have stayed the same while the engine has read on
        engine.restore(saved)
        np.testing.assert_array_equal(scores(engine, tokens[n_read:]), expected)
    with open_engine(path, policy, **settings) as engine:
        # fill the cache with another text. restore() must replace it
        engine.read(tokens[:13])
        meta, saved = session.read(tmp_path / "saved")
        assert meta == {"n": n_read}
        engine.restore(saved)
        assert engine.n_past == n_read
        np.testing.assert_array_equal(scores(engine, tokens[n_read:]), expected)
        np.testing.assert_array_equal(engine.rows.live, live)


def test_one_flipped_bit_spoils_at_most_two_messages(tmp_path):
    path, roles = tmp_path / "chat", ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": f'Turn {i}: "Jo*\n\u00e9"'} for i in range(6)]
    session.write(path, {"id": "1", "messages": messages, "n": 6}, [("tokens", np.arange(9, dtype=np.int32))])
    whole = path.read_bytes()
    for offset in range(len("kvtool session "), whole.index(b"\ntokens ") + 1):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[offset] ^= 1 << bit
            path.write_bytes(damaged)
            read = session.readable_messages(path)
            assert sum(message in read for message in messages) >= 4, (offset, bit)
            assert len(read) <= 6
    path.write_bytes(whole.replace(b"kvtool session", b"another format"))
    assert session.readable_messages(path) == []


def test_damaged_and_truncated_files_are_refused(tmp_path):
    path = tmp_path / "chat"
    session.write(path, {"messages": ["kept"]}, [("a", np.arange(90, dtype=np.int32).reshape(9, 10))])
    whole = path.read_bytes()
    meta, arrays = session.read(path)
    assert meta == {"messages": ["kept"]}
    np.testing.assert_array_equal(arrays["a"], np.arange(90).reshape(9, 10))
    first_of_rest = whole.index(b"\n", whole.index(b"\n") + 1) + 1
    for offset in range(len(whole)):
        damaged = bytearray(whole)
        damaged[offset] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(SessionError):
            session.read(path)
        # damage after the chat's text leaves the text readable
        if offset >= first_of_rest:
            assert session.read_meta(path) == {"messages": ["kept"]}
    for n in range(len(whole)):
        path.write_bytes(whole[:n])
        with pytest.raises(SessionError):
            session.read(path)


def test_refusal_of_another_format_names_its_number(tmp_path):
    path = tmp_path / "chat"
    session.write(path, {}, [])
    path.write_bytes(path.read_bytes().replace(b"session 1", b"session 9"))
    with pytest.raises(SessionError, match="format 9"):
        session.read(path)


def test_arrays_that_do_not_fit_leave_the_engine_unchanged(tiny_model):
    path = tiny_model(n_head=4, n_head_kv=2)
    tokens = random_tokens(60)
    with open_engine(path, policies.fit("h2o", 48, 8)) as engine:
        engine.read(tokens)
        saved = dict(engine.save())
    for name in saved:
        broken = {key: array for key, array in saved.items() if key != name}
        shorter = saved | {name: saved[name][:-1]}
        with open_engine(path, policies.fit("h2o", 48, 8)) as engine:
            engine.read(tokens[:20])
            kind = np.float32 if saved[name].dtype != np.float32 else np.float64
            of_another_type = saved | {name: saved[name].astype(kind)}
            for wrong in (broken, shorter, of_another_type):
                if name == "engine" and wrong is of_another_type:
                    # the counters in the array "engine" may have another type
                    continue
                with pytest.raises(SessionError, match="does not fit"):
                    engine.restore(wrong)
            assert engine.n_past == 20
            engine.read(tokens[20:])
            np.testing.assert_array_equal(engine.rows.pos[:, : engine.n_kv], saved["pos"])


@pytest.mark.parametrize("error", [LibraryError, OutOfMemory, StreamEnd])
def test_engine_is_empty_after_a_failed_restore(tiny_model, monkeypatch, error):
    tokens = random_tokens(60)
    with open_engine(tiny_model(), policies.fit("h2o", 48, 8, [])) as engine:
        expected = scores(engine, tokens)
        saved = dict(engine.save())
        with monkeypatch.context() as patched:

            def fail(positions):
                raise error("no memory")

            patched.setattr(engine.context, "set_positions", fail)
            with pytest.raises(SessionError if error is LibraryError else error):
                engine.restore(saved)
        assert engine.n_past == engine.rows.n_kv == 0
        np.testing.assert_array_equal(scores(engine, tokens), expected)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "lfm2"])
def test_invalid_counters_and_positions_are_refused(tiny_model, arch):
    path, tokens = tiny_model(arch=arch, n_ctx_train=256), random_tokens(60)
    with open_engine(path, policies.fit("h2o", 48, 8)) as engine:
        engine.read(tokens)
        saved = {name: array.copy() for name, array in engine.save()}
    wrong = [("engine", index, value) for index in range(9) for value in (-1, 2**40)]
    # n_past, n_restart and n_evicted may be any large number
    wrong = [each for each in wrong if each[1:] not in ((4, 2**40), (8, 2**40), (0, 2**40))]
    wrong += [("pos", (1, 5), 60), ("pos", (1, 5), -1), ("rot", (0, 3), 256), ("rot", (0, 3), -2)]
    wrong += [("live", 1, 5), ("live", 0, 2**20)]
    with open_engine(path, policies.fit("h2o", 48, 8)) as engine:
        engine.read(tokens[:20])
        for name, index, value in wrong:
            array = saved[name].copy()
            array[index] = value
            with pytest.raises(SessionError, match="does not fit"):
                engine.restore(saved | {name: array})
            assert engine.n_past == 20
        if arch == "gemma3":
            # only llama.cpp can check its own table, and this check comes after everything else was restored.
            # If the check fails, `restore` empties the engine
            table = saved["window"].copy()
            table[0] = 2**20
            with pytest.raises(SessionError, match="does not fit"):
                engine.restore(saved | {"window": table})
            assert engine.n_past == 0
        engine.restore(saved)
        assert engine.n_past == 60


def test_session_with_summed_recent_attention_is_restored(tiny_model):
    path, tokens = tiny_model(), random_tokens(60)
    with open_engine(path, policies.fit("snapkv", 48, 8), over_budget=False) as engine:
        engine.read(tokens[:48])
        saved = {name: array.copy() for name, array in engine.save()}
        engine.read(tokens[48:49])
        expected = live_positions(engine)
    saved["recent"] = saved["recent"].sum(axis=0)
    with open_engine(path, policies.fit("snapkv", 48, 8), over_budget=False) as engine:
        engine.restore(saved)
        engine.read(tokens[48:49])
        assert live_positions(engine) == expected


def test_sessions_count_important_steps_from_the_last_edit(tiny_model):
    # sessions store the steps of IMPORTANT as f32, counted from the last edit
    with open_engine(tiny_model(), policies.fit("corm", 512, 40, ["history=24", "window=8"])) as engine:
        engine.read(random_tokens(101)[:64])
        # a plan precedes these 37 tokens, and the next plan would come after 40
        engine.read(random_tokens(101)[64:])
        n_cleared = engine.signals.since
        assert 0 < n_cleared < 101
        saved = {name: array.copy() for name, array in engine.save()}
        assert saved["important"].dtype == np.float32
        assert saved["important"].max() == 101 - n_cleared
        important = engine.signals.read()["important"]
        assert len(np.unique(important)) > 3
        np.testing.assert_array_equal(saved["important"], np.where(important, important - n_cleared, 0))
        engine.reset()
        engine.restore(saved)
        np.testing.assert_array_equal(engine.signals.read()["important"], important)


def test_session_saved_over_the_budget_is_restored(tiny_model):
    path, tokens = tiny_model(), random_tokens(90)
    with open_engine(path, policies.fit("h2o", 48, 8)) as engine:
        engine.cache.check = lambda view, plan: (_ for _ in ()).throw(PlanError("not today"))
        with pytest.raises(PlanError):
            engine.read(tokens[:60])
        assert engine.n_kv == 60
        saved = {name: array.copy() for name, array in engine.save()}
        del engine.cache.check
        expected = scores(engine, tokens[60:])
    with open_engine(path, policies.fit("h2o", 48, 8)) as engine:
        engine.restore(saved)
        np.testing.assert_array_equal(scores(engine, tokens[60:]), expected)
