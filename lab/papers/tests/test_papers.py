"""The papers' experiments: kvtool accepts their commands, and the records belong to their runs."""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import typer

from kvtool import policies, tasks
from kvtool.cli import app
from kvtool.measure import grid, records
from kvtool.measure.grid import split_policy
from lab.papers import index, runner, samples, tables, texts
from lab.papers.commands import CompareRun, EvalRun, MapRun
from lab.papers.experiments import EXPERIMENTS, RUNS, kinds
from lab.papers.fading import Rule
from lab.papers.lines import is_program
from lab.papers.programs import FadingRun, RulerRun
from lab.papers.tests.made_up import answered, compared, ruled


def test_the_documents_are_what_the_records_kept_say():
    documents = [path.read_text(encoding="utf-8") for path in runner.DOCUMENTS]
    assert [runner.filled(text) for text in documents] == documents
    # each experiment is shown once
    shown = re.findall(r"<!-- experiment (\S+) -->", "".join(documents))
    assert sorted(shown) == sorted(EXPERIMENTS)
    # pages about papers have no tables written by hand: each table comes from the records
    for path, text in zip(runner.DOCUMENTS, documents, strict=True):
        if path.stem in index.PAPERS:
            assert "| --- |" not in re.sub(r"<!-- experiment .*?<!-- end -->", "", text, flags=re.S)


@pytest.mark.parametrize("mark", ["index", "claims", "sharing"])
def test_only_what_stands_between_the_marks_is_made_anew(mark):
    filled = runner.filled(f"a\n<!-- {mark} -->\nstale\n<!-- end -->\nb\n")
    assert re.fullmatch(rf"a\n<!-- {mark} -->\n(\|.+\n)+.*<!-- end -->\nb\n", filled, re.S)
    assert "stale" not in filled
    assert runner.filled(filled) == filled
    assert runner.filled("nothing") == "nothing"


def test_the_documents_show_the_commands_of_every_run():
    text = "".join(path.read_text(encoding="utf-8") for path in runner.DOCUMENTS)
    for name, run in RUNS.items():
        assert [line for line in run.shown().splitlines() if f"    {line}\n" not in text] == [], name


def test_successive_commands_with_the_same_comments_show_them_once():
    runs = [EvalRun("qa", (file,), ("full",), ("10%",)) for file in ("f/a.jsonl", "f/b.jsonl")]
    other = EvalRun("qa", ("f/c.jsonl",), ("h2o",), ("10%",))
    command = "kvtool eval qa {}.jsonl --policy POLICY --budget BUDGET"
    assert list(tables._commands([*runs, other, other], set())) == [
        *(command.format("a"), command.format("b"), "    # POLICY: full", "    # BUDGET: 10%"),
        *(command.format("c"), "    # POLICY: h2o", "    # BUDGET: 10%"),
    ]


def test_what_is_kept_is_of_a_run_and_tells_no_folder():
    for path in tables.RESULTS.glob("*.jsonl"):
        assert path.stem in RUNS, path.name
        labels = {
            split_policy(label.partition(",")[0])[0] for label in getattr(RUNS[path.stem], "policies", ())
        }
        if isinstance(RUNS[path.stem], FadingRun):
            assert {line["label"] for line in records.read(path)} == set(RUNS[path.stem].rules)
            continue
        if isinstance(RUNS[path.stem], MapRun):
            continue
        labels |= {
            f"{label} {type_k}" for label in labels for type_k in getattr(RUNS[path.stem], "types", ())
        }
        labels.add(getattr(RUNS[path.stem], "named", ""))
        for line in records.read(path):
            assert split_policy(line["label"].partition(",")[0])[0] in labels
            assert "/" not in line["of"] + line["model"]


