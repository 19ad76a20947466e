"""Models with sliding layers: policies evict only in full layers, and NLLs match tests/reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvtool import policies
from kvtool.config import budget
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.llama.cache.context import Context
from kvtool.llama.loaded.model import Model
from kvtool.measure import perplexity
from kvtool.models.catalogue import registry
from kvtool.models.header import read
from kvtool.models.layers import Kind
from kvtool.models.supported import unsupported
from tests.engine.running import N_UNTIED, ON_CUDA, distinct, open_engine, plain_logits, stepped_logits, text
from tests.engine.test_exactness import score_errors
from tests.reference import transformer

# llama.cpp scales Gemma's queries before it rounds them to half precision. The reference scales them
# afterwards
TOLERANCE = 2e-2 if transformer.half_precision else 1e-4
# half precision may change what these policies evict: tova evicts the same token in all rows of a layer, and
# corm compares attention with a threshold
TIED = ("tova", "corm") if transformer.half_precision else ()
# window of the sliding layers, which are layers 0 and 2; layers 1 and 3 attend to all tokens
WINDOW = 16


@pytest.fixture(scope="module")
def gemma3(tiny_model):
    return lambda **shape: tiny_model(arch="gemma3", window=WINDOW, **shape)


def assert_scored_alike(off, name):
    """Assert that `off`, the result of score_errors, is within TOLERANCE."""
    if ON_CUDA and name == "tova":
        off = off[:N_UNTIED]
    assert off.max() < TOLERANCE or (name in TIED and np.median(off) < TOLERANCE / 2)


def test_text_without_evictions_scores_like_the_definition(gemma3):
    path, tokens = gemma3(), text(200)
    want = transformer.run(transformer.Llama(path), tokens)
    with open_engine(path, policies.fit("full", 256)) as engine:
        got = perplexity.stream(engine, tokens)
        assert engine.context.row_layers.tolist() == [1, 1, 3, 3]
    assert np.abs(got - want.nll).max() < TOLERANCE


@pytest.mark.share(2, "positions", "evict_every")
@pytest.mark.parametrize("evict_every", [1, 16])
@pytest.mark.parametrize("positions", ["original", "in-cache", "auto"])
@pytest.mark.parametrize("name", ["streamingllm", "h2o", "tova"])
def test_evictions_score_like_the_definition(gemma3, name, positions, evict_every):
    # at position 130, gaps are closed, which also rotates the keys of the sliding layers
    path = gemma3(n_ctx_train=130)
    tokens = text(120 if positions == "original" else 400)
    how = {"positions": positions, "restarts": positions != "original"}
    assert_scored_alike(score_errors(path, tokens, policies.fit(name, 48, evict_every), name, **how), name)


@pytest.mark.parametrize("positions", ["original", "auto"])
def test_window_longer_than_the_budget_scores_like_the_definition(tiny_model, positions):
    path = tiny_model(arch="gemma3", window=80, n_ctx_train=200)
    tokens = text(190 if positions == "original" else 500)
    policy = policies.fit("h2o", 32, 16)
    assert score_errors(path, tokens, policy, "h2o", positions=positions).max() < TOLERANCE


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("buzz", ["logn=true"]),
        ("weightedkv", []),
        ("keydiff", []),
        ("rkv", []),
        ("expected", []),
        ("scissorhands", []),
        ("corm", ["history=8", "window=2", "t=cells"]),
    ],
    ids=str,
)
def test_other_policies_score_like_the_definition(gemma3, name, options):
    policy = policies.fit(name, 96 if name == "corm" else 48, 16, options)
    off = score_errors(gemma3(n_ctx_train=130), distinct(160), policy, name, positions="auto")
    assert_scored_alike(off, name)


@pytest.mark.parametrize("type_k", ["f16", "bf16", "q8_0"])
def test_rotation_of_keys_in_other_types_adds_little_error(tiny_model, type_k):
    path, tokens = tiny_model(arch="gemma3", window=WINDOW, head_dim=64, n_ctx_train=130), text(300)
    policy, how = policies.fit("streamingllm", 48, 16), {"positions": "auto", "restarts": True}
    off = score_errors(path, tokens, policy, "streamingllm", **how, type_k=type_k)
    # Stored keys are rounded to type_k. When gaps are closed (after 130 tokens), keys are rotated and rounded
    # again, which may increase the error only a little
    assert np.median(off[130:]) < 3 * np.median(off[:130])


@pytest.mark.parametrize("name", ["full", "h2o"])
def test_logits_without_evictions_equal_llama_cpp_bit_for_bit(gemma3, name):
    path, tokens = gemma3(), text(200)
    batches = np.split(tokens, range(16, len(tokens), 16))
    want = plain_logits(path, 256, batches, n_batch=16)
    with open_engine(path, policies.fit(name, 256, 16)) as engine:
        got = stepped_logits(engine, batches)
    if transformer.half_precision and name != "full":
        # to compute signals, a device uses other kernels, which round differently
        assert np.abs(got - want).max() < TOLERANCE
    else:
        assert got.tobytes() == want.tobytes()


def test_the_real_gemma_gives_the_logits_of_llama_cpp():
    if not (gemma := registry()["gemma3-270m"]).here:
        pytest.skip("gemma3-270m is not downloaded")
    batches = np.random.default_rng(0).integers(1000, 200000, (2, 16)).astype(np.int32)
    with open_engine(gemma.path, policies.fit("full", 256), n_batch=16, n_output=16) as engine:
        got = stepped_logits(engine, batches)
        layers = engine.model.layers
        assert engine.context.n_row == layers.n_row == 3
        sliding = layers.swa_bytes(16, "f32", "f32")
        assert engine.cache_bytes == 256 * layers.cell_bytes("f32", "f32") + sliding
    assert got.tobytes() == plain_logits(gemma.path, 256, batches, n_batch=16).tobytes()


@pytest.mark.parametrize("positions", ["auto", "in-cache"])
def test_the_same_text_after_a_reset_scores_the_same(gemma3, positions):
    tokens = text(200)
    with open_engine(gemma3(n_ctx_train=130), policies.fit("h2o", 48, 16), positions=positions) as engine:
        first = perplexity.stream(engine, tokens)
        engine.reset()
        assert perplexity.stream(engine, tokens).tolist() == first.tolist()


@pytest.mark.parametrize("type_k", ["f16", "q8_0"])
def test_cache_bytes_are_those_of_full_and_sliding_layers(tiny_model, type_k):
    path = tiny_model(arch="gemma3", window=300, n_layer=6, pattern=3)
    assert unsupported(read(path)) is None
    unloaded = Model(path, no_weights=True)
    layers = unloaded.layers
    unloaded.close()
    assert layers.n_swa == 300
    assert [layer.number for layer in layers.of(Kind.ROWS)] == [2, 5]
    assert [layer.number for layer in layers.of(Kind.SLIDING)] == [0, 1, 3, 4]
    assert layers.cell_bytes(type_k) == 2 * 2 * 32 * (2 + (2 if type_k == "f16" else 34 / 32))
    for n_batch in (64, 256):
        settings = Settings(type_k=type_k, n_batch=n_batch, over_budget=False)
        model = Model(path)
        assert model.layers == layers
        engine = Engine(model, policies.fit("streamingllm", 200, 16), settings)
        want = 256 * layers.cell_bytes(type_k) + layers.swa_bytes(n_batch, type_k)
        assert engine.cache_bytes == want
        engine.close()
        # a budget in bytes limits a batch to a quarter of the cells (64). With this shorter batch, the
        # sliding layers need fewer cells
        least = 256 * layers.cell_bytes(type_k) + layers.swa_bytes(64, type_k)
        assert budget.parse(f"{least}B", 1024).cells(layers, n_batch, type_k) == (256, 64)
        more = least + 256 * layers.cell_bytes(type_k)
        assert budget.parse(f"{more - 1}B", 1024).cells(layers, n_batch, type_k) == (256, 64)
        assert budget.parse(f"{more}B", 1024).cells(layers, n_batch, type_k) == (512, min(n_batch, 128))
        engine = Engine(model, policies.fit("streamingllm", 200, 16), replace(settings, n_batch=64))
        assert engine.cache_bytes == least
        engine.close()
        # with more cells in full layers, the sliding layers' cache does not grow
        context = Context(model, 1024, n_batch, type_k=type_k)
        assert context.cache_bytes == 1024 * layers.cell_bytes(type_k) + layers.swa_bytes(n_batch, type_k)
        context.close()
        model.close()


def test_model_without_sliding_layers_gets_the_requested_cells(tiny_model):
    model = Model(tiny_model())
    assert model.layers.n_swa == 0
    context = Context(model, 256, 512)
    assert context.n_cell == 256
    context.close()
    model.close()
