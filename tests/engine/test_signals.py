"""Signals and keys match their definitions after every batch, with random evictions in between."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from kvtool.engine import sizes
from kvtool.policy import Plan, Policy, Signal
from tests.engine.exact_engines import TOLERANCE, future_of, open_engine, random_tokens
from tests.reference import models, transformer

# largest accepted share of cells with wrong hits: rounding may move attention across the threshold 1 / t
AT_THE_EDGE = 0.01 if transformer.half_precision else 0.002

ALL = (
    Signal.ATTENTION
    | Signal.LAST
    | Signal.RECENT
    | Signal.SQUARES
    | Signal.HITS
    | Signal.IMPORTANT
    | Signal.HIGHEST
    | Signal.KEYS
)

REDUCE = {"sum": sum, "max": max, "first": lambda heads: heads[0]}


@dataclass(frozen=True, slots=True)
class Recorder(Policy):
    """Keep a random choice of tokens, and record every `View` that the engine passes."""

    budget: int
    slack: int
    group: str = "sum"
    n_query: int = 5
    t: str = "stream"
    reads: Signal = ALL
    n_future: int = 0
    n_skip: int = 0
    views: list = field(default_factory=list)

    def plan(self, view, state):
        self.views.append(view)
        rng = np.random.default_rng(view.next)
        order = rng.random(view.pos.shape).argsort(axis=1).argsort(axis=1)
        return Plan(order < self.budget - self.slack)


def run(path, policy, sizes, *, restores=False, **settings):
    """Return (rows, since, end) for each view of the policy.

    rows: the reference's rows when the view was made.
    since: number of tokens before the previous plan.
    end: number of tokens before this plan.
    restores: after every batch, save the engine, read another text, and restore the engine.
    """
    model = models.load(path)
    stream = transformer.Stream(model, positions="in-cache", t=policy.t, future=future_of(policy))
    tokens, begin, since, expected = random_tokens(sum(sizes)), 0, 0, []
    with open_engine(path, policy, positions="in-cache", over_budget=False, **settings) as engine:
        for size in sizes:
            n_view = len(policy.views)
            engine.evict_if_due()
            n = min(size, engine.room())
            if len(policy.views) > n_view:
                rows = [row for rows in stream.rows for row in rows]
                # the records are copied, because `seen` continues to grow
                records = [
                    each
                    for layer, layer_rows in zip(stream.layers, stream.rows, strict=True)
                    for each in stream.records(layer, layer_rows)
                ]
                now = [
                    [token | {"key": token["key"], "seen": list(token["seen"])} for token in row]
                    for row in records
                ]
                expected.append((now, since, stream.next))
                since = stream.next
                for row, pos, live in zip(rows, engine.rows.pos, engine.rows.live, strict=True):
                    row.keep(sorted(pos[:live].tolist()))
                stream._close_gaps(stream.counter)
            part = tokens[begin : begin + n]
            engine.step(part)
            stream.decode(part)
            begin += n
            if restores:
                saved = {name: array.copy() for name, array in engine.save()}
                engine.reset()
                engine.read(tokens[:5])
                engine.restore(saved)
    return expected


def placed(view, rows):
    """Yield (row, cell, token) for each token of a view. rows: the reference's rows."""
    for number, row in enumerate(rows):
        cell_of = {int(pos): cell for cell, pos in enumerate(view.pos[number])}
        for token in row:
            yield number, cell_of[token["pos"]], token


def queries_of(token):
    """Return [(step, t, attention of each head)] for the queries of a token's record."""
    return [(step, t, heads) for step, (t, heads) in enumerate(token["seen"], token["pos"] + 1)]


SIZES = [30, 18, 3, 9, 1, 3, 16, 5, 2, 9, 1, 1, 1, 1, 12, 16, 16]


