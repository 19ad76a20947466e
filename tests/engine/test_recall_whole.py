"""Whole reading with recall: a prompt's tokens are archived in one go after all of them were decoded.

The options are `--policy recall --prefill whole`.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvtool import policies
from kvtool.cli.explain import explain_run, long_text
from kvtool.errors import StreamEnd
from kvtool.llama.cache.segment import CLUSTERS
from kvtool.llama.loaded.model import Model
from tests.engine.exact_engines import TOLERANCE, open_engine, random_tokens
from tests.engine.exact_engines import fit_recall as fit
from tests.engine.test_exact_reader import logits_of

N_PROMPT, N_LATER = 300, 40


def logits_after(path, policy, tokens, n_prompt=N_PROMPT, **settings):
    """Return `logits_of` for a prompt and then single tokens."""
    return logits_of(path, policy, np.split(tokens, range(n_prompt, len(tokens))), **settings)


@pytest.mark.parametrize(
    ("arch", "shape", "settings", "tolerance"),
    [
        ("llama", {"n_head_kv": 2}, {}, TOLERANCE),
        ("llama", {"n_head_kv": 1}, {"flash": "on", "type_k": "f16", "type_v": "f16"}, 5e-2),
        ("gemma3", {}, {}, TOLERANCE),
    ],
    ids=["groups", "flash", "sliding"],
)
def test_logits_after_a_whole_read_equal_the_full_cache(tiny_model, arch, shape, settings, tolerance):
    path, tokens = tiny_model(arch, **shape), random_tokens(N_PROMPT + N_LATER)
    exact = {"archive_type": settings.get("type_k", "f32"), **settings}
    full, *_ = logits_after(path, policies.fit("full", 512), tokens, **settings)
    logits, (n_kv, n_archived), n_bytes = logits_after(
        path, fit(search="all"), tokens, prefill="whole", **exact
    )
    assert np.abs(logits - full).max() < tolerance
    assert n_kv <= 48
    assert n_kv + n_archived == N_PROMPT + N_LATER
    # the large cache is freed
    assert n_bytes == logits_after(path, fit(search="all"), tokens, **exact)[2]


def test_whole_read_of_an_mla_model_archives_the_prompt(tiny_model):
    path, tokens = tiny_model("deepseek2"), random_tokens(N_PROMPT)
    full, *_ = logits_after(path, policies.fit("full", 512), tokens)
    logits, (n_kv, n_archived), _ = logits_after(path, fit(), tokens, prefill="whole")
    assert np.abs(logits - full).max() < TOLERANCE
    assert (n_kv <= 48, n_kv + n_archived) == (True, N_PROMPT)


def test_a_batch_longer_than_the_small_cache_is_read_in_parts(tiny_model):
    # llama.cpp aborts if a step has more tokens than the context had cells when it was opened
    path, tokens = tiny_model(n_head_kv=2), random_tokens(900)
    logits = [
        logits_after(path, fit(search="all"), tokens, 900, prefill="whole", n_batch=n_batch)[0]
        for n_batch in (256, 1024)
    ]
    assert np.abs(logits[0] - logits[1]).max() < TOLERANCE


@pytest.mark.parametrize("prefill", ["stream", "whole", "exact"])
def test_archive_does_not_depend_on_the_number_of_threads(tiny_model, prefill):
    saved = []
    for n_threads in (1, 3):
        path = tiny_model(n_head_kv=2, n_ctx_train=4096)
        with open_engine(path, fit(), prefill=prefill, n_threads=n_threads) as engine:
            engine.read(random_tokens(1500))
            saved.append({name: np.array(values) for name, values in engine.save()})
    assert saved[0].keys() == saved[1].keys()
    assert any(name.startswith(CLUSTERS) for name in saved[0])
    for name, values in saved[0].items():
        np.testing.assert_array_equal(values, saved[1][name])


def test_whole_read_into_a_small_archive_keeps_the_newest_tokens(tiny_model):
    with open_engine(tiny_model(n_head_kv=2), fit(), prefill="whole", archive=256) as engine:
        engine.read(random_tokens(900))
        span = engine.context.archive.span
        assert 0 < len(span) <= 256
        assert span.stop == 900 - (engine.n_kv - engine.policy.sinks)
        engine.read(random_tokens(100, seed=2))
        assert len(engine.context.archive.span) <= 256


def test_rewind_into_a_whole_prompt_equals_rewind_of_a_stream(tiny_model):
    path, tokens = tiny_model(n_head_kv=2), random_tokens(N_PROMPT)
    logits = []
    for prefill in ("whole", "stream"):
        with open_engine(path, fit(search="all"), prefill=prefill, archive_type="f32") as engine:
            engine.read(tokens)
            assert engine.rewind(200)
            engine.step(tokens[200:201])
            logits.append(engine.context.logits()[-1].copy())
            assert engine.n_past == 201
    assert np.abs(logits[0] - logits[1]).max() < TOLERANCE


def test_prompt_beyond_the_context_cannot_be_read_whole(tiny_model):
    with open_engine(tiny_model(n_head_kv=2), fit(), prefill="whole", n_ctx=256) as engine:
        message = "the prompt has 257 tokens, more than recall can read whole in a context of 256"
        assert long_text(engine, "prompt", 257) == message
        message = "recall cannot read more in one piece; continue with --prefill stream"
        with pytest.raises(StreamEnd, match=message):
            engine.read(random_tokens(257))
        assert engine.read(random_tokens(256)) == 256


@pytest.mark.parametrize(
    ("prefill", "line"),
    [
        (None, "exact: in chunks of up to 512 tokens that attend to all before them; short texts in batches"),
        ("exact", "exact: in chunks of up to 64 tokens that attend to all before them\n"),
        ("stream", "stream: in batches"),
    ],
)
def test_explain_says_how_a_prompt_will_be_read(monkeypatch, capsys, tiny_model, prefill, line):
    monkeypatch.setattr(Model, "is_on_gpu", True)
    with open_engine(tiny_model(n_head_kv=2), fit(), prefill=prefill) as engine:
        explain_run(engine, "recall", "prompt")
    assert f"prefill     {line}" in capsys.readouterr().err


def test_message_says_how_a_long_prompt_is_read(tiny_model):
    with open_engine(tiny_model(n_head_kv=2), fit(), prefill="whole") as engine:
        message = long_text(engine, "prompt", 300)
    assert ": at most 48 of them (16 %) stay in the cache, the others go to host memory" in message
    assert " and are still used. It is read at once, in a cache of" in message
    with open_engine(tiny_model(n_head_kv=2), fit(), archive=100) as engine:
        message = long_text(engine, "prompt", 300)
    assert (
        ": at most 48 of them (16 %) stay in the cache, 100 fit into host memory and are still used, and "
        "the oldest 152 are forgotten (--archive sets that)"
    ) in message
