"""lab/papers/fading.py agrees with the engine's perplexity, and with the definition of its means."""

import math

import numpy as np
import pytest

from kvtool import policies
from kvtool.measure import perplexity
from lab.papers.fading import MERGES, Rule, attend, nll
from tests.engine.exact_engines import TOLERANCE, open_engine, random_tokens
from tests.reference import models


@pytest.mark.parametrize("name", ["h2o", "roco", "streamingllm"])
def test_a_rule_without_means_is_the_policy(tiny_model, name):
    path, tokens, budget = tiny_model(), random_tokens(130), 60
    with open_engine(path, policies.fit(name, budget, 1)) as engine:
        want = perplexity.stream(engine, tokens)
    actual = nll(models.load(path), tokens, Rule.parse(name), budget)
    assert actual == pytest.approx(want, abs=10 * TOLERANCE)


def test_no_rule_is_the_full_cache(tiny_model):
    path, tokens = tiny_model(), random_tokens(120)
    with open_engine(path, policies.fit("full", 128)) as engine:
        want = perplexity.stream(engine, tokens)
    assert nll(models.load(path), tokens, None, 0) == pytest.approx(want, abs=10 * TOLERANCE)


@pytest.mark.parametrize("merge", [name for name in MERGES if name != "cells"])
def test_means_are_those_of_the_definition(merge):
    rng = np.random.default_rng(1)
    n, group, dim, budget, n_query = 60, 2, 8, 20, 4
    query, key, value = (rng.normal(size=shape) for shape in ((n, group, dim), (n, dim), (n, dim)))
    # values that are close to each other, like the values of a model
    value *= 0.05
    given = (each.astype(np.float32) for each in (query, key, value))
    outputs = attend(*given, Rule.parse(f"streamingllm+6:{merge}:{n_query}"), budget)
    assert np.abs(outputs - _attend(query, key, value, budget - 6, 6, merge, n_query)).max() < 1e-5


def test_cells_that_take_the_bytes_of_means():
    query, key, value = (np.zeros(shape, np.float32) for shape in ((60, 2, 8), (60, 8), (60, 8)))
    # a mean takes 8 bytes more than a cell. Each of the 4 * 2 kept queries takes 8 * 2 bytes, and 4 bytes for
    # its total
    rule, cells = (Rule.parse(f"streamingllm+6:{merge}:4") for merge in ("output", "cells"))
    assert rule.n_byte(20, 2, 8) == 20 * 32 + 6 * 8 + 4 * 2 * (16 + 4)
    n_cell = 26
    assert cells.n_byte(20, 2, 8) == n_cell * 32 <= rule.n_byte(20, 2, 8) < (n_cell + 1) * 32
    value[:, 0] = np.arange(60)
    outputs = attend(query, key, value, cells, 20)
    kept = [*range(4), *range(60 - n_cell + 5 - 1, 60)]
    assert outputs[-1, :, 0] == pytest.approx(np.mean(kept))
    # `spare` also keeps the outputs of the queries: 8 * 2 bytes for each of the 4 * 2 queries
    assert Rule.parse("h2o+6:spare:4").n_byte(20, 2, 8) - rule.n_byte(20, 2, 8) == 4 * 2 * 16
    assert Rule.parse("h2o").n_byte(20, 2, 8) == 20 * 32


def test_a_rule_that_is_none_is_refused():
    with pytest.raises(ValueError, match="not a rule: tova\\+4"):
        Rule.parse("tova+4")
    with pytest.raises(ValueError, match="not a rule: h2o\\+4:newest"):
        Rule.parse("h2o+4:newest")


def _attend(query, key, value, n_cell, n_mean, merge, n_query):
    """Keep 4 sinks and the newest tokens; evicted tokens become means, which are dicts."""
    scale = 1 / math.sqrt(query.shape[-1])
    live, means, asked, output = [], [], [], np.empty_like(query)
    for t in range(len(query)):
        live.append({"key": key[t], "value": value[t], "size": 1, "bias": 0.0})
        for g, head_query in enumerate(query[t]):
            logits = [scale * each["key"] @ head_query + each["bias"] for each in live + means]
            total = np.logaddexp.reduce(logits)
            shares = np.exp(np.array(logits) - total)
            output[t, g] = sum(s * each["value"] for s, each in zip(shares, live + means, strict=True))
            asked.append((head_query, total, output[t, g]))
        if len(live) < n_cell:
            continue
        means.append(live.pop(4))
        if len(means) > n_mean:
            some = asked[-n_query * query.shape[1] :]
            _merge(means, merge, scale, some)
    return output


def _merge(means, merge, scale, asked):
    def seen(each):
        logits = (scale * each["key"] @ head_query + each["bias"] - total for head_query, total, _ in asked)
        return np.array([min(math.exp(x), 1) for x in logits])

    if merge == "spare":
        cost = [
            sum(
                s * s * ((each["value"] - out) ** 2).sum()
                for s, (*_, out) in zip(seen(each), asked, strict=True)
            )
            for each in means
        ]
        del means[int(np.argmin(cost))]
        return
    pairs = [(i, j) for i in range(len(means)) for j in range(i)]

    def cost_of(pair):
        a, b = (means[i] for i in pair)
        share = seen(a).sum() / (seen(a).sum() + seen(b).sum())
        mixed = share * a["value"] + (1 - share) * b["value"]
        error = np.outer(seen(a), a["value"] - mixed) + np.outer(seen(b), b["value"] - mixed)
        return (error**2).sum()

    one, other = min(pairs, key=cost_of)
    a, b = means[one], means[other]
    size = a["size"] + b["size"]
    share = np.clip(seen(a).sum() / (seen(a).sum() + seen(b).sum()), 0.01, 0.99)
    mean = {name: share * a[name] + (1 - share) * b[name] for name in ("key", "value")}
    now = sum(math.exp(scale * mean["key"] @ head_query - total) for head_query, total, _ in asked)
    wanted = math.log((seen(a).sum() + seen(b).sum()) / now)
    bias = np.clip(wanted, math.log(size) - 3, math.log(size) + 3)
    means[other] = mean | {"size": size, "bias": bias}
    del means[one]
