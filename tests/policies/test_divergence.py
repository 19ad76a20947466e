"""Divergence from the full cache.

kvtool compares only the likeliest tokens one by one. The result equals the definition, `lumped`, and is close
to the divergence over the whole vocabulary.
"""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import time
from contextlib import closing

import numpy as np
import pytest

from kvtool import policies
from kvtool.errors import InputError
from kvtool.measure import divergence, perplexity
from tests.blocking_policy import TIMEOUT_S
from tests.engine.exact_engines import open_engine, random_tokens


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(divergence, "_folder", lambda: tmp_path / "logits")


def log_softmax(logits):
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))


def lumped(p, q, n_top):
    """Return KL(P || Q) of the log-probabilities p and q f64[n_vocab].

    P's n_top likeliest tokens are compared one by one. The rest of the tokens is treated as one token.
    """
    top = np.argsort(-p)[:n_top]
    rest = np.setdiff1d(np.arange(len(p)), top)
    top_terms = (np.exp(p[top]) * (p[top] - q[top])).sum()
    mass_p, mass_q = np.exp(p[rest]).sum(), np.exp(q[rest]).sum()
    return top_terms + mass_p * np.log(mass_p / mass_q) if len(rest) else top_terms


def draw(seed, n=40, n_vocab=300):
    rng = np.random.default_rng(seed)
    p = (rng.normal(size=(n, n_vocab)) * 3).astype(np.float32)
    return p, (p + rng.normal(size=p.shape) * 0.5).astype(np.float32), rng.integers(0, n_vocab, n, np.int32)


def scored(p, q, target, tmp_path):
    """Write the predictions p as the reference, and score the predictions q against it, 7 tokens at a time.

    Return (writer, reader, NLL of p, NLL of q).
    """
    file, n = io.BytesIO(), len(p) + 1
    writer = divergence.ReferenceWriter(file, n, p.shape[1])
    (tmp_path / "reference").write_bytes(b"")
    steps = [slice(begin, begin + 7) for begin in range(0, len(p), 7)]
    p_nll = np.concatenate([writer.score(p[step], target[step]) for step in steps])
    (tmp_path / "reference").write_bytes(file.getvalue())
    reader = divergence.ReferenceReader(tmp_path / "reference", n, p.shape[1])
    nll = np.concatenate([reader.score(q[step], target[step]) for step in steps])
    reader.close()
    return writer, reader, p_nll, nll


@pytest.mark.parametrize("n_top", [1, 5, 64, 299, 300, 1000])
def test_divergence_matches_the_definition(n_top, tmp_path, monkeypatch):
    monkeypatch.setattr(divergence, "N_TOP", n_top)
    p, q, target = draw(n_top)
    _, reader, p_nll, nll = scored(p, q, target, tmp_path)
    log_p, log_q = log_softmax(p), log_softmax(q)
    expected = [lumped(a, b, n_top) for a, b in zip(log_p, log_q, strict=True)]
    np.testing.assert_allclose(reader.kl, expected, atol=2e-6)
    rows = np.arange(len(p))
    np.testing.assert_allclose(nll, -log_q[rows, target], atol=1e-6)
    np.testing.assert_allclose(reader.nll, -log_p[rows, target], atol=1e-6)
    assert (reader.nll == p_nll).all()
    assert (reader.same == (p.argmax(axis=1) == q.argmax(axis=1))).all()
    assert 0 < reader.same.mean() < 1


def test_equal_predictions_have_zero_divergence(tmp_path, monkeypatch):
    monkeypatch.setattr(divergence, "N_TOP", 50)
    p, _, target = draw(3)
    writer, reader, p_nll, nll = scored(p, p, target, tmp_path)
    for scores in (writer, reader):
        assert (scores.kl == 0).all()
        assert scores.same.all()
    assert (p_nll == nll).all()
    assert (p_nll == perplexity.nll_of(p, target)).all()


def test_divergence_grows_with_the_number_of_compared_tokens(tmp_path, monkeypatch):
    p, q, target = draw(4)
    kl = []
    for n_top in (2, 20, 200):
        monkeypatch.setattr(divergence, "N_TOP", n_top)
        kl.append(scored(p, q, target, tmp_path)[1].kl)
    assert (kl[0] <= kl[1] + 1e-6).all()
    assert (kl[1] <= kl[2] + 1e-6).all()
    assert (kl[0] < kl[2]).any()


def test_ties_for_the_likeliest_token_go_to_the_lowest_id(tmp_path):
    p = np.zeros((4, 300), np.float32)
    p[0, [7, 9]] = p[1, [7, 9]] = p[2, 9] = p[3, 7] = 5
    q = np.zeros_like(p)
    q[:, [7, 200]] = 5
    _, reader, _, _ = scored(p, q, np.zeros(4, np.int32), tmp_path)
    assert reader.same.tolist() == [True, True, False, True]


@pytest.mark.engine
@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="a vocabulary of 49,152")
def test_divergence_of_a_real_model_is_close_to_the_exact_one(smollm2, tmp_path, share_of):
    logits_of, settings = {}, {"n_ctx": 256, "flash": "on"}
    for kind in ("f16", "q8_0"):
        logits = logits_of[kind] = []

        def keep(step, target, logits=logits):
            logits.append(step.copy())
            return perplexity.nll_of(step, target)

        with open_engine(smollm2, policies.fit("full", 256), type_k=kind, type_v=kind, **settings) as engine:
            tokens = engine.model.tokenize(" ".join(str(i**3) for i in range(200)))[: share_of(80, 150)]
            perplexity.stream(engine, tokens, score=keep)
    p, q = (np.concatenate(logits) for logits in logits_of.values())
    _, reader, _, _ = scored(p, q, tokens[1:], tmp_path)
    log_p, log_q = log_softmax(p), log_softmax(q)
    exact = (np.exp(log_p) * (log_p - log_q)).sum(axis=1).mean()
    assert exact > 1e-5
    assert 0.95 < reader.kl.mean() / exact <= 1.0001


