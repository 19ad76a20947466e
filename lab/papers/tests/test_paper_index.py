"""The index says for each table and figure how many differences have the paper's direction."""

from __future__ import annotations

import pytest

from lab.papers import index, places, tables, verdicts
from lab.papers.commands import EvalRun
from lab.papers.experiments import EXPERIMENTS, RUNS
from lab.papers.experiments.kinds import Experiment, ScoreTable, directions
from lab.papers.samples import SCORES
from lab.papers.tests.made_up import lines


def test_a_papers_directions_are_those_of_its_own_method():
    paper = {("buzz", "64"): "3", ("h2o", "64"): "2.5", ("tova", "64"): "4", ("cam", "64"): "3"}
    paper |= {("full", "64"): "9", ("h2o", "128"): "9"}
    assert directions(paper, "buzz") == {("h2o", "64"): -1, ("tova", "64"): 1}


@pytest.fixture
def indexed(monkeypatch, keep):
    """Return the lines of the index for an experiment with made-up lines, and one that was not run."""
    monkeypatch.setattr(index, "PAPERS", {"buzz": {"made-up": "answers", "not-run": "more"}})
    monkeypatch.setitem(
        EXPERIMENTS, "not-run", Experiment(("not-there",), (ScoreTable("f1", against="buzz"),))
    )
    monkeypatch.setitem(RUNS, "not-there", EvalRun("qa", ("qa.jsonl",), ("buzz",), ("64",)))
    return lambda stored, *shown: list(index.rows(keep(stored, *shown)))


def test_the_index_tells_scores_apart_and_what_has_no_own_row(indexed):
    shown = [ScoreTable(score, against="buzz", worse=("h2o",)) for score in ("f1", "logp")]
    buzz = {"f1": [0.5, 0.4] * 3, "logp": [-1.0, -2.0] * 3}
    h2o = {"f1": [0.5, 0.3] * 3, "logp": [-2.0, -3.0] * 3}
    verdict = "F1: too few for a test; likelihood: 1 same, of 1"
    assert verdict in "".join(indexed(lines(buzz__64=buzz, h2o__64=h2o), *shown))
    assert "only the other policies are measured" in "".join(indexed(lines(h2o__64=h2o), *shown))


def test_scores_that_stand_next_to_others_in_the_index_have_a_name():
    for name in (name for experiments in index.PAPERS.values() for name in experiments):
        scores = {table.score for table in EXPERIMENTS[name].tables if table.against}
        assert len(scores) < 2 or all(SCORES[score].short for score in scores), name


BETTER, BUZZ, WORSE = ({"f1": scores} for scores in ([0.6, 0.5] * 6, [0.5, 0.4] * 6, [0.4, 0.3] * 6))
NOISE = {"f1": BUZZ["f1"][::-1]}


@pytest.mark.parametrize(
    ("others", "against", "worse", "verdict"),
    [
        ({"h2o__64": WORSE}, "buzz", ("h2o",), "1 same, of 1"),
        ({"h2o__64": WORSE}, "buzz", (), "no test"),
        ({"h2o__64": WORSE}, "h2o", ("buzz",), "1 other, of 1"),
        ({"h2o__64": NOISE}, "h2o", ("buzz",), "0 of 1"),
        (
            {"h2o__64": BETTER, "tova__64": WORSE, "cam__64": WORSE},
            "buzz",
            ("h2o", "tova", "cam"),
            "2 same, 1 other, of 3",
        ),
    ],
)
def test_the_index_says_what_became_of_each_table_and_figure(indexed, others, against, worse, verdict):
    shown = indexed(lines(buzz__64=BUZZ, **others), ScoreTable("f1", against=against, worse=worse))
    assert f"| [`made-up`](buzz.md) | answers | {verdict} | not measured |" in shown
    assert "| [`not-run`](buzz.md) | more | not measured | not measured |" in shown


def test_columns_of_budgets_stand_in_order():
    assert sorted(["100", "9 %", "none", "87.5 %"], key=verdicts.size) == ["none", "9 %", "87.5 %", "100"]


def test_one_difference_has_one_verdict():
    """The same two samples get the same verdict in every table."""
    stored = {}
    names = [name for experiments in index.PAPERS.values() for name in experiments]
    for name, model in [(each, model) for each in names for model in tables.models_of(each)]:
        for table in EXPERIMENTS[name].tables:
            kept = places.samples(tables.kept(tables.of_model(EXPERIMENTS[name], model)), table)
            for (row, column), sign in verdicts.compared(kept, table).items():
                both = (tuple(kept[each, column].values.items()) for each in (table.against, row))
                stored.setdefault((model, table.score, *both), {})[name, row, column] = sign
    assert not [signs for signs in stored.values() if len(set(signs.values())) > 1]
