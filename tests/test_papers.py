"""The papers' experiments: kvtool takes their commands, and their tables show what the records say."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer

from kvtool import policies, tasks
from kvtool.cli import app
from kvtool.measure import records, statistics
from kvtool.measure.grid import split_policy

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import experiments
import papers
from commands import Compare, Eval, Inspect
from experiments import EXPERIMENTS, RUNS, Experiment, Table

VERSIONS = {"model": "m.gguf", "kvtool": "1", "llama_cpp_python": "2", "patch": "3"}


def lines(**scores):
    """A line per policy, "h2o__64" for a budget of 64: scores by name."""
    found = []
    for number, (name, of_items) in enumerate(scores.items()):
        label, _, budget = name.partition("__")
        items = [f"i{i}" for i in range(len(next(iter(of_items.values()))))]
        about = {
            "label": label,
            "budget": budget or None,
            "of": "file",
            "items": items,
            "seconds": 60 + number,
        }
        found.append(about | {"scores": of_items} | VERSIONS)
    return found


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Render a table of made-up lines."""

    def render(found, *tables, model="Llama"):
        monkeypatch.setitem(RUNS, "made-up", Eval("qa", ("qa.jsonl",), ("full", "h2o"), ("64",)))
        monkeypatch.setitem(EXPERIMENTS, "made-up", Experiment(("made-up",), tables, model))
        records.rewrite(tmp_path / "made-up.jsonl", lambda _: found)
        return papers.render("made-up", tmp_path)

    return render


# the document


def test_the_documents_are_what_the_records_kept_say():
    texts = [path.read_text(encoding="utf-8") for path in papers.DOCUMENTS]
    assert [papers.tables(text) for text in texts] == texts
    # every experiment once
    shown = re.findall(r"<!-- experiment (\S+) -->", "".join(texts))
    assert sorted(shown) == sorted(EXPERIMENTS)
    # and no table of the papers' by hand
    outside = re.sub(r"<!-- experiment .*?<!-- end -->", "", texts[0], flags=re.S)
    assert "| --- |" not in outside


def test_what_is_kept_is_of_a_run_and_tells_no_folder():
    for path in papers.RESULTS.glob("*.jsonl"):
        assert path.stem in RUNS, path.name
        labels = {split_policy(label.partition(",")[0])[0] for label in RUNS[path.stem].policies}
        for line in records.read(path):
            assert split_policy(line["label"].partition(",")[0])[0] in labels
            assert "/" not in line["of"] + line["model"]


def test_a_table_of_tasks_has_a_score_of_each(measured):
    tasks = {"qa": "logp", "stream": "nll"}
    table = Table("", ("task",), "full", names={"stream": "stream, perplexity"}, scores=tasks, title="All")
    found = [
        {"label": label, "budget": budget, "task": task, "of": "f", "items": ["a", "b", "c"]}
        | {"scores": {name: [0.0, other, other]}, "seconds": 1}
        | VERSIONS
        for task, name, other in (("qa", "logp", -3.0), ("stream", "nll", 0.3))
        for label, budget, other in (("full", None, 0.0), ("h2o", "20%", other))
    ]
    # of another task, which is not asked for
    found.append(found[0] | {"task": "choice", "scores": {"acc": [1, 1, 1]}})
    shown = measured(found, table, model="")
    assert shown.split("\n\n")[1:3] == [
        "All:",
        "| policy | qa | stream, perplexity |\n| --- | ---: | ---: |\n"
        "| `full` | 0.00 ±0.00 | 1.00 ±0.00 |\n"
        # a difference of two standard errors and no more is none
        "| `h2o` | -2.00 ±1.00 | 1.22 ±0.12 |",
    ]


