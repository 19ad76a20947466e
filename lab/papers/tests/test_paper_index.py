"""The index says of each table and figure which differences are the paper's, and against whom."""

from __future__ import annotations

from kvtool.measure import records
from lab.papers import index, places, tables, verdicts
from lab.papers.commands import Eval
from lab.papers.experiments import EXPERIMENTS, RUNS
from lab.papers.experiments.kinds import Experiment, Table, directions
from lab.papers.samples import SCORES
from lab.papers.tests.made_up import lines


def test_a_papers_directions_are_those_of_its_own_method():
    paper = {("buzz", "64"): "3", ("h2o", "64"): "2.5", ("tova", "64"): "4", ("cam", "64"): "3"}
    paper |= {("full", "64"): "9", ("h2o", "128"): "9"}
    assert directions(paper, "buzz") == {("h2o", "64"): -1, ("tova", "64"): 1}


def test_the_index_tells_scores_apart_and_what_has_no_own_row(monkeypatch, tmp_path):
    entry = index.Entry("Table 1", "answers", ("made-up",))
    monkeypatch.setattr(index, "PAPERS", {"buzz": (entry,)})
    monkeypatch.setitem(RUNS, "made-up", Eval("qa", ("qa.jsonl",), ("buzz", "h2o"), ("64",)))
    shown = tuple(Table(score, against="buzz", worse=("h2o",)) for score in ("f1", "logp"))
    monkeypatch.setitem(EXPERIMENTS, "made-up", Experiment(("made-up",), shown))
    own = {"f1": [0.5, 0.4] * 3, "logp": [-1.0, -2.0] * 3}
    other = {"f1": [0.5, 0.3] * 3, "logp": [-2.0, -3.0] * 3}
    records.rewrite(tmp_path / "made-up.jsonl", lambda _: lines(buzz__64=own, h2o__64=other))
    said = "F1: too few texts or items for a test; likelihood: **same direction**: 1 of 1, `h2o`"
    assert said in "".join(index.rows(tmp_path))
    records.rewrite(tmp_path / "made-up.jsonl", lambda _: lines(h2o__64=other))
    assert "only the other policies are measured" in "".join(index.rows(tmp_path))


def test_scores_that_stand_beside_others_in_the_index_have_a_name():
    for entry in (entry for entries in index.PAPERS.values() for entry in entries):
        tables_of = [table for name in entry.experiments for table in EXPERIMENTS[name].tables]
        told = {table.score for table in tables_of if table.against}
        assert len(told) < 2 or all(SCORES[score].short for score in told), entry.name


def test_the_index_says_what_became_of_each_table_and_figure(monkeypatch, tmp_path):
    own, other = [0.5, 0.4] * 5, [0.4, 0.3] * 5
    entries = (
        index.Entry("Table 1", "answers", ("made-up",)),
        index.Entry("Table 2", "more", ("not-run",)),
        index.Entry("Figure 1", "the method", said="a drawing"),
    )
    monkeypatch.setattr(index, "PAPERS", {"buzz": entries})
    monkeypatch.setitem(RUNS, "made-up", Eval("qa", ("qa.jsonl",), ("buzz", "h2o", "tova"), ("64",)))
    monkeypatch.setitem(EXPERIMENTS, "not-run", Experiment(("not-there",), (Table("f1", against="buzz"),)))
    monkeypatch.setitem(RUNS, "not-there", Eval("qa", ("qa.jsonl",), ("buzz",), ("64",)))
    records.rewrite(tmp_path / "made-up.jsonl", lambda _: lines(buzz__64={"f1": own}, h2o__64={"f1": other}))
    said = {
        ("h2o",): "**same direction**: 1 of 1, `h2o`",
        (): "numbers; nothing to compare them with",
    }
    for worse, verdict in said.items():
        table = Table("f1", against="buzz", worse=worse)
        monkeypatch.setitem(EXPERIMENTS, "made-up", Experiment(("made-up",), (table,)))
        shown = list(index.rows(tmp_path))
        assert f"| Table 1 | answers | {verdict} | not measured | `made-up` |" in shown
        assert "| Table 2 | more | not measured | not measured | `not-run` |" in shown
        assert "| Figure 1 | the method | a drawing |  |  |" in shown
    table = Table("f1", against="h2o", worse=("buzz",))
    monkeypatch.setitem(EXPERIMENTS, "made-up", Experiment(("made-up",), (table,)))
    assert "**other direction**: 1 of 1, `buzz`" in "".join(index.rows(tmp_path))
    noise = lines(buzz__64={"f1": own}, h2o__64={"f1": own[::-1]})
    records.rewrite(tmp_path / "made-up.jsonl", lambda _: noise)
    assert "cannot be told (1 difference)" in "".join(index.rows(tmp_path))
    assert index.fill_index("a\n<!-- index -->\nold\n<!-- end -->\n", tmp_path).count("Table 1") == 1