def test_unknown_experiments_are_refused(monkeypatch, tmp_path, capsys):
    with pytest.raises(ValueError, match="no experiment nothing; there are: weightedkv-table-1"):
        tables.fill("<!-- experiment nothing -->\n<!-- end -->")
    monkeypatch.setattr(sys, "argv", ["papers", "run", str(tmp_path), "buzz-table-3", "buzz-table-33"])
    with pytest.raises(SystemExit) as stopped:
        runner.main()
    assert stopped.value.code == 2
    assert "no experiment buzz-table-33; there are: " in capsys.readouterr().err


@pytest.mark.parametrize("name", RUNS)
def test_every_command_is_one_that_kvtool_takes(name):
    run = RUNS[name]
    for label in getattr(run, "policies", ()):
        policy, options = split_policy(label)
        for budget in getattr(run, "budgets", None) or [getattr(run, "budget", "4096")]:
            # a budget in percent depends on the prompt, and `kvtool eval` increases it to the policy's
            # minimum. 4,096 cells are enough for every policy
            n = 4096 if budget.endswith("%") else int(budget)
            fitted = policies.fit(policy, n, None, list(options))
            assert not (fitted.ragged and "whole" in getattr(run, "more", ()))
        policies.parse_options(policy, policies.load(policy), list(options))
    if isinstance(run, EvalRun):
        given = [run.more[i + 1] for i, word in enumerate(run.more) if word == "--set"]
        tasks.make(run.task, given)
    if isinstance(run, CompareRun) and not run.budgets:
        assert all(map(grid.keeps_all_it_needs, run.policies))
    for rule in getattr(run, "rules", ()):
        assert rule == "full" or Rule.parse(rule).n_byte(run.budget, 3, 64)
    commands = list(run.commands())
    assert commands
    for command in commands:
        if is_program(command):
            assert find_spec(command[0])
            continue
        kind = typer.main.get_command(app).commands[command[0]]
        # raises an error for an unknown option or a wrong value
        kind.make_context(command[0], list(command[1:]))


def test_every_run_belongs_to_an_experiment_and_every_table_to_a_score():
    assert {run for experiment in EXPERIMENTS.values() for run in experiment.runs} == set(RUNS)
    for experiment in EXPERIMENTS.values():
        labels = {label for run in experiment.runs for label in getattr(RUNS[run], "policies", ())}
        for table in experiment.tables:
            scores = table.scores.values() or [table.score]
            assert set(scores) <= set(samples.SCORES)
            asked_for = {getattr(RUNS[run], "task", None) for run in experiment.runs}
            asked_for |= {name for run in experiment.runs for name in getattr(RUNS[run], "questions", ())}
            assert set(table.scores) <= asked_for
            rows = {*table.rows, *(row for row, _ in table.paper), *filter(None, [table.against])}
            rows = {row.removesuffix(" q8_0").removesuffix(" q4_0") for row in rows}
            labels |= {getattr(RUNS[run], "named", "") for run in experiment.runs}
            labels |= {rule for run in experiment.runs for rule in getattr(RUNS[run], "rules", ())}
            if table.row == "budget":
                rows -= {budget for run in experiment.runs for budget in RUNS[run].budgets}
            # the rows of a MapRun are means of a map, and `labels` has only policies
            assert rows - {"corm, capped"} <= labels or isinstance(RUNS[experiment.runs[0]], MapRun)
            assert not table.paper or experiment.model