def test_only_what_stands_between_the_marks_is_made_anew(measured):
    measured(lines(h2o__64={"f1": [0.5, 0.7]}), Table("f1"))
    text = (
        "a\n<!-- experiment made-up -->\nold\n<!-- end -->\nb\n<!-- experiment made-up -->\n<!-- end -->\nc\n"
    )
    first, second = papers.tables(text), papers.tables(papers.tables(text))
    assert first == second
    assert "old" not in first
    assert re.fullmatch(r"a\n<!--.*-->\nb\n<!--.*-->\nc\n", first, re.S)
    assert first.count("kvtool eval qa qa.jsonl") == 2


def test_unknown_experiments_are_refused(monkeypatch, tmp_path, capsys):
    with pytest.raises(SystemExit, match="no experiment nothing; there are: weightedkv-table-1"):
        papers.tables("<!-- experiment nothing -->\n<!-- end -->")
    monkeypatch.setattr(sys, "argv", ["papers.py", "run", str(tmp_path), "buzz-table-3", "buzz-table-33"])
    with pytest.raises(SystemExit) as stopped:
        papers.main()
    assert stopped.value.code == 2
    assert "no experiment buzz-table-33; there are: " in capsys.readouterr().err


# the commands


@pytest.mark.parametrize("name", RUNS)
def test_every_command_is_one_that_kvtool_takes(name):
    run = RUNS[name]
    for label in run.policies:
        policy, options = split_policy(label)
        for budget in run.budgets if isinstance(run, Compare | Eval) else [run.budget]:
            # a share of the shortest prompt gives way to the smallest budget that works
            n = 4096 if budget.endswith("%") else int(budget)
            policies.fit(policy, n, None, list(options))
        policies.parse_options(policies.load(policy), list(options))
        assert not (policies.load(policy).ragged and "whole" in getattr(run, "more", ()))
    if isinstance(run, Eval):
        given = [run.more[i + 1] for i, word in enumerate(run.more) if word == "--set"]
        tasks.make(run.task, given)
    commands = list(run.commands())
    assert commands
    for command in commands:
        kind = typer.main.get_command(app).commands[command[0]]
        # raises for an option that there is not, or a value of another kind
        kind.make_context(command[0], command[1:])


def test_every_run_belongs_to_an_experiment_and_every_table_to_a_score():
    assert {run for each in EXPERIMENTS.values() for run in each.runs} == set(RUNS)
    for each in EXPERIMENTS.values():
        labels = {label for run in each.runs for label in RUNS[run].policies}
        for table in each.tables:
            scores = table.scores.values() or [table.score]
            assert set(scores) <= set(papers.SCORES)
            assert set(table.scores) <= {getattr(RUNS[run], "task", None) for run in each.runs}
            asked = {*table.rows, *(row for row, _ in table.paper), *filter(None, [table.against])}
            assert asked - {"corm, capped"} <= labels
            assert not table.paper or each.model


def test_an_eval_is_shown_once_and_run_for_each_policy_and_budget():
    run = Eval("qa", ("folder/qa.jsonl",), ("full", "h2o:decay=0.9"), ("10%", "64"), ("--limit", "3"))
    head, tail = ["eval", "qa", "folder/qa.jsonl", "--policy"], ["--limit", "3"]
    assert list(run.commands()) == [
        [*head, "full", *tail],
        [*head, "h2o", "-o", "decay=0.9", "--budget", "10%", *tail],
        [*head, "h2o", "-o", "decay=0.9", "--budget", "64", *tail],
    ]
    assert run.shown() == (
        "kvtool eval qa qa.jsonl --policy POLICY --budget BUDGET --limit 3\n"
        "    # POLICY: full, h2o -o decay=0.9\n    # BUDGET: 10%, 64"
    )
    assert Compare("f/t.txt", ("corm",), (), 9).shown() == (
        "kvtool compare t.txt --policies corm --budgets '' --types f16 --max-tokens 9"
    )


# what is kept of the records


