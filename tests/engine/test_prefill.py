"""Whole reading: a prompt is decoded into a large cache, and then compressed once into a small cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest

from kvtool import policies
from kvtool.engine.whole_reader import WholeReader
from kvtool.errors import KvtoolError, PlanError, StreamEnd, UsageError
from kvtool.policies.h2o import H2O
from kvtool.policy import PER_CELL, Plan, Policy, Ranked, Signal
from tests.engine.exact_engines import (
    LOGIT_TOLERANCE,
    assert_continues_as_defined,
    distinct_tokens,
    future_of,
    live_positions,
    open_engine,
    random_tokens,
)
from tests.engine.test_exactness import twin
from tests.reference import bumblebee, transformer


def evict(stream, name, policy, ends=()):
    """Let a reference stream evict by the policy's definition in tests/reference.

    ends: the end of each segment of a prompt. Queries attend only to tokens of the same segment. Therefore
    the last queries of every segment count as the last queries of the prompt.
    """
    twin_keep, _ = twin(name, policy)

    def keep(rows, **params):
        for row in rows if ends else ():
            for token in row:
                later = ends[-1] - min(end for end in ends if token["pos"] < end)
                token["seen"] = [(t + later, heads) for t, heads in token["seen"]]
        return twin_keep(rows, **params)

    stream.evict(keep, pinned=0, budget=policy.budget, slack=policy.slack)


@pytest.mark.share(1, "positions", "n_batch")
@pytest.mark.parametrize(("positions", "n_batch"), [("original", 64), ("in-cache", 512)])
@pytest.mark.parametrize(
    ("name", "heads"),
    [
        *((name, "equal") for name in ("h2o", "tova", "snapkv", "expected", "buzz", "streamingllm")),
        *((name, "adaptive") for name in ("h2o", "snapkv", "expected", "keydiff", "rkv")),
    ],
)
def test_whole_read_keeps_the_tokens_of_the_definition(tiny_model, name, heads, positions, n_batch):
    path, tokens = tiny_model(n_head_kv=2), random_tokens(330)
    policy = policies.fit(name, 48, 8, ["heads=adaptive"] if heads == "adaptive" else [])
    stream = transformer.Stream(transformer.load(path), positions=positions, future=future_of(policy))
    with open_engine(path, policy, positions=positions, n_batch=n_batch, prefill="whole") as engine:
        small = engine.cache_bytes
        engine.read(tokens[:310])
        expected = stream.decode(tokens[:310])[-1]
        evict(stream, name, policy)
        assert np.abs(engine.context.logits()[0] - expected).max() < LOGIT_TOLERANCE
        # the large cache is freed
        if heads == "equal":
            assert engine.cache_bytes == small
        else:
            assert engine.n_until_plan == policy.slack
            assert engine.context.layer_cells.max() < 310
            assert len(set(engine.rows.live.tolist())) > 1
        assert_continues_as_defined(engine, stream, tokens[310:], lambda: evict(stream, name, policy))


@pytest.mark.parametrize("heads", ["equal", "adaptive"])
@pytest.mark.parametrize("name", ["snapkv", "expected"])
def test_layers_that_share_a_budget_hold_it_in_total(tiny_model, name, heads):
    policy = policies.fit(name, 300, 8, ["layers=adaptive", f"heads={heads}"])
    with open_engine(tiny_model(n_head_kv=2, n_layer=3), policy, prefill="whole") as engine:
        engine.read(random_tokens(800))
        n_live = engine.rows.live.reshape(3, 2)
        assert 6 * policy.n_keep - 6 <= n_live.sum() <= 6 * policy.n_keep
        assert len(set(n_live.sum(axis=1).tolist())) > 1
        if heads == "equal":
            assert (n_live[:, 0] == n_live[:, 1]).all()
        # the stream continues, and evicts every 8 tokens
        for part in np.split(random_tokens(64, seed=3), 8):
            engine.step(part)
            engine.evict_if_due()
        assert 6 * policy.n_keep - 6 <= engine.rows.live.sum() <= 6 * policy.n_keep


def test_policy_adopts_the_kept_tokens_of_ragged_rows(monkeypatch, tiny_model):
    adopt, views = H2O.adopt, []

    def noted(self, view, state):
        views.append(view)
        adopt(self, view, state)
        # this also changes the state of dead cells in the shorter rows; the engine has to set it to zero
        # again
        state[0][:, : view.n_kv] += 1

    monkeypatch.setattr(H2O, "adopt", noted)
    policy = policies.fit("h2o", 48, 8, ["heads=adaptive"])
    with open_engine(tiny_model(n_head_kv=2), policy, prefill="whole") as engine:
        engine.read(random_tokens(310))
        (view,) = views
        dead = np.arange(engine.n_kv) >= engine.rows.live[:, None]
        assert dead.any()
        assert view.live.tolist() == engine.rows.live.tolist()
        assert np.array_equal(view.pos < 0, dead)
        (sums, *_) = engine.state
        assert np.array_equal(view.attn > 0, ~dead)
        assert np.array_equal(sums[:, : engine.n_kv] > 0, ~dead)


@dataclass(frozen=True, slots=True)
class Watcher(Policy):
    """Policy that reads all signals, records the views, and keeps the newest tokens."""

    budget: int
    slack: int
    views: list = field(default_factory=list)

    reads = ~Signal.NONE & ~Signal.FUTURE
    n_query = 4
    prefill = "whole"

    def plan(self, view, state):
        self.views.append(view)
        keep = np.zeros(view.pos.shape, np.bool_)
        keep[:, -self.n_keep :] = True
        return Plan(keep)


@dataclass(frozen=True, slots=True)
class WatcherOfRows(Watcher):
    ragged = True


@pytest.mark.parametrize("n", [64, 65, 200])
def test_signals_of_ragged_rows_equal_those_of_equal_rows(tiny_model, n):
    views = []
    for policy in (Watcher(48, 8), WatcherOfRows(48, 8)):
        with open_engine(tiny_model(n_head_kv=2), policy, n_batch=64) as engine:
            engine.read(random_tokens(n))
        views.append(policy.views[0])
    for name in PER_CELL.values():
        expected, actual = (getattr(view, name) for view in views)
        if expected is not None:
            assert expected.any(), name
            assert np.abs(actual - expected).max() < 1e-4, name


@pytest.mark.parametrize("reason", ["rows share a budget", "the policy counts queries"])
def test_prompt_that_cannot_be_read_in_segments_is_streamed(tiny_model, reason):
    # `Whole` reads IMPORTANT, which depends on the number of tokens that a query has seen
    share = reason == "rows share a budget"
    policy = policies.fit("snapkv", 48, 8, ["heads=adaptive"]) if share else Whole(48, 8)
    with open_engine(tiny_model(n_ctx_train=130, n_head_kv=2), policy) as engine:
        assert engine.reads_whole(130)
        assert not engine.reads_whole(131)
        assert engine.read(random_tokens(131)) == 131


def test_rows_that_share_a_budget_read_no_prompt_twice_beyond_the_context(tiny_model):
    policy = policies.fit("kvzip", 48, 8, ["heads=adaptive"])
    with (
        open_engine(tiny_model(n_ctx_train=330, n_head_kv=2), policy) as engine,
        pytest.raises(StreamEnd, match="320 tokens, read twice, .* rows that .* with -o heads=equal"),
    ):
        engine.read(random_tokens(320))


@pytest.mark.parametrize("heads", ["equal", "adaptive"])
def test_prompts_beyond_the_cells_of_an_index_are_not_read_whole(tiny_model, heads):
    path = tiny_model(arch="deepseek32")
    policy = policies.fit("snapkv", 48, 8, [f"heads={heads}"])
    with open_engine(path, policy) as engine:
        assert engine.reads_whole(512)
        assert not engine.reads_whole(513)
        assert engine.read(random_tokens(600)) == 600
    with open_engine(path, policy, prefill="whole") as engine:
        with pytest.raises(UsageError, match="chooses 512 cells by an index: a prompt of 600 tokens cannot"):
            engine.read(random_tokens(600))
        assert engine.read(random_tokens(500)) == 500


def summaries(rows, *, next, pinned, budget, slack, window, sinks, mixture, phi, **_):
    """Return the positions that the definition of BumbleBee's offline algorithm keeps in each row."""
    stays = {*range(sinks), *range(next - window, next)}
    return [sorted(bumblebee.summary(row, stays, budget - slack, mixture, phi)) for row in rows]


