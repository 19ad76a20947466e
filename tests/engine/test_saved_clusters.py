"""Saved clusters: a restored archive has its earlier clusters and does not compute them again."""

from __future__ import annotations

import sys
from contextlib import closing

import numpy as np
import pytest

from kvtool import policies
from kvtool.chats import session
from kvtool.chats.archive_file import ArchiveFile, archive_path
from kvtool.cli import progress
from kvtool.errors import SessionError
from kvtool.llama.cache.segment import CENTERS, CLUSTER_DIGESTS, CLUSTERS, Clusters, listed
from kvtool.measure import perplexity
from tests.engine.exact_engines import open_engine, random_tokens

MODEL = {"n_head_kv": 2, "n_ctx_train": 1024, "key_bias": 3.0}


def start_engine(path, archive=1200, **settings):
    policy = policies.fit("recall", 48, 16, ["search=clusters", "exact=64"])
    # iq4_nl also saves and restores the centers of blocks
    return open_engine(path, policy, archive=archive, **{"archive_type": "iq4_nl", **settings})


def in_memory(engine):
    return {name: array.copy() for name, array in engine.save()}


def clusters(engine):
    """Return {(begin, is_far): the stored clusters, as bytes} for all blocks."""
    archive = engine.context.archive
    n = archive.n_block
    return {
        block: archive.read_clusters(block[0], block[0] + n, block[1]).tobytes()
        for block in archive.clustered
    }


def progress_of(engine):
    """Return a list that will receive the progress (done, n) of computing clusters."""
    reports = []
    engine.context.archive.while_sealing = lambda done, n: reports.append((done, n))
    return reports


def write(path, engine, store):
    with store.write(engine.context.archive) as listed:
        session.write(path, {}, [*engine.save(archived=False), *listed])


def assert_engines_equal(one, other, seed):
    """Assert that two engines score the next tokens bit for bit the same, and have the same clusters."""
    tokens = random_tokens(150, seed=seed)
    assert (perplexity.stream(one, tokens) == perplexity.stream(other, tokens)).all()
    assert clusters(one) == clusters(other)


def test_saved_clusters_are_restored_and_missing_ones_are_computed(tiny_model):
    path, tokens = tiny_model(**MODEL), random_tokens(1750)
    with start_engine(path) as engine:
        engine.read(tokens[:1650])
        saved, computed = in_memory(engine), clusters(engine)
        assert {is_far for _, is_far in computed} == {True, False}
        expected = perplexity.stream(engine, tokens[1650:])
    names = [name for name in saved if name.startswith(CLUSTERS)]
    assert len(names) == 3
    rng = np.random.default_rng(1)
    other = {name: rng.integers(0, 256, len(saved[name]), np.uint8) for name in names[1:]}
    wrong_flags = saved[CLUSTERS].copy()
    wrong_flags[:, 2] = 1 - wrong_flags[:, 2]
    for arrays, is_known in (
        (saved, True),
        # a state without clusters, as earlier versions saved it. The clusters are computed again
        ({name: array for name, array in saved.items() if name not in names}, True),
        # these random bytes are a valid assignment of tokens to clusters, but not the assignment that was
        # computed
        (saved | other, False),
        # in this table, is_far is wrong for all blocks. Only clusters whose flag is right are used, so all
        # clusters are computed again
        (saved | other | {CLUSTERS: wrong_flags}, True),
    ):
        with start_engine(path) as engine:
            engine.restore(arrays)
            assert (clusters(engine) == computed) == is_known
            assert b"".join(clusters(engine).values()) == (
                b"".join(computed.values() if is_known else (other[name].tobytes() for name in names[1:]))
            )
            assert (perplexity.stream(engine, tokens[1650:]) == expected).all() == is_known


@pytest.mark.parametrize("n_threads", [1, 3])
def test_restore_reports_the_progress_of_clustering(tiny_model, n_threads):
    path = tiny_model(**MODEL)
    with start_engine(path) as engine:
        engine.read(random_tokens(900))
        saved = in_memory(engine)
    with start_engine(path, n_threads=n_threads) as engine:
        reports = progress_of(engine)
        engine.restore(saved)
        # each call clusters up to two rows per thread, and progress is reported if rows are left. One thread
        # needs two calls for the four rows, three threads need one
        assert reports == ([(2, 4)] if n_threads == 1 else [])


