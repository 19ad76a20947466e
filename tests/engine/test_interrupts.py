"""Ctrl-C in a Python program: KeyboardInterrupt comes after the current step, and the engine can continue."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import closing

import numpy as np
import pytest

import kvtool
from kvtool import policies
from kvtool.system.interrupt import delayed
from tests.engine.exact_engines import open_engine, random_tokens

POLICIES = {"full": 512, "recall": 64, "h2o": 48, "corm": 80, "bumblebee": 48}
"""Policies and their budgets. corm has ragged rows, and bumblebee reads prompts whole."""


@pytest.fixture(autouse=True)
def plain_handler():
    """Let Ctrl-C raise KeyboardInterrupt, as Python does by default."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(monkeypatch, context, method, n=1):
    """Send Ctrl-C to this process directly after the nth call of a method of the context."""
    plain, calls = getattr(context, method), []

    def interrupted(*args, **kwargs):
        result = plain(*args, **kwargs)
        calls.append(method)
        if len(calls) == n:
            os.kill(os.getpid(), signal.SIGINT)
        return result

    monkeypatch.setattr(context, method, interrupted)


@pytest.mark.parametrize(
    ("name", "method"),
    # full never calls `apply`
    [*((name, "decode") for name in POLICIES), *((name, "apply") for name in POLICIES if name != "full")],
)
def test_an_engine_continues_after_ctrl_c_as_if_it_had_been_stopped(tiny_model, monkeypatch, name, method):
    policy, tokens = policies.fit(name, POLICIES[name], 8), random_tokens(150)
    options = {"n_batch": 16} if name == "bumblebee" else {"n_batch": 16, "prefill": "stream"}
    with (
        open_engine(tiny_model(), policy, **options) as engine,
        open_engine(tiny_model(), policy, **options) as other,
    ):
        for each in (engine, other):
            each.read(tokens[:20])
        with monkeypatch.context() as patch:
            interrupt(patch, engine.context, method, 3 if method == "decode" else 1)
            with pytest.raises(KeyboardInterrupt):
                engine.read(tokens[20:])
        # the text was not read to its end
        assert 20 < engine.n_past < len(tokens)
        other.read(tokens[20 : engine.n_past])
        for each in (engine, other):
            each.read(tokens[each.n_past :])
        assert engine.n_past == other.n_past == len(tokens)
        np.testing.assert_array_equal(engine.context.logits(), other.context.logits())
        assert engine.cells().pos.tolist() == other.cells().pos.tolist()
        assert all(map(np.array_equal, engine.state, other.state))


def test_ctrl_c_while_a_prompt_is_read_whole_empties_the_cache(tiny_model, monkeypatch):
    policy, tokens = policies.fit("bumblebee", 48, 8), random_tokens(150)
    with open_engine(tiny_model(), policy, n_batch=16) as engine:
        engine.read(tokens)
        expected = engine.context.logits().copy()
        engine.reset()
        with monkeypatch.context() as patch:
            interrupt(patch, engine.context, "decode", 3)
            with pytest.raises(KeyboardInterrupt):
                engine.read(tokens)
        assert engine.n_past == 0
        engine.read(tokens)
        np.testing.assert_array_equal(engine.context.logits(), expected)


def test_ctrl_c_during_a_rewind_is_raised_after_it(tiny_model, monkeypatch):
    with open_engine(tiny_model(), policies.fit("recall", 64, 8)) as engine:
        engine.read(random_tokens(150))
        with monkeypatch.context() as patch:
            interrupt(patch, engine.context, "apply")
            with pytest.raises(KeyboardInterrupt):
                engine.rewind(100)
        assert engine.n_past == 100
        assert engine.read(random_tokens(20, seed=2)) == 20


