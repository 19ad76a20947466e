"""KVzip: repeats a prompt, keeps the tokens that the repetition attends to, and removes the repetition."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from fake_cache import kept_positions, view_of
from reference import kvzip

from kvtool import policies
from kvtool.errors import StreamEnd, UsageError
from kvtool.policies.kvzip import KVzip
from tests.cli.in_process_command import run_kvtool
from tests.engine.exact_engines import (
    LOGIT_TOLERANCE,
    assert_continues_as_defined,
    live_positions,
    open_engine,
    random_tokens,
)
from tests.reference import transformer

PLAIN = {"sinks": 0, "window": 1}


def test_prompt_keeps_the_most_attended_tokens():
    view = view_of(7, highest=[1, 5, 2, 9, 2, 0, 0])
    # on ties the newer token stays
    assert kept_positions(view, KVzip.fit(5, 1, **PLAIN).compress(view)) == [[1, 3, 4, 6]]
    assert kept_positions(view, KVzip.fit(5, 1, sinks=1, window=2).compress(view)) == [[0, 3, 5, 6]]
    assert kept_positions(view, KVzip.fit(5, 1, sinks=0, window=0).compress(view)) == [[1, 2, 3, 4]]


def test_later_tokens_stay_until_the_prompt_is_evicted():
    policy = KVzip.fit(5, 2, **PLAIN)
    state = policy.start(1, 6, 4)
    # token 3 got no attention. Its score must not be 0, because 0 marks a token without a score. Therefore
    # token 3 gets the smallest score instead
    policy.adopt(view_of(4, highest=[4, 8, 6, 0]), state)
    view = view_of(6, highest=[0] * 6)
    policy.observe(view, state)
    assert kept_positions(view, policy.plan(view, state)) == [[1, 4, 5]]
    state[0][:] = 0
    assert kept_positions(view, policy.plan(view, state)) == [[3, 4, 5]]


def test_pinned_and_held_tokens_get_no_score():
    policy = KVzip.fit(6, 1, **PLAIN)
    state = policy.start(1, 6, 4)
    policy.adopt(view_of(6, highest=[0, 0, 5, 0, 0, 0], pinned=1, held=2), state)
    assert (state[0] > 0).tolist() == [[False, True, True, True, False, False]]


# KVzip in an engine


def repeat(engine, stream, tokens, begin, stop):
    """Run the reference's reconstruction pass over tokens[begin:stop], in chunks of the engine's size."""
    words, tokenize, n_held = engine.policy.reconstruction, engine.model.tokenize, engine.n_held
    header = tokens[len(tokens) - n_held :] if n_held else tokenize("\n")
    n_chunk = engine.whole_reader.reconstruction.n_chunk(stream.n)
    for chunk_begin in range(begin, stop, n_chunk):
        chunk = tokens[chunk_begin : min(chunk_begin + n_chunk, stop)]
        request = [tokenize(words.first if chunk_begin == begin else words.later)]
        request += (
            [] if chunk_begin == begin else [tokens[max(chunk_begin - words.n_lead, begin) : chunk_begin]]
        )
        kvzip.reconstruct(
            stream, chunk_begin, chunk_begin + len(chunk), np.concatenate([*request, header]).tolist(), chunk
        )


def evict(engine, stream):
    policy = engine.policy
    params = policies.chosen(policy)
    params["window"] = max(policy.window, engine.n_held)
    common = {"pinned": engine.n_pinned, "budget": policy.budget, "slack": policy.slack}
    stream.evict(kvzip.keep, **common, **params)


def assert_rows_choose_for_themselves(engine):
    assert len({tuple(row) for row in live_positions(engine)}) > 1


def check_prompt(path, options, *, n_pinned, n_held, positions="auto", n_batch=64):
    """Compare what the engine and the definition keep of a prompt, and how both continue."""
    tokens, n, policy = random_tokens(230), 200, policies.fit("kvzip", 48, 8, options)
    stream = transformer.Stream(transformer.load(path), positions=positions)
    with open_engine(path, policy, positions=positions, n_batch=n_batch) as engine:
        engine.pin(n_pinned)
        engine.hold(n_held)
        small = engine.cache_bytes
        assert engine.read(tokens[:n]) == n
        expected = stream.decode(tokens[:n])[-1]
        assert np.abs(engine.context.next_logits - expected).max() < LOGIT_TOLERANCE
        repeat(engine, stream, tokens[:n], n_pinned, n - n_held)
        evict(engine, stream)
        if policy.ragged:
            assert len(set(engine.rows.live.tolist())) > 1
        else:
            assert engine.cache_bytes == small
        assert_rows_choose_for_themselves(engine)
        assert_continues_as_defined(engine, stream, tokens[n:], lambda: evict(engine, stream))


# the prompt is repeated in one chunk, in two or three, or in many
@pytest.mark.parametrize(
    ("positions", "chunk", "n_pinned", "n_held"),
    [("original", 2048, 0, 0), ("in-cache", 2048, 11, 6), ("original", 100, 11, 6), ("in-cache", 30, 0, 0)],
)
def test_prompt_keeps_the_tokens_of_the_definition(tiny_model, positions, chunk, n_pinned, n_held):
    options = {"n_pinned": n_pinned, "n_held": n_held, "positions": positions}
    check_prompt(tiny_model(n_head_kv=2), [f"chunk={chunk}"], **options)


@pytest.mark.parametrize(("chunk", "n_batch", "floor"), [(2048, 64, 0), (100, 512, 0.5)])
def test_rows_that_share_a_budget_keep_the_tokens_of_the_definition(tiny_model, chunk, n_batch, floor):
    options = [f"chunk={chunk}", "heads=adaptive", f"floor={floor}"]
    check_prompt(tiny_model(n_head_kv=2), options, n_pinned=11, n_held=6, n_batch=n_batch)


def test_each_segment_of_a_prompt_beyond_the_context_is_repeated(tiny_model):
    path, tokens, n = tiny_model(n_head_kv=2, n_ctx_train=330), random_tokens(408), 400
    policy = policies.fit("kvzip", 48, 8)
    model, parts = transformer.load(path), []
    with open_engine(path, policy) as engine:
        assert engine.whole_reader.n_segments(n) == 3
        # a segment has 133 or 134 tokens, more than a chunk, so each segment is repeated in several chunks
        assert engine.whole_reader.reconstruction.n_chunk(134) < 133
        assert engine.read(tokens[:n]) == n
        for segment in np.array_split(tokens[:n], 3):
            part = transformer.Stream(model)
            part.next = begin = parts[-1].next if parts else 0
            expected = part.decode(segment)[-1]
            repeat(engine, part, tokens[:n], begin, part.next)
            parts.append(part)
        whole = transformer.join(parts, policy.n_keep)
        evict(engine, whole)
        assert np.abs(engine.context.next_logits - expected).max() < LOGIT_TOLERANCE
        assert_rows_choose_for_themselves(engine)
        assert_continues_as_defined(engine, whole, tokens[n:], lambda: evict(engine, whole))


@pytest.mark.parametrize("arch", ["llama", "gemma3", "lfm2", "deepseek2", "refact"])
@pytest.mark.parametrize("chunk", [2048, 30])
def test_reconstruction_leaves_the_cache_unchanged(tiny_model, arch, chunk):
    path, tokens = tiny_model(arch=arch), random_tokens(150)
    policy = policies.fit("kvzip", 300, 8, [f"chunk={chunk}"])
    logits = []
    for run_policy in (policy, policy, policies.fit("full", 300)):
        with open_engine(path, run_policy) as engine:
            engine.read(tokens[:120])
            before = {name: array.copy() for name, array in engine.save()}
            if not logits:
                decode = partial(engine._decode_text, stopped=lambda: False)
                signals = engine.whole_reader.reconstruction.read(tokens[:120], 0, decode)
                assert (signals["highest"] > 0).all()
                after = dict(engine.save())
                # only one number of the array "engine" differs: the position from which signals are counted
                assert (after.pop("engine") != before.pop("engine")).sum() == 1
                assert before.keys() == after.keys()
                assert [name for name in before if not np.array_equal(before[name], after[name])] == []
            engine.read(tokens[120:])
            logits.append(engine.context.logits().copy())
    # logits have the same bits with the reconstruction, without it, and with the full cache
    assert np.array_equal(logits[0], logits[1])
    assert np.array_equal(logits[0], logits[2])


def test_signals_are_recorded_only_during_a_reconstruction(tiny_model):
    with open_engine(tiny_model(), policies.fit("kvzip", 300, 8)) as engine:
        engine.read(random_tokens(60))
        assert not engine.signals.read()["highest"].any()
        engine.context.watch(on=True)
        engine.read(random_tokens(20))
        assert engine.signals.read()["highest"].all()


@pytest.mark.parametrize("heads", ["equal", "adaptive"])
def test_prompt_stopped_during_its_repetition_can_be_read_again(tiny_model, heads):
    tokens, lengths = random_tokens(300), []
    policy, path = policies.fit("kvzip", 48, 8, [f"heads={heads}"]), tiny_model(n_head_kv=2)

    def stopped():
        lengths.append(engine.n_past)
        return lengths[-1] > 300

    with open_engine(path, policy) as engine:
        small = engine.cache_bytes
        assert engine.read(tokens, stopped) == 0
        assert (engine.n_past, engine.n_kv, engine.cache_bytes) == (0, 0, small)
        assert engine.read(tokens) == 300
        repeated = engine.context.logits().copy(), live_positions(engine)
    with open_engine(path, policy) as engine:
        engine.read(tokens)
        assert np.array_equal(engine.context.logits(), repeated[0])
        assert live_positions(engine) == repeated[1]


def test_text_that_fits_is_not_repeated(tiny_model):
    with open_engine(tiny_model(), policies.fit("kvzip", 48, 8)) as engine:
        engine.read(random_tokens(48))
        assert not engine.state[0].any()
        # with one more token, the oldest tokens except the sinks are evicted
        engine.read(random_tokens(1))
        assert live_positions(engine)[0] == [*range(4), *range(12, 49)]


def test_a_cache_for_a_prompt_has_room_for_its_repetition(tiny_model):
    with open_engine(tiny_model(), policies.fit("kvzip", 48, 8, ["chunk=100"])) as engine:
        n_before = engine.whole_reader.reconstruction.n_before
        assert engine.whole_reader.n_cells(500) == -(-(500 + 100 + n_before) // 256) * 256


def test_prompts_that_cannot_be_read_twice_are_refused(tiny_model):
    policy = policies.fit("kvzip", 48, 8)
    with (
        pytest.raises(UsageError, match="KVzip reads a prompt twice; choose --prefill whole"),
        open_engine(tiny_model(), policy, prefill="stream"),
    ):
        pass
    with (
        open_engine(tiny_model(n_ctx_train=330), policy, positions="original") as engine,
        pytest.raises(
            StreamEnd, match="the prompt of 300 tokens, read twice, is longer than the context"
        ) as end,
    ):
        engine.read(random_tokens(300))
    # the message must not suggest --prefill stream, which KVzip does not support
    assert "--prefill stream" not in str(end.value)
    with (
        open_engine(tiny_model(arch="deepseek32"), policy) as engine,
        pytest.raises(UsageError, match="of 500 tokens, read twice, cannot be read whole; choose a shorter"),
    ):
        engine.read(random_tokens(500))
    with (
        open_engine(tiny_model(n_ctx_train=80), policy) as engine,
        pytest.raises(UsageError, match="a context of 80 tokens is too short to read a prompt twice"),
    ):
        engine.read(random_tokens(70))


@pytest.mark.parametrize(
    "command",
    [["perplexity", "--policy", "kvzip"], ["compare", "--policies", "kvzip", "--budgets", "48"]],
    ids=lambda command: command[0],
)
def test_perplexity_and_compare_refuse_kvzip(tiny_model, tmp_path, command):
    file = tmp_path / "a.txt"
    file.write_text("abc" * 100)
    done = run_kvtool(command[0], file, *command[1:], "-m", tiny_model())
    assert done.returncode == 2
    reason = "the text is read only once; choose another policy, or use generate or eval"
    assert done.stderr == f"kvtool: `kvzip` reads a prompt twice, but here {reason}\n"


def test_saved_prompt_can_be_restored_for_several_questions(tiny_model):
    path, tokens, policy = tiny_model(), random_tokens(240), policies.fit("kvzip", 48, 8)
    questions = tokens[200:220], tokens[220:]
    logits = []
    with open_engine(path, policy) as engine:
        engine.read(tokens[:200])
        saved = {name: array.copy() for name, array in engine.save()}
        engine.read(questions[0])
        logits.append(engine.context.logits().copy())
    with open_engine(path, policy) as engine:
        for question in (questions[1], questions[0]):
            engine.restore(saved)
            assert engine.state[0].any()
            engine.read(question)
        logits.append(engine.context.logits().copy())
    assert np.array_equal(*logits)
