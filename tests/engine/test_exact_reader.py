"""Texts that are read in chunks (`--prefill exact`). Each chunk attends to the archive on the device."""

from __future__ import annotations

import numpy as np
import pytest

from kvtool import policies
from kvtool.engine.loop import Engine
from kvtool.errors import LibraryError, OutOfMemory, StreamEnd, UsageError
from kvtool.llama.cache.archive import Archive
from kvtool.llama.cache.context import Context
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
        ("deci", {"n_head_kv": [2, 1]}, {"flash": "on", "type_k": "q8_0", "type_v": "q8_0"}, 0.5),
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
def test_archive_types_that_devices_cannot_read_are_converted(tiny_model, kind):
    path, parts = tiny_model(n_head_kv=2, n_ctx_train=2048), parts_of()[:2]
    full = logits_of(path, policies.fit("full", 1024), parts)[0]
    streamed, exact = (
        np.square(logits_of(path, fit(), parts, prefill=prefill, archive_type=kind)[0] - full).mean() ** 0.5
        for prefill in ("stream", "exact")
    )
    # the error of logits; logits of other texts differ by 1.4
    assert 0.1 < streamed < 0.5
    assert exact < 1.1 * streamed


@pytest.mark.parametrize("settings", [{}, HALF], ids=str)
def test_exact_reading_with_mla_equals_the_full_cache(tiny_model, settings):
    path, parts = tiny_model("deepseek2", n_ctx_train=2048), parts_of()[:2]
    with_archive = {"archive_type": settings.get("type_k", "f32"), **settings}
    few = fit_recall(exact=16)
    full = logits_of(path, policies.fit("full", 1024), parts, **settings)[0]
    streamed, exact = (
        logits_of(path, few, parts, prefill=prefill, **with_archive)[0] for prefill in ("stream", "exact")
    )
    tolerance = ROUGH if settings else TOLERANCE
    assert np.abs(exact - full).max() < tolerance < np.abs(streamed - full).max()


def test_single_tokens_are_read_in_steps(tiny_model):
    path, (prompt, _, *later), logits = tiny_model("deepseek2", n_ctx_train=2048), parts_of(), []
    for decode in (Engine.read, Engine.step):
        with open_engine(path, fit_recall(exact=16), prefill="exact", archive_type="f32") as engine:
            engine.read(prompt)
            for token in later:
                decode(engine, token)
                logits.append(engine.context.logits()[-1].copy())
    np.testing.assert_array_equal(logits[:N_LATER], logits[N_LATER:])


@pytest.mark.parametrize(("kind", "most"), [("q8_0", 0.05), ("q5_0/q4_0", 0.25), ("iq4_nl", 0.3)])
def test_exact_reading_with_mla_reads_every_archive_type(tiny_model, kind, most):
    path, parts = tiny_model("deepseek2", n_ctx_train=2048), parts_of()[:2]
    full = logits_of(path, policies.fit("full", 1024), parts)[0]
    exact = logits_of(path, fit_recall(exact=16), parts, prefill="exact", archive_type=kind)[0]
    # the error of logits, whose standard deviation is 2
    assert np.square(exact - full).mean() ** 0.5 < most


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


def test_exact_reading_equals_the_full_cache_up_to_the_end_of_the_context(tiny_model):
    path, parts = tiny_model(n_head_kv=2, n_ctx_train=1024), parts_of(900, 24)
    # the last tokens are read as one text, because single tokens treat tokens beyond half of the context as
    # if they were at this distance
    parts = [*parts[:2], np.concatenate(parts[2:])]
    full = logits_of(path, policies.fit("full", 1024), parts)[0]
    exact, (n_kv, n_archived), _ = logits_of(path, fit(), parts, prefill="exact", archive_type="f32")
    assert n_kv + n_archived == 1024
    assert np.abs(exact - full).max() < TOLERANCE