def compared(policy, params, budget, nll, **more):
    return {
        "policy": policy,
        "params": params,
        "budget": budget,
        "text": "t.txt",
        "tokens": 65,
        "n_scored": 64,
        "nll_blocks": [2 * value for value in nll],
        "cells": 13.0,
        "cpu_s": 0.65,
        "seconds": 5.0,
        **VERSIONS,
        "model": "/somewhere/m.gguf",
        **more,
    }


def test_of_a_comparison_its_own_cells_are_kept_with_the_most_exact_name():
    run = Compare("t.txt", ("full", "buzz", "buzz:swap=true", "corm"), ("50",), 65)
    nll = np.linspace(1, 2, 32).tolist()
    found = [
        compared("full", {}, 65, nll),
        compared("corm", {"window": 256}, 8192, nll),
        compared("buzz", {"swap": False}, 50, nll),
        compared("buzz", {"swap": True}, 50, nll),
        compared("corm", {"window": 20}, 50, nll),
        compared("buzz", {"swap": False}, 60, nll),
        compared("h2o", {}, 50, nll),
        {**compared("buzz", {"swap": False}, 50, nll), "error": "no"},
    ]
    kept = list(run.lines(found))
    assert [(line["label"], line["budget"]) for line in kept] == [
        ("full", None),
        ("corm", None),
        ("buzz", "50"),
        ("buzz:swap=true", "50"),
        ("corm, capped", "50"),
    ]
    assert kept[0]["scores"] == {"nll": pytest.approx(nll), "evicted": [0.8], "ms": [10]}
    assert kept[0]["weights"] == {"nll": [2] * 32}
    assert kept[0]["seconds"] == 0.65
    assert kept[0]["model"] == "m.gguf"


def answered(policy, options, budget, number, scores, **more):
    return {
        "task": "qa",
        "policy": policy,
        "options": options,
        "budget": budget,
        "id": f"i{number}",
        "file": "qa.jsonl",
        "scores": scores,
        "seconds": 2.0,
        "output": "of a data set",
        **VERSIONS,
        **more,
    }


def test_of_a_task_scores_are_kept_and_no_outputs():
    run = Eval("qa", ("folder/qa.jsonl",), ("full", "h2o:decay=0.9"), ("10%",))
    found = [
        answered("full", [], None, 1, {"f1": 1.0}),
        answered("h2o", ["decay=0.9"], "10%", 1, {"f1": 0.25}),
        {**answered("h2o", ["decay=0.9"], "10%", 2, {}), "error": "does not fit"},
    ]
    full, h2o = run.lines(found)
    assert full == {
        "label": "full",
        "budget": None,
        "task": "qa",
        "of": "qa.jsonl",
        "items": ["i1"],
        "scores": {"f1": [1.0]},
        "seconds": 2,
        **VERSIONS,
    }
    assert (h2o["label"], h2o["budget"], h2o["items"], h2o["seconds"]) == (
        "h2o:decay=0.9",
        "10%",
        ["i1", "i2"],
        4,
    )
    assert h2o["scores"] == {"f1": [0.25, None]}


def test_of_a_choice_the_right_ones_share_is_kept():
    run = Eval("choice", ("c.jsonl",), ("full",), ())
    more = {"task": "choice", "choices": ["a", "b"], "references": ["b"], "logp": [-3.0, -2.0]}
    (line,) = run.lines([answered("full", [], None, 1, {"acc": 1.0}, **more)])
    assert line["scores"]["right"] == [pytest.approx(np.log(np.exp(-2) / (np.exp(-2) + np.exp(-3))))]


def test_of_a_look_at_the_cells_each_quarters_share_is_kept():
    run = Inspect(("a.txt",), ("h2o", "h2o:sinks=2"), "20", 8)
    record = {
        "policy": "h2o",
        "params": {"sinks": 2, "window": 4},
        "budget": 20,
        "file": "a.txt",
        "share": [1, 0.5, 0, 0, 0.25, 0.25, 1, 1],
        "seconds": 1.0,
        **VERSIONS,
    }
    kept = list(run.lines([record]))
    assert [line["scores"]["held"] for line in kept] == [[0.75], [0], [0.25], [1]]
    assert len({line["part"] for line in kept}) == 4
    assert {line["label"] for line in kept} == {"h2o:sinks=2"}
    assert [command[3:6] for command in run.commands()][1] == ["h2o", "-o", "sinks=2"]