def test_an_eval_is_shown_once_and_run_for_each_policy_and_budget():
    run = EvalRun("qa", ("folder/qa.jsonl",), ("full", "h2o:decay=0.9"), ("10%", "64"), limit=3)
    head, tail = ("eval", "qa", "folder/qa.jsonl", "--policy"), ("--limit", "3")
    assert list(run.commands()) == [
        (*head, "full", *tail),
        (*head, "h2o", "-o", "decay=0.9", "--budget", "10%", *tail),
        (*head, "h2o", "-o", "decay=0.9", "--budget", "64", *tail),
    ]
    assert run.shown() == (
        "kvtool eval qa qa.jsonl --policy POLICY --budget BUDGET --limit 3\n"
        "    # POLICY: full, h2o -o decay=0.9\n    # BUDGET: 10%, 64"
    )
    named = EvalRun("qa", ("folder/qa.jsonl",), ("full",), (), ("--temp", "0"), limit=3, named="--temp 0")
    assert named.shown() == "kvtool eval qa qa.jsonl --policy full --limit 3\n    # with --temp 0"
    warm = replace(named, more=("--temp", "1"), named="--temp 1")
    assert list(tables._commands([named, warm], set())) == [
        "kvtool eval qa qa.jsonl --policy full --limit 3",
        "    # with --temp 0",
        "    # with --temp 1",
    ]
    assert CompareRun(texts.EIGHT, ("corm",), (), 9).shown().endswith("\n    # FILE: the eight texts")
    assert CompareRun(("f/t.txt",), ("corm",), (), 9).shown() == (
        "kvtool compare t.txt --policies corm --budgets '' --types f16 --max-tokens 9"
    )
    assert CompareRun(("f/t.txt", "f/u.txt"), ("corm",), (), 9, model="m.gguf").shown() == (
        "kvtool compare FILE --policies corm --budgets '' --types f16 --max-tokens 9 -m m.gguf\n"
        "    # FILE: t.txt, u.txt"
    )


def test_a_run_asks_for_what_is_missing_and_keeps_what_tables_need(monkeypatch, tmp_path):
    data, work, results = (tmp_path / name for name in ("data", "work", "results"))
    (data / "sets").mkdir(parents=True)
    (data / "sets" / "qa.jsonl").write_text("")
    results.mkdir()
    run = EvalRun("qa", ("sets/qa.jsonl",), ("full", "h2o"), ("10%",), limit=1)
    monkeypatch.setitem(RUNS, "made-up", run)
    calls = []

    def kvtool(*arguments):
        calls.append(arguments)
        policy = arguments[arguments.index("--policy") + 1]
        budget = None if policy == "full" else "10%"
        record = answered(policy, [], budget, 1, {"f1": 1 / 3}, seconds=0.123)
        records.append(Path(arguments[arguments.index("--records") + 1]), record)
        return ""

    monkeypatch.setattr(runner, "_kvtool", kvtool)
    runner.run(data, work, ["made-up"], ["-m", "tiny"], results)
    assert [arguments[2] for arguments in calls] == [str(data / "sets" / "qa.jsonl")] * 2
    assert all(
        arguments[-5:-2] == ("-m", "tiny", "--records") and arguments[-1] == "--resume" for arguments in calls
    )
    lines = records.read(results / "made-up.jsonl")
    assert [(line["label"], line["scores"], line["seconds"]) for line in lines] == [
        ("full", {"f1": [0.333333]}, 0.1),
        ("h2o", {"f1": [0.333333]}, 0.1),
    ]
    assert "of a data set" not in (results / "made-up.jsonl").read_text()

    # lines that are kept are not measured again, even without the folder of all results
    del calls[:]
    runner.run(data, tmp_path / "other", ["made-up"], [], results)
    assert not calls
    monkeypatch.setitem(RUNS, "made-up", replace(run, limit=2))
    assert len(runner.missing("made-up", results)) == 2
    runner.run(data, tmp_path / "other", ["made-up"], [], results)
    assert [arguments[arguments.index("--policy") + 1] for arguments in calls] == ["full", "h2o"]
    assert [line["label"] for line in records.read(results / "made-up.jsonl")] == ["full", "h2o"]


def test_a_program_that_goes_on_keeps_its_records_itself(monkeypatch, tmp_path):
    tasks = ("vt", "cwe")
    run = RulerRun(tasks, ("full",), (), 128, ("f16",), ("after",), 4096, 1, model="m.gguf")
    monkeypatch.setitem(RUNS, "made-up", run)
    calls = []

    def python(*words):
        calls.append(words)
        given = dict(zip(words[2::2], words[3::2], strict=True))
        records.append(Path(given["--json"]), ruled("full", 0, 1, part=given["--tasks"]))

    monkeypatch.setattr(runner, "_python", python)
    for _ in range(2):
        runner.run(tmp_path, tmp_path / "work", ["made-up"], ["-t", "1"], tmp_path, tmp_path)
    assert [words[:2] for words in calls] == [("-m", "lab.papers.ruler")] * 2
    # both tasks are in one file
    assert {words[-1] for words in calls} == {str(tmp_path / "work" / "m" / "made-up.jsonl")}
    assert str(tmp_path / "paul_graham_essays") in " ".join(calls[0])
    assert [line["of"] for line in records.read(tmp_path / "made-up.jsonl")] == list(tasks)