@pytest.mark.parametrize("is_terminal", [True, False])
def test_terminal_shows_the_progress_of_clustering(tiny_model, monkeypatch, capsys, is_terminal):
    monkeypatch.setattr(progress, "_SOON_S", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with start_engine(tiny_model(**MODEL)) as engine:
        engine.read(random_tokens(900))
        saved = {name: array for name, array in in_memory(engine).items() if not name.startswith(CLUSTERS)}
        with progress.restoring_progress(engine.context.archive):
            engine.restore(saved)
        assert ("opening the archive: 2 of 4 rows, 50%" in capsys.readouterr().err) == is_terminal
        engine.restore(saved)
        assert not capsys.readouterr().err


@pytest.mark.parametrize("limit", [100_000, 1200], ids=["all", "forgetting"])
def test_session_opened_at_every_turn_equals_an_uninterrupted_one(tiny_model, tmp_path, limit):
    path, file = tiny_model(**MODEL), tmp_path / "talk.kv"
    rng = np.random.default_rng(1)
    with (
        start_engine(path, limit) as engine,
        start_engine(path, limit) as other,
        closing(ArchiveFile(file)) as store,
    ):
        for turn in range(24):
            tokens = random_tokens(int(rng.integers(1, 300)), seed=turn)
            for each in (engine, other):
                each.read(tokens)
                if turn % 5 == 4 and limit > 1200:
                    # the rewind removes tokens that are already in the file
                    assert each.rewind(each.n_past - 450)
            write(file, engine, store)
            size = archive_path(file).stat().st_size if engine.n_archived else 0
            engine.reset()
            saved = session.read(file)[1]
            engine.restore(saved)
            store.adopt(saved)
            assert clusters(engine) == clusters(other)
            if size:
                # saving again appends nothing
                write(file, engine, store)
                assert archive_path(file).stat().st_size == size
        assert engine.n_archived > 500
        assert_engines_equal(engine, other, seed=3)
        if limit > 1200:
            for each in (engine, other):
                assert each.rewind(each.n_past - 600)
            assert_engines_equal(engine, other, seed=4)


def test_session_without_clusters_gets_them_at_the_next_save(tiny_model, tmp_path):
    path, file = tiny_model(**MODEL), tmp_path / "talk.kv"
    with start_engine(path) as engine, start_engine(path) as other:
        for each in (engine, other):
            each.read(random_tokens(900))
        with closing(ArchiveFile(file)) as store:
            write(file, engine, store)
        with file.open("rb") as raw:
            meta, arrays = session._load(raw, "it")
        session.write(
            file, meta, [item for item in arrays.items() if item[0] not in (CLUSTERS, CLUSTER_DIGESTS)]
        )
        saved = session.read(file)[1]
        assert not listed(saved, Clusters)
        engine.restore(saved)
        assert clusters(engine) == clusters(other)
        with closing(ArchiveFile(file)) as store:
            store.adopt(saved)
            write(file, engine, store)
        assert {each.is_far for each in listed(session.read(file)[1], Clusters)} == {True, False}
        assert_engines_equal(engine, other, seed=2)


def test_next_stream_is_saved_with_its_own_clusters(tiny_model, tmp_path):
    path, file = tiny_model(**MODEL), tmp_path / "talk.kv"
    with start_engine(path) as engine, start_engine(path) as other, closing(ArchiveFile(file)) as store:
        for seed in (1, 2):
            engine.reset()
            engine.read(random_tokens(900, seed=seed))
            write(file, engine, store)
        other.restore(session.read(file)[1])
        assert_engines_equal(engine, other, seed=3)


def test_smaller_archive_restores_the_clusters_of_its_blocks(tiny_model):
    path = tiny_model(**MODEL)
    with start_engine(path, 5000) as engine:
        engine.read(random_tokens(1650))
        saved, computed = in_memory(engine), clusters(engine)
    with start_engine(path, 1300) as engine:
        engine.restore(saved)
        restored = clusters(engine)
        first = min(restored)
        assert {is_far for block, is_far in restored if block > first[0]} == {True, False}
        assert all(computed[block] == data for block, data in restored.items() if block != first)
        engine.read(random_tokens(100))


@pytest.mark.parametrize(
    ("index", "value"), [(0, 7), (0, -256), (1, 10**12), (1, 2**62), (1, 0), (1, 256 * 40), (None, 1)]
)
def test_invalid_clusters_and_centers_are_refused(tiny_model, index, value):
    path = tiny_model(**MODEL)
    with start_engine(path) as engine:
        engine.read(random_tokens(1650))
        saved = in_memory(engine)
        spoiled = saved[CLUSTERS].copy()
        if index is None:
            spoiled = spoiled[:, :4]
        else:
            spoiled[-1, index] = value
        for wrong in (
            {CLUSTERS: spoiled},
            {CLUSTERS: saved[CLUSTERS].astype(np.float64)},
            {f"{CLUSTERS}.0": saved[f"{CLUSTERS}.0"][1:]},
            {CENTERS: saved[CENTERS][1:]},
            {CENTERS: saved[CENTERS].astype(np.float64)},
        ):
            with pytest.raises(SessionError, match="does not fit this model, policy or cache"):
                engine.restore(saved | wrong)
        engine.restore(saved)
