"""Checkpoints in a session's archive file: each is written once, and a later process can rewind to it."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from kvtool import policies
from kvtool.chats import archive_file, session
from kvtool.chats.archive_file import ArchiveFile, archive_path
from kvtool.engine import checkpoints
from kvtool.errors import SessionError
from kvtool.llama.cache.segment import CHECKPOINTS, SavedCheckpoint, listed
from tests.engine.exact_engines import open_engine, random_tokens

SPACING = 60


@pytest.fixture(autouse=True)
def spacing(monkeypatch):
    monkeypatch.setattr(checkpoints, "SPACING", SPACING)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "chat.kv"


def start_engine(tiny_model, name, **settings):
    policy = policies.fit(name, 1024 if name == "full" else 64, 16, ["window=8"] if name == "corm" else [])
    return open_engine(tiny_model("lfm2"), policy, archive_type="f32", n_batch=16, **settings)


def save(path, engine, file=None):
    """Write a session of this engine, as `Conversation.save_to` does. file: the session's archive file."""
    if not file:
        with closing(ArchiveFile(path)) as file:
            save(path, engine, file)
        return
    with file.write(engine.context.archive, engine.checkpoints.to_save()) as listed:
        session.write(path, {}, [*engine.save(archived=False), *listed])


def checkpoint_data(engine):
    return [(checkpoint.n_past, bytes(checkpoint.data)) for checkpoint in engine.checkpoints]


@pytest.mark.parametrize("name", ["recall", "full", "h2o", "corm"])
def test_checkpoints_are_saved_and_restored(tiny_model, path, name):
    with start_engine(tiny_model, name) as engine, start_engine(tiny_model, name) as other:
        engine.read(random_tokens(200))
        save(path, engine)
        other.restore(session.read(path)[1])
        assert len(other.checkpoints) == 3
        assert checkpoint_data(other) == checkpoint_data(engine)
        n = engine.n_kept(190)
        assert n > 120
        assert engine.rewind(190) == other.rewind(190) == n
        logits = []
        for each in (engine, other):
            each.read(random_tokens(50, seed=2))
            logits.append(each.context.logits()[-1].copy())
        assert (logits[0] == logits[1]).all()


@pytest.mark.parametrize("name", ["recall", "full", "h2o", "corm"])
def test_a_turn_appends_its_new_checkpoints(tiny_model, path, name):
    with start_engine(tiny_model, name) as engine, closing(ArchiveFile(path)) as file:
        engine.read(random_tokens(150))
        save(path, engine, file)
        first, before = archive_path(path).read_bytes(), listed(session.read(path)[1], SavedCheckpoint)
        assert len(before) == 2
        engine.read(random_tokens(100, seed=2))
        save(path, engine, file)
        assert archive_path(path).read_bytes().startswith(first)
        now = listed(session.read(path)[1], SavedCheckpoint)
        assert len(now) == 3
        assert now.items() >= before.items()
        # after a rewind, other checkpoints follow the first two
        engine.rewind(140)
        engine.read(random_tokens(120, seed=3))
        save(path, engine, file)
        assert listed(session.read(path)[1], SavedCheckpoint).keys() & now.keys() == before.keys()


def test_dropped_checkpoints_take_no_more_than_half_of_the_file(tiny_model, path):
    with start_engine(tiny_model, "full") as engine:
        n_bytes = engine.context.fixed_state.n_bytes
    limit = 3 * n_bytes
    with start_engine(tiny_model, "full", checkpoints=limit) as engine, closing(ArchiveFile(path)) as file:
        for _ in range(20):
            engine.read(random_tokens(40))
            engine.checkpoints.take()
            save(path, engine, file)
            assert len(engine.checkpoints) <= 3
            assert archive_path(path).stat().st_size < 7 * n_bytes
            with start_engine(tiny_model, "full") as other:
                other.restore(session.read(path)[1])
                assert checkpoint_data(other) == checkpoint_data(engine)
        # a new chat has no checkpoints, and therefore no archive file
        engine.reset()
        save(path, engine, file)
        assert not archive_path(path).exists()
        session.read(path)


@pytest.mark.parametrize("harm", ["damaged", "missing", "another"])
@pytest.mark.parametrize("name", ["recall", "h2o"])
def test_only_sessions_with_archived_tokens_need_their_archive_file(tiny_model, path, name, harm):
    with start_engine(tiny_model, name) as engine, start_engine(tiny_model, name) as other:
        engine.read(random_tokens(100))
        save(path, engine)
        place = archive_path(path)
        data = bytearray(place.read_bytes())
        if harm == "damaged":
            data[-1] ^= 1
        else:
            # change a digit of the archive's id
            data[20] = ord("0" if data[20] != ord("0") else "1")
        place.unlink() if harm == "missing" else place.write_bytes(data)
        if name == "recall":
            with pytest.raises(SessionError, match=r"chat.kv.archive (is|belongs)"):
                session.read(path)
            return
        _, saved = session.read(path)
        other.restore(saved)
        assert len(other.checkpoints) == 0
        assert other.n_past == 100
        # the next turn writes a new archive file. The old file is replaced, or moved away if it may belong to
        # another chat
        other.read(random_tokens(100, seed=2))
        engine.read(random_tokens(100, seed=2))
        with closing(ArchiveFile(path)) as file:
            file.adopt(saved)
            save(path, other, file)
            assert bool(file.moved) == (harm == "another")
        _, saved = session.read(path)
        engine.restore(saved)
        assert checkpoint_data(engine) == checkpoint_data(other) != []
        assert {k: v.tobytes() for k, v in engine.save()} == {k: v.tobytes() for k, v in other.save()}