@pytest.mark.parametrize("positions", ["original", "in-cache"])
def test_bumblebee_summarizes_a_prompt_and_continues_as_a_stream(tiny_model, positions):
    path, tokens = tiny_model(n_head_kv=2), distinct_tokens(110)
    policy = policies.fit("bumblebee", 32, 8)
    params = policies.chosen(policy)
    stream = transformer.Stream(transformer.load(path), positions=positions)
    with open_engine(path, policy, positions=positions) as engine:
        engine.read(tokens[:80])
        stream.decode(tokens[:80])
        stream.evict(summaries, pinned=0, budget=policy.budget, slack=policy.slack, **params)
        plan = partial(evict, stream, "bumblebee", policy)
        assert_continues_as_defined(engine, stream, tokens[80:], plan)
        assert engine.n_evicted > 70


@pytest.mark.parametrize("name", ["h2o", "snapkv"])
def test_prompt_beyond_the_context_is_read_in_separate_segments(tiny_model, name):
    path, tokens = tiny_model(n_ctx_train=130), random_tokens(310)
    policy = policies.fit(name, 48, 8)
    model, parts = transformer.load(path), []
    for segment in np.array_split(tokens[:300], 3):
        part = transformer.Stream(model)
        part.next = parts[-1].next if parts else 0
        expected = part.decode(segment)
        parts.append(part)
    whole = transformer.join(parts, policy.n_keep)
    evict(whole, name, policy, ends=(100, 200, 300))
    # `join` sets in_cache, so this eviction has closed the gaps between positions. Later evictions leave gaps
    whole.in_cache = False
    with open_engine(path, policy, prefill="whole") as engine:
        engine.read(tokens[:300])
        assert np.abs(engine.context.logits()[0] - expected[-1]).max() < LOGIT_TOLERANCE
        # the next plan also gives the same result, because the signals of the kept cells were not lost
        assert_continues_as_defined(engine, whole, tokens[300:], lambda: evict(whole, name, policy))