def program(monkeypatch, *arguments):
    """Run the program with two made-up experiments: each runs one model on one text."""
    texts = ("texts/a.txt",)
    small, large = (
        CompareRun(texts, ("full",), (), 64, model=model, minutes=1) for model in ("", kinds.LARGE)
    )
    monkeypatch.setattr(runner, "RUNS", {"small": small, "large": large})
    for name, run in runner.RUNS.items():
        monkeypatch.setitem(RUNS, name, run)
        monkeypatch.setitem(EXPERIMENTS, f"of-{name}", kinds.Experiment((name,), (kinds.ScoreTable("nll"),)))
    monkeypatch.setattr(sys, "argv", ["papers", *map(str, arguments)])
    runner.main()


def test_what_is_not_there_is_said_before_anything_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(runner, "_python", lambda *_: pytest.fail("it ran"))
    folders = ("--results", tmp_path / "results", "--work", tmp_path)
    for more, message in (
        (["of-small"], f"not there: {tmp_path / 'texts' / 'a.txt'}; lab/papers/README.md says"),
        (["of-large"], f"a.txt, {kinds.LARGE}; lab/papers/README.md says"),
        (["of-small", "-t", "x"], "argument -t/--threads: invalid int value: 'x'"),
    ):
        with pytest.raises(SystemExit) as stopped:
            program(monkeypatch, "run", tmp_path, *more, *folders)
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err
    program(monkeypatch, "files", "of-large")
    assert capsys.readouterr().out == "texts/a.txt\n"
    with pytest.raises(SystemExit):
        program(monkeypatch, "show", "of-small", "--results", tmp_path / "typo")
    assert f"no folder {tmp_path / 'typo'}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["of-small", "of-large"])
def test_another_models_results_are_its_own(monkeypatch, tmp_path, capsys, name):
    document = tmp_path / "document.md"
    document.write_text(f"<!-- experiment {name} -->\n<!-- end -->")
    monkeypatch.setattr(runner, "DOCUMENTS", (document,))
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    calls = []

    def kvtool(*arguments):
        calls.append(arguments)
        path = Path(arguments[arguments.index("--records") + 1])
        line = compared("full", {}, 64, [1.5] * 32, text="a.txt", tokens=64, model="/m/b.gguf")
        records.append(path, line)
        return ""

    monkeypatch.setattr(runner, "_kvtool", kvtool)
    folders = ("--results", tmp_path / "results")
    program(monkeypatch, "run", tmp_path, name, "-m", "b.gguf", "--work", tmp_path / "work", *folders)
    assert calls[0][-7:-4] == ("-m", "b.gguf", "-t")
    # with --results, `run` does not write the document
    assert "kvtool" not in document.read_text()
    program(monkeypatch, "show", name, *folders)
    shown = capsys.readouterr().out
    assert "-m b.gguf" in shown
    assert f"| `full` | {np.exp(1.5):.2f}" in shown
    assert "SmolLM2" not in shown
    assert "Qwen" not in shown
    del calls[:]
    program(monkeypatch, "run", tmp_path, name, "-m", "b.gguf", "--work", tmp_path / "work", *folders)
    assert not calls
    assert "all of it is there" in capsys.readouterr().err


