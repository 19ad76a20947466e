"""The engine and an independent transformer with true per-row eviction score a text alike."""

from __future__ import annotations

from contextlib import contextmanager
from importlib import import_module

import numpy as np
import pytest

from kvtool import policies
from kvtool.engine import Engine, Settings
from kvtool.llama import Model
from kvtool.measure import perplexity
from tests.reference import transformer

pytestmark = pytest.mark.engine

TOLERANCE = 1e-4


@contextmanager
def open_engine(path, policy, **settings):
    model = Model(path)
    exact = {"type_k": "f32", "type_v": "f32", "flash": "off", "n_threads": 1, "n_batch": 64, "n_output": 64}
    engine = Engine(model, policy, Settings(**(exact | settings)))
    try:
        yield engine
    finally:
        engine.close()
        model.close()


def reference(path, tokens, policy, name, **kwargs):
    params = {key: getattr(policy, key) for key in policies.params(type(policy))}
    keep = import_module(f"tests.reference.{name}").keep
    return transformer.run(
        transformer.Llama(path),
        tokens,
        budget=policy.budget,
        slack=policy.slack,
        keep=keep,
        **params,
        **kwargs,
    )


def text(n, n_vocab=256, seed=1):
    """Tokens with repetitions, so that some matter later."""
    rng = np.random.default_rng(seed)
    phrases = [rng.integers(3, 259, 7) for _ in range(9)]
    tokens = np.concatenate([phrases[i] for i in rng.integers(0, 9, n // 7 + 1)])
    return tokens[:n].astype(np.int32)


@pytest.mark.parametrize("n_head_kv", [1, 2, 4])
@pytest.mark.parametrize("evict_every", [1, 16])
@pytest.mark.parametrize("positions", ["original", "in-cache", "auto"])
@pytest.mark.parametrize("name", ["h2o", "tova", "buzz", "streamingllm", "random", "local"])
def test_tiny_models_score_like_the_definition(tiny_model, name, positions, evict_every, n_head_kv):
    path = tiny_model(n_head_kv=n_head_kv, n_ctx_train=130)
    tokens = text(120 if positions == "original" else 280)
    policy = policies.fit(name, 48, evict_every)
    want = reference(path, tokens, policy, name, positions=positions)
    with open_engine(path, policy, positions=positions) as engine:
        got = perplexity.stream(engine, tokens)
        assert engine.n_evicted > 0
    assert np.abs(got - want.nll).max() < TOLERANCE