# flash attention ("on") needs larger tolerances. Its keys are in half precision, and signals of several steps
# are computed together
@pytest.mark.share(3, "n_head_kv", "restores")
@pytest.mark.parametrize(
    ("flash", "tolerance", "edge"), [("off", TOLERANCE, AT_THE_EDGE), ("on", max(TOLERANCE, 1e-2), 0.03)]
)
@pytest.mark.parametrize("restores", [False, True])
@pytest.mark.parametrize("n_head_kv", [1, 2, 4])
@pytest.mark.parametrize("group", REDUCE)
def test_signals_match_the_definition(tiny_model, group, n_head_kv, restores, flash, tolerance, edge):
    policy = Recorder(48, 16, group)
    steps = run(tiny_model(n_head_kv=n_head_kv), policy, SIZES, restores=restores, flash=flash)
    for view, (rows, since, end) in zip(policy.views, steps, strict=True):
        expected = {
            name: np.zeros(view.pos.shape)
            for name in ("attn", "last", "squares", "hits", "important", "highest")
        }
        for number, cell, token in placed(view, rows):
            new = [query for query in queries_of(token) if query[0] > since]
            one = [REDUCE[group](heads) for _, _, heads in new]
            expected["attn"][number, cell] = sum(one)
            expected["last"][number, cell] = one[-1]
            expected["squares"][number, cell] = sum(value**2 for value in one)
            # `highest` is the maximum over the row's heads, even if the other signals are sums over them
            expected["highest"][number, cell] = max(a for _, _, heads in new for a in heads)
            hits = [(step, sum(a * t >= 1 for a in heads)) for step, t, heads in new]
            expected["hits"][number, cell] = sum(hit for _, hit in hits)
            expected["important"][number, cell] = max((step for step, hit in hits if hit), default=0)
        for name in ("attn", "last", "squares", "highest"):
            np.testing.assert_allclose(getattr(view, name), expected[name], atol=tolerance, rtol=tolerance)
        for name in ("hits", "important"):
            assert (getattr(view, name) != expected[name]).mean() < edge
        assert end == view.next