def test_defaults_of_whoever_measures_do_not_count(monkeypatch):
    for name in ("KVTOOL_TEMP", "KVTOOL_CONFIG", "KVTOOL_CACHE"):
        monkeypatch.setenv(name, "/mine")
    code = "import os; print(sorted((k, v) for k, v in os.environ.items() if k.startswith('KVTOOL_')))"
    variables = ast.literal_eval(runner._python("-c", code))
    assert ("KVTOOL_CACHE", "/mine") in variables
    assert ("KVTOOL_CONFIG", os.devnull) in variables
    assert {name for name, _ in variables} <= {"KVTOOL_CACHE", "KVTOOL_CONFIG", "KVTOOL_WHEELS"}


def test_comparisons_of_the_same_tokens_share_their_results(monkeypatch, tmp_path):
    files = []
    monkeypatch.setattr(runner, "_kvtool", lambda *arguments: files.append(arguments[-2]))
    run = CompareRun(("t.txt",), ("full",), (), 64)
    for name, each in {
        "one": run,
        "two": replace(run, policies=("corm",)),
        "three": replace(run, max_tokens=65),
    }.items():
        monkeypatch.setitem(RUNS, name, each)
    runner.run(tmp_path, tmp_path, ["one", "two", "three"], [], tmp_path)
    assert files[0] == files[1] != files[2]


def test_of_a_text_only_policies_without_lines_are_compared():
    run = CompareRun(("f/t.txt", "f/u.txt"), ("full", "h2o", "corm"), ("64", "128"), 65)
    about = {"of": "t.txt", "tokens": 65}
    places = [("full", None), ("corm", None), ("corm, capped", "64"), ("corm, capped", "128"), ("h2o", "64")]
    lines = [about | {"label": label, "budget": budget} for label, budget in places]
    commands = [ask.command for ask in run.missing(lines, "made-up")]
    assert [(command[1], command[3]) for command in commands] == [
        ("f/t.txt", "h2o"),
        ("f/u.txt", "full,h2o,corm"),
    ]
    done = [*lines, about | {"label": "h2o", "budget": "128"}]
    assert [ask.command[1] for ask in run.missing(done, "made-up")] == ["f/u.txt"]


def test_a_plan_says_what_is_missing_and_what_it_costs(monkeypatch, tmp_path):
    monkeypatch.setitem(
        RUNS, "small", EvalRun("qa", ("qa.jsonl",), ("full", "h2o"), ("64",), limit=1, minutes=10)
    )
    large = EvalRun("qa", ("qa.jsonl",), ("full",), (), limit=1, model=kinds.LARGE, minutes=7)
    monkeypatch.setitem(RUNS, "large", large)
    monkeypatch.setitem(EXPERIMENTS, "made-up", kinds.Experiment(("small", "large")))
    monkeypatch.setitem(EXPERIMENTS, "shares-it", kinds.Experiment(("small",)))
    runner.rewrite(tmp_path / "small.jsonl", lambda _: [{"label": "h2o", "budget": "64", "items": ["a"]}])
    runner.rewrite(tmp_path / "large.jsonl", lambda _: [{"label": "full", "budget": None, "items": ["a"]}])
    small = "(SmolLM2-135M-Instruct): 10 minutes; 1 of 2 commands missing, about 5 minutes"
    assert list(runner.plan(["made-up", "shares-it"], tmp_path)) == [
        f"made-up {small}",
        "made-up (Qwen2.5-Coder-1.5B-Instruct): 7 minutes; all there",
        f"shares-it {small}",
        "in all 0.3 hours of one core, of which 0.1 are missing",
    ]


def test_of_types_full_alone_has_several():
    run = CompareRun(("f/t.txt",), ("full", "h2o"), ("50",), 65, types=("f16", "q8_0"))
    assert [command[7:9] for command in run.commands()] == [("f16,q8_0", "--max-tokens")]
    nll = np.linspace(1, 2, 32).tolist()
    results = [
        compared("full", {}, 65, nll),
        compared("full", {}, 65, nll, type_k="q8_0", kv_bytes=2**19),
        compared("h2o", {}, 50, nll),
    ]
    lines = list(run.lines(results))
    assert [line["label"] for line in lines] == ["full", "full q8_0", "h2o"]
    assert [line["bytes"] for line in lines] == [[2**20, 0], [2**19, 0], [2**20, 0]]
    assert not list(run.missing(lines, "made-up"))
    assert [ask.command[3] for ask in run.missing(lines[::2], "made-up")] == ["full"]


