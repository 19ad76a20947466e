"""Checkpoints: a stream of a model with sliding or recurrent layers is rewound to a checkpoint."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from kvtool import policies
from kvtool.engine import checkpoints
from kvtool.engine.chunk_size import ChunkSize
from kvtool.errors import UsageError
from kvtool.llama.loaded.model import Model
from tests.engine import exact_engines
from tests.engine.exact_engines import ON_CUDA, TOLERANCE, open_engine, random_tokens
from tests.engine.test_chunk_size import SLOW
from tests.engine.test_rewind import logits, state

N_CTX = 1024
SPACING = 200
KINDS = ["lfm2", "gpt_oss", "gemma3", "gemma4"]


@pytest.fixture(autouse=True)
def spacing(monkeypatch):
    monkeypatch.setattr(checkpoints, "SPACING", SPACING)


def fit(name):
    return policies.fit(name, N_CTX if name == "full" else 64, 16, ["search=all"] if name == "recall" else [])


def start_engine(path, name, n_batch=16, **settings):
    return open_engine(path, fit(name), archive_type="f32", n_batch=n_batch, **settings)


def arrays_of(engine):
    """Return the saved arrays, without the cells of sliding layers.

    Some of these cells belong to dropped tokens, and may hold anything.
    """
    return {name: array.copy() for name, array in engine.save() if name != "window_cells"}


def assert_same_arrays(engine, other):
    actual, expected = arrays_of(engine), arrays_of(other)
    assert actual.keys() == expected.keys()
    if not ON_CUDA:
        assert [key for key in actual if not np.array_equal(actual[key], expected[key])] == []


def check_rewound(engine, fresh, tokens, n):
    """Rewind to n tokens or somewhat fewer, and compare with `fresh`, which reads only the kept tokens."""
    n_kept = engine.n_kept(n)
    assert n - checkpoints.SPACING - 16 < n_kept <= n
    assert engine.rewind(n) == n_kept
    assert not engine.context.has_logits
    fresh.empty()
    fresh.read(tokens[:n_kept])
    # the engine evicts before it makes a checkpoint, but `fresh` has not evicted after its last step
    fresh.evict_if_due()
    assert state(engine) == state(fresh)
    actual, expected = (logits(each, tokens[n_kept : n_kept + 40]) for each in (engine, fresh))
    assert np.abs(actual - expected).max() < TOLERANCE
    assert state(engine) == state(fresh)


# with a context of 150 tokens, gaps between positions are closed before each checkpoint
@pytest.mark.parametrize("arch", KINDS)
@pytest.mark.parametrize(("name", "n_ctx"), [("recall", N_CTX), ("recall", 150), ("full", N_CTX)])
def test_a_stream_goes_back_to_a_checkpoint(tiny_model, name, arch, n_ctx):
    path, tokens = tiny_model(arch, n_ctx_train=n_ctx), random_tokens(500)
    with start_engine(path, name) as engine, start_engine(path, name) as fresh:
        assert engine.can_rewind
        engine.read(tokens)
        places = [checkpoint.n_past for checkpoint in engine.checkpoints]
        # a checkpoint is made only between two steps, so checkpoints are up to 15 tokens farther apart than
        # SPACING
        assert ((np.diff([0, *places]) - SPACING) // 16 == 0).all()
        assert len(places) == 2
        for n in (480, 300):
            check_rewound(engine, fresh, tokens, n)
        assert [checkpoint.n_past for checkpoint in engine.checkpoints] == places[:1]
        if arch == "lfm2":
            assert engine.rewind(100) == 0
            assert engine.n_past == len(engine.checkpoints) == 0


@pytest.mark.parametrize("arch", [kind for kind in KINDS if kind != "lfm2"])
@pytest.mark.parametrize(("name", "n_ctx"), [("recall", N_CTX), ("recall", 150), ("full", N_CTX)])
def test_sliding_layers_rewind_to_tokens_between_checkpoints(tiny_model, share_of, name, arch, n_ctx):
    path, tokens = tiny_model(arch, n_ctx_train=n_ctx), random_tokens(500)
    with start_engine(path, name) as engine, start_engine(path, name) as fresh:
        for n in (490, 450, 333, 225, 61, 3)[:: share_of(2, 1)]:
            engine.read(tokens[engine.n_past :])
            engine.checkpoints.take()
            n_kept = engine.rewind(n)
            # With a short context, gaps between positions may be closed between token n and the next
            # checkpoint. A rewind cannot undo this. The stream then goes back to an earlier checkpoint
            assert n_kept == n or (n_ctx < N_CTX and n - SPACING - 16 < n_kept < n)
            fresh.reset()
            fresh.read(tokens[:n_kept])
            actual, expected = (logits(each, tokens[n_kept : n_kept + 40]) for each in (engine, fresh))
            assert np.abs(actual - expected).max() < TOLERANCE


def test_sliding_layers_do_not_rewind_to_overwritten_tokens(tiny_model, monkeypatch):
    monkeypatch.setattr(checkpoints, "SPACING", 400)
    with start_engine(tiny_model("gemma3", n_ctx_train=N_CTX), "full") as engine:
        engine.read(random_tokens(500))
        (checkpoint,) = engine.checkpoints
        # the sliding layers have only the last 256 tokens before the checkpoint. With a window of 16, a cut
        # to n tokens needs the last 15 of these n. So a cut to fewer than `first` tokens goes back to 0
        first = checkpoint.n_past - 256 + 15
        assert [engine.n_kept(n) for n in (first - 1, first, first + 1)] == [0, first, first + 1]


@pytest.mark.parametrize("prefill", ["whole", "exact"])
@pytest.mark.parametrize("arch", KINDS)
def test_prompts_read_whole_or_exactly_have_checkpoints(tiny_model, arch, prefill):
    path, tokens = tiny_model(arch, n_ctx_train=N_CTX), random_tokens(450)
    with (
        start_engine(path, "recall", prefill=prefill) as engine,
        start_engine(path, "recall", prefill=prefill) as fresh,
    ):
        for each in (engine, fresh):
            each.read(tokens)
        n = engine.n_kept(440)
        assert n >= 2 * SPACING
        assert engine.rewind(440) == n
        engine.read(tokens[n:])
        # after the rewind, tokens attend to clusters of the archive, so the logits are only similar
        actual, expected = (logits(each, random_tokens(20, seed=2)) for each in (engine, fresh))
        assert np.abs(actual - expected).max() < 0.05


def test_stopped_whole_read_leaves_no_checkpoints(tiny_model):
    with start_engine(tiny_model("gemma3", n_ctx_train=N_CTX), "recall", prefill="whole") as engine:
        assert engine.read(random_tokens(450), lambda: engine.n_past > 2 * SPACING) == 0
        assert len(engine.checkpoints) == 0


def test_older_checkpoints_are_farther_apart(tiny_model):
    with start_engine(tiny_model("lfm2", n_ctx_train=256), "recall") as engine:
        n_bytes = engine.context.fixed_state.n_bytes
    with start_engine(tiny_model("lfm2", n_ctx_train=256), "recall", checkpoints=4 * n_bytes) as engine:
        for _ in range(60):
            engine.read(random_tokens(16))
            engine.checkpoints.take()
        places = [checkpoint.n_past for checkpoint in engine.checkpoints]
        assert len(places) == engine.checkpoints.max_bytes // n_bytes == 4
        assert engine.checkpoints.n_bytes == 4 * n_bytes
        assert places[-1] == 960
        distances = 960 - np.array(places[:-1])
        assert (distances[:-1] > 1.5 * distances[1:]).all()
        assert 300 < distances[0] < 960


@pytest.mark.parametrize(("n_free", "n"), [(1600, 100), (160, 10), (64, 8), (32, 8), (20, 5), (3, 0)])
def test_default_checkpoint_limit_depends_on_free_memory(tiny_model, monkeypatch, n_free, n):
    with start_engine(tiny_model("lfm2"), "recall") as engine:
        n_bytes = engine.context.fixed_state.n_bytes
    monkeypatch.setattr(checkpoints, "free_bytes", lambda: n_free * n_bytes)
    with start_engine(tiny_model("lfm2"), "recall") as engine:
        assert engine.checkpoints.max_bytes // n_bytes == n
        engine.checkpoints.share(3)
        assert engine.checkpoints.max_bytes // n_bytes == min(max(n // 3, 8), n)


def test_large_states_are_copied_less_often_on_a_gpu(tiny_model, monkeypatch):
    monkeypatch.setattr(Model, "is_on_gpu", True)
    path, places = tiny_model("lfm2", n_ctx_train=N_CTX), []
    for token_bytes in (100, 10):
        monkeypatch.setattr(checkpoints, "_GPU_TOKEN_BYTES", token_bytes)
        with start_engine(path, "full") as engine:
            assert (
                engine.context.fixed_state.n_bytes // 10 > SPACING > engine.context.fixed_state.n_bytes // 100
            )
            engine.read(random_tokens(500))
            places.append(len(engine.checkpoints))
    assert places == [2, 1]


def test_limit_below_one_checkpoint_is_refused(tiny_model):
    path = tiny_model("lfm2")
    with (
        pytest.raises(UsageError, match="at least 4KiB for one checkpoint"),
        start_engine(path, "recall", checkpoints=100),
    ):
        pass
    with start_engine(path, "recall", checkpoints=0) as engine:
        engine.read(random_tokens(200))
        assert not engine.can_rewind
        assert engine.rewind(100) == engine.n_past == 0


def test_recall_without_recurrent_layers_makes_no_checkpoints(tiny_model):
    with start_engine(tiny_model(), "recall") as engine:
        engine.read(random_tokens(300))
        assert not len(engine.checkpoints)
        assert engine.rewind(200) == 200


def test_rewind_to_forgotten_tokens_changes_nothing(tiny_model):
    path = tiny_model("lfm2", n_ctx_train=N_CTX)
    with start_engine(path, "recall", archive=60) as engine:
        engine.read(random_tokens(500))
        before = state(engine)
        assert engine.rewind(250) is None
        assert state(engine) == before
        assert engine.context.has_logits
        assert len(engine.checkpoints) == 2


FORGETTING = sorted(set(policies.names()) - {"full", "recall", "kvzip"})


@pytest.mark.parametrize(
    ("name", "arch"), [*product(FORGETTING, ["llama"]), *product(exact_engines.KINDS, ["gemma3", "lfm2"])]
)
def test_evicting_policies_rewind_to_a_checkpoint(tiny_model, monkeypatch, name, arch):
    # only sliding layers need a longer text: it has to be longer than their 256 cells
    scale = 1 if arch == "gemma3" else 2
    monkeypatch.setattr(checkpoints, "SPACING", SPACING // scale)
    path, tokens = tiny_model(arch, n_ctx_train=N_CTX), random_tokens(520 // scale)
    with (
        start_engine(path, name, prefill="stream") as engine,
        start_engine(path, name, prefill="stream") as fresh,
    ):
        assert engine.can_rewind
        for each in (engine, fresh):
            each.pin(5)
            each.hold(3)
        engine.read(tokens)
        engine.checkpoints.take()
        places = [checkpoint.n_past for checkpoint in engine.checkpoints]
        assert len(places) == 3
        for n in (480 // scale, 300 // scale):
            # read more tokens one by one, so that the policy forgets more
            logits(engine, random_tokens(60, seed=3))
            check_rewound(engine, fresh, tokens, n)
            assert_same_arrays(engine, fresh)
        assert [checkpoint.n_past for checkpoint in engine.checkpoints] == places[:1]
        assert engine.rewind(100 // scale) == engine.n_past == len(engine.checkpoints) == 0
        assert engine.n_pinned == 5


@pytest.mark.parametrize("name", ["h2o", "snapkv", "streamingllm", "kvzip"])
def test_whole_read_has_checkpoints_only_after_the_prompt(tiny_model, monkeypatch, name):
    monkeypatch.setattr(checkpoints, "SPACING", 30)
    path, tokens = tiny_model(n_ctx_train=N_CTX), random_tokens(300)
    with (
        start_engine(path, name, prefill="whole") as engine,
        start_engine(path, name, prefill="whole") as fresh,
    ):
        for each in (engine, fresh):
            assert each.read(tokens) == 300
        assert len(engine.checkpoints) == 0
        engine.checkpoints.take()
        logits(engine, random_tokens(100, seed=2))
        places = [checkpoint.n_past for checkpoint in engine.checkpoints]
        assert places == [300, 330, 360, 390]
        for n in (340, 310):
            assert engine.rewind(n) == n // 30 * 30
            fresh.rewind(300)
            logits(fresh, random_tokens(n // 30 * 30 - 300, seed=2))
            fresh.evict_if_due()
            assert state(engine) == state(fresh)
            assert_same_arrays(engine, fresh)
            fresh.checkpoints.take()


def test_copies_of_the_cache_stay_within_the_limit(tiny_model, monkeypatch):
    path = tiny_model(n_ctx_train=N_CTX)
    with start_engine(path, "h2o") as engine:
        engine.read(random_tokens(250))
        engine.checkpoints.take()
        *_, n_bytes = (checkpoint.part.n_bytes for checkpoint in engine.checkpoints)
        n_most = engine.checkpoints.max_bytes // 8
        assert n_bytes < n_most < 1.5 * n_bytes + 2**14
    # no copy is made within a step, because the cache may exceed the budget until the step ends
    with start_engine(path, "h2o", n_batch=160) as engine:
        engine.chunk_size = ChunkSize(SLOW)
        engine.read(random_tokens(700))
        assert max(checkpoint.part.n_bytes for checkpoint in engine.checkpoints) <= n_most
        assert len(engine.checkpoints) == 2
    message = "--checkpoints must be at least"
    with pytest.raises(UsageError, match=message), start_engine(path, "h2o", checkpoints=9):
        pass
    with start_engine(path, "h2o", checkpoints=3 * n_most) as engine:
        for _ in range(20):
            engine.read(random_tokens(40))
            engine.checkpoints.take()
            assert engine.checkpoints.n_bytes <= 3 * n_most
        assert 3 <= len(engine.checkpoints) < 6
    # the default limit is room for 8 checkpoints, even if much more memory is free
    monkeypatch.setattr(checkpoints, "free_bytes", lambda: 10**6 * n_most)
    with start_engine(path, "h2o") as engine:
        assert engine.checkpoints.max_bytes == 8 * n_most
    monkeypatch.setattr(checkpoints, "free_bytes", lambda: 3 * n_most)
    with start_engine(path, "h2o") as engine:
        engine.read(random_tokens(250))
        assert engine.checkpoints.max_bytes == len(engine.checkpoints) == 0
        assert engine.rewind(240) == 0
