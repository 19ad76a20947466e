"""Rewinding: a stream that is cut to n tokens has the same state as when it had read only these n tokens."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from kvtool import policies
from kvtool.errors import LibraryError, UsageError
from kvtool.llama.cache.archive import Archive
from kvtool.llama.cache.context import Context
from kvtool.llama.libllama.workers import add_rpc
from tests.engine import rpc_server
from tests.engine.exact_engines import TOLERANCE, open_engine, random_tokens
from tests.engine.exact_engines import fit_recall as fit
from tests.engine.test_worker import working

SEARCHES = ({}, {"search": "all"}, {"exact": 40})
"""Ways in which recall searches its archive."""


def start_engine(path, policy, archive_type="f32", n_batch=16, **settings):
    return open_engine(path, policy, archive_type=archive_type, n_batch=n_batch, **settings)


def state(engine):
    """Return the state of a stream without keys and values: counters and tables."""
    cells, archive = engine.cells(), engine.context.archive
    counters = {
        name: getattr(engine, name)
        for name in ("n_past", "n_kv", "n_pinned", "n_held", "n_restart", "n_evicted", "n_archived")
    }
    counters |= {"due": engine.n_until_plan, "planned": engine.cache.n_planned, "room": engine.room()}
    counters |= {"next": engine.rows.next_rot, "pos": cells.pos.tolist(), "rot": cells.rot.tolist()}
    has_some = archive and archive.n
    return counters | {"archive": dict(archive.save(tokens=False))["archive"].tolist() if has_some else []}


def logits(engine, tokens):
    """Return the logits f32[n, n_vocab] of these tokens, read one by one."""
    rows = []
    for token in tokens:
        engine.step(np.array([token]))
        rows.append(engine.context.logits()[-1].copy())
    return np.array(rows)


def check_back(engine, fresh, n, n_later, tolerance):
    """Read n + n_later tokens, rewind to n, and compare with `fresh`, which reads only the first n tokens."""
    tokens = random_tokens(n + 40)
    for each in (engine, fresh):
        each.reset()
        # the tokens of a step all attend exactly to the same clusters. Therefore both engines must divide the
        # text into the same steps
        each.read(tokens[:n])
    expected = state(fresh)
    engine.read(random_tokens(n_later, seed=2))
    assert engine.n_past == n + n_later
    assert engine.rewind(n) == n
    assert not engine.context.has_logits
    assert state(engine) == expected
    actual, expected = (logits(each, tokens[n:]) for each in (engine, fresh))
    assert np.abs(actual - expected).max() < tolerance
    assert state(engine) == state(fresh)


# {trained context: (numbers of later tokens, lengths to rewind to)}. With a context of 256, gaps between
# positions are closed.
STREAMS = {
    1024: ((30, 500), (899, 700, 513, 512, 300, 20, 3)),
    256: ((200, 800), (690, 470, 463, 258, 257, 256, 255, 250, 120, 20)),
}


@pytest.mark.share(2, "n_ctx", "n_later")
@pytest.mark.parametrize("search", SEARCHES, ids=str)
@pytest.mark.parametrize(
    ("n_ctx", "n_later"), [(n_ctx, n) for n_ctx, lengths in STREAMS.items() for n in lengths[0]]
)
def test_rewound_stream_equals_one_that_read_no_more(tiny_model, share_of, search, n_ctx, n_later):
    policy, lengths = fit(**search), STREAMS[n_ctx][1][:: share_of(2, 1)]
    path = tiny_model(n_head_kv=2, n_ctx_train=n_ctx)
    with start_engine(path, policy) as engine, start_engine(path, policy) as fresh:
        for n in sorted({*lengths, policy.n_live + 1, policy.n_live}, reverse=True):
            check_back(engine, fresh, n, n_later, TOLERANCE)


# a window of 100 tokens is larger than the budget
@pytest.mark.parametrize("prefill", ["exact", "whole"])
@pytest.mark.parametrize(("arch", "shape"), [("llama", {}), ("gemma3", {}), ("gemma3", {"window": 100})])
def test_rewind_to_the_closing_of_gaps_after_a_prompt_that_was_read_at_once(tiny_model, arch, shape, prefill):
    n_ctx, n_prompt, n = 256, 240, 280
    path, policy = tiny_model(arch, n_ctx_train=n_ctx, **shape), fit(search="all")
    tokens, states, expected = random_tokens(n), {}, {}
    with start_engine(path, policy, prefill=prefill) as engine:
        engine.read(tokens[:n_prompt])
        for i in range(n_prompt, n):
            states[i], expected[i] = state(engine), logits(engine, tokens[i : i + 1])
            if engine.n_past == n_ctx + 1:
                assert engine.n_restart == 1
                engine.checkpoints.take()
        engine.checkpoints.take()
        # the last token before an eviction, when the cache is full, and two earlier tokens
        for i in (270, 263, n_ctx + 1):
            assert engine.rewind(i) == i
            assert state(engine) == states[i]
            assert np.abs(logits(engine, tokens[i : i + 1]) - expected[i]).max() < TOLERANCE
            engine.checkpoints.take()


@pytest.mark.parametrize("arch", ["llama", "deepseek2", "deepseek32", "qwen2vl", "refact", "gpt2"])
def test_full_rewinds_to_any_token(tiny_model, arch):
    n_ctx = 256
    policy = policies.fit("full", n_ctx)
    path = tiny_model(arch, n_ctx_train=n_ctx)
    with open_engine(path, policy, n_batch=16) as engine, open_engine(path, policy, n_batch=16) as fresh:
        assert engine.can_rewind
        for n, n_later in ((n_ctx - 40, 40), (100, 9), (60, 1), (1, 130)):
            check_back(engine, fresh, n, n_later, TOLERANCE)
        assert engine.rewind(0) == 0
        assert engine.n_past == 0


KINDS = [
    # flash attention adds up in another order. Archived and rewound keys and values are rounded
    ({"flash": "on", "type_k": "f16", "type_v": "f16", "archive_type": "f16"}, {}, 2e-2),
    ({"flash": "off", "type_k": "f16", "type_v": "f16", "archive_type": "q8_0"}, {}, 0.2),
    ({"archive_type": "iq4_nl"}, {"key_bias": 30.0}, 5),
    # quantized keys are stored multiplied by a Hadamard matrix
    ({"flash": "on", "type_k": "q8_0", "type_v": "q8_0", "archive_type": "q8_0"}, {}, 0.2),
    # MLA: values are a part of the keys
    ({}, {"arch": "deepseek2"}, TOLERANCE),
    ({}, {"arch": "qwen2vl"}, TOLERANCE),
    ({}, {"arch": "maincoder"}, TOLERANCE),
]


@pytest.mark.parametrize(("settings", "model", "tolerance"), KINDS, ids=str)
def test_rewind_works_with_other_caches_and_models(tiny_model, settings, model, tolerance):
    path = tiny_model(**model, n_ctx_train=256)
    # search=all chooses no clusters, so rounding cannot change the choice
    policy = fit(search="all") if settings else fit()
    with start_engine(path, policy, **settings) as engine, start_engine(path, policy, **settings) as fresh:
        for n in (600, 270, 200, 40):
            check_back(engine, fresh, n, 300, tolerance)


def test_rewind_works_with_an_archive_file(tiny_model, tmp_path):
    path, settings = tiny_model(n_head_kv=2, n_ctx_train=256), {"archive_file": str(tmp_path / "archive")}
    with start_engine(path, fit(), **settings) as engine, start_engine(path, fit()) as fresh:
        for n in (690, 250, 20):
            check_back(engine, fresh, n, 300, TOLERANCE)


def test_rewind_keeps_pinned_and_held_tokens(tiny_model):
    path, policy = tiny_model(n_head_kv=2, n_ctx_train=256), fit(64)
    with start_engine(path, policy) as engine, start_engine(path, policy) as fresh:
        for n in (500, 60, 12, 5):
            for each in (engine, fresh):
                each.reset()
                each.pin(12)
                each.hold(3)
                each.read(random_tokens(n))
            engine.read(random_tokens(300, seed=2))
            assert engine.rewind(n) == n
            assert state(engine) == state(fresh)
            for each in (engine, fresh):
                each.read(random_tokens(200, seed=3))
            assert state(engine) == state(fresh)
            assert (engine.cells().pos[:, :12] == np.arange(12)).all()


def test_rewound_stream_can_be_saved_and_restored(tiny_model):
    path = tiny_model(n_head_kv=2, n_ctx_train=256)
    with start_engine(path, fit()) as engine, start_engine(path, fit()) as other:
        engine.read(random_tokens(900))
        assert engine.rewind(400) == 400
        other.restore({name: array.copy() for name, array in engine.save()})
        assert state(engine) == state(other)
        both = [logits(each, random_tokens(50, seed=2)) for each in (engine, other)]
        assert (both[0] == both[1]).all()


def test_rewind_to_a_forgotten_window_changes_nothing(tiny_model):
    policy = fit()
    with start_engine(tiny_model(n_head_kv=2), policy, archive=100) as engine:
        engine.read(random_tokens(600))
        before, n_min = state(engine), engine.context.archive.span.start + policy.n_keep - policy.sinks
        assert engine.rewind(300) is None
        assert engine.rewind(n_min - policy.slack) is None
        assert state(engine) == before
        assert engine.context.has_logits
        assert engine.rewind(n_min + policy.slack)
        engine.step(random_tokens(1))
        # sinks are never forgotten, so a stream can always go back to them
        assert engine.rewind(3) == 3
        assert engine.n_kv == 3


@pytest.mark.parametrize(
    ("name", "part", "method"),
    [("recall", Context, "apply"), ("recall", Archive, "rewind"), ("h2o", Context, "set_positions")],
)
def test_failed_rewind_starts_over(tiny_model, monkeypatch, name, part, method):
    def fail(*_, **__):
        monkeypatch.undo()
        raise LibraryError

    states, policy = [], policies.fit(name, 48, 16)
    with start_engine(tiny_model(n_head_kv=2, n_ctx_train=256), policy, prefill="stream") as engine:
        engine.pin(6)
        for _ in range(2):
            engine.read(random_tokens(190))
            engine.checkpoints.take()
            engine.read(random_tokens(110))
            states.append(state(engine))
            monkeypatch.setattr(part, method, fail)
            assert engine.rewind(200) == engine.n_past == engine.n_archived == 0
        assert engine.n_pinned == 6
        assert states[0] == states[1]


@pytest.mark.parametrize("name", ["streamingllm", "h2o"])
def test_rewind_without_checkpoints_starts_over(tiny_model, name):
    policy = policies.fit(name, 64, 16)
    with open_engine(tiny_model(), policy, n_batch=16, checkpoints=0) as engine:
        engine.pin(3)
        engine.read(random_tokens(200))
        assert not engine.can_rewind
        assert engine.rewind(200) == 200
        assert engine.n_kept(100) == engine.rewind(100) == engine.n_past == 0
        assert engine.n_pinned == 3


def test_rewind_outside_the_stream_is_refused(tiny_model):
    with start_engine(tiny_model(), fit()) as engine:
        engine.read(random_tokens(100))
        for n in (-1, 101):
            with pytest.raises(UsageError, match=r"n must be in 0\.\.100"):
                engine.rewind(n)
        assert engine.rewind(0) == 0
        assert engine.n_past == engine.n_kv == engine.n_archived == 0


def client(endpoint, path):
    """Rewind streams whose cells are on a worker; print the lengths that were checked, as JSON."""
    add_rpc(endpoint)
    policy, lengths = fit(search="all"), []
    for flash, kind in (("off", "f32"), ("on", "f16")):
        settings = {"flash": flash, "type_k": kind, "type_v": kind, "n_gpu_layers": 99}
        with (
            start_engine(path, policy, **settings) as engine,
            start_engine(path, policy, **settings) as fresh,
        ):
            for n in (120, 20):
                check_back(engine, fresh, n, 60, TOLERANCE if kind == "f32" else 2e-2)
                lengths.append(n)
    print(json.dumps(lengths))


def test_rewind_works_with_cells_on_a_worker(tiny_model):
    path = tiny_model(n_head_kv=2, n_ctx_train=256)
    with working() as worker:
        lengths, _ = rpc_server.client("tests.engine.test_rewind", worker.endpoint, str(path))
    assert lengths == [120, 20, 120, 20]


if __name__ == "__main__":
    client(*sys.argv[1:])