def test_results_of_two_texts_with_one_name_are_not_mixed(monkeypatch, tmp_path):
    def measure(policy, digest):
        monkeypatch.setitem(RUNS, "made-up", CompareRun(("t.txt",), (policy,), ("8",), 65))
        record = compared(policy, {}, 8, [1.0] * 32, text_sha256=digest)
        monkeypatch.setattr(runner, "_kvtool", lambda *words: records.append(Path(words[-2]), record))
        runner.run(tmp_path, tmp_path / f"{policy}-{digest}", ["made-up"], [], tmp_path)

    measure("local", "a")
    measure("h2o", "a")
    before = records.read(tmp_path / "made-up.jsonl")
    assert [line["text_sha256"] for line in before] == ["a", "a"]
    with pytest.raises(SystemExit, match=r"made-up.jsonl has results of another text that is called t.txt"):
        measure("tova", "b")
    assert records.read(tmp_path / "made-up.jsonl") == before


def test_a_command_that_fails_ends_the_run(monkeypatch, tmp_path):
    monkeypatch.setitem(RUNS, "made-up", CompareRun(("no-such-file.txt",), ("full",), (), 64))
    with pytest.raises(SystemExit, match="no-such-file.txt.*exit code 5"):
        runner.run(tmp_path, tmp_path, ["made-up"], [], tmp_path)


def test_ctrl_c_ends_a_run_in_one_line_without_the_command(monkeypatch, capsys):
    with pytest.raises(KeyboardInterrupt):
        runner._python("-c", "raise SystemExit(130)")

    def stopped():
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "main", stopped)
    with pytest.raises(SystemExit) as end:
        runpy.run_module("lab.papers", run_name="__main__")
    assert end.value.code == 130
    assert capsys.readouterr().err == "stopped; the same command continues\n"


def test_without_a_folder_only_the_folder_is_asked_for(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        program(monkeypatch, "run")
    assert capsys.readouterr().err.endswith("error: the following arguments are required: DATA\n")


def test_the_papers_numbers_are_read_by_columns(monkeypatch, tmp_path):
    monkeypatch.setattr(kinds, "NUMBERS", tmp_path)
    tables = {
        "one": {"columns": ["a, 1", "b"], "rows": {"full": ["1.0", None], "h2o": ["2", "3.50"]}},
        "two": {"columns": ["c"], "rows": {"h2o": ["4"]}},
        "short": {"columns": ["a", "b"], "rows": {"full": ["1"]}},
    }
    (tmp_path / "mine.json").write_text(json.dumps({"tables": tables}))
    one = {("full", "a, 1"): "1.0", ("h2o", "a, 1"): "2", ("h2o", "b"): "3.50"}
    assert kinds.numbers("mine", "one") == one
    assert kinds.numbers("mine", "one", "two") == one | {("h2o", "c"): "4"}
    with pytest.raises(ValueError, match="zip"):
        kinds.numbers("mine", "short")


@pytest.mark.parametrize("path", sorted(kinds.NUMBERS.glob("*.json")), ids=lambda path: path.stem)
def test_every_number_of_a_paper_is_in_a_table(path):
    """Find misspelt policies and unused tables. Otherwise their numbers would be missing unnoticed."""
    tables = [table.paper.items() for each in EXPERIMENTS.values() for table in each.tables]
    for name in json.loads(path.read_text(encoding="utf-8"))["tables"]:
        numbers = kinds.numbers(path.stem, name)
        assert any(numbers.items() & shown for shown in tables)
        assert {split_policy(label)[0] for label, _ in numbers} <= set(policies.names())
        assert min(map(float, numbers.values())) > 0
