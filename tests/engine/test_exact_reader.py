"""Texts that are read in chunks (`--prefill exact`). Each chunk attends to the archive on the device."""

from __future__ import annotations

import numpy as np
import pytest

from kvtool import policies
from kvtool.errors import LibraryError, StreamEnd, UsageError
from kvtool.llama.cache.archive import Archive
from kvtool.llama.loaded.model import Model
from tests.engine.exact_engines import ON_CUDA, TOLERANCE, fit_recall, open_engine, random_tokens

N_PROMPT, N_LATER = 400, 20
HALF = {"flash": "on", "type_k": "f16", "type_v": "f16"}
ROUGH = 0.1 if ON_CUDA else 5e-2
"""Tolerance of logits with flash attention, which adds half-precision numbers in another order."""


def fit(**params):
    # with search=all, single tokens after the chunks attend to each archived token, and not to means of
    # clusters
    return fit_recall(**{"search": "all", **params})


def logits_of(path, policy, parts, **settings):
    """Return (logits f32[n_part, n_vocab] after each part, (n_kv, n_archived), bytes of the cache)."""
    with open_engine(path, policy, **settings) as engine:
        logits = []
        for part in parts:
            assert engine.read(part) == len(part)
            logits.append(engine.context.logits()[-1].copy())
        return np.array(logits), (engine.n_kv, engine.n_archived), engine.cache_bytes


def parts_of(n_prompt=N_PROMPT, n_later=N_LATER):
    """Return the parts of a stream: a prompt, a later turn, and then arrays of one token."""
    tokens = random_tokens(n_prompt + 100 + n_later)
    prompt, turn, later = np.split(tokens, [n_prompt, n_prompt + 100])
    return [prompt, turn, *np.split(later, n_later)]


@pytest.mark.parametrize(
    ("arch", "shape", "settings", "tolerance"),
    [
        ("llama", {"n_head_kv": 2}, {}, TOLERANCE),
        ("llama", {"n_head_kv": 1}, {}, TOLERANCE),
        ("llama", {"n_head_kv": 2}, HALF, ROUGH),
        ("llama", {"n_head_kv": 2}, {"flash": "on", "type_k": "q8_0", "type_v": "q8_0"}, 0.5),
        ("gemma3", {}, {}, TOLERANCE),
        ("gemma2", {}, {}, TOLERANCE),
        ("gemma2", {}, HALF, ROUGH),
        ("gpt_oss", {}, {}, TOLERANCE),
        ("gpt_oss", {}, HALF, ROUGH),
        ("gemma4", {}, {}, TOLERANCE),
        ("lfm2", {}, {}, TOLERANCE),
    ],
    ids=str,
)
def test_exact_reading_equals_the_full_cache(tiny_model, arch, shape, settings, tolerance):
    path, parts = tiny_model(arch, n_ctx_train=2048, **shape), parts_of()
    with_archive = {"archive_type": settings.get("type_k", "f32"), **settings}
    full, _, _ = logits_of(path, policies.fit("full", 1024), parts, **settings)
    exact, (n_kv, n_archived), n_bytes = logits_of(path, fit(), parts, prefill="exact", **with_archive)
    assert np.abs(exact - full).max() < tolerance
    assert n_kv <= 48
    assert n_kv + n_archived == sum(map(len, parts))
    # the cells that were allocated for a chunk are freed again
    assert n_bytes == logits_of(path, fit(), parts, **with_archive)[2]


@pytest.mark.parametrize("kind", ["q5_0/q4_0", "iq4_nl"])
def test_types_that_exact_reading_cannot_use_are_refused_before_the_text_is_read(tiny_model, kind):
    settings = {"prefill": "exact", "archive_type": kind}
    with (
        pytest.raises(UsageError, match="choose --archive-type q8_0"),
        open_engine(tiny_model(n_head_kv=2), fit(), **settings),
    ):
        pass