def test_a_rival_is_named_without_its_options_unless_it_is_the_same_policy():
    table = Table("nll", against="buzz:kept=true")
    rows = {"h2o:sinks=4": "`h2o`", "buzz:logn=true": "`buzz:logn=true`", "buzz": "`buzz`", "full": "`full`"}
    assert {row: verdicts.rival(row, table) for row in rows} == rows
    assert verdicts.rival("keys before RoPE", Table("values", against="values", head="matrix")) == (
        "keys before RoPE"
    )


def test_the_index_names_the_rivals_of_each_direction(monkeypatch, tmp_path):
    own, better, worse = [0.5, 0.4] * 6, [0.6, 0.5] * 6, [0.4, 0.3] * 6
    entry = index.Entry("Table 1", "answers", ("made-up",))
    monkeypatch.setattr(index, "PAPERS", {"buzz": (entry,)})
    monkeypatch.setitem(RUNS, "made-up", Eval("qa", ("qa.jsonl",), ("buzz", "h2o"), ("64",)))
    table = Table("f1", against="buzz", worse=("h2o", "tova", "cam"))
    monkeypatch.setitem(EXPERIMENTS, "made-up", Experiment(("made-up",), (table,)))
    found = lines(buzz__64={"f1": own}, h2o__64={"f1": better}, tova__64={"f1": worse}, cam__64={"f1": worse})
    records.rewrite(tmp_path / "made-up.jsonl", lambda _: found)
    shown = "".join(index.rows(tmp_path))
    assert "**same direction**: 2 of 3, `tova`, `cam`; **other direction**: 1 of 3, `h2o`" in shown
    assert "names: none." in shown
    records.rewrite(tmp_path / "made-up.jsonl", lambda _: found[:2] + [found[2] | {"patch": "4"}])
    assert "names: `made-up`." in "".join(index.rows(tmp_path))


def test_a_verdict_names_columns_where_a_rival_has_several():
    own, better, worse = [0.5, 0.4] * 6, [0.6, 0.5] * 6, [0.4, 0.3] * 6
    found = lines(buzz__64={"f1": own}, buzz__128={"f1": own}, h2o__64={"f1": worse}, h2o__128={"f1": better})
    table = Table("f1", against="buzz", worse=("h2o",))
    told = verdicts.verdict(places.samples(found, table), table)
    assert (told.same, told.other) == ((("`h2o`", "64"),), (("`h2o`", "128"),))
    assert verdicts.listed((("`h2o`", "64"), ("`cam`", ""), ("`h2o`", "9"))) == "`h2o` (9, 64), `cam`"


def test_one_difference_has_one_verdict():
    """The same two samples, wherever they stand."""
    found = {}
    names = [name for entries in index.PAPERS.values() for entry in entries for name in entry.experiments]
    for name, model in [(each, model) for each in names for model in tables.models_of(each)]:
        for table in EXPERIMENTS[name].tables:
            kept = places.samples(tables.kept(tables.of_model(EXPERIMENTS[name], model)), table)
            for (row, column), sign in verdicts.compared(kept, table).items():
                both = (tuple(kept[each, column].values.items()) for each in (table.against, row))
                found.setdefault((model, table.score, *both), {})[name, row, column] = sign
    assert not [signs for signs in found.values() if len(set(signs.values())) > 1]