@pytest.mark.share(2, "size")
@pytest.mark.parametrize("size", [1, 7, 16, 64])
@pytest.mark.parametrize(("n_query", "group"), [(5, "max"), (90, "sum")])
def test_recent_attention_covers_exactly_the_last_queries(tiny_model, size, n_query, group):
    # between two plans there are fewer than 90 queries, so some came before the last plan. With small
    # batches, some came even before the second last plan
    policy = Recorder(104, 64 if size == 64 else 32, group, n_query)
    steps = run(tiny_model(), policy, [size] * (280 // size))
    for view, (rows, _, end) in zip(policy.views, steps, strict=True):
        assert view.next == end
        expected = np.zeros(view.pos.shape)
        for number, cell, token in placed(view, rows):
            last = [heads for step, _, heads in queries_of(token) if step > end - n_query]
            expected[number, cell] = sum(map(REDUCE[group], last))
        assert (expected > 0).sum() > 100
        np.testing.assert_allclose(view.recent, expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert len(policy.views) > 1


@pytest.mark.parametrize("t", ["stream", "cells"])
def test_t_counts_stream_tokens_or_cells_as_requested(tiny_model, t):
    policy = Recorder(48, 16, t=t)
    for view, (rows, since, _) in zip(policy.views, run(tiny_model(), policy, [48, 16, 16, 16]), strict=True):
        hits = np.zeros(view.pos.shape)
        for number, cell, token in placed(view, rows):
            for step, t_, heads in queries_of(token):
                if step > since:
                    hits[number, cell] += sum(a * t_ >= 1 for a in heads)
        assert (view.hits != hits).mean() < AT_THE_EDGE


@pytest.mark.parametrize("flash", ["off", "on"])
def test_keys_are_those_of_new_cells_before_rope(tiny_model, flash):
    policy = Recorder(48, 16)
    exact = {"type_k": "f32", "type_v": "f32"} if flash == "off" else {"type_k": "f16", "type_v": "f16"}
    for view, (rows, since, end) in zip(
        policy.views, run(tiny_model(n_head_kv=2), policy, SIZES, flash=flash, **exact), strict=True
    ):
        n_new = end - since
        assert view.keys.shape[1] == n_new
        for number, row in enumerate(rows):
            new = np.array([token["key"] for token in row if token["pos"] >= since])
            assert [token["pos"] for token in row if token["pos"] >= since] == view.pos[
                number, -n_new:
            ].tolist()
            actual = view.keys[number]
            # the reference orders a key's elements differently, so products of keys are compared
            tolerance = TOLERANCE if flash == "off" else 0.2
            np.testing.assert_allclose(actual @ actual.T, new @ new.T, atol=tolerance, rtol=tolerance)


FUTURE = Signal.FUTURE | Signal.VALUE_NORMS


def check_future(views, expected):
    assert len(views) == len(expected) > 2
    for view, (rows, _, _) in zip(views, expected, strict=True):
        for number, row in enumerate(rows):
            cells = np.argsort(view.pos[number])
            future = np.array([token["future"] for token in row])
            n_head = future.shape[1]
            assert view.n_head[number] == n_head
            assert not view.future_mean[number, n_head:].any()
            actual = np.stack((view.future_mean, view.future_variance), axis=-1)[number][:n_head, cells]
            np.testing.assert_allclose(actual.swapaxes(0, 1), future, atol=TOLERANCE, rtol=TOLERANCE)
            norms = [token["value_norm"] for token in row]
            np.testing.assert_allclose(view.value_norms[number, cells], norms, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.share(3, "n_head_kv", "restores")
@pytest.mark.parametrize("restores", [False, True])
@pytest.mark.parametrize("n_head_kv", [1, 2, 4])
@pytest.mark.parametrize(("n_query", "n_future", "n_skip"), [(5, 7, 0), (40, 16, 3), (90, 1, 200)])
def test_future_logits_match_the_definition(tiny_model, n_query, n_future, n_skip, n_head_kv, restores):
    ahead = {"n_query": n_query, "n_future": n_future, "n_skip": n_skip}
    policy = Recorder(48, 16, reads=FUTURE, **ahead)
    check_future(policy.views, run(tiny_model(n_head_kv=n_head_kv), policy, SIZES, restores=restores))


@pytest.mark.parametrize(
    "arch", ["smollm3", "maincoder", "qwen2vl", "gpt_oss", "lfm2", "deepseek2", "gemma4", "refact", "gpt2"]
)
def test_future_logits_match_the_definition_in_any_kind_of_model(tiny_model, arch):
    policy = Recorder(48, 16, n_query=20, reads=FUTURE, n_future=9, n_skip=2)
    check_future(policy.views, run(tiny_model(arch), policy, SIZES))


def test_future_logits_nearly_match_the_definition_with_8_bit_keys(tiny_model):
    # stored keys (but not values) are multiplied by an orthogonal matrix, which must not change the logits
    policy = Recorder(48, 16, n_query=20, reads=FUTURE, n_future=9)
    settings = {"type_k": "q8_0", "type_v": "q8_0", "flash": "on"}
    path = tiny_model(n_head_kv=2, head_dim=64)
    for view, (rows, _, _) in zip(policy.views, run(path, policy, SIZES, **settings), strict=True):
        for number, row in enumerate(rows):
            order = np.argsort(view.pos[number])
            future = np.array([token["future"] for token in row])
            actual = view.future_mean[number][:, order].T
            assert np.abs(actual - future[..., 0]).max() < 0.1 * np.abs(future[..., 0]).max()
            norms = np.array([token["value_norm"] for token in row])
            np.testing.assert_allclose(view.value_norms[number, order], norms, rtol=0.05)


def test_signals_computed_for_several_steps_at_once_are_the_same(tiny_model, monkeypatch):
    views = []
    for n_defer in (0, 3, 32):
        monkeypatch.setattr(sizes, "_N_DEFER", n_defer)
        policy = Recorder(48, 16)
        run(tiny_model(), policy, SIZES[:8], flash="on")
        views.append(policy.views)
    for view, *others in zip(*views, strict=True):
        for other in others:
            for name in ("attn", "last", "recent", "squares", "hits", "important", "highest"):
                np.testing.assert_allclose(getattr(other, name), getattr(view, name), atol=1e-4, rtol=1e-4)