@pytest.mark.parametrize(("archive_type", "tolerance"), [("f32", TOLERANCE), ("q8_0", 0.1)])
def test_chunks_beyond_the_context_attend_like_streamed_steps(tiny_model, archive_type, tolerance):
    path, tokens = tiny_model(n_head_kv=2, n_ctx_train=512), random_tokens(1800)
    settings = {"n_batch": 16, "archive_type": archive_type}
    with open_engine(path, fit(), **settings) as engine:
        # Gaps between positions are closed before the text, but not amid it: the positions of live cells then
        # depend on the way of reading. The first streamed step of the text begins with an eviction, so that
        # it is as long as a chunk
        n_before = engine.policy.n_live + 91 * 16
        before, text = tokens[:n_before], tokens[n_before:]
        engine.read(before)
        n_restart = engine.n_restart
        assert (n_restart, engine.n_kv) == (3, engine.policy.n_live)
        saved = {name: np.array(values) for name, values in engine.save()}
        engine.read(text)
        streamed = engine.context.logits()[-1].copy()
    with open_engine(path, fit(), prefill="exact", **settings) as engine:
        engine.restore(saved)
        assert engine.n_exact(len(text)) == engine.read(text) == len(text)
        exact = engine.context.logits()[-1].copy()
        assert engine.n_restart == n_restart
    assert np.abs(exact - streamed).max() < tolerance


def test_clusters_of_archived_tokens_do_not_change_the_logits(tiny_model):
    path, tokens = tiny_model(n_head_kv=2, n_ctx_train=512), random_tokens(1200)
    logits = []
    for policy in (fit(), fit(search="clusters", exact=16)):
        with open_engine(path, policy, prefill="exact", archive_type="f32") as engine:
            engine.read(tokens)
            logits.append(engine.context.logits()[-1].copy())
            n_clustered = len(engine.context.archive.clustered)
    assert n_clustered > 2
    assert np.abs(logits[0] - logits[1]).max() < TOLERANCE


def test_gaps_are_closed_between_chunks(tiny_model):
    path, tokens = tiny_model(n_head_kv=2, n_ctx_train=512), random_tokens(1200)
    with open_engine(path, fit(), prefill="exact", archive_type="f32") as engine:
        assert engine.read(tokens) == 1200
        assert engine.n_restart == 2
        assert engine.n_kv + engine.n_archived == 1200
        at_once = engine.context.logits()[-1].copy()
    with open_engine(path, fit(), prefill="exact", archive_type="f32") as engine:
        for part in np.split(tokens, [512, 1024]):
            engine.read(part)
        np.testing.assert_array_equal(engine.context.logits()[-1], at_once)


def test_text_that_ends_beyond_original_positions_is_read_as_far_as_it_fits(tiny_model):
    path, tokens = tiny_model(n_head_kv=2, n_ctx_train=512), random_tokens(700)
    with open_engine(path, fit(), prefill="exact", positions="original") as engine:
        with pytest.raises(StreamEnd, match="the context of 512 tokens"):
            engine.read(tokens)
        assert engine.n_past == 512


def test_text_is_read_exactly_as_far_as_the_device_has_memory(monkeypatch, tiny_model):
    path, tokens = tiny_model(n_head_kv=2, n_ctx_train=2048), random_tokens(500)
    monkeypatch.setattr(Model, "is_on_gpu", True)
    with open_engine(path, fit(), prefill=None) as engine:
        for n, n_exact in ((300, 300), (63, 0)):
            n_bytes = engine.exact_reader.device_bytes(n)
            monkeypatch.setattr("kvtool.engine.exact_reader.gpu_free_bytes", lambda only, n=n_bytes: n)
            assert engine.n_exact(len(tokens)) == n_exact
        # an archive of limited length needs no more memory for a longer text
        monkeypatch.setattr(engine.context.archive, "n_max", 60)
        assert engine.n_exact(len(tokens)) == len(tokens)