# the statistics


def test_a_cell_is_a_mean_with_its_standard_error_and_the_papers_number(measured):
    rng = np.random.default_rng(0)
    full, h2o = rng.random(30), rng.random(30)
    text = measured(
        lines(full={"f1": full.tolist()}, h2o__64={"f1": h2o.tolist()}, h2o__128={"f1": full.tolist()}),
        Table("f1", paper={("h2o", "64"): "12.3", ("tova", "64"): "4.5"}),
    )
    error = 100 * full.std(ddof=1) / np.sqrt(30)
    all_kept = f"{100 * full.mean():.1f} ±{error:.1f}"
    evicted = f"{100 * h2o.mean():.1f} ±{100 * h2o.std(ddof=1) / np.sqrt(30):.1f}"
    assert f"| policy | 64 | 128 |\n| --- | ---: | ---: |\n| `full` | {all_kept} | {all_kept} |\n" in text
    assert f"| `h2o` | {evicted} (12.3) | {all_kept} |\n| `tova` | (4.5) |  |\n" in text
    assert "In brackets: the paper's numbers, with Llama." in text
    assert "*30 items, 3 minutes; m, kvtool 1, llama-cpp-python 2, patch 3.*" in text


def test_differences_are_paired_and_named_where_a_table_s_tests_tell_them(measured):
    noise = np.random.default_rng(0).normal(size=40)
    spread = np.tile([1, -1], 20)
    # of 40 items of spread 1 the mean's error is 0.16; three tests need 2.5 of it
    error = spread.std(ddof=1) / np.sqrt(40)
    text = measured(
        lines(
            buzz__64={"logp": noise.tolist()},
            h2o__64={"logp": (noise + spread + 3 * error).tolist()},
            tova__64={"logp": (noise + spread - 3 * error).tolist()},
            local__64={"logp": (noise + spread + 2.1 * error).tolist()},
        ),
        Table("logp", against="buzz"),
    )
    ends = dict(re.findall(r"\| `(\w+)` \| .*?±[\d.]+ ?(\w*) \|", text))
    # alone, local's would be told, and is once the others are
    assert ends == {"buzz": "", "h2o": "better", "tova": "worse", "local": "better"}
    alone = np.tile([1.0, -1.0], 20) + 2.1 * error
    many = {f"h2o:decay=0.{i}__64": {"logp": (noise + alone).tolist()} for i in range(1, 9)}
    text = measured(lines(buzz__64={"logp": noise.tolist()}, **many), Table("logp", against="buzz"))
    assert "better" not in text


def test_of_perplexities_lower_is_better_and_errors_are_of_blocks(measured):
    rng = np.random.default_rng(0)
    counts = statistics.block_counts(1000)
    means = rng.normal(3, 0.2, len(counts))
    of_blocks = {
        "of": "t.txt",
        "budget": "64",
        "tokens": 1001,
        "weights": {"nll": counts.tolist()},
        "seconds": 0,
        **VERSIONS,
    }
    found = [
        {**of_blocks, "label": "buzz", "scores": {"nll": means.tolist()}},
        {**of_blocks, "label": "h2o", "scores": {"nll": (means + 0.1).tolist()}},
    ]
    text = measured(found, Table("nll", against="buzz"))
    nll, error = statistics.mean_error(*statistics.joined(means * counts, counts))
    assert f"| `buzz` | {np.exp(nll):.2f} ±{np.exp(nll) * error:.2f} |" in text
    assert f"| `h2o` | {np.exp(nll + 0.1):.2f} ±{np.exp(nll + 0.1) * error:.2f} worse |" in text
    assert "*1,001 tokens" in text


