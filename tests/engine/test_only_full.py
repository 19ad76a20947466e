"""Models whose cells only llama.cpp may edit: the policy `full` runs, and other policies are refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvtool import policies
from kvtool.errors import UsageError
from kvtool.models import layers
from tests.cli.in_process_command import assert_one_line, run_kvtool
from tests.engine.exact_engines import TOLERANCE, open_engine, random_tokens

REASON = "it is one of a test"


@pytest.fixture
def path(talker, monkeypatch):
    """A llama model that kvtool treats like a model that runs only with `full`."""
    monkeypatch.setitem(layers.ONLY_FULL, "llama", REASON)
    return talker


def full():
    return policies.fit("full", 300)


def test_logits_equal_those_without_the_restriction(path, monkeypatch):
    tokens, logits = random_tokens(150), []
    for is_only_full in (True, False):
        if not is_only_full:
            monkeypatch.delitem(layers.ONLY_FULL, "llama")
        with open_engine(path, full()) as engine:
            engine.read(tokens)
            logits.append(engine.context.logits()[-1].copy())
            assert engine.checkpoints.are_whole == is_only_full
    assert np.abs(logits[0] - logits[1]).max() < TOLERANCE


def test_stream_can_be_reset_saved_and_rewound(path):
    tokens = random_tokens(150)
    with open_engine(path, full()) as engine, open_engine(path, full()) as other:
        engine.read(tokens)
        expected = engine.context.logits()[-1].copy()
        engine.reset()
        engine.read(tokens[:70])
        other.restore({name: array.copy() for name, array in engine.save()})
        for each in (engine, other):
            each.read(tokens[70:])
            assert np.abs(each.context.logits()[-1] - expected).max() < TOLERANCE
        # tokens cannot be removed from the cache, so `rewind` restores a copy of the whole cache
        other.reset()
        other.read(tokens[:100])
        other.checkpoints.take()
        other.read(tokens[100:])
        assert other.rewind(120) == 100
        other.read(tokens[100:])
        assert np.abs(other.context.logits()[-1] - expected).max() < TOLERANCE
        assert engine.rewind(100) == engine.n_past == 0


@pytest.mark.parametrize("settings", [{}, {"n_draft": 3}])
def test_other_policies_and_draft_tokens_are_refused(path, settings):
    policy = full() if settings else policies.fit("h2o", 64)
    message = "cannot drop draft tokens" if settings else f"only with --policy full: {REASON}"
    with pytest.raises(UsageError, match=message), open_engine(path, policy, **settings):
        pass


def test_generate_replaces_the_default_policy_by_full(path):
    words = "generate", "-m", path, "-p", "the river", "-n", "8", "--raw", "--json"
    done = run_kvtool(*words)
    assert done.returncode == 0, done.stderr
    assert f"this model runs only with the policy full: {REASON}" in done.stderr
    record = json.loads(done.stdout)
    assert (record["policy"], record["drafted"]) == ("full", 0)
    assert_one_line(
        run_kvtool(*words, "--policy", "h2o"), 2, f"this model runs only with --policy full: {REASON}"
    )
    assert_one_line(run_kvtool(*words, "--draft", "lookup"), 2, "cannot be used with this model")