def test_failed_restore_keeps_the_checkpoints(tiny_model):
    with start_engine(tiny_model, "full") as engine:
        engine.read(random_tokens(150))
        before = checkpoint_data(engine)
        with pytest.raises(SessionError):
            engine.restore({})
        assert checkpoint_data(engine) == before != []
        assert engine.rewind(140) > 0


def test_sessions_of_earlier_versions_have_no_checkpoints(tiny_model, path):
    with start_engine(tiny_model, "full") as engine, start_engine(tiny_model, "full") as other:
        engine.read(random_tokens(100))
        session.write(path, {}, engine.save(archived=False))
        assert path.read_bytes().startswith(b"kvtool session 1 ")
        other.restore(session.read(path)[1])
        assert len(other.checkpoints) == 0
        assert other.rewind(90) == 0
        save(path, engine)
        assert path.read_bytes().startswith(b"kvtool session 3 ")


def test_checkpoints_that_do_not_fit_are_left_out(tiny_model, path):
    with (
        start_engine(tiny_model, "full") as engine,
        start_engine(tiny_model, "full", checkpoints=10**9) as other,
    ):
        engine.read(random_tokens(200))
        save(path, engine)
        arrays = dict(session.read(path)[1])
        n_bytes = engine.context.fixed_state.n_bytes
        table = np.array(arrays[CHECKPOINTS])
        table[0, 4] += 8
        table[1, 0] = 999
        other.restore(arrays | {CHECKPOINTS: table})
        assert [checkpoint.n_past for checkpoint in other.checkpoints] == table[2:, 0].tolist()
        assert other.checkpoints.n_bytes == n_bytes
    with start_engine(tiny_model, "full", checkpoints=2 * n_bytes) as other:
        other.restore(arrays)
        assert checkpoint_data(other) == checkpoint_data(engine)[1:]


def test_restored_checkpoints_are_thinned_as_new_ones_are(tiny_model, path):
    with start_engine(tiny_model, "full") as engine:
        engine.read(random_tokens(600))
        save(path, engine)
        places, n_bytes = [each.n_past for each in engine.checkpoints], engine.context.fixed_state.n_bytes
    assert len(places) == 9
    with start_engine(tiny_model, "full", checkpoints=4 * n_bytes) as other:
        other.restore(session.read(path)[1])
        kept = [each.n_past for each in other.checkpoints]
    # the distance between checkpoints grows with their age, so one of the older half is kept
    assert len(kept) == 4
    assert kept[0] < places[4]
    assert kept[-1] == places[-1]


def test_two_sessions_share_no_archive_file(tiny_model, path):
    with start_engine(tiny_model, "full") as engine:
        engine.read(random_tokens(100))
        save(path, engine)
        before = archive_path(path).read_bytes()
        session.set_aside(path)
        engine.read(random_tokens(100))
        with closing(ArchiveFile(path)) as file:
            file.adopt(session.read(path)[1])
            save(path, engine, file)
        (spare,) = path.parent.glob("chat.kv.1*.archive")
        assert spare.read_bytes() == before
        assert archive_file.size(path) > len(before)


def test_session_stores_few_copies_of_a_large_cache(tiny_model, path, monkeypatch):
    monkeypatch.setattr(checkpoints, "_MAX_SAVED_BYTES", 0)
    with start_engine(tiny_model, "h2o") as engine, closing(ArchiveFile(path)) as file:
        for n in range(12):
            engine.read(random_tokens(50))
            engine.checkpoints.take()
            save(path, engine, file)
            parts = [*listed(session.read(path)[1], SavedCheckpoint)]
            # the newest checkpoint is not listed, because the session itself has that state
            assert len(parts) == min(n, 3)
            assert n < 1 or parts[-1].n_past == engine.n_past - 50
            assert n < 3 or n // 5 * 50 < parts[0].n_past <= engine.n_past - 150
            assert n < 1 or archive_path(path).stat().st_size < 7 * max(part.n_bytes for part in parts)
        assert len(engine.checkpoints) >= 8
        with start_engine(tiny_model, "h2o") as other:
            other.restore(session.read(path)[1])
            assert [checkpoint.n_past for checkpoint in other.checkpoints] == [part.n_past for part in parts]
            n = engine.n_past - 30
            assert other.rewind(n) == engine.rewind(n) == engine.n_past == n - 20
            assert {k: v.tobytes() for k, v in other.save()} == {k: v.tobytes() for k, v in engine.save()}


def test_session_stores_all_copies_of_a_small_cache(tiny_model, path):
    with start_engine(tiny_model, "h2o") as engine:
        for _ in range(7):
            engine.read(random_tokens(50))
            engine.checkpoints.take()
        save(path, engine)
        saved = [part.n_past for part in listed(session.read(path)[1], SavedCheckpoint)]
        # the newest checkpoint is not listed, because the session itself has that state
        assert saved == [checkpoint.n_past for checkpoint in engine.checkpoints][:-1]
        assert len(saved) == 6
