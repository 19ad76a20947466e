"""Residents (`--resident`): means of clusters and archived tokens that are in cells on the device.

A step attends to these cells, and does not search the archive in host memory.
"""

from __future__ import annotations

import ctypes
from contextlib import closing, contextmanager

import numpy as np
import pytest

from kvtool import policies
from kvtool.config.report import line, report
from kvtool.engine import residents
from kvtool.errors import LibraryError, UsageError
from kvtool.llama.cache.archive import Archive
from kvtool.llama.libllama import log
from kvtool.llama.libllama.library import api
from kvtool.llama.loaded.model import Model
from lab.benchmarks import gpu_rows
from tests.engine.exact_engines import ON_CUDA, open_engine, random_tokens
from tests.engine.test_joint import Counting, one_by_one, run_streams

N_PROMPT, N_LATER = 700, 40
ROUGH = 0.1 if ON_CUDA else 5e-2
"""Tolerance of logits with flash attention, which adds half-precision numbers in another order."""

HALF = {"flash": "on", "type_k": "f16", "type_v": "f16", "archive_type": "f16"}
ALL = 1024
"""Number of residents that is enough for the whole archive."""


def fit(budget=64):
    return policies.fit("recall", budget, 16, ["exact=64"])


@pytest.fixture
def always_repeated(monkeypatch):
    """Repeat a step if any attention goes to a cluster that should have been resident.

    With ALL residents, attention is then exact.
    """
    monkeypatch.setattr(residents, "_LIMITS", (0.0, 0.0))


def written_logits(path, policy, tokens, n_prompt=N_PROMPT, **settings):
    """Read the first n_prompt tokens exactly, then decode the rest one by one.

    Return the logits f32[n, n_vocab] of the tokens after the prompt, and the number of steps that the engine
    repeated.
    """
    exact = {"prefill": "exact"} if policy.recall else {}
    with open_engine(path, policy, **(HALF | exact | settings)) as engine:
        engine.read(tokens[:n_prompt])
        logits = []
        for token in tokens[n_prompt:]:
            engine.step(np.array([token]))
            logits.append(engine.context.logits()[-1].copy())
        if settings.get("resident"):
            assert engine.residents.n_now == settings["resident"], "the residents were refused"
        return np.array(logits), engine.residents.n_repeated


def test_last_chunk_of_one_token_needs_no_residents(tiny_model):
    path = tiny_model(n_head_kv=2, n_ctx_train=2048)
    with open_engine(path, fit(), prefill="exact", resident=64, **HALF) as engine:
        assert engine.exact_reader.n_chunk == 64
        assert engine.read(random_tokens(193)) == 193
        assert engine.n_archived > 64


@pytest.mark.parametrize(
    ("arch", "shape", "settings", "tolerance"),
    [
        ("llama", {"n_head_kv": 2}, {}, ROUGH),
        ("llama", {"n_head_kv": 1}, {}, ROUGH),
        ("llama", {"n_head_kv": 2}, {"type_k": "q8_0", "type_v": "q8_0", "archive_type": "q8_0"}, 0.5),
        ("gemma3", {}, {}, ROUGH),
        ("gemma2", {}, {}, ROUGH),
        ("gpt_oss", {}, {}, ROUGH),
        ("gemma4", {}, {}, ROUGH),
        ("lfm2", {}, {}, ROUGH),
        ("qwen35", {}, {}, ROUGH),
    ],
    ids=str,
)
@pytest.mark.usefixtures("always_repeated")
def test_keeping_all_tokens_resident_equals_the_full_cache(tiny_model, arch, shape, settings, tolerance):
    path, tokens = tiny_model(arch, n_ctx_train=2048, **shape), random_tokens(N_PROMPT + N_LATER)
    cache = {name: settings[name] for name in ("type_k", "type_v") if name in settings}
    full, _ = written_logits(path, policies.fit("full", 1024), tokens, **cache)
    logits, n_repeated = written_logits(path, fit(), tokens, resident=ALL, **settings)
    assert np.abs(logits - full).max() < tolerance
    # the first step is repeated, because there are no residents yet. Steps after a block was clustered are
    # also repeated
    assert 1 <= n_repeated < N_LATER // 2


