"""Recall: tokens that leave the window are archived, and return in the step whose queries need them."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest

from kvtool import policies
from kvtool.errors import KvtoolError, LibraryError, PlanError, SessionError, StreamEnd, UsageError
from kvtool.llama.cache.archive import set_layer
from kvtool.llama.libllama.devices import has_gpu
from kvtool.llama.libllama.library import check
from kvtool.measure import perplexity
from kvtool.models.layers import Layers
from kvtool.policies.recall import Recall
from kvtool.system.memory import rss_bytes
from tests.engine import saved_state
from tests.engine.exact_engines import ON_CUDA, TOLERANCE, open_engine, random_tokens
from tests.engine.exact_engines import fit_recall as fit
from tests.tools.test_files import full_after, limited


def scores(path, policy, tokens, **settings):
    with open_engine(path, policy, **settings) as engine:
        return perplexity.stream(engine, tokens)


@pytest.fixture
def without_values(monkeypatch):
    """Treat values as a part of keys, as with MLA. Steps then recall tokens instead of synthetic cells."""
    monkeypatch.setattr(Layers, "has_values", False)


@pytest.mark.parametrize("search", ["clusters", "all"])
@pytest.mark.parametrize(
    ("flash", "kind", "tolerance"),
    # with flash attention, keys are rounded to half precision and sums have another order, so tolerances are
    # larger
    [("off", "f32", TOLERANCE), ("on", "f16", 2e-2), ("on", "q8_0", 0.1)],
)
def test_recalling_the_whole_archive_equals_the_full_cache(
    tiny_model, without_values, search, flash, kind, tolerance
):
    path, tokens = tiny_model(n_head_kv=2), random_tokens(120)
    settings = {"type_k": kind, "type_v": kind, "flash": flash, "n_batch": 16}
    full = scores(path, policies.fit("full", 256, 0), tokens, **settings)
    forgetting = scores(path, policies.fit("streamingllm", 64, 16), tokens, **settings)
    with open_engine(path, fit(128, recalled=64, search=search), archive_type=kind, **settings) as engine:
        actual = perplexity.stream(engine, tokens)
        assert engine.context.archive.n == 64
    assert np.abs(actual - full).max() < tolerance < np.abs(forgetting - full).max()


@pytest.mark.parametrize("n_head_kv", [1, 2, 4])
@pytest.mark.parametrize(
    ("flash", "kind", "tolerance"),
    # tolerances are larger if the cache's type rounds the keys of synthetic ("made") cells
    [("off", "f32", TOLERANCE), ("on", "f16", 2e-2), ("off", "f16", 2e-2), ("on", "q8_0", 0.2)],
)
def test_synthetic_cells_equal_the_full_cache(tiny_model, n_head_kv, flash, kind, tolerance):
    path, tokens = tiny_model(n_head_kv=n_head_kv), random_tokens(200)
    settings = {"type_k": kind, "type_v": kind, "flash": flash, "n_batch": 16}
    full = scores(path, policies.fit("full", 256, 0), tokens, **settings)
    forgetting = scores(path, policies.fit("streamingllm", 48, 16), tokens, **settings)
    policy = fit(search="all")
    with open_engine(path, policy, archive_type=kind, **settings) as engine:
        actual = perplexity.stream(engine, tokens)
        assert engine.policy.recall.n_cell == 4 // n_head_kv
        assert engine.n_archived > 150
        assert engine.n_kv + engine.policy.recall.n_cell <= policy.budget
    assert np.abs(actual - full).max() < tolerance < np.abs(forgetting - full).max()


@pytest.mark.parametrize("n_head_kv", [1, 2])
@pytest.mark.parametrize(
    ("kind", "tolerance"), [("q8_0", 0.01), ("q5_0", 0.03), ("q4_1", 0.05), ("q4_0", 0.04)]
)
def test_quantized_synthetic_keys_give_each_head_its_logit(tiny_model, n_head_kv, kind, tolerance):
    # with one layer, keys do not depend on attention, so errors do not add up
    path, tokens = tiny_model(n_head_kv=n_head_kv, n_layer=1), random_tokens(200)
    settings = {"type_k": kind, "type_v": "f16", "flash": "on", "n_batch": 16}
    full = scores(path, policies.fit("full", 256, 0), tokens, **settings)
    actual = scores(path, fit(search="all"), tokens, archive_type="f32", **settings)
    # the tolerance is larger on a GPU, because a GPU may round queries in addition to keys
    assert np.abs(actual - full).max() < (0.09 if has_gpu() else tolerance)


def test_archived_keys_and_values_may_have_different_types(tiny_model):
    def archived(kind):
        with open_engine(path, fit(search="all"), archive_type=kind) as engine:
            return perplexity.stream(engine, tokens), engine.context.archive.slab_bytes

    path, tokens = tiny_model(n_head_kv=2, head_dim=64), random_tokens(200)
    kinds = ["f32", "q8_0", "q8_0/q4_0", "q5_0/q4_0", "iq4_nl", "q4_0"]
    nll, n_bytes = zip(*map(archived, kinds), strict=True)
    assert list(n_bytes) == sorted(set(n_bytes), reverse=True)
    errors = [np.abs(value - nll[0]).mean() for value in nll]
    assert errors == sorted(set(errors))
    assert errors[-1] < 0.3


# Distances are limited to 200 tokens, so the older blocks are far. Gaps are closed inside some blocks
@pytest.mark.parametrize(
    ("options", "shape", "settings"),
    [
        (["chunk=1"], {"rope": "norm", "yarn": 4.0}, {}),
        (["chunk=16"], {"rope": "neox"}, {"type_k": "q8_0", "flash": "on"}),
        (["chunk=2", "search=all"], {"rope": "neox"}, {}),
    ],
    ids=str,
)
def test_biases_of_keys_do_not_spoil_keys_of_4_bits(tiny_model, options, shape, settings):
    def scored(kind):
        with open_engine(path, policy, positions="auto", archive_type=kind, **settings) as engine:
            nll = perplexity.stream(engine, tokens)
            assert engine.n_restart > 0
            return nll

    path = tiny_model(n_head_kv=2, head_dim=64, n_ctx_train=400, key_bias=30.0, **shape)
    policy, tokens = policies.fit("recall", 48, 16, options), random_tokens(600)
    exact = scored("f32")
    centered, plain = (np.abs(scored(kind) - exact).mean() for kind in ("iq4_nl", "q4_0"))
    assert centered < 0.4 * plain


@pytest.mark.parametrize("n_head_kv", [2, 4])
def test_synthetic_cells_equal_the_full_cache_with_capped_logits(tiny_model, n_head_kv):
    path, tokens = tiny_model("gemma2", n_head_kv=n_head_kv), random_tokens(200)
    full = scores(path, policies.fit("full", 256, 0), tokens, n_batch=16)
    actual = scores(path, fit(search="all"), tokens, archive_type="f32")
    assert np.abs(actual - full).max() < TOLERANCE


@pytest.mark.parametrize("params", [{"exact": 100}, {"recalled": 9, "exact": 100}], ids=["made", "tokens"])
def test_recalled_tokens_do_not_depend_on_the_number_of_threads(tiny_model, monkeypatch, params):
    monkeypatch.setattr(Layers, "has_values", "recalled" not in params)
    results = []
    for n_threads in (1, 2, 5):
        with open_engine(tiny_model(n_head_kv=2), fit(**params), n_threads=n_threads) as engine:
            engine.read(random_tokens(900))
            archive = engine.context.archive
            tokens = [each.tolist() for each in archive.attended(4, 9)] if "recalled" in params else []
            results.append((tokens, engine.context.logits().tolist()))
            # the archive has more than three blocks of 256 tokens, so that the threads have blocks to share
            assert engine.n_archived > 3 * 256
    assert results[0] == results[1] == results[2]


def test_table_has_synthetic_cells_only_for_the_tokens_of_a_step(tiny_model):
    policy = fit(budget=256, search="all", chunk=64)
    with open_engine(tiny_model(n_head_kv=2), policy) as engine:
        engine.read(random_tokens(900))
        assert engine.context.n_cell > 256
        n_cell = engine.policy.recall.n_cell
        for n in (1, 5, 1):
            engine.read(random_tokens(n))
            # in llama.cpp's table, synthetic cells directly follow the live tokens
            assert len(saved_state.parse(engine.context.state()).pos) == engine.n_kv + n * n_cell


def test_keys_of_nan_get_no_attention(tiny_model):
    logits = []
    with open_engine(tiny_model(n_head_kv=2), fit(search="all"), archive_type="f32") as engine:
        engine.read(random_tokens(200))
        good = {name: array.copy() for name, array in engine.save()}
        of_layers = [name for name in good if name.startswith("archive.")]
        for is_number in (False, True):
            broken = {
                name: np.full(len(good[name]) // 4, np.nan, np.float32).view(np.uint8) for name in of_layers
            }
            engine.restore(good if is_number else good | broken)
            if is_number:
                engine.context.archive.forget()
            engine.read(random_tokens(1, seed=2))
            logits.append(engine.context.logits().copy())
    assert np.abs(logits[0] - logits[1]).max() < TOLERANCE


CLUSTERED = {"n_head_kv": 2, "n_ctx_train": 1024}
"""Shape of a model whose context is so short that some clusters are farther away than half of it."""


def test_clusters_reduce_the_error_and_exact_tokens_reduce_it_more(tiny_model):
    path, tokens = tiny_model(**CLUSTERED), random_tokens(1000)
    full = scores(path, policies.fit("full", 1024, 0), tokens, n_batch=16)
    error = {}
    for name, params in {"window": None, "few": {"exact": 1}, "many": {"exact": 500}}.items():
        policy = fit(**params) if params else policies.fit("streamingllm", 48, 16)
        error[name] = np.abs(scores(path, policy, tokens, archive_type="f32") - full)[600:].mean()
    assert error["many"] < 0.9 * error["few"] < 0.8 * error["window"]


def test_search_in_8_bit_keys_adds_little_error(tiny_model):
    # in steps of few queries, queries are rounded to 8 bits if the CPU has instructions for that. With
    # search=all they are never rounded
    path, tokens = tiny_model(n_head_kv=2, n_layer=1, head_dim=64, n_ctx_train=4096), random_tokens(900)
    runs = [
        scores(path, fit(chunk=1, **params), tokens, archive_type="q8_0")
        for params in ({"exact": 10**6}, {"search": "all"}, {"exact": 1})
    ]
    error, smallest = (np.abs(run - runs[1])[400:].mean() for run in (runs[0], runs[2]))
    assert error < 0.02 < 0.2 < smallest


def test_steps_attend_exactly_to_more_tokens_of_a_longer_archive(tiny_model):
    path = tiny_model(n_head=2, n_head_kv=2, n_layer=1, n_ctx_train=1024)
    most = []
    with open_engine(path, fit(exact=256, chunk=64)) as engine:
        archive = engine.context.archive
        archive.trace(2048)
        for _ in range(2):
            # rows cluster a block at different times. At this length, all rows have clustered the same blocks
            engine.read(random_tokens(8180))
            engine.read(random_tokens(2))
            pos = archive.attended(engine.context.n_row, 2048)[0]
            sealed = (pos >= 0) & (pos < archive.clustered[-1][0] + archive.n_block)
            most.append(sealed.sum(axis=1).min())
    # a step of 2 tokens attends exactly to at least 2 * exact = 512 tokens. If the archive has n > 8,192
    # tokens, this number is multiplied by (n / 8,192) ** 0.25: 16,320 tokens give 608
    assert 512 <= most[0] < 604 < 608 <= most[1] < 660


@pytest.mark.parametrize("archive", [1, 40, 260])
def test_small_archive_is_within_its_limit_and_ends_at_the_window(tiny_model, archive):
    with open_engine(tiny_model(**CLUSTERED), fit(search="clusters", exact=64), archive=archive) as engine:
        for part in np.split(random_tokens(1600), 50):
            engine.read(part)
            span = engine.context.archive.span
            assert len(span) <= archive
            # the archive ends where the window begins
            assert not span or span.stop == engine.cells().pos.max() + 1 - (engine.n_kv - engine.policy.sinks)


def test_recall_with_an_empty_archive_equals_streamingllm_bit_for_bit(tiny_model):
    path, tokens = tiny_model(n_head_kv=2), random_tokens(64)
    expected = scores(path, policies.fit("streamingllm", 96, 16), tokens, n_batch=16)
    with open_engine(path, fit(98)) as engine:
        actual = perplexity.stream(engine, tokens)
        assert engine.context.archive.n == 0
    assert np.abs(actual - expected).max() <= (1e-5 if ON_CUDA else 0)


def test_attention_to_archived_tokens_equals_the_full_cache(tiny_model):
    path, tokens = tiny_model(n_head_kv=2), random_tokens(200)
    with open_engine(path, fit(search="all", chunk=1), archive_type="f32") as engine:
        engine.context.archive.trace(200)
        perplexity.stream(engine, tokens)
        pos, attn = engine.context.archive.attended(4, 200)
        n = engine.n_archived
    with open_engine(path, policies.fit("tova", 256, 1)) as engine:
        perplexity.stream(engine, tokens[:-1])
        engine.step(tokens[-1:])
        expected = np.stack([signal[:, :200] for signal in engine.signals.read().values()])[0]
    for row in range(4):
        assert pos[row, :n].tolist() == list(range(4, 4 + n))
        assert (pos[row, n:] == -1).all()
        assert np.abs(attn[row, :n] - expected[row, 4 : 4 + n]).max() < TOLERANCE


def test_full_archive_forgets_the_oldest_tokens(tiny_model):
    path, tokens = tiny_model(n_head_kv=2, n_ctx_train=512), random_tokens(400)
    with open_engine(path, fit(), archive=40) as engine:
        perplexity.stream(engine, tokens)
        assert engine.context.archive.n == 40
        table = dict(engine.context.archive.save())["archive"]
        live = engine.cells().pos[0]
        # the archive ends where the window begins
        assert table[1] == live[live >= 4].min()


def test_forgotten_tokens_are_not_recalled(tiny_model):
    path, tokens = tiny_model(n_head_kv=2), random_tokens(200)
    few, many = (scores(path, fit(), tokens, archive=n) for n in (20, 1000))
    assert not np.allclose(few, many)


@pytest.mark.parametrize(
    ("params", "n_ctx", "n_saved", "settings"),
    [
        ({}, 130, 250, {"type_k": "f32", "archive_type": "f32", "archive": 100}),
        ({}, 130, 250, {"type_k": "f16", "archive_type": "q8_0", "archive": 100}),
        # this archive has clusters, some of them beyond half of the context
        ({"exact": 64}, 1024, 1650, {"archive": 1200}),
        ({"search": "all"}, 1024, 1650, {"archive": 1200}),
    ],
    ids=str,
)
def test_restored_stream_continues_bit_for_bit(tiny_model, params, n_ctx, n_saved, settings):
    path, tokens = tiny_model(n_head_kv=2, n_ctx_train=n_ctx), random_tokens(n_saved + 50)
    policy = fit(**params)
    with open_engine(path, policy, **settings) as engine:
        perplexity.stream(engine, tokens[:n_saved])
        saved = {name: array.copy() for name, array in engine.save()}
        expected = perplexity.stream(engine, tokens[n_saved:])
        assert engine.n_restart > 0
    with open_engine(path, policy, **settings) as engine:
        # the second `restore` replaces the contents of the first
        for _ in range(2):
            engine.restore(saved)
            assert (perplexity.stream(engine, tokens[n_saved:]) == expected).all()


def test_a_saved_archive_that_does_not_fit_is_refused(tiny_model):
    with open_engine(tiny_model(n_head_kv=2), fit()) as engine:
        perplexity.stream(engine, random_tokens(200))
        saved = {name: array.copy() for name, array in engine.save()}
        for name, wrong in (
            ("archive", saved["archive"][:2]),
            ("archive", saved["archive"].astype(np.int32)),
            ("archive.0", saved["archive.0"][:-1]),
            # the first archive begins after its own end; the second archive ends after the end of the stream
            ("archive", np.array([9, 8, 0, 0, 0])),
            ("archive", np.array([0, 2**62, 0, 0, 0])),
            # wrong tables of archives with 8 tokens: 9 tokens are beyond half of the context; the second run
            # of positions begins at token 900; the first run does not begin at token 0
            ("archive", np.array([0, 8, 9, 0, 0])),
            ("archive", np.array([0, 8, 0, 0, 0, 900, 0])),
            ("archive", np.array([0, 8, 0, 1, 0])),
        ):
            with pytest.raises(SessionError):
                engine.restore(saved | {name: wrong})


def test_archive_read_returns_the_saved_bytes(tiny_model):
    with open_engine(tiny_model(n_head_kv=2), fit()) as engine:
        perplexity.stream(engine, random_tokens(200))
        archive, saved = engine.context.archive, dict(engine.save())
        n, sizes = archive.n, archive.layer_bytes
        begin, end = archive.span.start + 7, archive.span.stop - 9
        pieces = np.split(archive.read(begin, end), np.cumsum(sizes)[:-1] * (end - begin))
        for layer, (size, piece) in enumerate(zip(sizes, pieces, strict=True)):
            assert (piece == saved[f"archive.{layer}"].reshape(n, size)[7:-9].reshape(-1)).all()
        # archived=False leaves out the archived tokens, and nothing else
        assert set(saved) - set(dict(engine.save(archived=False))) == {
            f"archive.{i}" for i in range(len(sizes))
        }


WRONG = [
    ({"recalled": -1}, r"recalled must be in 1..27 \(the budget of 48 less 16 slack, 4 sinks and the newest"),
    ({"recalled": 9999}, "recalled must be in 1..27 .*, got 9999; with .* at least 10020$"),
    (
        {"sinks": 99},
        "budget of 48 is too small for 99 sinks, the newest token, a cell for what is .* 16 slack; .* 117$",
    ),
    ({"budget": 1, "evict_every": None}, "a budget of 1 is too small for recall; use at least 7$"),
    ({"sinks": -1}, "sinks must not be negative, got -1"),
    ({"chunk": 0}, "chunk must be at least 1, got 0"),
    ({"exact": -1}, "exact must not be negative, got -1"),
    ({"search": "all", "exact": 5}, "exact goes with search=clusters; leave out -o exact or -o search=all$"),
    ({"search": "tokens"}, "search must be one of clusters, all, got 'tokens'"),
]


@pytest.mark.parametrize(("params", "line"), WRONG, ids=str)
def test_impossible_parameters_are_refused_with_one_line(params, line):
    with pytest.raises(UsageError, match=line):
        fit(**params)


def test_the_smallest_budget_has_room_for_a_recalled_token():
    assert fit(policies.spec("recall").smallest_budget(), None).split()["recalled"] == 1


def test_the_smallest_budget_has_room_for_held_tokens(tiny_model):
    smallest = policies.spec("recall").smallest_budget(n_held=20)
    # a model with one synthetic cell per row
    path = tiny_model(n_head_kv=4)
    with open_engine(path, fit(smallest, None)) as engine:
        engine.hold(20)
        engine.read(random_tokens(200))
        assert engine.cells().pos[0, -20:].tolist() == list(range(180, 200))
    with open_engine(path, fit(smallest - 1, None)) as engine, pytest.raises(UsageError):
        engine.hold(20)


@pytest.mark.parametrize("positions", ["original", "auto"])
def test_live_and_recalled_cells_together_are_within_the_budget(tiny_model, positions):
    rng = np.random.default_rng(5)
    policy, tokens, begin = fit(48, 8), random_tokens(600), 0
    with open_engine(tiny_model(n_ctx_train=1024), policy, positions=positions) as engine:
        while begin < len(tokens):
            engine.evict_if_due()
            n = min(int(rng.integers(1, engine.room() + 1)), len(tokens) - begin)
            engine.step(tokens[begin : begin + n])
            begin += n
            n_synthetic = engine.policy.recalled if engine.n_archived else 0
            assert engine.n_kv + n_synthetic <= 48
            # llama.cpp's table also has n_synthetic synthetic cells for each token of the step
            assert len(saved_state.parse(engine.context.state()).pos) == engine.n_kv + n * n_synthetic
        assert engine.n_archived == engine.n_evicted == 600 - engine.n_kv


def test_steps_are_at_most_a_chunk_once_tokens_are_archived(tiny_model):
    steps = []
    with open_engine(tiny_model(), fit(96, 8, chunk=12)) as engine:
        decode = engine._decode
        engine._decode = lambda tokens, n_output: (
            steps.append((len(tokens), engine.n_archived)),
            decode(tokens, n_output),
        )
        engine.read(random_tokens(300))
        n_live = engine.policy.n_live
    # while nothing is archived, steps may be longer than a chunk
    assert steps[0][0] > 12
    assert max(n for n, n_archived in steps if n_archived) <= 12
    assert sum(n for n, n_archived in steps if not n_archived) == n_live


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"positions": "in-cache"}, "Recall needs the distances of the text"),
        ({"archive_type": "q8_0"}, "heads of 8 and 8 numbers are not archived as q8_0; choose f16"),
        (
            {"archive_bytes": 100},
            r"^--archive is too small: the archive grows in steps of 256 tokens and needs at least two steps "
            r"\([0-9]+ KiB\)$",
        ),
    ],
    ids=str,
)
def test_unsupported_settings_are_refused_with_one_line(tiny_model, settings, line):
    settings = {"archive_type": "f16"} | settings
    with pytest.raises(KvtoolError, match=line), open_engine(tiny_model(head_dim=8), fit(), **settings):
        pass


@pytest.mark.parametrize("n_text", [0, 100])
def test_first_eviction_comes_when_first_plan_says(tiny_model, n_text):
    with open_engine(tiny_model(), fit(96, 8)) as engine:
        foretold = engine.first_plan(n_text)
        if n_text:
            for _ in engine.steps(random_tokens(n_text), late=True):
                if engine.n_evicted:
                    break
        while not engine.n_evicted:
            engine.evict_if_due()
            engine.step(random_tokens(1))
        # n_past includes the step after the eviction: one token, or up to n_batch tokens of the text
        assert engine.n_past - foretold in ((0, 1) if not n_text else range(engine.n_batch + 1))


def test_pinned_and_held_tokens_are_within_the_live_cells(tiny_model):
    with open_engine(tiny_model(), fit(96, 8)) as engine:
        n_keep = engine.policy.n_keep
        with pytest.raises(UsageError, match="choose a larger budget"):
            engine.hold(n_keep)
        # at most n_keep // 2 tokens are pinned, even if more are requested. Later tokens are archived
        engine.pin(500)
        assert engine.n_pinned == n_keep // 2
        engine.read(random_tokens(200))
        pos = engine.cells().pos[0]
        assert pos[: n_keep // 2].tolist() == list(range(n_keep // 2))
        assert pos[-1] == 199
        assert engine.context.archive.span.start == n_keep // 2
        with pytest.raises(UsageError, match="archived already"):
            engine.pin(3)
        engine.pin(n_keep)


def test_closed_engine_raises_usage_error(tiny_model):
    with open_engine(tiny_model(), fit()) as engine:
        engine.read(random_tokens(100))
        engine.close()
        with pytest.raises(UsageError):
            engine.reset()
        with pytest.raises(UsageError):
            _ = engine.n_archived


def test_smaller_archive_restores_the_newest_saved_tokens(tiny_model):
    path, tokens = tiny_model(n_head_kv=2), random_tokens(900)
    with open_engine(path, fit()) as engine:
        perplexity.stream(engine, tokens)
        saved = {name: array.copy() for name, array in engine.save()}
    with open_engine(path, fit(), archive=50) as engine:
        engine.restore(saved)
        assert engine.n_archived == 50
        # only the newest 50 of the saved tokens take memory
        assert engine.archive_bytes <= engine.context.archive.max_bytes


def test_rows_that_evict_different_tokens_are_refused(tiny_model):
    class Uneven(Recall):
        def scores(self, view, state):
            return np.random.default_rng(1).random(view.pos.shape, np.float32)

    policy = Uneven(48, 16, 0, 0)
    with open_engine(tiny_model(n_head_kv=2), policy) as engine, pytest.raises(PlanError, match="archived"):
        engine.read(random_tokens(100))


# only the largest of these archives has clusters. In smaller archives, steps attend exactly to all tokens
@pytest.mark.parametrize("slabs", [2, 3.5, 6])
def test_archive_never_exceeds_its_limit_in_bytes(tiny_model, slabs):
    path = tiny_model(n_ctx_train=512)
    with open_engine(path, fit()) as engine:
        slab = engine.context.archive.slab_bytes
    with open_engine(path, fit(), archive_bytes=int(slabs * slab)) as engine:
        archive, most = engine.context.archive, int(slabs) * slab
        sizes = set()
        for _ in engine.steps(random_tokens(2500)):
            sizes.add(engine.archive_bytes)
            assert archive.n <= archive.n_max
        assert max(sizes) <= archive.max_bytes == most < max(sizes) + slab
        # with clusters, blocks of 256 tokens are forgotten together
        assert 0 <= archive.n_max - archive.n <= (255 if slabs > 4 else 0)
        # a slab has 256 tokens. The first token may be anywhere in its slab. n_max tokens always fit into the
        # slabs, but n_max + 1 tokens may need one slab more
        n, touched = archive.n_max, lambda n, begin: (begin + n - 1) // 256 - begin // 256 + 1
        assert max(touched(n, begin) for begin in range(256)) == int(slabs)
        assert max(touched(n + 1, begin) for begin in range(256)) == int(slabs) + 1


@pytest.mark.skipif(rss_bytes() is None, reason="the system does not say how much memory is resident")
def test_memory_does_not_grow_once_the_archive_is_full(tiny_model, share_of):
    n = share_of(1000, 2000)
    with open_engine(tiny_model(n_head_kv=2, n_ctx_train=512), fit(), archive=n) as engine:
        engine.read(random_tokens(3 * n // 2))
        before, archive_bytes = rss_bytes(), engine.archive_bytes
        engine.read(random_tokens(share_of(4000, 6000)))
        # since `before`, at least 4,000 tokens were read, but memory grew by less than the size of 1,000
        # tokens
        assert rss_bytes() - before < 1000 * sum(engine.context.archive.layer_bytes)
        # a slab has 256 tokens, and the first token may be anywhere in its slab, so the number of slabs may
        # differ by one
        assert abs(engine.archive_bytes - archive_bytes) <= engine.context.archive.slab_bytes


def test_forgotten_tokens_free_their_memory(tiny_model):
    with open_engine(tiny_model(n_head_kv=2, n_ctx_train=512), fit()) as engine:
        perplexity.stream(engine, random_tokens(2000))
        archive = engine.context.archive
        assert archive.n_bytes > 0
        archive.forget()
        assert archive.n_bytes == 0


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="limits memory as Linux counts it")
def test_a_push_without_memory_changes_nothing(tiny_model):
    with open_engine(tiny_model(n_head_kv=4, head_dim=64), fit(), archive_type="f32") as engine:
        engine.read(random_tokens(200))
        archive, cells, before = engine.context.archive, np.arange(16), []

        def fill():
            while archive.n < 200_000:
                before[:] = [archive.span, archive.n_bytes]
                archive.push(cells, archive.end)

        n_page = int(Path("/proc/self/statm").read_text().split()[0])
        most = n_page * resource.getpagesize() + 4 * archive.slab_bytes
        message = "^no memory for [0-9]+ KiB more of the archive; choose a smaller --archive$"
        full = pytest.raises(StreamEnd, match=message)
        with limited(resource.RLIMIT_AS, most), full:
            fill()
        assert before == [archive.span, archive.n_bytes]
        # after the failed push, every layer has the same number of tokens
        saved = dict(archive.save())
        assert [saved[f"archive.{i}"].nbytes for i in (0, 1)] == [archive.n * n for n in archive.layer_bytes]
        archive.push(cells, archive.end)
        assert archive.end == before[0].stop + len(cells)


@pytest.mark.parametrize("flash", ["off", "on"])
def test_resize_leaves_room_for_recalled_tokens(tiny_model, flash):
    path, parts = tiny_model(n_head_kv=2), np.split(random_tokens(300), [200, 250])

    def stream(sizes):
        with open_engine(path, fit(), flash=flash) as engine:
            context, n_recall = engine.context, engine.policy.recall.n_cell
            n_filled = context.n_cell - engine.policy.n_live
            for part, n in zip(parts, sizes, strict=True):
                if n:
                    context.resize(np.full(len(context.layer_cells), n))
                yield perplexity.stream(engine, part)
                engine.evict_if_due()
                engine.step(part[-1:])
                # llama.cpp's own table contains the synthetic cells, at the end of the table
                assert len(saved_state.parse(context.state()).pos) == engine.n_kv + n_recall
            n_recall = n_filled
            for n in (engine.n_kv + n_recall - 1, n_recall, 1):
                reason = f"{n} cells cannot hold its {engine.n_kv} tokens and {n_recall} recalled ones"
                with pytest.raises(LibraryError, match=reason):
                    context.resize(np.full(len(context.layer_cells), n))

    expected, actual = (np.concatenate(list(stream(sizes))) for sizes in ((0, 0, 0), (0, 512, 256)))
    assert np.abs(actual - expected).max() < TOLERANCE


def test_cells_for_recalled_tokens_hold_no_live_tokens(tiny_model):
    with open_engine(tiny_model(n_head_kv=2), fit()) as engine:
        context, n = engine.context, engine.policy.n_live
        end = n - 20
        for begin in range(0, end, 16):
            context.decode(random_tokens(min(16, end - begin)), begin, 0)
        with pytest.raises(LibraryError, match="cannot decode"):
            context.decode(random_tokens(21), end, 0)
        context.decode(random_tokens(20), end, 0)
        with pytest.raises(LibraryError, match=f"n_keep must be in 0..{n}, got {n + 1}"):
            context.apply(np.empty((0, 4), np.int32), n + 1, 0)
        context.apply(np.empty((0, 4), np.int32), n, 0)


def test_empty_archive_has_no_bases(tiny_model):
    with open_engine(tiny_model(n_head_kv=2), fit()) as engine:
        archive = engine.context.archive
        archive.rebase(77)
        assert dict(archive.save())["archive"].tolist() == [0, 0, 0, 0, 77]
        archive.forget()
        assert dict(archive.save())["archive"].tolist() == [0, 0, 0]


def test_archive_can_be_restored_without_its_table(tiny_model):
    path, tokens = tiny_model(n_head_kv=2), random_tokens(200)
    with open_engine(path, fit()) as engine:
        perplexity.stream(engine, tokens)
        n, layers = engine.context.archive.n, dict(engine.save())
    with open_engine(path, fit()) as engine:
        handle = engine.context.handle
        for i in range(2):
            data = layers[f"archive.{i}"]
            check(set_layer(handle, i, [(0, data)], 0, n))
        engine.step(tokens[:16])
        # if one layer gets other tokens than the rest, the archive is emptied
        check(set_layer(handle, 1, [(5, data)], 5, 9))
        assert engine.n_archived == 0
        engine.step(tokens[16:32])
        for parts, what in (
            ([1], r"first\[0\] in 0..0, got 1"),
            ([0, 5, 4], r"\[2\] in 5..9, got 4"),
            ([0, 10], "got 10"),
        ):
            with pytest.raises(LibraryError, match=what):
                check(set_layer(handle, 1, [(block, data) for block in parts], 0, 9))


@pytest.fixture
def path_of_file(tmp_path):
    if os.name != "posix":
        pytest.skip("Windows has no archive in a file yet")
    return str(tmp_path / "archive")


def test_archive_in_a_file_equals_the_archive_in_memory(tiny_model, path_of_file):
    path, tokens = tiny_model(n_head_kv=2, n_ctx_train=512), random_tokens(1500)
    expected = scores(path, fit(), tokens, archive=700)
    with open_engine(path, fit(), archive=700, archive_file=path_of_file) as engine:
        assert (perplexity.stream(engine, tokens) == expected).all()
        assert os.listdir(os.path.dirname(path_of_file)) == []
        archive, archive_bytes = engine.context.archive, engine.archive_bytes
        assert (archive.n, archive.file) == (700, path_of_file)
        assert 3 * archive.slab_bytes <= archive_bytes <= archive.max_bytes
        saved = {name: array.copy() for name, array in engine.save()}
        engine.reset()
        assert engine.archive_bytes == 0
        assert (perplexity.stream(engine, tokens) == expected).all()
        engine.restore(saved)
        assert dict(archive.save())["archive.1"].tolist() == saved["archive.1"].tolist()


def test_archive_file_must_be_new(tiny_model, path_of_file):
    Path(path_of_file).write_text("mine")
    for path, reason in (
        (path_of_file, "File exists"),
        (os.path.dirname(path_of_file), "File exists"),
        (f"{path_of_file}/file", "Not a directory"),
        (f"{path_of_file}.d/file", "No such file or directory"),
    ):
        with (
            pytest.raises(UsageError, match=f"^cannot make the archive's file {path}: {reason}$"),
            open_engine(tiny_model(), fit(), archive_file=path),
        ):
            pass
    assert Path(path_of_file).read_text() == "mine"


def test_archive_file_can_grow_to_any_length(tiny_model, path_of_file):
    # equal tokens of several blocks are equal only in types whose keys are not centered
    in_file = {"archive_type": "q8_0", "archive_file": path_of_file}
    with open_engine(tiny_model(n_head_kv=2), fit(), **in_file) as engine:
        engine.read(random_tokens(200))
        archive, cells = engine.context.archive, np.arange(16)
        span = archive.span
        first = archive.read(span.start, span.stop)
        # a file's slabs are mapped in groups of 64, so 200 slabs take several maps
        while archive.n_bytes < 200 * archive.slab_bytes:
            archive.push(cells, archive.end)
        assert (archive.read(span.start, span.stop) == first).all()
        pushed = [archive.read(end - 16, end) for end in range(archive.end, span.stop, -16)]
        assert all((chunk == pushed[0]).all() for chunk in pushed)


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="maps as Linux lists them")
def test_archive_file_is_mapped_without_read_ahead(tiny_model, path_of_file):
    with open_engine(tiny_model(n_head_kv=2), fit(), archive_file=path_of_file) as engine:
        engine.read(random_tokens(200))
        _, _, mapping = Path("/proc/self/smaps").read_text().partition(f"{path_of_file} (deleted)\n")
        flags = next(line for line in mapping.splitlines() if line.startswith("VmFlags:"))
        # the flag "rr" means "random read advise": the system does not read ahead
        assert "rr" in flags.split()


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="open files as Linux lists them")
def test_emptying_and_closing_an_archive_file_frees_its_disk_space(tiny_model, path_of_file):
    with open_engine(tiny_model(n_head_kv=2), fit(), archive_file=path_of_file) as engine:
        engine.read(random_tokens(600))
        # iterdir() opens a descriptor itself. It is in the list, but closed by now
        links = {fd: os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.exists()}
        (descriptor,) = [fd for fd, name in links.items() if name == f"{path_of_file} (deleted)"]
        # clusters are in memory, not in the file
        assert 0.8 * engine.archive_bytes < descriptor.stat().st_size < engine.archive_bytes
        assert descriptor.stat().st_blocks * 512 >= descriptor.stat().st_size
        engine.context.archive.forget()
        assert descriptor.stat().st_blocks == descriptor.stat().st_size == 0
    assert not descriptor.exists()


def test_stream_continues_when_a_full_disk_has_room_again(tiny_model, path_of_file):
    path, tokens = tiny_model(n_head_kv=2, n_ctx_train=512), random_tokens(1500)

    def read(engine):
        while engine.n_past < len(tokens):
            engine.evict_if_due()
            engine.step(tokens[engine.n_past :][: min(16, engine.room())])
        return engine.context.logits().copy(), dict(engine.context.archive.save())

    with open_engine(path, fit()) as engine:
        expected = read(engine)
    with open_engine(path, fit(), archive_file=path_of_file) as engine:
        archive = engine.context.archive
        with full_after(3 * archive.slab_bytes + 4096):
            for _ in range(3):
                with pytest.raises(StreamEnd, match="^no room for the archive on the disk: File too large; "):
                    read(engine)
                assert 2 * archive.slab_bytes < archive.n_bytes <= 3 * archive.slab_bytes
                assert 768 - 16 < archive.span.stop <= 768 < engine.n_past
        actual = read(engine)
    assert (actual[0] == expected[0]).all()
    assert all((actual[1][name] == array).all() for name, array in expected[1].items())


def test_table_has_no_synthetic_cells_without_archived_tokens(tiny_model):
    with open_engine(tiny_model(n_head_kv=2), fit()) as engine:
        engine.read(random_tokens(200))
        engine.step(random_tokens(1))
        for n_synthetic in (2, 0):
            assert len(saved_state.parse(engine.context.state()).pos) == engine.n_kv + n_synthetic
            engine.context.archive.forget()
