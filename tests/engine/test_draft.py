"""Verification of draft tokens: the contents of rows and the logits do not depend on the drafts."""

from __future__ import annotations

import numpy as np
import pytest

from kvtool import policies
from kvtool.errors import LibraryError, OutOfMemory
from kvtool.llama.cache.context import Context
from kvtool.policy import Signal
from tests.engine.exact_engines import distinct_tokens, open_engine, random_tokens

N_DRAFT = 5


def decoded_logits(engine, tokens, rng=None):
    """Decode tokens and yield the logits after each token.

    Without `rng`, tokens are decoded one by one. With `rng`, they are decoded in steps with partly wrong
    draft tokens.
    """
    begin = 0
    while begin < len(tokens):
        n = engine.draft_room() if rng else 0
        right = tokens[begin + 1 : begin + 1 + n]
        if not len(right) or rng.random() < 0.2:
            engine.step(tokens[begin : begin + 1])
            yield engine.context.next_logits.copy()
            begin += 1
            continue
        drafts = right.copy()
        n_true = int(rng.integers(0, len(right) + 1))
        if n_true < len(right):
            drafts[n_true] = (drafts[n_true] + 1) % 256
        engine.draft(np.concatenate([tokens[begin : begin + 1], drafts]))
        for i in range(n_true + 1):
            engine.context.sample_from(i)
            yield engine.context.next_logits.copy()
        engine.drop_drafts(len(right) - n_true)
        begin += 1 + n_true


def cells_of(engine):
    cells = engine.cells()
    return cells.pos, cells.rot, cells.live


KINDS = ("gemma3", "gpt_oss", "deepseek2", "deepseek32", "refact", "gemma4", "lfm2")
# recall does not support ALiBi (refact). With MLA (deepseek), all queries of a step recall the same tokens,
# so a wrong draft token would change the logits of the correct ones
REFUSED = {("refact", "recall"), ("deepseek2", "recall"), ("deepseek32", "recall")}


def same_with_drafts(path, name, tokens):
    policy = policies.fit(name, 200 if name == "full" else 48)
    results = []
    for rng in (None, np.random.default_rng(1)):
        with open_engine(path, policy, n_draft=N_DRAFT, n_batch=32, archive_type="f32") as engine:
            logits = np.array([*decoded_logits(engine, tokens, rng)])
            assert engine.n_past == len(tokens)
            assert engine.n_evicted > 100 or name == "full"
            signals = {} if policy.reads in (Signal.NONE, Signal.KEYS) else engine.signals.read()
            results.append((logits, cells_of(engine), signals))
    (logits, rows, signals), (own_logits, own_rows, own_signals) = results
    for one, other in zip(rows, own_rows, strict=True):
        assert np.array_equal(one, other)
    assert np.abs(logits - own_logits).max() < 1e-3
    for field, values in signals.items():
        assert np.abs(values - own_signals[field]).max() < 1e-4, field


@pytest.mark.parametrize("name", policies.names())
def test_drafts_do_not_change_rows_logits_or_signals(tiny_model, name):
    n = 150 if name == "full" else 240
    tokens = distinct_tokens(n, n_vocab=400) if name == "knorm" else random_tokens(n)
    same_with_drafts(tiny_model(n_ctx_train=200, n_vocab=400), name, tokens)


@pytest.mark.parametrize("name", ["h2o", "snapkv", "corm", "recall"])
@pytest.mark.parametrize("arch", KINDS)
def test_drafts_do_not_change_results_in_any_kind_of_model(tiny_model, arch, name):
    if (arch, name) in REFUSED:
        pytest.skip("refused")
    same_with_drafts(tiny_model(arch=arch, n_ctx_train=130), name, random_tokens(170))


def test_drafts_attend_to_the_archive_like_single_tokens(tiny_model, monkeypatch):
    def fail(*_):
        raise OutOfMemory

    path, tokens = tiny_model(n_ctx_train=4096), random_tokens(1500)
    policy, logits = policies.fit("recall", 96, None, ["exact=24"]), []
    for rng in (None, np.random.default_rng(1)):
        with open_engine(path, policy, n_draft=N_DRAFT, archive_type="f32") as engine:
            engine.read(tokens[:1300])
            assert engine.context.archive.clustered
            if rng:
                with monkeypatch.context() as patch:
                    patch.setattr(Context, "decode", fail)
                    with pytest.raises(OutOfMemory):
                        engine.draft(tokens[1300:1304])
            # a draft that failed does not change how a text attends to the archive
            engine.read(tokens[1300:1308])
            text = engine.context.next_logits.copy()
            logits.append(np.array([text, *decoded_logits(engine, tokens[1308:], rng)]))
    assert np.abs(logits[0] - logits[1]).max() < 1e-3


@pytest.mark.parametrize(("n_batch", "n_draft"), [(1, 0), (2, 0), (2, 1), (6, 5)])
@pytest.mark.parametrize("settings", [{}, {"resident": 64}])
def test_recurrent_layers_keep_earlier_states_with_any_batch_size(tiny_model, n_batch, n_draft, settings):
    tokens, logits = random_tokens(20), []
    for n in (0, n_draft):
        sizes = {"n_batch": n_batch, "n_output": 1, "n_draft": n}
        with open_engine(tiny_model(arch="lfm2"), policies.fit("recall", 48), **sizes, **settings) as engine:
            engine.read(tokens)
            logits.append([*decoded_logits(engine, tokens, np.random.default_rng(1))])
    assert np.abs(np.subtract(*logits)).max() < 1e-3


def test_recurrent_layers_drop_draft_tokens_at_most_once_per_step(tiny_model):
    tokens = random_tokens(20)
    with open_engine(tiny_model(arch="lfm2"), policies.fit("recall", 48), n_draft=N_DRAFT) as engine:
        engine.draft(tokens[:4])
        engine.drop_drafts(2)
        with pytest.raises(LibraryError, match=r"n must be in 0\.\.0"):
            engine.drop_drafts(1)
        # a later step overwrites the saved states, so draft tokens of an earlier step cannot be dropped
        engine.draft(tokens[4:7])
        engine.step(tokens[7:8])
        with pytest.raises(LibraryError, match=r"n must be in 0\.\.0"):
            engine.drop_drafts(1)


def test_gaps_may_be_closed_right_after_draft_tokens_were_dropped(tiny_model):
    tokens = random_tokens(260)
    logits = []
    for has_drafts in (False, True):
        with open_engine(tiny_model("lfm2"), policies.fit("h2o", 48), n_ctx=200, n_draft=3) as engine:
            for token in tokens[:187]:
                engine.step([token])
            if has_drafts:
                engine.draft([tokens[187], 9, 9, 9])
                engine.drop_drafts(3)
            else:
                engine.step([tokens[187]])
            # these tokens do not fit in the context, so gaps between positions are closed first
            engine.read(tokens[188:208])
            logits.append(engine.context.next_logits.copy())
    assert np.abs(logits[0] - logits[1]).max() < 1e-4