def test_the_papers_differences_are_counted(measured):
    better, same = [0.9, 0.8] * 5, [0.1, 0.8, 0.9, 0.0] * 2 + [0.5, 0.4]
    own = [0.5, 0.4] * 5
    found = lines(
        full={"f1": better},
        buzz__64={"f1": own},
        h2o__64={"f1": better},
        tova__64={"f1": better},
        local__64={"f1": same},
        cam__64={"f1": better},
    )
    paper = {"full": "9", "buzz": "5", "h2o": "6", "tova": "4", "local": "3", "cam": "5", "roco": "1"}
    text = measured(found, Table("f1", against="buzz", paper={(row, "64"): n for row, n in paper.items()}))
    # h2o is as there, tova is not, local is not told; full, equal ones and what was not measured do not count
    assert (
        "In brackets: the paper's numbers, with Llama.\n"
        "Where a difference can be told here, it is either way.\n"
        "Of its 3 differences from `buzz`, 1 appears here, 1 is reversed, 1 cannot be told (5 tests in the "
        "table).\n" in text
    )
    lower = measured(
        [line | {"scores": {"ms": line["scores"]["f1"]}} for line in found],
        Table("ms", against="buzz", paper={("buzz", "64"): "5", ("h2o", "64"): "6"}),
    )
    assert "it is the paper's.\nOf its 1 difference from `buzz`, 1 appears here, 0 are" in lower
    # one number each is no test
    single = [line | {"scores": {"f1": line["scores"]["f1"][:1]}, "items": ["a"]} for line in found]
    text = measured(single, Table("f1", against="buzz", paper={(row, "64"): n for row, n in paper.items()}))
    assert "No difference can be told here.\nOf its 3 differences" in text
    assert "0 cannot be told (0 tests in the table),\n3 are of single numbers, which have no test." in text


def test_what_the_paper_says_without_numbers_is_told_as_well(measured):
    better, same, own = [0.9, 0.8] * 5, [0.1, 0.8, 0.9, 0.0] * 2 + [0.5, 0.4], [0.5, 0.4] * 5
    found = lines(buzz__64={"f1": own}, h2o__64={"f1": better}, local__64={"f1": same}, full={"f1": better})
    told = {
        "h2o": "it is the other way round.\nOf its 1 difference from `buzz`, 0 appear here, 1 is reversed",
        "local": "No difference can be told here.\nOf its 1 difference from `buzz`, 0 appear here, 0 are",
    }
    for worse, said in told.items():
        assert said in measured(found, Table("f1", against="buzz", worse=(worse,)))
    text = measured(found, Table("f1", against="h2o", worse=("buzz", "local", "full")))
    assert (
        "it is the paper's.\nOf its 3 differences from `h2o`, 1 appears here, 0 are reversed, 2 cannot be"
        in text
    )
    # what was not measured tells nothing
    assert "differences" not in measured(found, Table("f1", against="buzz", worse=("tova",)))
    assert "differences" not in measured(found, Table("f1", against="cam", worse=("h2o",)))


def test_the_geometric_means_error_is_that_of_draws():
    rng = np.random.default_rng(0)
    scores = {
        name: rng.gamma(3, size, 400) for name, size in (("rouge1", 0.1), ("rouge2", 0.02), ("rougeL", 0.08))
    }
    linear = papers._rouge({name: values.tolist() for name, values in scores.items()})
    drawn = rng.integers(400, size=(4000, 400))
    geometric = np.prod([values[drawn].mean(axis=1) for values in scores.values()], axis=0) ** (1 / 3)
    mean, error = statistics.mean_error(np.array(linear), np.ones(400))
    assert mean == pytest.approx(np.prod([values.mean() for values in scores.values()]) ** (1 / 3))
    assert error == pytest.approx(geometric.std(), rel=0.05)
    # an item that failed is none, and no bigram at all leaves no error
    assert papers._rouge({"rouge1": [0.5, None], "rouge2": [0.5, None], "rougeL": [0.5, None]}) == [0.5, None]
    assert papers._rouge({"rouge1": [0.5, 0.5], "rouge2": [0, 0], "rougeL": [0.5, 0.5]}) == [0, None]


