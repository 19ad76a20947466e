"""One stream reads a prompt with prefill="whole", and other streams start from a copy of its cache.

Each of the other streams keeps the same tokens as if it had read the prompt itself.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from kvtool import policies
from kvtool.engine.cached_prompt import CachedPrompt
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.llama.model import Model
from kvtool.measure.grid import split_policy
from kvtool.policy import Signal, SignalRequest
from kvtool.tasks.shared import Shared
from tests.engine.running import text

SETTINGS = Settings(n_threads=1, n_batch=64, prefill="whole", type_k="f32", type_v="f32", flash="off")
TOKENS = text(300)


@pytest.fixture(scope="module")
def model(tiny_model):
    with closing(Model(tiny_model())) as model:
        yield model


@pytest.fixture(scope="module")
def whole(model):
    return Shared(model, SETTINGS).whole(TOKENS)


def left(model, name, whole=None, tokens=TOKENS, budget=64, **settings):
    """Return (kept positions of a prompt, logits after it, logits after 5 more tokens, n_decoded).

    n_decoded: number of tokens that were decoded to read the prompt.
    """
    name, options = split_policy(name)
    policy = policies.spec(name, None, options).fit(512 if name == "full" else budget)
    with closing(Engine(model, policy, replace(SETTINGS, **settings))) as engine:
        n_decoded = []
        decode = engine.context.decode
        engine.context.decode = lambda part, *more: (n_decoded.append(len(part)), decode(part, *more))
        assert engine.read(tokens, cached=whole) == len(tokens)
        first = engine.context.next_logits.copy()
        n = sum(n_decoded)
        engine.step(TOKENS[:5])
        # sorted, with the dead cells (-1) of ragged rows first
        pos = np.sort(engine.rows.view_pos())
        return pos, first, engine.context.next_logits.copy(), n


LAST = ("snapkv", "tova", "rkv", "expected")
NONE = ("full", "streamingllm", "random", "h2o", "roco", "bumblebee", "knorm", "keydiff", "buzz")
SHARING = ("h2o", "snapkv", "expected", "kvzip")


def assert_leaves_the_same(model, name, whole):
    """Assert that a policy keeps the same tokens with and without the cached prompt, and that logits agree.

    Return the number of tokens decoded without the cached prompt, and the number decoded with it.
    """
    (pos, *alone, n), (cached_pos, *cached, n_cached) = left(model, name), left(model, name, whole)
    assert np.array_equal(pos, cached_pos)
    for one, other in zip(alone, cached, strict=True):
        assert np.abs(one - other).max() < 1e-4
    return n, n_cached


@pytest.mark.parametrize("name", SHARING)
def test_rows_that_share_a_budget_start_from_the_cached_prompt(model, whole, name):
    # each layer has 320 cells for the 300 tokens, so 20 cells are empty
    n, n_cached = assert_leaves_the_same(model, f"{name}:heads=adaptive", whole)
    # n counts the tokens of the prompt and of a reconstruction pass
    n_query = policies.spec(name).fit(64).n_query if name in LAST else 0
    assert n_cached == n - len(TOKENS) + n_query


@pytest.mark.parametrize("name", [*NONE, *LAST, "scissorhands"])
def test_policies_keep_the_same_tokens_from_a_cached_prompt(model, whole, name):
    n, n_cached = assert_leaves_the_same(model, name, whole)
    assert n >= len(TOKENS)
    # sums of attention are cached with the prompt, so policies in NONE decode no token again. Policies in
    # LAST need signals of the prompt's last queries, so they decode the last tokens again. scissorhands needs
    # the signal HITS, which is not cached, so it decodes all tokens again
    n_query = max(policies.spec(name).fit(64).n_query, 1)
    assert n_cached == (0 if name in NONE else n_query if name in LAST else len(TOKENS))


def test_a_reconstruction_pass_is_done_once(model):
    whole = Shared(model, SETTINGS).whole(TOKENS)
    alone = [left(model, "kvzip", budget=budget) for budget in (64, 100)]
    together = [left(model, "kvzip", whole, budget=budget) for budget in (64, 100)]
    for one, other in zip(alone, together, strict=True):
        assert np.array_equal(one[0], other[0])
        assert np.abs(one[2] - other[2]).max() < 1e-4
    assert together[0][3] == alone[0][3] - len(TOKENS)
    assert together[1][3] == 0


def test_reconstruction_in_other_chunks_is_not_reused(model):
    whole = Shared(model, SETTINGS).whole(TOKENS)
    alone = left(model, "kvzip", n_ctx=512)
    left(model, "kvzip", whole)
    assert np.array_equal(left(model, "kvzip", whole, n_ctx=512)[0], alone[0])


@pytest.mark.parametrize("name", ["full", "h2o", "kvzip"])
def test_prompt_with_other_tokens_is_decoded(model, name):
    other = TOKENS.copy()
    other[7] += 1
    whole = Shared(model, SETTINGS).whole(TOKENS)
    for tokens in (other, TOKENS[:299]):
        alone, after = left(model, name, tokens=tokens), left(model, name, whole, tokens)
        assert np.array_equal(alone[0], after[0])
        assert np.array_equal(alone[2], after[2])
        assert after[3] == alone[3]
    # the cached prompt can still be used for a prompt with the same tokens
    alone, after = left(model, name), left(model, name, whole)
    assert np.array_equal(alone[0], after[0])


@pytest.mark.parametrize("type_k", ["f16", "bf16"])
def test_other_cache_types_decode_the_prompt_again(model, whole, type_k):
    alone, after = left(model, "h2o", type_k=type_k), left(model, "h2o", whole, type_k=type_k)
    assert np.array_equal(alone[2], after[2])
    assert after[3] == len(TOKENS)


def test_other_models_decode_the_prompt_again(tiny_model, whole):
    with closing(Model(tiny_model(n_layer=3))) as other:
        alone, after = left(other, "h2o"), left(other, "h2o", whole)
        assert np.array_equal(alone[2], after[2])
        assert after[3] == len(TOKENS)


def test_empty_and_too_long_prompts_are_not_cached(model):
    shared = Shared(model, replace(SETTINGS, n_ctx=300))
    assert shared.whole(TOKENS) is None
    assert shared.whole(TOKENS[:0]) is None
    assert len(shared.whole(TOKENS[:299]).tokens) == 299


def test_models_with_sliding_layers_use_no_cached_prompt(tiny_model):
    with closing(Model(tiny_model(arch="gemma3"))) as model:
        whole = Shared(model, SETTINGS).whole(TOKENS)
        alone, after = left(model, "h2o"), left(model, "h2o", whole)
        assert np.array_equal(alone[0], after[0])
        assert after[3] == len(TOKENS)


def test_longer_prompt_continues_from_the_last_one(model, whole, monkeypatch):
    shared = Shared(model, SETTINGS)
    n_read = []
    read = Engine.read
    monkeypatch.setattr(
        Engine, "read", lambda self, tokens: (n_read.append(len(tokens)), read(self, tokens))[1]
    )
    shared.whole(TOKENS[:250])
    prompt = shared.whole(TOKENS)
    assert shared.whole(TOKENS) is prompt
    assert n_read == [250, 50]
    assert np.abs(prompt.logits - whole.logits).max() < 1e-4
    for name, values in whole.signals.items():
        assert np.abs(prompt.signals[name] - values).max() < 1e-3
    # a shorter prompt does not reuse a longer one
    shared.whole(TOKENS[:250])
    assert n_read == [250, 50, 250]


def test_cached_signals_are_used_only_for_the_same_request():
    def known(**asked):
        request = SignalRequest(Signal.ATTENTION | Signal.RECENT | Signal.HITS, n_query=8)
        return CachedPrompt(TOKENS, None, ("f16", "f16"), [], np.zeros((1, 1), np.float32), request, {}).has(
            SignalRequest(**asked)
        )

    for reads in (Signal.ATTENTION, Signal.ATTENTION | Signal.KEYS, Signal.HITS):
        assert known(reads=reads)
    assert known(reads=Signal.NONE, group="max")
    assert known(reads=Signal.RECENT, n_query=8)
    assert not known(reads=Signal.SQUARES)
    assert not known(reads=Signal.ATTENTION, group="max")
    assert not known(reads=Signal.RECENT, n_query=9)
    assert not known(reads=Signal.HITS, t="cells")
