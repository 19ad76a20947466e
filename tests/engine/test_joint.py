"""Joint steps of several streams: each stream has the same rows and logits as without the other streams."""

from __future__ import annotations

import itertools
import threading
from contextlib import ExitStack, closing
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest

from kvtool import policies
from kvtool.engine.loop import Engine
from kvtool.engine.settings import Settings
from kvtool.errors import LibraryError, OutOfMemory
from kvtool.llama.cache.context import Context
from kvtool.llama.cache.joint import MAX_CONTEXTS, JointContext, Part
from kvtool.llama.libllama.devices import has_gpu
from kvtool.llama.libllama.library import error_text, lib
from kvtool.llama.loaded.model import Model
from kvtool.policy import Signal
from kvtool.serve import batching
from kvtool.serve.batching import ComputeLock, StepBatcher
from tests.blocking_policy import TIMEOUT_S, until
from tests.engine.exact_engines import LOGIT_TOLERANCE, ON_CUDA, TOLERANCE, distinct_tokens, random_tokens

EXACT = {"type_k": "f32", "type_v": "f32", "flash": "off", "n_threads": 1, "n_batch": 32}
EXACT["archive_type"] = "f32"


@pytest.fixture
def start_engine(tiny_model):
    """start_engine(policy) opens an engine. All engines share one model."""
    with ExitStack() as stack:
        model = stack.enter_context(closing(Model(tiny_model(n_ctx_train=400))))
        yield lambda policy: stack.enter_context(closing(Engine(model, policy, Settings(**EXACT))))


class StreamResult(NamedTuple):
    """Result of a stream. See Rows for pos and live.

    logits: f32[n, n_vocab] after each token that was decoded by itself.
    n_repeated: number of repeated steps.
    """

    pos: np.ndarray
    live: np.ndarray
    signals: dict[str, np.ndarray]
    logits: np.ndarray
    n_repeated: int


def one_by_one(lock):
    """Return a StepBatcher that makes no joint steps."""
    return StepBatcher(lock, 1)