def test_exact_reading_is_closer_to_full_than_streaming(tiny_model):
    path, parts = tiny_model(n_head_kv=2, n_ctx_train=2048), parts_of()
    full, _, _ = logits_of(path, policies.fit("full", 1024), parts)
    few = fit(search="clusters", exact=16)
    streamed, exact = (
        logits_of(path, few, parts, prefill=prefill, archive_type="f32")[0] for prefill in ("stream", "exact")
    )
    # only the logits after prompt and turn are compared. The single tokens after them attend to most of the
    # archive by clusters
    assert np.abs(exact[:2] - full[:2]).max() < TOLERANCE < np.abs(streamed[:2] - full[:2]).max()


@pytest.mark.parametrize("n_batch", [16, 100, 256])
def test_chunk_length_does_not_change_the_logits(tiny_model, n_batch):
    path, parts = tiny_model(n_head_kv=2, n_ctx_train=2048), parts_of()
    exact = {"prefill": "exact", "archive_type": "f32"}
    logits = [logits_of(path, fit(), parts, n_batch=n, **exact)[0] for n in (64, n_batch)]
    assert np.abs(logits[0] - logits[1]).max() < TOLERANCE


def test_archive_in_a_file_gives_the_same_logits(tiny_model, tmp_path):
    path, parts = tiny_model(n_head_kv=2, n_ctx_train=2048), parts_of()
    logits = [
        logits_of(path, fit(), parts, prefill="exact", archive_file=file)[0]
        for file in (None, str(tmp_path / "archive"))
    ]
    np.testing.assert_array_equal(*logits)


def test_forgotten_tokens_are_not_attended_to(tiny_model):
    path, parts = tiny_model(n_head_kv=2, n_ctx_train=2048), parts_of(900)
    all_known, forgetful = (
        logits_of(path, fit(), parts, prefill="exact", archive_type="f32", archive=n) for n in (None, 300)
    )
    assert 0 < forgetful[1][1] <= 300
    assert np.isfinite(forgetful[0]).all()
    assert np.abs(forgetful[0] - all_known[0]).max() > TOLERANCE


def test_text_beyond_half_of_the_context_is_streamed(tiny_model):
    path, tokens = tiny_model(n_head_kv=2, n_ctx_train=1024), random_tokens(700)
    staged = []
    with open_engine(path, fit(), prefill="exact", archive_type="f32") as engine:
        stage = engine.context.archive.stage
        engine.context.archive.stage = lambda n: (staged.append(n), stage(n))[1]
        assert engine.read(tokens) == 700
        assert staged == [512, 0]
        assert engine.n_kv + engine.n_archived == 700
        engine.read(random_tokens(40, seed=2))
        assert staged == [512, 0]


def test_a_stop_between_chunks_keeps_what_was_read(tiny_model):
    path, tokens = tiny_model(n_head_kv=2, n_ctx_train=2048), random_tokens(N_PROMPT)
    calls = []
    with open_engine(path, fit(), prefill="exact", archive_type="f32") as engine:
        n = engine.read(tokens, lambda: calls.append(0) or len(calls) > 3)
        assert n == engine.n_past == 3 * 64
        assert engine.n_kv + engine.n_archived == n
        assert engine.read(tokens[n:]) == N_PROMPT - n
        stopped = engine.context.logits()[-1].copy()
    at_once = logits_of(path, fit(), [tokens], prefill="exact", archive_type="f32")[0][-1]
    assert np.abs(stopped - at_once).max() < TOLERANCE


def test_a_full_disk_ends_the_stream_until_there_is_room_again(monkeypatch, tiny_model):
    path, tokens = tiny_model(n_head_kv=2, n_ctx_train=2048), random_tokens(N_PROMPT)
    settings = {"prefill": "exact", "archive_type": "f32", "n_batch": 256}
    at_once, counts, n_bytes = logits_of(path, fit(), [tokens], **settings)

    def full(*_):
        raise StreamEnd("the disk is full")

    with open_engine(path, fit(), **settings) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(engine.context.archive, "push", full)
            for _ in range(2):
                with pytest.raises(StreamEnd, match="the disk is full"):
                    engine.read(tokens[engine.n_past :])
        engine.read(tokens[engine.n_past :])
        assert ((engine.n_kv, engine.n_archived), engine.cache_bytes) == (counts, n_bytes)
        assert np.abs(engine.context.logits()[-1] - at_once[-1]).max() < TOLERANCE


