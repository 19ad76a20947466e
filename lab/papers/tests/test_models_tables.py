"""The tables of several models."""

from __future__ import annotations

import re

from lab.papers import runner, tables
from lab.papers.commands import EvalRun
from lab.papers.experiments import EXPERIMENTS, RUNS, kinds
from lab.papers.experiments.kinds import Experiment, ScoreTable
from lab.papers.tests.made_up import lines


def two_models(monkeypatch, tmp_path, large_score):
    """Render an experiment with a run of each of two models. The larger model's has only `large_score`."""
    scores = {"": {"f1": [0.75, 0.75]}, kinds.LARGE: {large_score: [0.25, 0.25]}}
    for model, stored in scores.items():
        name = f"made-up{model}"
        monkeypatch.setitem(RUNS, name, EvalRun("qa", ("qa.jsonl",), ("full",), (), model=model))
        runner.rewrite(tmp_path / f"{name}.jsonl", lambda _, stored=stored: lines(full=stored))
    shown = ScoreTable("f1"), ScoreTable("acc_norm", ("of",))
    runs = tuple(f"made-up{model}" for model in scores)
    monkeypatch.setitem(EXPERIMENTS, "made-up", Experiment(runs, shown))
    return tables.render("made-up", tmp_path)


def test_each_model_has_columns_of_its_own(monkeypatch, tmp_path):
    text = two_models(monkeypatch, tmp_path, "f1")
    assert text.startswith("    kvtool eval qa qa.jsonl --policy POLICY")
    assert f"-m {kinds.LARGE}" in text
    assert "F1, %:\n\n| policy | 135M: None | 1.5B: None |" in text
    assert "| `full` | 75.0 | 25.0 |" in text


def test_each_model_has_tables_of_its_own_if_they_differ(monkeypatch, tmp_path):
    first, second = two_models(monkeypatch, tmp_path, "acc_norm").split("**Qwen2.5-Coder-1.5B-Instruct**")
    assert first.startswith("**SmolLM2-135M-Instruct**\n\n    kvtool eval qa qa.jsonl --policy POLICY")
    assert "75.0" in first
    assert "25.0" in second
    assert f"-m {kinds.LARGE}" in second


def test_one_table_may_have_all_models_each_with_its_own_budgets(monkeypatch, tmp_path):
    of_model = {
        "small": lines(full={"f1": [1, 1]}, h2o__64={"f1": [0, 0]}, h2o__32={"f1": [0, 1]}),
        "large": [
            line | {"model": "large.gguf"} for line in lines(full={"f1": [1, 0]}, h2o__8={"f1": [1, 1]})
        ],
    }
    for name, stored in of_model.items():
        model = "" if name == "small" else "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
        monkeypatch.setitem(RUNS, name, EvalRun("qa", ("qa.jsonl",), ("full",), (), model=model))
        runner.rewrite(tmp_path / f"{name}.jsonl", lambda _, stored=stored: stored)
    # a row without measurements is not shown
    table = ScoreTable("f1", ("model", "budget"), rows=("full", "h2o", "roco"), names={"m.gguf": "small"})
    monkeypatch.setitem(EXPERIMENTS, "made-up", Experiment(("small", "large"), (table,), together=True))
    text = tables.render("made-up", tmp_path)
    assert re.findall(r"^\| .*", text, re.M) == [
        "| policy | small, 64 | small, 32 | large.gguf, 8 |",
        "| --- | ---: | ---: | ---: |",
        "| `full` | 100.0 | 100.0 | 50.0 ±50.0 |",
        "| `h2o` | 0.0 | 50.0 ±50.0 | 100.0 |",
    ]


def test_tables_with_the_same_single_column_are_one_table(measured):
    stored = lines(full={"f1": [0.5], "acc_norm": [0.2]}, h2o__64={"f1": [0.75], "acc_norm": [0.25]})
    tables_shown = (
        ScoreTable("f1"),
        ScoreTable("acc_norm", rows=("h2o",)),
        ScoreTable("acc_norm", ("of",), head="row"),
    )
    assert re.findall(r"^\| .*", measured(stored, *tables_shown), re.M) == [
        "| policy, 64 | F1, % | Accuracy by likelihood a byte, % |",
        "| --- | ---: | ---: |",
        "| `full` | 50.0 |  |",
        "| `h2o` | 75.0 | 25.0 |",
        "| row | file |",
        "| --- | ---: |",
        "| full | 20.0 |",
        "| h2o | 25.0 |",
    ]