def test_a_pooled_column_has_the_items_of_all(measured):
    found = lines(h2o__64={"f1": [0.0, 0.2]})
    other = [line | {"of": "other", "scores": {"f1": [0.4, 1.0]}} for line in found]
    text = measured(found + other, Table("f1", ("of",), names={"file": "first"}, pooled="all"))
    assert "| policy | first | other | all |" in text
    assert "| `h2o` | 10.0 ±10.0 | 70.0 ±30.0 | 40.0 ±" in text


def test_rows_and_budgets_are_those_asked_for(measured):
    found = lines(
        full={"f1": [1, 0]}, h2o__64={"f1": [1, 0]}, h2o__128={"f1": [0, 0]}, tova__64={"f1": [0, 1]}
    )
    text = measured(found, Table("f1", rows=("full", "tova")))
    assert "| policy | 64 |\n| --- | ---: |\n| `full` | 50.0 ±50.0 |\n| `tova` | 50.0 ±50.0 |\n" in text
    text = measured(found, Table("f1", rows=("h2o", "full"), budgets=("128",)))
    assert re.findall(r"^\| .*", text, re.M) == [
        "| policy | 128 |",
        "| --- | ---: |",
        "| `h2o` | 0.0 ±0.0 |",
        "| `full` | 50.0 ±50.0 |",
    ]


def test_what_was_never_run_says_so(tmp_path):
    for name in EXPERIMENTS:
        text = papers.render(name, tmp_path)
        assert text.endswith("\n\nNot measured yet.")
        assert "| --- |" not in text


# running


def test_a_run_asks_for_what_is_missing_and_keeps_what_tables_need(monkeypatch, tmp_path):
    data, work, results = (tmp_path / name for name in ("data", "work", "results"))
    (data / "sets").mkdir(parents=True)
    (data / "sets" / "qa.jsonl").write_text("")
    results.mkdir()
    run = Eval("qa", ("sets/qa.jsonl",), ("full", "h2o"), ("10%",), ("--limit", "1"))
    monkeypatch.setitem(RUNS, "made-up", run)
    asked = []

    def kvtool(*arguments):
        asked.append(arguments)
        policy = arguments[arguments.index("--policy") + 1]
        budget = None if policy == "full" else "10%"
        record = answered(policy, [], budget, 1, {"f1": 1 / 3}, seconds=0.123)
        records.append(Path(arguments[arguments.index("--json") + 1]), record)
        return ""

    monkeypatch.setattr(papers, "_kvtool", kvtool)
    papers.run(data, work, ["made-up"], ["-m", "tiny"], results)
    assert [arguments[2] for arguments in asked] == [str(data / "sets" / "qa.jsonl")] * 2
    assert all(
        arguments[-5:-2] == ("-m", "tiny", "--json") and arguments[-1] == "--resume" for arguments in asked
    )
    kept = records.read(results / "made-up.jsonl")
    assert [(line["label"], line["scores"], line["seconds"]) for line in kept] == [
        ("full", {"f1": [0.333333]}, 0.1),
        ("h2o", {"f1": [0.333333]}, 0.1),
    ]
    assert "of a data set" not in (results / "made-up.jsonl").read_text()

    del asked[:]
    papers.run(data, tmp_path / "other", ["made-up"], [], results, only=["h2o"])
    assert [arguments[arguments.index("--policy") + 1] for arguments in asked] == ["h2o"]
    assert records.read(results / "made-up.jsonl") == kept
    papers.run(data, tmp_path / "other", ["made-up"], [], results, only=["full"])
    assert [line["label"] for line in records.read(results / "made-up.jsonl")] == ["h2o", "full"]


