"""Claims of the papers' abstracts: their numbers, computed again in another way, and their tests' power."""

from __future__ import annotations

import re
from itertools import product

import numpy as np
import pytest

from kvtool.measure import records
from lab.papers import claims, index, significance, tables, verdicts
from lab.papers.experiments import EXPERIMENTS
from lab.papers.places import samples
from lab.papers.samples import SCORES


def kept(name, label, budget=None):
    """The lines of a run with this label and budget."""
    lines = records.read(tables.RESULTS / f"{name}.jsonl")
    return [line for line in lines if (line["label"], line["budget"]) == (label, budget)]


def rows():
    return [line for line in claims.rows() if line.startswith("|")][2:]


def mean_rouge(line, items):
    """The geometric mean of ROUGE-1, -2 and -L of some items, in percent."""
    return 100 * np.prod([np.mean(np.array(line["scores"][f"rouge{n}"])[items]) for n in "12L"]) ** (1 / 3)


@pytest.mark.parametrize(("run", "row"), [("xsum", 0), ("xsum-1.5b", 1)])
def test_buzz_at_40_percent_has_a_share_of_the_full_caches_rouge_with_an_interval(run, row):
    (buzz,), (full,) = kept(run, "buzz:kept=true", "40%"), kept(run, "full")
    assert buzz["items"] == full["items"]
    n, rng = len(buzz["items"]), np.random.default_rng(1)
    ratio = 100 * mean_rouge(buzz, range(n)) / mean_rouge(full, range(n))
    drawn = [rng.integers(n, size=n) for _ in range(4000)]
    ends = np.quantile([100 * mean_rouge(buzz, at) / mean_rouge(full, at) for at in drawn], [0.025, 0.975])
    shown, *interval = map(int, re.search(r": (\d+) % \((\d+) to (\d+)\)", rows()[row]).groups())
    assert shown == round(ratio)
    # the interval's ends differ a little, because the draws here have another seed
    assert interval == pytest.approx(ends, abs=2)
    assert f"{shown} % ({interval[0]} to {interval[1]})" in (tables.LABORATORY / "buzz.md").read_text()


def test_bytes_of_a_cell_are_those_that_full_records():
    for name, model in (("texts-corm", ""), ("texts-corm-1.5b", tables.LARGE)):
        line = kept(name, "full")[0]
        assert line["bytes"][0] == line["tokens"] * claims._CELL_BYTES[model]


def test_each_claim_stands_once_and_each_of_its_rows_is_measured():
    heads = [row.split(" | ")[0] for row in rows()]
    assert [head.lstrip("| ") for head in heads if head != "| "] == [
        f"**{claim.paper}**: {claim.says}" for claim in claims.CLAIMS
    ]
    assert {claim.paper for claim in claims.CLAIMS} == set(index.TITLES.values())
    assert all(row.count("|") == 6 for row in rows())


def test_tests_against_h2o_are_counted_each_once():
    tests = {}
    n = 0
    names = {name for experiments in index.PAPERS.values() for name in experiments}
    unequal = {name for name in names if EXPERIMENTS[name].unequal}
    assert unequal == {"buzz-table-3-kept"}
    for name in names - unequal:
        for model, table in product(tables.models_of(name), EXPERIMENTS[name].tables):
            places = samples(tables.kept(tables.of_model(EXPERIMENTS[name], model)), table)
            for (row, column), sign in verdicts.compared(places, table).items():
                n += 1
                method, other = (tuple(places[each, column].values.items()) for each in (table.against, row))
                tests[model, table.score, method, other] = (row, table.score, sign)
    assert n == len(tests)
    of_h2o = [sign for row, score, sign in tests.values() if row.startswith("h2o") and SCORES[score].short]
    text = re.sub(r"\s+", " ", list(claims.rows())[-1])
    assert f"have {len(of_h2o)} tests against H2O" in text
    assert -1 not in of_h2o
    assert f"method is ahead in 0, H2O in {of_h2o.count(1)} (" in text
    assert "`buzz-table-3-kept` is not counted" in text


def test_about_as_good_is_told_by_a_small_loss_and_not_by_a_difference_that_was_not_found():
    rng, ones = np.random.default_rng(0), np.ones(12)
    # with noise this large neither test finds anything
    wide = rng.normal(0, 1, 12)
    assert significance.sign_flip_test(wide) > 0.05
    assert significance.not_worse_test(wide, ones, 0.01) > 0.05
    assert significance.power(wide, ones, 0.01) < 0.1
    small = rng.normal(-0.002, 0.002, 12)
    assert significance.not_worse_test(small, ones, 0.01) < 0.05
    assert significance.power(small, ones, 0.01) > 0.99
    # with a loss of about 0.022, above the margin of 0.01, a method is not "about as good"
    assert significance.not_worse_test(small - 0.02, ones, 0.01) > 0.95
    assert significance.not_worse_test(np.ones(4), np.ones(4), 0.01) == 1 / 2**4


def test_the_power_is_how_often_the_test_says_so_without_a_difference():
    rng, ones, margin = np.random.default_rng(2), np.ones(16), 0.5
    draws = rng.normal(size=(400, 16))
    is_significant = [significance.not_worse_test(draw, ones, margin) <= 0.05 for draw in draws]
    about = np.mean([significance.power(draw, ones, margin) for draw in draws])
    assert np.mean(is_significant) == pytest.approx(about, abs=0.08)