ENDED = "the prompt of 131 tokens is longer than the context of 130"
COUNTS = f"{ENDED}, and a policy that counts each token's queries cannot read more in one piece; continue"


@pytest.mark.parametrize(
    ("name", "positions", "options", "message"),
    [
        ("h2o", "original", [], f"{ENDED}; continue with --positions auto or in-cache, or with"),
        ("h2o", "auto", ["heads=adaptive"], f"{ENDED}, and rows that share a budget cannot"),
        ("h2o", "auto", ["score=mean"], f"{COUNTS} with --prefill stream$"),
        ("cam", "auto", ["score=average"], COUNTS),
        ("roco", "auto", [], COUNTS),
        ("weightedkv", "auto", ["merge=false"], COUNTS),
        ("scissorhands", "auto", [], COUNTS),
        ("buzz", "auto", ["logn=true"], COUNTS),
    ],
)
def test_whole_read_beyond_the_context_ends_the_stream(tiny_model, name, positions, options, message):
    policy, path = policies.fit(name, 48, 8, options), tiny_model(n_ctx_train=130)
    with open_engine(path, policy, positions=positions, prefill="whole") as engine:
        with pytest.raises(StreamEnd, match=message):
            engine.read(random_tokens(131))
        assert engine.read(random_tokens(130)) == 130


@dataclass(frozen=True, slots=True)
class Forgetful(Ranked):
    """Policy that divides by `View.lived`, but does not set `counts_queries`."""

    budget: int
    slack: int

    reads = Signal.ATTENTION
    sums = ("attn",)

    def scores(self, view, state):
        return state[0][:, : view.n_kv] / view.lived


def test_policy_that_forgets_counts_queries_is_told_so(tiny_model):
    with open_engine(tiny_model(n_ctx_train=130), Forgetful(48, 8), prefill="whole") as engine:
        with pytest.raises(PlanError, match="no view.lived; set counts_queries = True"):
            engine.read(random_tokens(131))
        assert engine.read(random_tokens(130)) == 130