# references in files


def write(path, n=9, n_vocab=300):
    p, _, target = draw(0, n - 1, n_vocab)
    with divergence.writing(path, n, n_vocab) as scores:
        scores.score(p, target)
    return scores


def test_scoring_one_token_at_a_time_gives_the_same_result(tmp_path):
    p, q, target = draw(0, 8)
    path = tmp_path / "reference"
    whole = write(path)
    with closing(divergence.ReferenceReader(path, 9, 300)) as reader:
        for i in range(8):
            reader.score(p[i : i + 1], target[i : i + 1])
    assert np.array_equal(reader.nll, whole.nll)
    assert np.array_equal(reader.kl, whole.kl)


def test_second_writer_of_a_reference_gets_a_reader(tmp_path):
    path = divergence.path_of({"model": "m"})
    assert isinstance(write(path), divergence.ReferenceWriter)
    assert isinstance(write(path), divergence.ReferenceReader)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert divergence.path_of({"model": "n"}) != path


def test_incomplete_references_are_not_used(tmp_path):
    path = divergence.path_of({})

    def stop():
        with divergence.writing(path, 9, 300) as scores:
            scores.score(*draw(0, 4)[::2])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    assert list(path.parent.iterdir()) == []
    write(path)
    for n in (8, 10):
        with pytest.raises(InputError, match="are gone"):
            divergence.ReferenceReader(path, n, 300)


def _hold(path, entered, is_released):
    with divergence.writing(path, 9, 300) as scores:
        entered.set()
        assert is_released.wait(TIMEOUT_S)
        if isinstance(scores, divergence.ReferenceWriter):
            scores.score(*draw(0, 8)[::2])


@pytest.mark.large
def test_second_process_waits_for_the_same_reference():
    path, context = divergence.path_of({}), multiprocessing.get_context("spawn")
    entered, is_released = context.Event(), context.Event()
    process = context.Process(target=_hold, args=(path, entered, is_released))
    process.start()
    assert entered.wait(TIMEOUT_S)
    assert not path.exists()
    is_released.set()
    assert isinstance(write(path), divergence.ReferenceReader)
    process.join()


def test_least_recently_used_references_are_deleted_first(monkeypatch):
    paths = [divergence.path_of({"i": i}) for i in range(4)]
    for age, path in zip((10, 30, 20), paths, strict=False):
        write(path)
        then = time.time() - age
        os.utime(path, (then, then))
    size = paths[0].stat().st_size
    monkeypatch.setattr(divergence, "MAX_BYTES", 3 * size)
    # paths[1] is the oldest file, but it was read just now. Therefore paths[2] is deleted
    divergence.ReferenceReader(paths[1], 9, 300).close()
    write(paths[3])
    assert [path.exists() for path in paths] == [True, True, False, True]
    # the newest file stays, whatever its size
    monkeypatch.setattr(divergence, "MAX_BYTES", 1)
    paths[0].unlink()
    write(paths[0])
    assert [path.exists() for path in paths] == [True, False, False, False]


def test_references_in_a_read_only_folder_are_read(monkeypatch, tmp_path):
    def fails(path, *_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    path = tmp_path / "reference"
    write(path)
    monkeypatch.setattr(os, "utime", fails)
    assert isinstance(write(path), divergence.ReferenceReader)


def test_a_reference_goes_to_a_disk_that_has_room(monkeypatch, tmp_path):
    path, spare, free = tmp_path / "cache" / "x.ref", tmp_path / "spare", {}
    spare.mkdir()
    monkeypatch.setattr(divergence, "gettempdir", lambda: str(spare))
    monkeypatch.setattr(divergence, "free_disk_bytes", lambda file: free[file.parent])
    n_bytes = 10 * (8 + 4 + 100 * 8)
    for own, other, folder in (
        (n_bytes, 0, path.parent),
        (n_bytes - 1, n_bytes, spare),
        (0, n_bytes - 1, None),
    ):
        free.update({path.parent: own, spare: other})
        assert divergence.folder_with_room(path, 10, 100) == folder


def test_references_of_too_long_texts_do_not_fit(monkeypatch):
    monkeypatch.setattr(divergence, "MAX_BYTES", 50 * divergence._row(300).itemsize)
    assert divergence.fits(50, 300)
    assert not divergence.fits(51, 300)


@pytest.mark.engine
def test_the_full_cache_does_not_differ_from_itself(tiny_model):
    tokens, path = random_tokens(200), divergence.path_of({})
    nll = []
    for run in (0, 1):
        with (
            open_engine(tiny_model(), policies.fit("full", 200), type_k="f16", type_v="f16") as engine,
            divergence.writing(path, 200, engine.model.n_vocab) as scores,
        ):
            nll.append(perplexity.stream(engine, tokens, score=scores.score))
            assert isinstance(scores, (divergence.ReferenceWriter, divergence.ReferenceReader)[run])
            assert (scores.kl == 0).all()
            assert scores.same.all()
    assert (nll[0] == nll[1]).all()
    with open_engine(tiny_model(), policies.fit("full", 200), type_k="f16", type_v="f16") as engine:
        assert (perplexity.stream(engine, tokens) == nll[0]).all()