@pytest.mark.parametrize("name", ["full", "recall", "h2o"])
def test_generate_and_chats_continue_after_ctrl_c(talker, monkeypatch, name):
    settings = kvtool.Settings(n_threads=1, n_batch=16)
    policy = kvtool.load_policy(name, POLICIES[name], evict_every=8)
    with (
        closing(kvtool.load_model(talker)) as model,
        closing(kvtool.Engine(model, policy, settings)) as engine,
        closing(kvtool.Engine(model, policy, settings)) as other,
    ):
        pieces = []
        with monkeypatch.context() as patch:
            interrupt(patch, engine.context, "decode", 60)
            with pytest.raises(KeyboardInterrupt):
                pieces.extend(kvtool.generate(engine, "Once upon a time", n_max=100))
        n = engine.n_past
        # the piece that the last step decoded was yielded before the step
        assert pieces == list(kvtool.generate(other, "Once upon a time", n_max=len(pieces)))
        assert (other.n_past, len(pieces) > 50) == (n, True)
        later = ["".join(kvtool.generate(each, " And", n_max=8)) for each in (engine, other)]
        assert later[0] == later[1]

        talks = [kvtool.chat(each) for each in (engine, other)]
        with monkeypatch.context() as patch:
            interrupt(patch, engine.context, "decode", 40)
            with pytest.raises(KeyboardInterrupt):
                list(talks[0].reply("Name a fruit."))
        reply = talks[0].messages[-1]["content"]
        assert reply
        assert "".join(talks[1].reply("Name a fruit.", talks[0].writer.n_written)) == reply
        # while a turn is read: its other tokens are read before the next turn
        with monkeypatch.context() as patch:
            interrupt(patch, engine.context, "decode")
            with pytest.raises(KeyboardInterrupt):
                list(talks[0].reply("Name a colour. " * 5))
        assert [message["content"] for message in talks[0].messages[-2:]] == ["Name a colour. " * 5, ""]
        assert "".join(talks[0].reply("Name a car.", n_max=4))
        assert len(talks[0].writer.tokens) == engine.n_past
        assert talks[0].undo_turn() == "Name a car."
        assert talks[0].undo_turn() == "Name a colour. " * 5
        replies = ["".join(talk.reply("Name a car.", n_max=8)) for talk in talks]
        assert [*talks[0].writer.tokens] == [*talks[1].writer.tokens]
        assert replies[0] == replies[1]


def test_ctrl_c_does_not_interrupt_an_undo_or_a_reset(talker, monkeypatch):
    policy = kvtool.load_policy("recall", 64, evict_every=8)
    settings = kvtool.Settings(n_threads=1, n_batch=16)
    with (
        closing(kvtool.load_model(talker)) as model,
        closing(kvtool.Engine(model, policy, settings)) as engine,
    ):
        talk = kvtool.chat(engine)
        for turn in ("Name a fruit. " * 5, "Name a car."):
            list(talk.reply(turn, n_max=4))
        before = talk.messages[:-2]
        for undone, left in ((talk.undo, before), (lambda: talk.reset("Be brief."), [])):
            with monkeypatch.context() as patch:
                interrupt(patch, engine.context, "apply")
                with pytest.raises(KeyboardInterrupt):
                    undone()
            assert [message for message in talk.messages if message["role"] != "system"] == left
            assert len(talk.writer.tokens) == engine.n_past
        assert talk.messages == [{"role": "system", "content": "Be brief."}]
        list(talk.reply("Name a boat.", n_max=4))
        assert len(talk.writer.tokens) == engine.n_past


def test_the_outermost_block_raises():
    reached = []

    def interrupted():
        with delayed:
            with delayed:
                assert not delayed.is_over
                signal.raise_signal(signal.SIGINT)
                reached.append("inner")
            assert delayed.is_over
            reached.append("outer")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert reached == ["inner", "outer"]
    assert not delayed.is_over
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    # the next block starts without an interrupt
    with delayed:
        assert not delayed.is_over


def test_a_second_ctrl_c_is_raised_at_once():
    reached = []

    def interrupted():
        with delayed, delayed:
            signal.raise_signal(signal.SIGINT)
            reached.append("first")
            signal.raise_signal(signal.SIGINT)
            reached.append("second")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert reached == ["first"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with delayed:
        assert not delayed.is_over


def test_a_program_s_own_handler_acts_at_once():
    came = []
    signal.signal(signal.SIGINT, lambda *_: came.append("own"))
    with delayed:
        signal.raise_signal(signal.SIGINT)
        assert came == ["own"]
        assert not delayed.is_over


def test_blocks_of_other_threads_delay_nothing():
    inside, leave = threading.Event(), threading.Event()

    def other():
        with delayed:
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    thread.start()
    try:
        inside.wait()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        leave.set()
        thread.join()
    with delayed:
        assert not delayed.is_over