def test_more_residents_reduce_the_error(tiny_model):
    path, tokens = tiny_model(n_head_kv=2, n_ctx_train=2048), random_tokens(N_PROMPT + N_LATER)
    full, _ = written_logits(path, policies.fit("full", 1024), tokens)
    few, many = (np.abs(written_logits(path, fit(), tokens, resident=n)[0] - full).mean() for n in (32, 256))
    assert ROUGH / 100 < many < few


def test_the_same_text_gives_the_same_logits(tiny_model):
    path, tokens = tiny_model(n_head_kv=2, n_ctx_train=2048), random_tokens(N_PROMPT + N_LATER)
    runs = [written_logits(path, fit(), tokens, resident=64, n_threads=n) for n in (1, 1, 3)]
    assert [n for _, n in runs] == [runs[0][1]] * 3
    np.testing.assert_array_equal(runs[0][0], runs[1][0])
    assert ON_CUDA or np.abs(runs[0][0] - runs[2][0]).max() < ROUGH


@pytest.mark.usefixtures("always_repeated")
def test_residents_beyond_the_context_equal_a_search_of_all_clusters(tiny_model):
    # Half of the context is 63 tokens. Older tokens keep this distance, so each step rotates their keys
    # again. About every 70 tokens, gaps between positions are closed, and all keys are rotated
    path, tokens = tiny_model(n_head_kv=2, n_ctx_train=126), random_tokens(900)
    all_exact = policies.fit("recall", 48, 16, ["exact=4096"])
    host, _ = written_logits(path, all_exact, tokens, prefill="stream", n_prompt=300)
    device, n_repeated = written_logits(path, fit(48), tokens, prefill="stream", n_prompt=300, resident=ALL)
    assert np.abs(device - host).max() < 2 * ROUGH
    assert 0 < n_repeated < 300


@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        ("deepseek2", {"prefill": "stream"}),
        ("llama", {"flash": "off", "archive_type": "f32", "type_k": "f32", "type_v": "f32"}),
    ],
    ids=str,
)
def test_steps_search_the_archive_if_no_tokens_can_be_resident(tiny_model, arch, settings):
    path, tokens = tiny_model(arch, n_ctx_train=2048), random_tokens(N_PROMPT + 4)
    host, _ = written_logits(path, fit(), tokens, **settings)
    with open_engine(path, fit(), **(HALF | {"prefill": "exact", "resident": 64} | settings)) as engine:
        engine.read(tokens[:N_PROMPT])
        for token in tokens[N_PROMPT:]:
            engine.step(np.array([token]))
        np.testing.assert_array_equal(engine.context.logits()[-1], host[-1])
        assert engine.residents.n_token == engine.residents.n_now == 0
        assert report(engine, "recall")["resident_refusal"]
        assert "; no residents: " in line(report(engine, "recall"))


def test_archive_is_searched_again_if_its_means_exceed_the_cells(tiny_model, monkeypatch):
    path, tokens = tiny_model(n_head_kv=2, n_ctx_train=2048), random_tokens(900)
    monkeypatch.setattr(residents, "_MAX_MEANS", 48)
    monkeypatch.setattr(residents, "_MAX_SETS", 0)
    host, _ = written_logits(path, fit(), tokens, n_prompt=300)
    device, _ = written_logits(path, fit(), tokens, n_prompt=300, resident=64)
    far = np.abs(device - host).max(axis=1) > ROUGH
    # the cells hold at most 48 means: 16 clusters for each of three blocks. Until they are full, steps attend
    # to residents, so their logits differ from `host`. Later steps search the archive in host memory
    assert far[:400].any()
    with open_engine(path, fit(), **(HALF | {"resident": 64})) as engine:
        engine.read(tokens)
        assert engine.n_archived > 3 * 256 + 64
        engine.step(tokens[:1])
        assert engine.context.archive.missed() == 0.0


