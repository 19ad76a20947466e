"""Engines that compute exactly, and texts for them."""

from __future__ import annotations

from contextlib import closing, contextmanager

import numpy as np

from kvtool import policies
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.llama.cache.decoder import FLASH
from kvtool.llama.libllama.devices import devices, has_gpu
from kvtool.llama.libllama.library import api
from kvtool.llama.libllama.log import start_backends
from kvtool.llama.loaded.model import Model
from kvtool.policy import Signal
from kvtool.units import CACHE_TYPES
from tests.reference import transformer

transformer.half_precision = any(device["name"].startswith("Vulkan") for device in devices())

ON_CUDA = any(device["name"].startswith("CUDA") for device in devices())
"""True if there is a CUDA device.

CUDA's order of half-precision sums depends on load and batch length, so results vary.
"""

TOLERANCE = 1e-2 if has_gpu() else 1e-4
"""Largest accepted difference from tests/reference. It is larger on a GPU, which rounds differently."""

LOGIT_TOLERANCE = max(TOLERANCE, 1e-3)
"""Largest accepted difference of logits from the reference."""


N_UNTIED = 64
"""Number of tokens that tests of `tova` compare on CUDA.

After these tokens, two tokens of a row have nearly equal scores: 2.78574e-3 and 2.78573e-3. CUDA adds numbers
in another order than the definition, so rounding errors may decide which of the two is evicted.
"""

KINDS = ("h2o", "buzz", "corm", "weightedkv")
"""One policy of each kind: h2o ranks tokens, buzz works by segments, corm has ragged rows, weightedkv merges.

Tests that run with every policy are in tests/policies/test_contract.py.
"""


@contextmanager
def open_engine(path, policy, n_gpu_layers=None, mtp=False, **settings):
    """Open an engine with an f32 cache, no flash attention, one thread, and logits of every token.

    A policy with recall gets prefill=stream and an archive in q8_0, because with a GPU kvtool would choose
    another way of reading and another type. `settings` override these defaults.
    """
    exact = {"type_k": "f32", "type_v": "f32", "flash": "off", "n_threads": 1, "n_batch": 64, "n_output": 64}
    if policy.recall:
        exact |= {"prefill": "stream", "archive_type": "q8_0"}
    with (
        closing(Model(path, n_gpu_layers=n_gpu_layers, mtp=mtp)) as model,
        closing(Engine(model, policy, Settings(**(exact | settings)))) as engine,
    ):
        yield engine


def fit_recall(budget=48, evict_every=16, **params):
    """Return the policy `recall` with these parameters."""
    return policies.fit("recall", budget, evict_every, [f"{key}={value}" for key, value in params.items()])


def future_of(policy):
    """Return the argument `future` for a reference Stream: None if the policy reads neither signal of it.

    For a policy that reads only VALUE_NORMS, the reference also computes future logits, at one position.
    """
    if not policy.reads & (Signal.FUTURE | Signal.VALUE_NORMS):
        return None
    return policy.n_query, max(policy.n_future, 1), policy.n_skip


def random_tokens(n, seed=1, n_vocab=259):
    """Tokens i32[n] for a tiny model: random phrases that repeat, so that early tokens matter later."""
    rng = np.random.default_rng(seed)
    phrases = [rng.integers(3, n_vocab, 7) for _ in range(9)]
    tokens = np.concatenate([phrases[i] for i in rng.integers(0, 9, n // 7 + 1)])
    return tokens[:n].astype(np.int32)


def distinct_tokens(n, seed=1, n_vocab=259):
    """Return n different tokens i32[n] for a tiny model.

    Equal tokens would tie in the first layer, and rounding would decide which of them stays.
    """
    return np.random.default_rng(seed).permutation(np.arange(3, n_vocab))[:n].astype(np.int32)


def stepped_logits(engine, batches):
    """Return the logits f32[n, n_vocab] of all tokens; each batch is decoded in one step."""
    logits = []
    for batch in batches:
        engine.step(batch, len(batch))
        logits.append(engine.context.logits().copy())
    return np.concatenate(logits)


def plain_logits(path, n_cell, batches, *, n_batch=64, flash="off", type_k="f32", type_v="f32"):
    """Return the logits f32[n, n_vocab] that llama.cpp computes without kvtool."""
    start_backends()
    model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
    params = api.llama_context_default_params()
    params.n_ctx, params.n_seq_max, params.swa_full = n_cell, 1, False
    params.n_batch = params.n_ubatch = n_batch
    params.n_threads = params.n_threads_batch = 1
    params.type_k, params.type_v = CACHE_TYPES[type_k], CACHE_TYPES[type_v]
    params.flash_attn_type = FLASH[flash]
    context = api.llama_init_from_model(model, params)
    batch = api.llama_batch_init(n_batch, 0, 1)
    n_vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    logits, n_past = [], 0
    for tokens in batches:
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens.tolist()):
            batch.token[i], batch.pos[i], batch.logits[i] = token, n_past + i, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        assert api.llama_decode(context, batch) == 0
        logits.append(np.ctypeslib.as_array(api.llama_get_logits(context), (len(tokens), n_vocab)).copy())
        n_past += len(tokens)
    api.llama_batch_free(batch)
    api.llama_free(context)
    api.llama_model_free(model)
    return np.concatenate(logits)


def positions_of(stream):
    """Return the positions of the tokens in each row of a reference stream."""
    return [row.pos.tolist() for rows in stream.rows for row in rows]


def assert_continues_as_defined(engine, stream, tokens, evict):
    """Decode tokens one by one with engine and reference stream; assert that their logits and rows agree.

    Both must have evicted just before the call. evict() makes the stream evict. It is called every `slack`
    tokens if the policy is ragged, else whenever the rows hold `budget` entries. The engine evicts at the
    same tokens.
    """
    assert live_positions(engine) == positions_of(stream)
    policy = engine.policy
    for i in range(len(tokens)):
        if i and i % policy.slack == 0 if policy.ragged else stream.n >= policy.budget:
            evict()
        engine.step(tokens[i : i + 1])
        expected = stream.decode(tokens[i : i + 1])
        assert np.abs(engine.context.logits() - expected).max() < LOGIT_TOLERANCE
        assert live_positions(engine) == positions_of(stream)


def live_positions(engine):
    """Return the sorted positions of the tokens in each row."""
    return [sorted(pos[:n].tolist()) for pos, n in zip(engine.rows.pos, engine.rows.live, strict=True)]
