"""Every kind of model that kvtool runs scores like the definition, and goes on bit by bit from a session."""

from __future__ import annotations

import numpy as np
import pytest

import tests.tiny_kinds as tiny_kinds
from kvtool import policies
from kvtool.errors import KvtoolError
from kvtool.measure import perplexity
from tests.reference import models
from tests.running import TOLERANCE, open_engine, text
from tests.test_exactness import reference

pytestmark = pytest.mark.engine

N_CTX_TRAIN = 130
KINDS = {
    "smollm3": {},
    "qwen2vl": {},
    "gpt_oss": {},
    "lfm2": {},
    "deepseek2": {},
    "deepseek2-no-q-rank": {"q_rank": 0},
    "gemma4": {},
}
"""How each is written."""


@pytest.fixture(scope="module", params=KINDS)
def path(request, tmp_path_factory):
    name = request.param
    path = tmp_path_factory.mktemp(name) / f"{name}.gguf"
    getattr(tiny_kinds, f"write_{name.split('-')[0]}")(path, n_ctx_train=N_CTX_TRAIN, **KINDS[name])
    return path


@pytest.fixture(scope="module")
def model(path):
    return models.load(path)


@pytest.mark.parametrize("name", ["full", "h2o", "tova", "buzz", "streamingllm"])
def test_scores_like_the_definition(path, model, name):
    # past 130 positions start over, and keys turn
    tokens = text(120 if name == "full" else 300)
    policy = policies.fit(name, 128, None) if name == "full" else policies.fit(name, 48, 16)
    want = reference(model, tokens, policy, name, positions="auto")
    with open_engine(path, policy, positions="auto") as engine:
        got = perplexity.stream(engine, tokens)
        assert (engine.n_evicted > 0) == (engine.n_restart > 0) == (name != "full")
    assert np.abs(got - want.nll).max() < TOLERANCE


def test_a_restored_engine_goes_on_bit_by_bit(path):
    tokens, policy = text(200), policies.fit("h2o", 48, 16)
    with open_engine(path, policy) as engine:
        perplexity.stream(engine, tokens[:101])
        there = {name: array.copy() for name, array in engine.save()}
        want = perplexity.stream(engine, tokens[101:])
        assert engine.n_restart
    with open_engine(path, policy) as engine:
        # something else is in it before
        perplexity.stream(engine, tokens[20:60])
        engine.restore(there)
        np.testing.assert_array_equal(perplexity.stream(engine, tokens[101:]), want)


def test_values_that_are_a_part_of_keys_are_not_merged(tmp_path):
    path, policy = tmp_path / "latent.gguf", policies.fit("weightedkv", 48, 16)
    tiny_kinds.write_deepseek2(path)
    with open_engine(path, policy) as engine, pytest.raises(KvtoolError, match=r"^[^\n]*cannot be merged$"):
        engine.read(text(100))
