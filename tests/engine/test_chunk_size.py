"""Steps decoded in parts leave the same state as whole steps, and other threads wait for at most one part."""

from __future__ import annotations

import numpy as np
import pytest

from kvtool import policies
from kvtool.engine.chunk_size import ChunkSize
from tests.engine.exact_engines import TOLERANCE, open_engine, random_tokens

SLOW = 1e-9
"""Target time of a part in seconds.

Every part takes longer, so all parts have the minimum size of 32 tokens.
"""


def sizes(parts):
    return [part.stop - part.start for part in parts]


def test_part_size_adapts_to_the_target_time():
    size = ChunkSize(0.5)
    for took, n in ((0.2, 64), (0.31, 128), (0.4, 128), (0.6, 128), (0.7, 64), (0.7, 32), (0.7, 32)):
        size.note(size.n, took)
        assert size.n == n
    # only steps of at least n = 32 tokens count, so the short time of one token is ignored
    size.note(60, 0.8)
    size.note(1, 0.01)
    assert size.n == 32
    size.note(60, 0.5)
    assert size.n == 64


def test_short_remainder_is_merged_or_divided_evenly():
    for n, expected in ((130, [32, 32, 32, 34]), (104, [32, 32, 40]), (105, [32, 32, 21, 20]), (20, [20])):
        size, begin, parts = ChunkSize(0.5), 0, []
        while begin < n:
            parts.append(size.part(begin, n))
            begin = parts[-1].stop
        assert sizes(parts) == expected


@pytest.mark.parametrize(
    ("name", "prefill"),
    [
        *((name, "stream") for name in policies.names() if name != "kvzip"),
        *((name, "whole") for name in ("h2o", "snapkv", "bumblebee", "kvzip")),
    ],
)
def test_dividing_steps_into_parts_does_not_change_the_result(tiny_model, name, prefill):
    """Some steps reach the end of the context. Dividing a step must not change where gaps are closed."""
    n_calls, tokens, runs = [], random_tokens(420), []
    settings = {"n_batch": 160, "prefill": prefill, "n_ctx": 512 if name == "full" else 400}
    policy = policies.fit(name, 480 if name == "full" else 200, None if name == "full" else 16)
    for size in (None, ChunkSize(SLOW)):
        with open_engine(tiny_model(), policy, **settings) as engine:
            engine.chunk_size = size
            n_calls.append(0)

            def stopped():
                n_calls[-1] += 1
                return False

            assert engine.read(tokens, stopped) == 420
            runs.append((engine.cells().pos.tolist(), engine.n_evicted, engine.context.logits()[-1].copy()))
    (cells, n_evicted, logits), (in_parts, n_evicted_in_parts, logits_in_parts) = runs
    assert cells == in_parts
    assert n_evicted == n_evicted_in_parts
    assert np.abs(logits - logits_in_parts).max() < TOLERANCE
    assert n_calls[0] < n_calls[1]


def test_steps_that_search_the_archive_are_not_divided(tiny_model):
    with open_engine(tiny_model(), policies.fit("recall", 200, 80, ["chunk=64"])) as engine:
        engine.chunk_size = ChunkSize(SLOW)
        lengths = sizes(engine.steps(random_tokens(400), late=True, every=False))
        assert engine.n_archived
    assert lengths[0] == 32
    assert max(lengths) == 64


@pytest.mark.parametrize("name", ["h2o", "corm"])
def test_stop_within_a_step_keeps_the_budget(tiny_model, name):
    tokens = random_tokens(300)
    with open_engine(tiny_model(), policies.fit(name, 64, 8), n_batch=256) as engine:
        engine.chunk_size = ChunkSize(SLOW)
        assert 96 <= engine.read(tokens, lambda: engine.n_past >= 96) < 128
        assert engine.n_until_plan >= 0
        assert engine.read(tokens[engine.n_past :]) == 300 - 96
