"""Whole reading with recall: a prompt's tokens are archived in one go after all of them were decoded.

The options are `--policy recall --prefill whole`.
"""

from __future__ import annotations

from contextlib import closing, contextmanager

import numpy as np
import pytest

from kvtool import policies
from kvtool.chats.writer import Writer
from kvtool.cli.explain import explain_run, long_text
from kvtool.errors import LibraryError, OutOfMemory, StreamEnd, UsageError
from kvtool.llama.cache.context import Context
from kvtool.llama.cache.segment import CLUSTERS
from kvtool.llama.libllama.devices import has_gpu
from kvtool.llama.loaded.model import Model
from kvtool.llama.sampler import Sampler
from tests.engine.exact_engines import TOLERANCE, open_engine, random_tokens
from tests.engine.exact_engines import fit_recall as fit
from tests.engine.test_exact_reader import logits_of
from tests.serve.http_requests import message
from tests.serve.killed_turns import SlotServer

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


def beside_gpu(monkeypatch, n_bytes):
    """Pretend that a GPU computes all layers and has n_bytes free."""
    monkeypatch.setattr(Model, "is_on_gpu", True)
    monkeypatch.setattr("kvtool.engine.whole_reader.gpu_free_bytes", lambda only: n_bytes)


def test_prompts_that_fit_in_half_of_a_gpu_are_read_whole_by_default(monkeypatch, tiny_model):
    path = tiny_model(n_head_kv=2)
    with open_engine(path, fit(), prefill=None) as engine:
        assert not engine.reads_whole(300) or has_gpu()
        needed = engine.whole_reader.n_bytes(300)
        beside_gpu(monkeypatch, 2 * needed)
        assert engine.reads_whole(300)
        # cells are allocated 256 at a time, so these tokens need a larger cache, for which the GPU has no
        # room
        assert not engine.reads_whole(300 + 256)
        # whole reading is only for texts longer than the budget
        assert not engine.reads_whole(48)
        assert "It is read at once, in a cache of" in long_text(engine, "prompt", 300)
        assert engine.read(random_tokens(300)) == 300
        assert (engine.cache.n_planned, engine.n_archived) == (300, 300 - engine.n_kv)
        # only the first text of a stream is a prompt
        assert not engine.reads_whole(300)
    beside_gpu(monkeypatch, 2**40)
    for settings in (
        {"prefill": "stream"},
        {"prefill": None, "n_ctx": 256},
    ):
        with open_engine(path, fit(), **settings) as engine:
            assert not engine.reads_whole(300)
    with open_engine(path, policies.fit("h2o", 48), prefill=None) as engine:
        assert not engine.reads_whole(300)


@pytest.mark.parametrize(
    ("prefill", "line"),
    [(None, "exact up to half of the context (512), in chunks of"), ("stream", "stream: in batches")],
)
def test_explain_says_how_a_prompt_will_be_read(monkeypatch, capsys, tiny_model, prefill, line):
    beside_gpu(monkeypatch, 2**40)
    with open_engine(tiny_model(n_head_kv=2), fit(), prefill=prefill) as engine:
        explain_run(engine, "recall", "prompt")
    assert f"prefill     {line}" in capsys.readouterr().err


def refuse_above(n):
    """Return a function to replace `Context.resize`. It fails above n cells per row, like a full GPU."""
    resize = Context.resize

    def refuse(self, n_cell):
        if n_cell.max() > n:
            raise LibraryError("llama.cpp refused: no memory for the cache")
        resize(self, n_cell)

    return refuse


def fail_above(n):
    """Return a function to replace `Context.decode`. It fails above n cells per row."""
    decode = Context.decode

    def fail(self, tokens, pos_0, n_output):
        if self.layer_cells.max() > n:
            raise OutOfMemory("no memory for the cache or a step")
        decode(self, tokens, pos_0, n_output)

    return fail


@pytest.mark.parametrize(
    ("method", "replacement", "error"),
    [("resize", refuse_above, LibraryError), ("decode", fail_above, OutOfMemory)],
)
def test_prompt_is_streamed_if_the_gpu_refuses_the_memory(
    monkeypatch, tiny_model, method, replacement, error
):
    path, tokens = tiny_model(n_head_kv=2), random_tokens(N_PROMPT + N_LATER)
    streamed, *_, n_bytes = logits_after(path, fit(), tokens)
    beside_gpu(monkeypatch, 2**40)
    monkeypatch.setattr(Context, method, replacement(256))
    logits, *_, own_bytes = logits_after(path, fit(), tokens, prefill=None)
    np.testing.assert_array_equal(logits, streamed)
    assert own_bytes == n_bytes
    with pytest.raises(error, match="no memory for the cache"):
        logits_after(path, fit(), tokens, prefill="whole")


@contextmanager
def open_writer(path, **settings):
    with open_engine(path, fit(), **settings) as engine:
        yield Writer(engine, Sampler(engine.model, seed=1))