def test_stream_rewinds_into_the_text(tiny_model):
    path, tokens = tiny_model(n_head_kv=2, n_ctx_train=2048), random_tokens(N_PROMPT)
    with open_engine(path, fit(), prefill="exact", archive_type="f32") as engine:
        engine.read(tokens)
        assert engine.rewind(200)
        engine.read(tokens[200:])
        repeated = engine.context.logits()[-1].copy()
    at_once = logits_of(path, fit(), [tokens], prefill="exact", archive_type="f32")[0][-1]
    assert np.abs(repeated - at_once).max() < TOLERANCE


def test_stream_continues_after_save_and_restore(tiny_model):
    path, (prompt, turn, *_) = tiny_model(n_head_kv=2, n_ctx_train=2048), parts_of()
    with open_engine(path, fit(), prefill="exact", archive_type="f32") as engine:
        engine.read(prompt)
        saved = {name: np.array(values) for name, values in engine.save()}
        engine.read(turn)
        expected = engine.context.logits()[-1].copy()
    with open_engine(path, fit(), prefill="exact", archive_type="f32") as engine:
        engine.restore(saved)
        engine.read(turn)
        np.testing.assert_array_equal(engine.context.logits()[-1], expected)


def test_text_is_streamed_if_the_device_has_no_memory(monkeypatch, tiny_model):
    path, parts = tiny_model(n_head_kv=2, n_ctx_train=2048), parts_of()
    streamed, _, _ = logits_of(path, fit(), parts, prefill="stream")
    stage = Archive.stage

    def refuse(self, n):
        if n:
            raise LibraryError("llama.cpp refused: a device has no 1 MiB for archived tokens")
        return stage(self, n)

    monkeypatch.setattr(Archive, "stage", refuse)
    with pytest.raises(LibraryError, match="has no 1 MiB"):
        logits_of(path, fit(), parts, prefill="exact")
    monkeypatch.setattr(Model, "is_on_gpu", True)
    monkeypatch.setattr("kvtool.engine.whole_reader.gpu_free_bytes", lambda only: 0)
    monkeypatch.setattr("kvtool.engine.exact_reader.gpu_free_bytes", lambda only: 2**40)
    logits, _, _ = logits_of(path, fit(), parts, prefill=None)
    assert np.abs(logits - streamed).max() < TOLERANCE


def test_exact_reading_is_the_default_with_a_gpu_that_has_room(monkeypatch, tiny_model):
    path, parts = tiny_model(n_head_kv=2, n_ctx_train=2048), parts_of()
    exact, _, n_bytes = logits_of(path, fit(), parts, prefill="exact", archive_type="f32")
    monkeypatch.setattr(Model, "is_on_gpu", True)
    # the GPU has no room to read the text whole
    monkeypatch.setattr("kvtool.engine.whole_reader.gpu_free_bytes", lambda only: 0)
    for free, is_exact in ((2**40, True), (0, False)):
        monkeypatch.setattr("kvtool.engine.exact_reader.gpu_free_bytes", lambda only, free=free: free)
        with open_engine(path, fit(search="clusters", exact=16), prefill=None, archive_type="f32") as engine:
            assert engine.cache_bytes == n_bytes
            engine.read(parts[0])
            assert (np.abs(engine.context.logits()[-1] - exact[0]).max() < TOLERANCE) == is_exact


def test_evicting_policies_and_mla_models_refuse_exact_reading(tiny_model):
    for arch, policy, message in (
        ("llama", policies.fit("h2o", 48), "only policies that recall can"),
        ("deepseek2", policies.fit("recall", 48, 16), "values are a part of its keys"),
    ):
        with pytest.raises(UsageError, match=message), open_engine(tiny_model(arch), policy, prefill="exact"):
            pass