@pytest.mark.usefixtures("always_repeated")
def test_means_of_sets_replace_clusters_without_cells(tiny_model, monkeypatch):
    # The archive has 19 blocks of 16 clusters. The clusters of 16 blocks form 16 sets, and 3 blocks are in no
    # set. n_page is the number of these sets and blocks for whose clusters there are cells
    path, tokens = tiny_model(n_head=2, n_head_kv=2, n_ctx_train=16384), random_tokens(5010)
    full, _ = written_logits(path, policies.fit("full", 5120), tokens, n_prompt=5000)

    def error(policy, n_mean=0, n_mean_set=64, **settings):
        monkeypatch.setattr(residents, "_means_for", lambda n: residents._Means(n_mean, n_mean_set))
        return np.abs(written_logits(path, policy, tokens, n_prompt=5000, **settings)[0] - full).mean()

    all_cells, without_sets, half, few = (
        error(fit(), 16 * n_page, n_mean_set, resident=2048)
        for n_page, n_mean_set in ((19, 64), (22, 0), (12, 64), (6, 64))
    )
    # a GPU may add up the cells in another order
    assert abs(all_cells - without_sets) < ROUGH
    assert all_cells < half < few < error(policies.fit("streamingllm", 64)) / 1.5


def test_archive_is_searched_if_the_device_has_no_memory(tiny_model, monkeypatch):
    path, tokens = tiny_model(n_head_kv=2, n_ctx_train=2048), random_tokens(N_PROMPT + 4)
    host, _ = written_logits(path, fit(), tokens)

    def refuse(self, n_mean, n_mean_set, n_token):
        raise LibraryError("llama.cpp refused: a device has no memory for residents")

    monkeypatch.setattr(Archive, "reside", refuse)
    with open_engine(path, fit(), **(HALF | {"prefill": "exact", "resident": 64})) as engine:
        engine.read(tokens[:N_PROMPT])
        for token in tokens[N_PROMPT:]:
            engine.step(np.array([token]))
        np.testing.assert_array_equal(engine.context.logits()[-1], host[-1])


@pytest.mark.parametrize(
    ("missed", "n_min", "n_max"),
    [
        (lambda rng: rng.uniform(0, 0.03), 140, 180),  # 4 % of 4,000 steps
        (lambda rng: rng.uniform(0.041, 0.1), 4000, 4000),  # above the largest limit
        (lambda rng: rng.uniform(0, 0.0124), 0, 0),  # below the smallest limit
    ],
)
def test_the_limit_of_missed_attention_adapts_to_the_model(tiny_model, monkeypatch, missed, n_min, n_max):
    tokens = random_tokens(N_PROMPT + 1)
    rng = np.random.default_rng(0)
    with open_engine(tiny_model("llama"), fit(), prefill="exact", resident=ALL, **HALF) as engine:
        engine.read(tokens[:N_PROMPT])
        engine.step(tokens[N_PROMPT:])
        monkeypatch.setattr(Archive, "missed", lambda archive: missed(rng))
        n_repeated = 0
        for i in range(6000):
            engine.residents.prepare()
            # do not count the first steps, which adapt the limit
            n_repeated += engine.residents.misses() and i >= 2000
        assert n_min <= n_repeated <= n_max