def run_streams(model, policy, tokens, n_generated, *, make_batcher=one_by_one, **settings):
    """Return the StreamResult of each stream.

    Stream i reads its tokens as a text, except for the last n_generated[i] tokens, which it decodes one by
    one.
    make_batcher: a function that makes a StepBatcher.
    """
    n_stream = len(tokens)
    with ExitStack() as stack:
        lock = ComputeLock()
        batcher = make_batcher(lock)
        stack.callback(batcher.close)
        engines = [
            stack.enter_context(closing(Engine(model, policy, Settings(**(EXACT | settings)))))
            for _ in range(n_stream)
        ]
        logits, errors, barrier = [[] for _ in range(n_stream)], [], threading.Barrier(n_stream)

        def live(i):
            engine, n_read = engines[i], len(tokens[i]) - n_generated[i]
            lock.acquire()
            try:
                engine.read(tokens[i][:n_read])
                with batcher.writing(engine):
                    # wait until all streams are writing
                    lock.release()
                    barrier.wait(TIMEOUT_S)
                    lock.acquire()
                    for i_token in range(n_read, len(tokens[i])):
                        batcher.step(engine, 0)
                        engine.step(tokens[i][i_token : i_token + 1])
                        logits[i].append(engine.context.next_logits.copy())
            except BaseException as error:
                errors.append(error)
                raise
            finally:
                lock.release()

        threads = [threading.Thread(target=live, args=(i,)) for i in range(n_stream)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive()
        assert not errors
        read = policy.reads not in (Signal.NONE, Signal.KEYS)
        return [
            StreamResult(
                engine.rows.pos.copy(),
                engine.rows.live.copy(),
                engine.signals.read() if read else {},
                np.array(stream_logits),
                engine.residents.n_repeated,
            )
            for engine, stream_logits in zip(engines, logits, strict=True)
        ]


class Counting(StepBatcher):
    """StepBatcher that records the number of streams of each joint step."""

    sizes: list[int]

    def __init__(self, *args):
        super().__init__(*args)
        self.sizes = []

    def _decode_joint(self, parts):
        done = super()._decode_joint(parts)
        if done:
            self.sizes.append(len(parts))
        return done


def same_together(
    path, name, n=150, n_generated=(50, 35, 50), budget=48, options=(), rounds=False, **settings
):
    """Assert that streams have the same results alone and in joint steps.

    rounds: True if rounding may change which tokens stay. Only the first logits are then compared.
    """
    policy = policies.fit(name, 300 if name == "full" else budget, None, [*options])
    make_tokens = partial(distinct_tokens, n_vocab=400) if name == "knorm" else random_tokens
    tokens = [make_tokens(n + 10 * i, seed=i) for i in range(len(n_generated))]
    batchers = []

    def several(lock):
        batchers.append(Counting(lock, len(n_generated)))
        return batchers[0]

    with closing(Model(path)) as model:
        single = run_streams(model, policy, tokens, n_generated, **settings)
        together = run_streams(model, policy, tokens, n_generated, make_batcher=several, **settings)
    n_longest = sorted(n_generated)[-2]
    assert batchers[0].sizes == [sum(n > i_step for n in n_generated) for i_step in range(n_longest)]
    for one, other in zip(single, together, strict=True):
        errors = np.abs(one.logits - other.logits)
        if rounds:
            assert np.median(errors[:8]) < 2e-3
            continue
        assert np.array_equal(one.pos, other.pos)
        assert np.array_equal(one.live, other.live)
        assert errors.max() < LOGIT_TOLERANCE
        for field, values in one.signals.items():
            assert np.abs(values - other.signals[field]).max() < TOLERANCE, field


@pytest.mark.parametrize("name", policies.names())
def test_joint_steps_do_not_change_any_stream(tiny_model, name):
    same_together(tiny_model(n_ctx_train=400, n_vocab=400), name, rounds=ON_CUDA and name == "corm")


@pytest.mark.parametrize("name", ["h2o", "corm", "recall"])
@pytest.mark.parametrize("arch", ["gemma3", "gpt_oss", "deepseek2", "refact", "gemma4"])
def test_joint_steps_do_not_change_any_kind_of_model(tiny_model, arch, name):
    if (arch, name) == ("refact", "recall"):
        pytest.skip("refused")
    # with MLA, a GPU rounds products of several tokens to half precision, so other tokens may stay
    rounds = has_gpu() and arch == "deepseek2" and name != "h2o"
    same_together(tiny_model(arch=arch, n_ctx_train=400), name, rounds=rounds)


def run_two_streams(path, make_batcher, n_generated=40, n=100):
    """Return the results of two streams under h2o, first decoded one after the other, then in joint steps."""
    policy, tokens = policies.fit("h2o", 48), [random_tokens(n, seed=i) for i in range(2)]
    with closing(Model(path)) as model:
        single = run_streams(model, policy, tokens, (n_generated, n_generated))
        return single, run_streams(
            model, policy, tokens, (n_generated, n_generated), make_batcher=make_batcher
        )


def test_streams_with_recurrent_layers_decode_one_by_one(tiny_model):
    path, lines = tiny_model(arch="lfm2", n_ctx_train=400), []
    single, joint = run_two_streams(path, lambda lock: StepBatcher(lock, 2, lines.append))
    assert lines == [
        "answers are written one after the other: a model with recurrent layers takes no joint steps"
    ]
    for one, other in zip(single, joint, strict=True):
        assert np.array_equal(one.logits, other.logits)


def test_missing_memory_for_joint_steps_is_reported_once(tiny_model, monkeypatch):
    def no_room(*args):
        tried.append(args)
        raise OutOfMemory("no memory to decode for 2 chats at once")

    tried, lines = [], []
    monkeypatch.setattr(batching, "JointContext", no_room)
    run_two_streams(tiny_model(n_ctx_train=400), lambda lock: StepBatcher(lock, 2, lines.append))
    assert len(tried) == 1
    (line,) = lines
    assert line.startswith(
        "answers are written one after the other: no memory to decode for 2 chats at once; "
    )


def test_more_streams_than_a_joint_step_takes_are_decoded_in_groups(tiny_model, monkeypatch):
    monkeypatch.setattr(batching, "MAX_CONTEXTS", 2)
    policy, tokens, batchers = policies.fit("h2o", 48), [random_tokens(60, seed=i) for i in range(5)], []

    def in_groups(lock):
        batchers.append(Counting(lock, 300))
        return batchers[0]

    with closing(Model(tiny_model(n_ctx_train=400))) as model:
        single = run_streams(model, policy, tokens, [3] * 5)
        beside = run_streams(model, policy, tokens, [3] * 5, make_batcher=in_groups)
    assert batchers[0].sizes == [2] * 6
    for one, other in zip(single, beside, strict=True):
        assert np.array_equal(one.pos, other.pos)
        assert np.abs(one.logits - other.logits).max() < LOGIT_TOLERANCE


def test_joint_step_takes_at_most_the_streams_llama_cpp_allows(start_engine):
    context = start_engine(policies.fit("h2o", 48)).context
    JointContext(context, MAX_CONTEXTS, MAX_CONTEXTS).close()
    with pytest.raises(LibraryError, match="n_seq_max must be <= 256"):
        JointContext(context, MAX_CONTEXTS + 1, MAX_CONTEXTS + 1)


class Broken(Counting):
    """StepBatcher that lets every third joint step fail, beginning with the first."""

    def _decode_joint(self, parts):
        if len(self.sizes) % 3 == 0:
            self.sizes.append(0)
            return False
        return super()._decode_joint(parts)


def test_streams_decode_one_by_one_after_a_failed_joint_step(tiny_model):
    path = tiny_model(n_ctx_train=400)
    single, joint = run_two_streams(path, lambda lock: Broken(lock, 2), 60, 120)
    for one, other in zip(single, joint, strict=True):
        assert np.array_equal(one.pos, other.pos)
        assert np.abs(one.logits - other.logits).max() < LOGIT_TOLERANCE


def test_joint_step_decodes_nothing_if_one_stream_has_no_room(start_engine):
    policy, tokens = policies.fit("full", 300), random_tokens(256)
    one, other, single = (start_engine(policy) for _ in range(3))
    for engine in (one, other, single):
        engine.read(tokens[:100])
    # fill the cache of `other` until llama.cpp has no cell left
    filler, n_ctx = np.full(32, 5, np.int32), other.context.n_ctx
    for begin in range(100, n_ctx, 32):
        other.context.decode(filler[: n_ctx - begin], begin, 1)
    with closing(JointContext(one.context, 2, 4)) as joint:
        parts = [Part(one.context, tokens[:1], 100, 1), Part(other.context, tokens[:1], n_ctx, 1)]
        with pytest.raises(LibraryError, match="2 chats at once"):
            joint.decode(parts)
        # the failed step changed nothing: positions continue where they were
        joint.decode(parts[:1])
    single.step(tokens[:1])
    assert np.abs(one.context.logits() - single.context.logits()).max() < LOGIT_TOLERANCE


def test_other_threads_get_turns_between_joint_steps(tiny_model, monkeypatch):
    monkeypatch.setattr(batching, "SLICE_STEPS", 4)
    n_steps, is_over = [], threading.Event()

    class Crowded(Counting):
        def _decode_joint(self, parts):
            if not self.sizes:
                thread.start()
            # wait until the other thread asks for its turn, however slow it is
            until(lambda: self._lock._waiting)
            return super()._decode_joint(parts)

    def take_turns():
        while not is_over.is_set():
            batchers[0]._lock.acquire()
            n_steps.append(len(batchers[0].sizes))
            batchers[0]._lock.release()

    def several(lock):
        batchers.append(Crowded(lock, 2))
        return batchers[0]

    batchers, thread = [], threading.Thread(target=take_turns)
    with closing(Model(tiny_model(n_ctx_train=400))) as model:
        try:
            run_streams(
                model,
                policies.fit("h2o", 48),
                [random_tokens(100), random_tokens(100, 2)],
                (50, 50),
                make_batcher=several,
            )
        finally:
            is_over.set()
        thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    # the other thread gets a turn after every few joint steps
    assert sum(a < b <= a + 6 for a, b in itertools.pairwise(n_steps)) >= 7


@pytest.mark.parametrize(
    ("type_k", "type_v", "refused"),
    [("f16", "f16", None), ("q8_0", "f16", "q8_0"), ("f16", "q8_0", "q8_0"), ("f32", "f32", "f32")],
)
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_the_cells_of_a_joint_context_must_be_f16(tiny_model, arch, type_k, type_v, refused):
    with ExitStack() as stack:
        model = stack.enter_context(closing(Model(tiny_model(arch=arch))))
        like, context = (
            stack.enter_context(closing(Context(model, 256, 32, **types, flash="on", n_threads=1)))
            for types in ({}, {"type_k": type_k, "type_v": type_v})
        )
        status = lib.llama_kvtool_enable_joint(context.handle, like.handle, 1)
        if refused:
            assert status < 0
            assert error_text() == f"the cells of a context for joint steps must be f16, got {refused}"
        else:
            assert status >= 0


@pytest.mark.parametrize("n_most", [0, 5])
def test_joint_step_refuses_duplicate_or_too_many_members(start_engine, n_most):
    engine = start_engine(policies.fit("h2o", 48))
    with closing(JointContext(engine.context, 4, 4)) as joint:
        part = Part(engine.context, random_tokens(1), 0, 1)
        with pytest.raises(LibraryError, match=r"member|n_member"):
            joint.decode([part] * (n_most or 2))
