"""Fixtures of the laboratory's tests."""

import pytest

from lab.papers import runner, tables
from lab.papers.commands import EvalRun
from lab.papers.experiments import EXPERIMENTS, RUNS
from lab.papers.experiments.kinds import Experiment


@pytest.fixture
def keep(monkeypatch, tmp_path):
    """keep(lines, *tables) makes the experiment "made-up" and its records. Returns the folder of records."""

    def make(stored, *shown, model="Llama"):
        monkeypatch.setitem(RUNS, "made-up", EvalRun("qa", ("qa.jsonl",), ("full", "h2o"), ("64",)))
        monkeypatch.setitem(EXPERIMENTS, "made-up", Experiment(("made-up",), shown, model))
        runner.rewrite(tmp_path / "made-up.jsonl", lambda _: stored)
        return tmp_path

    return make


@pytest.fixture
def measured(keep):
    """Render a table of made-up lines."""
    return lambda stored, *shown, **more: tables.render("made-up", keep(stored, *shown, **more))