@pytest.mark.parametrize("name", ["h2o", "recall"])
def test_a_prompt_read_whole_can_be_stopped_and_read_again(tiny_model, name):
    tokens, lengths, policy = random_tokens(300), [], policies.fit(name, 48, 8)

    def stopped():
        lengths.append(engine.n_past)
        return len(lengths) == 3

    with open_engine(tiny_model(), policy, prefill="whole") as engine:
        engine.pin(5)
        assert engine.read(tokens, stopped) == 0
        assert lengths[-1] > 0
        assert (engine.n_past, engine.n_kv, engine.n_archived, engine.n_pinned) == (0, 0, 0, 5)
        assert engine.read(tokens) == 300
        repeated = engine.context.logits().copy()
        assert (np.sort(engine.rows.pos[:, : engine.n_kv], axis=1)[:, :5] == np.arange(5)).all()
    with open_engine(tiny_model(), policy, prefill="whole") as engine:
        engine.pin(5)
        engine.read(tokens)
        assert np.array_equal(engine.context.logits(), repeated)


def test_short_and_later_texts_are_not_read_whole(tiny_model, monkeypatch):
    def fail(*_):
        raise AssertionError("the text was read whole")

    monkeypatch.setattr(WholeReader, "read", fail)
    tokens = random_tokens(200)
    with open_engine(tiny_model(), policies.fit("h2o", 48, 8), prefill="whole") as engine:
        engine.read(tokens[:48])
        assert engine.n_evicted == 0
        engine.read(tokens[48:])
        assert engine.n_past == 200
        assert engine.n_kv <= 48


def test_prompt_read_again_after_a_reset_gives_the_same_result(tiny_model):
    tokens = random_tokens(200)
    with open_engine(tiny_model(), policies.fit("h2o", 48, 8), prefill="whole") as engine:
        results = []
        for _ in range(2):
            engine.read(tokens)
            results.append((engine.context.logits().copy(), live_positions(engine), engine.cache_bytes))
            engine.reset()
        assert np.array_equal(results[0][0], results[1][0])
        assert results[0][1:] == results[1][1:]


@dataclass(frozen=True, slots=True)
class Whole(Policy):
    """Policy that reads prompts whole and keeps the newest tokens.

    Each plan removes the last function from `fails` and calls it.
    """

    budget: int
    slack: int
    fails: list = field(default_factory=list)
    views: list = field(default_factory=list)
    reads = Signal.ATTENTION | Signal.IMPORTANT
    prefill = "whole"

    def start(self, n_row, n_cell, n_dim):
        return (np.zeros((n_row, n_cell), np.float32),)

    def observe(self, view, state):
        state[0][:, : view.n_kv] += view.attn

    def plan(self, view, state):
        self.views.append(view)
        if self.fails:
            self.fails.pop()()
        return Plan(view.pos >= np.sort(view.pos, axis=1)[:, -(self.budget - self.slack), None])


def _raises(error):
    raise error


@pytest.mark.parametrize("error", [ValueError("not today"), StreamEnd("not today"), KeyboardInterrupt()])
def test_failed_plan_of_a_prompt_leaves_an_empty_usable_cache(tiny_model, error):
    tokens, states = random_tokens(200), []
    for fails in ([], [lambda: _raises(error)]):
        with open_engine(tiny_model(), Whole(48, 8, fails)) as engine:
            small = engine.cache_bytes
            engine.hold(3)
            if fails:
                with pytest.raises((KvtoolError, KeyboardInterrupt)):
                    engine.read(tokens)
                assert (engine.n_past, engine.n_kv, engine.n_held, engine.cache_bytes) == (0, 0, 3, small)
            assert engine.read(tokens) == 200
            engine.read(tokens[:30])
            states.append(
                (live_positions(engine), engine.state[0].tolist(), engine.context.logits().tolist())
            )
    assert states[0] == states[1]


@pytest.mark.parametrize(
    ("name", "prefill", "reason"),
    [
        # CORM cannot compress a prompt to a given size, because each row keeps as many tokens as it needs
        ("corm", "whole", "CORM cannot read a prompt whole; choose --prefill stream"),
        ("h2o", "half", "prefill must be stream, whole or exact, got 'half'"),
    ],
)
def test_invalid_ways_to_read_a_prompt_are_refused(tiny_model, name, prefill, reason):
    policy = policies.fit(name, 96, 8)
    with pytest.raises(UsageError, match=reason), open_engine(tiny_model(), policy, prefill=prefill):
        pass