# in an 8B model with an f16 cache, one cell in all rows takes 128 KiB, so these cells would take 672 and
# 832 MiB
@pytest.mark.parametrize(("n_archived", "n_cell"), [(32768, 5376), (131072, 6656), (786432, 6656)])
def test_a_long_archive_takes_as_many_cells_as_planned(tiny_model, n_archived, n_cell):
    settings = HALF | {"resident": 2048, "archive": n_archived}
    with open_engine(tiny_model(n_ctx_train=2048), fit(), **settings) as engine:
        assert engine.context.archive.n_max == n_archived
        assert engine.residents.n_bytes == n_cell * (engine.cache_bytes // engine.context.n_cell)
        assert residents.n_cells(2048, n_archived) == n_cell


def test_blocks_and_clusters_have_the_librarys_sizes(tiny_model):
    with open_engine(tiny_model(), fit(), **HALF) as engine:
        archive = engine.context.archive
        assert archive.n_block == residents.N_BLOCK
        with pytest.raises(LibraryError, match=f"must be multiples of {residents._N_CLUSTER} and "):
            archive.resident_bytes(1, 0, 0)


def test_cells_of_residents_are_counted_and_freed(tiny_model):
    with open_engine(tiny_model(n_head_kv=2, n_ctx_train=2048), fit(), **(HALF | {"resident": 64})) as engine:
        engine.read(random_tokens(N_PROMPT))
        n_before = engine.cache_bytes
        engine.step(random_tokens(1))
        archive = engine.context.archive
        n_cell = (engine.cache_bytes - n_before) // (n_before // engine.context.n_cell)
        # 256 cells are for means, 384 for tokens without clusters, and 64 for residents. 64 cells are added,
        # so that the sum is a multiple of 256
        assert n_cell == 256 + 384 + 64 + 64
        archive.reside(0, 0, 0)
        assert engine.cache_bytes == n_before


@pytest.mark.parametrize("arch", ["llama", "qwen35"])
@pytest.mark.usefixtures("always_repeated")
def test_rewound_and_restored_streams_continue_like_an_uninterrupted_one(tiny_model, arch):
    path, tokens = tiny_model(arch, n_ctx_train=2048), random_tokens(N_PROMPT + N_LATER)
    settings = HALF | {"prefill": "exact", "resident": ALL}
    expected, _ = written_logits(path, fit(), tokens, resident=ALL)
    with open_engine(path, fit(), **settings) as engine:
        engine.read(tokens[:N_PROMPT])
        for token in random_tokens(30, seed=5):
            engine.step(np.array([token]))
        n_kept = engine.rewind(N_PROMPT - 40)
        # a model with recurrent layers can only be rewound to a checkpoint. Without a checkpoint, it begins
        # again at 0
        assert n_kept == (N_PROMPT - 40 if arch == "llama" else 0)
        engine.read(tokens[n_kept:N_PROMPT])
        for token in tokens[N_PROMPT : N_PROMPT + 20]:
            engine.step(np.array([token]))
        assert np.abs(engine.context.logits()[-1] - expected[19]).max() < ROUGH
        saved = {name: np.array(values) for name, values in engine.save()}
    with open_engine(path, fit(), **settings) as engine:
        engine.restore(saved)
        for token in tokens[N_PROMPT + 20 :]:
            engine.step(np.array([token]))
        assert np.abs(engine.context.logits()[-1] - expected[-1]).max() < ROUGH
        assert engine.residents.n_token == ALL


def test_recurrent_layers_without_an_earlier_state_have_no_residents(tiny_model):
    # a step can be repeated only from a copy of the recurrent state, and an engine without resident= keeps no
    # copy
    with open_engine(tiny_model("lfm2", n_ctx_train=2048), fit(), **HALF) as engine:
        archive = engine.context.archive
        with pytest.raises(LibraryError, match="recurrent layers of this model cannot drop a token"):
            archive.resident_bytes(256, 0, 64)
        with pytest.raises(LibraryError, match="recurrent layers of this model cannot drop a token"):
            archive.reside(256, 0, 64)


@pytest.mark.parametrize("arch", ["llama", "lfm2", "qwen35"])
@pytest.mark.usefixtures("always_repeated")
def test_drafts_with_residents_give_the_logits_of_single_tokens(tiny_model, arch):
    path, tokens = tiny_model(arch, n_ctx_train=2048), random_tokens(N_PROMPT + N_LATER)
    expected, _ = written_logits(path, fit(), tokens, resident=ALL)
    settings = HALF | {"prefill": "exact", "resident": ALL, "n_draft": 4}
    with open_engine(path, fit(), **settings) as engine:
        engine.read(tokens[:N_PROMPT])
        n_past = N_PROMPT
        while n_past < len(tokens) - 5:
            n = min(engine.draft_room(), 4)
            # the last draft token is wrong, so it is dropped
            step = np.append(tokens[n_past : n_past + n], 3) if n else tokens[n_past : n_past + 1]
            engine.draft(step)
            n_right = max(n, 1)
            logits = engine.context.logits()[:n_right]
            assert np.abs(logits - expected[n_past - N_PROMPT : n_past - N_PROMPT + n_right]).max() < ROUGH
            engine.drop_drafts(len(step) - n_right)
            n_past += n_right
        assert engine.residents.n_repeated


@pytest.mark.usefixtures("always_repeated")
def test_streams_in_joint_steps_attend_to_their_residents(tiny_model):
    settings = HALF | {"prefill": "exact", "resident": ALL, "n_batch": 256}
    tokens, n_written, batchers = [random_tokens(600 + 40 * i, seed=i) for i in range(3)], (40, 30, 40), []

    def several(lock):
        batchers.append(Counting(lock, 3))
        return batchers[0]

    with closing(Model(tiny_model(n_head_kv=2, n_ctx_train=2048))) as model:
        each_alone, together = (
            run_streams(model, fit(), tokens, n_written, make_batcher=batcher, **settings)
            for batcher in (one_by_one, several)
        )
    assert batchers[0].sizes == [3] * 30 + [2] * 10
    for single, joint in zip(each_alone, together, strict=True):
        assert np.abs(single.logits - joint.logits).max() < ROUGH
        # the first step is repeated, since it has no residents yet
        assert 1 <= joint.n_repeated < 20


@pytest.mark.parametrize("n", [-1, 2**20 + 1, 2**32 + 64])
def test_invalid_numbers_of_residents_are_refused(n):
    from kvtool.engine.settings import Settings

    with pytest.raises(UsageError, match=rf"resident must be in 0\.\.1048576, got {n}$"):
        Settings(resident=n)


@contextmanager
def logged():
    """Yield a list that receives the lines that llama.cpp logs."""
    lines = []
    callback = api.llama_log_callback(lambda level, line, _: lines.append(line.decode("utf-8", "replace")))
    api.llama_log_set(callback, ctypes.c_void_p(0))
    try:
        yield lines
    finally:
        api.llama_log_set(log._log_callback, ctypes.c_void_p(0))


def graphs_of_a_step(path, policy, monkeypatch, **settings):
    """Return the number of splits and the operations of the graph that decodes one token."""
    monkeypatch.setenv("GGML_SCHED_DEBUG", "2")
    # if graphs are not reused, each step logs its graph
    monkeypatch.setenv("LLAMA_GRAPH_REUSE_DISABLE", "1")
    with open_engine(path, policy, **(HALF | settings)) as engine:
        engine.read(random_tokens(N_PROMPT))
        engine.step(random_tokens(1))
        with logged() as lines:
            engine.step(random_tokens(1))
            engine.context.logits()
    splits, operations, _ = max(gpu_rows.graphs_of("".join(lines)), key=lambda graph: sum(graph[1].values()))
    return splits, operations


def test_step_with_residents_computes_nothing_on_the_host(tiny_model, monkeypatch):
    path = tiny_model(n_head_kv=2, n_ctx_train=2048)
    plain, _ = graphs_of_a_step(path, policies.fit("streamingllm", 64), monkeypatch)
    _, searched = graphs_of_a_step(path, fit(), monkeypatch)
    splits, operations = graphs_of_a_step(path, fit(), monkeypatch, resident=64)
    assert searched["CUSTOM"] > 0
    assert operations["CUSTOM"] == 0
    assert splits == plain