def test_long_later_text_is_read_whole_with_earlier_tokens(monkeypatch, tiny_model):
    path, tokens = tiny_model(n_head_kv=2), random_tokens(700)
    with open_writer(path, prefill="whole") as writer:
        writer.read(tokens)
        expected = writer.engine.context.logits()[-1].copy()
    beside_gpu(monkeypatch, 2**40)
    with open_writer(path, prefill=None) as writer:
        engine = writer.engine
        engine.pin(5)
        writer.read(tokens[:100])
        # a new text is read together with the 100 earlier tokens if it is at least an eighth of the stream:
        # 15 of 115 tokens are enough, but 14 of 114 are not
        assert (engine.rereads(14), engine.rereads(15)) == (False, True)
        message = "It is read at once, with the 100 tokens before it, in a cache of"
        assert message in long_text(engine, "turn", 500)
        assert writer.read(tokens[100:600])
        assert (engine.n_past, engine.n_pinned, engine.cache.n_planned) == (600, 5, 600)
        np.testing.assert_array_equal(writer.tokens, tokens[:600])
        assert not engine.rereads(1)
        assert not engine.rereads(85)
    # the second and the last text are so long that the whole stream is read again, as if it were a single
    # prompt
    with open_writer(path, prefill=None) as writer:
        writer.read(tokens[:20])
        writer.read(tokens[20:600])
        writer.read(tokens[600:610])
        writer.read(tokens[610:])
        np.testing.assert_array_equal(writer.engine.context.logits()[-1], expected)
    for prefill in ("stream", "whole"):
        with open_writer(path, prefill=prefill) as writer:
            writer.read(tokens[:100])
            assert not writer.engine.rereads(500)


def test_stop_during_a_reread_loses_no_tokens(monkeypatch, tiny_model):
    path, tokens = tiny_model(n_head_kv=2), random_tokens(600)
    beside_gpu(monkeypatch, 2**40)
    with open_writer(path, prefill=None) as writer:
        writer.read(tokens)
        expected = writer.engine.context.logits()[-1].copy()
    with open_writer(path, prefill=None) as writer:
        writer.read(tokens[:100])
        mark = writer.save()

        def stop(n_read, n):
            writer.stop = n_read > 0

        with writer.showing(stop):
            assert not writer.read(tokens[100:])
        assert (writer.engine.n_past, writer.is_new) == (0, False)
        np.testing.assert_array_equal(writer.unread, tokens)
        writer.stop = False
        assert writer.rewind(100, mark)
        np.testing.assert_array_equal(writer.unread, tokens[:100])
        assert writer.read(tokens[100:])
        np.testing.assert_array_equal(writer.engine.context.logits()[-1], expected)


def test_tokens_unknown_to_the_writer_prevent_a_reread(monkeypatch, tiny_model):
    beside_gpu(monkeypatch, 2**40)
    with open_writer(tiny_model(n_head_kv=2), prefill=None) as writer:
        writer.engine.read(random_tokens(100))
        writer.read(random_tokens(200, seed=2))
        assert writer.engine.n_past == 300


def test_stop_before_a_reread_leaves_the_stream_unchanged(monkeypatch, tiny_model):
    beside_gpu(monkeypatch, 2**40)
    with open_writer(tiny_model(n_head_kv=2), prefill=None) as writer:
        writer.read(random_tokens(100))
        writer.stop = True
        assert not writer.read(random_tokens(200, seed=2))
        assert (writer.engine.n_past, len(writer.unread)) == (100, 200)
        with pytest.raises(UsageError, match=r"n must be in 0\.\.100"):
            writer.rewind(301, writer.save())


def test_gpu_that_refused_a_prompt_is_asked_only_for_shorter_ones(monkeypatch, tiny_model):
    beside_gpu(monkeypatch, 2**40)
    with open_writer(tiny_model(n_head_kv=2), prefill=None) as writer:
        engine, resize = writer.engine, Context.resize
        with monkeypatch.context() as full:
            full.setattr(Context, "resize", refuse_above(300))
            writer.read(random_tokens(400))
        engine.empty()
        assert (engine.reads_whole(400), engine.reads_whole(399)) == (False, True)
        assert Context.resize is resize


def test_client_that_leaves_during_a_reread_can_ask_again(monkeypatch, talker, tmp_path):
    beside_gpu(monkeypatch, 2**40)
    with closing(Model(talker)) as model:
        messages = [message("system", "Be brief."), message("user", "My name is Bob. " + "I walk. " * 20)]
        server = SlotServer(model, "recall", tmp_path / "one")
        reply, *_ = server.ask(messages)
        messages += [message("assistant", reply), message("user", "Waves come and go. " * 20)]
        server.leave(messages, 64)
        assert server.slot.engine.n_past == 0
        second_answer = server.ask(messages)
        assert second_answer == SlotServer(model, "recall", tmp_path / "two").ask(messages)
        assert second_answer[1] == 0


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