def test_inspect_is_run_once_a_text_and_policy(monkeypatch, tmp_path):
    monkeypatch.setitem(RUNS, "made-up", Inspect(("a.txt", "b.txt"), ("h2o",), "20", 8))
    said = {
        "policy": "h2o",
        "params": {},
        "budget": 20,
        "share": [1.0] * 8,
        "seconds": 1.0,
        "model": "/x/m.gguf",
        "text": [],
    }
    asked = []
    monkeypatch.setattr(papers, "_kvtool", lambda *arguments: asked.append(arguments) or json.dumps(said))
    monkeypatch.setattr(records, "versions", lambda: {name: VERSIONS[name] for name in list(VERSIONS)[1:]})
    for _ in range(2):
        papers.run(tmp_path, tmp_path / "work", ["made-up"], ["-t", "1"], tmp_path)
    assert [arguments[1] for arguments in asked] == ["a.txt", "b.txt"]
    assert [line["of"] for line in records.read(tmp_path / "made-up.jsonl")] == ["a.txt"] * 4 + ["b.txt"] * 4


def test_comparisons_of_the_same_tokens_share_their_results(monkeypatch, tmp_path):
    files = []
    monkeypatch.setattr(papers, "_kvtool", lambda *arguments: files.append(arguments[-2]))
    run = Compare("t.txt", ("full",), (), 64)
    for name, each in {
        "one": run,
        "two": replace(run, policies=("corm",)),
        "three": replace(run, max_tokens=65),
    }.items():
        monkeypatch.setitem(RUNS, name, each)
    papers.run(tmp_path, tmp_path, ["one", "two", "three"], [], tmp_path)
    assert files[0] == files[1] != files[2]


def test_a_command_that_fails_ends_the_run(monkeypatch, tmp_path):
    monkeypatch.setitem(RUNS, "made-up", Compare("no-such-file.txt", ("full",), (), 64))
    with pytest.raises(SystemExit, match="no-such-file.txt.*exit code 5"):
        papers.run(tmp_path, tmp_path, ["made-up"], [], tmp_path)


def test_the_papers_numbers_are_read_by_columns(monkeypatch, tmp_path):
    monkeypatch.setattr(experiments, "NUMBERS", tmp_path)
    tables = {
        "one": {"columns": ["a, 1", "b"], "rows": {"full": ["1.0", None], "h2o": ["2", "3.50"]}},
        "two": {"columns": ["c"], "rows": {"h2o": ["4"]}},
        "short": {"columns": ["a", "b"], "rows": {"full": ["1"]}},
    }
    (tmp_path / "mine.json").write_text(json.dumps({"tables": tables}))
    one = {("full", "a, 1"): "1.0", ("h2o", "a, 1"): "2", ("h2o", "b"): "3.50"}
    assert experiments.numbers("mine", "one") == one
    assert experiments.numbers("mine", "one", "two") == one | {("h2o", "c"): "4"}
    with pytest.raises(ValueError, match="zip"):
        experiments.numbers("mine", "short")


@pytest.mark.parametrize("path", sorted(experiments.NUMBERS.glob("*.json")), ids=lambda path: path.stem)
def test_every_number_of_a_paper_is_in_a_table(path):
    """A misspelt policy, or a table that no experiment uses, would not be shown."""
    tables = [table.paper.items() for each in EXPERIMENTS.values() for table in each.tables]
    for name in json.loads(path.read_text(encoding="utf-8"))["tables"]:
        numbers = experiments.numbers(path.stem, name)
        assert any(numbers.items() & shown for shown in tables)
        assert {split_policy(label)[0] for label, _ in numbers} <= set(policies.names())
        assert min(map(float, numbers.values())) > 0