def test_a_stop_between_chunks_keeps_what_was_read(tiny_model):
    path, tokens = tiny_model(n_head_kv=2, n_ctx_train=2048), random_tokens(N_PROMPT)
    calls = []
    with open_engine(path, fit(), prefill="exact", archive_type="f32") as engine:
        n = engine.read(tokens, lambda: calls.append(0) or len(calls) > 4)
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
    # the allocation of so many rows fails on every machine
    monkeypatch.setattr(Archive, "stage", lambda self, n: stage(self, n and 2**38))
    with pytest.raises(LibraryError, match=r"a device has no \d+ MiB for archived tokens"):
        logits_of(path, fit(), parts, prefill="exact")
    monkeypatch.setattr(Model, "is_on_gpu", True)
    monkeypatch.setattr("kvtool.engine.exact_reader.gpu_free_bytes", lambda only: 2**40)
    logits, _, _ = logits_of(path, fit(), parts, prefill=None)
    assert np.abs(logits - streamed).max() < TOLERANCE


def test_as_much_as_fits_is_read_exactly(monkeypatch, tiny_model):
    path, tokens = tiny_model(n_head_kv=2, n_ctx_train=2048), random_tokens(N_PROMPT)
    monkeypatch.setattr(Model, "is_on_gpu", True)
    monkeypatch.setattr("kvtool.engine.exact_reader.gpu_free_bytes", lambda only: 2**40)
    stage, staged = Archive.stage, []

    def refuse(self, n):
        staged.append(n)
        return stage(self, 2**38 if n > 250 else n)

    monkeypatch.setattr(Archive, "stage", refuse)
    with open_engine(path, fit(), prefill=None) as engine:
        assert engine.read(tokens) == N_PROMPT
        # the whole text, its first half, its second half, and half of that
        assert [n for n in staged if n] == [400, 200, 400, 300]
        engine.reset()
        # the limit remains, because later texts would fail in the same way
        assert engine.n_exact(N_PROMPT) == 0


def test_rest_of_a_text_is_streamed_if_a_chunk_finds_no_memory(monkeypatch, tiny_model):
    path, tokens = tiny_model(n_head_kv=2, n_ctx_train=2048), random_tokens(N_PROMPT)
    monkeypatch.setattr(Model, "is_on_gpu", True)
    monkeypatch.setattr("kvtool.engine.exact_reader.gpu_free_bytes", lambda only: 2**40)
    decode = Context.decode

    def fail(self, tokens, pos_0, n_output):
        if len(tokens) > 16 and pos_0 >= 128:
            raise OutOfMemory("no memory for a step")
        decode(self, tokens, pos_0, n_output)

    with open_engine(path, fit(), prefill=None, archive_type="f32") as engine:
        monkeypatch.setattr(engine.exact_reader, "n_chunk", 64)
        with monkeypatch.context() as patch:
            patch.setattr(Context, "decode", fail)
            assert engine.read(tokens) == engine.n_past == N_PROMPT
        logits = engine.context.logits()[-1].copy()
    exact = logits_of(path, fit(), [tokens], prefill="exact", archive_type="f32")[0][-1]
    assert np.abs(logits - exact).max() < TOLERANCE


def test_exact_reading_is_the_default_with_a_gpu_that_has_room(monkeypatch, tiny_model):
    path, parts = tiny_model(n_head_kv=2, n_ctx_train=2048), parts_of()
    exact, _, n_bytes = logits_of(path, fit(), parts, prefill="exact", archive_type="f32")
    monkeypatch.setattr(Model, "is_on_gpu", True)
    for free, is_exact in ((2**40, True), (0, False)):
        monkeypatch.setattr("kvtool.engine.exact_reader.gpu_free_bytes", lambda only, free=free: free)
        with open_engine(path, fit(search="clusters", exact=16), prefill=None, archive_type="f32") as engine:
            assert engine.cache_bytes == n_bytes
            engine.read(parts[0])
            assert (np.abs(engine.context.logits()[-1] - exact[0]).max() < TOLERANCE) == is_exact


def test_evicting_policies_refuse_exact_reading(tiny_model):
    with (
        pytest.raises(UsageError, match="only policies that recall can"),
        open_engine(tiny_model(), policies.fit("h2o", 48), prefill="exact"),
    ):
        pass
