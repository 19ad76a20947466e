"""RULER under many policies: its rows, and the tables of its records."""

from __future__ import annotations

import json

import pytest

from kvtool.engine.whole import Whole
from kvtool.measure import records
from papers import ruler
from papers.ruler import Row
from tests import tiny


def record(item, score, policy="full", removed=0.0, budget=0, type_kv="f16", question="after"):
    return {
        "id": item,
        "question": question,
        **{"policy": policy, "removed": removed, "budget": budget, "type_kv": type_kv},
        **{"scores": {"string_match": score}, "kv_bytes": 2**20, "archive_bytes": 2**21 * bool(budget)},
    }


def test_rows_are_policies_with_shares_and_others():
    assert list(ruler.rows(["h2o", "kvzip"], [0.5, 0.9], ["recall@128", "full@q4_0"])) == [
        Row("full"),
        Row("h2o", 0.5),
        Row("h2o", 0.9),
        Row("kvzip", 0.5),
        Row("kvzip", 0.9),
        Row("recall", budget=128),
        Row("full", type_kv="q4_0"),
    ]


def test_a_policy_keeps_its_share_and_has_room_for_the_answer():
    policy = Row("h2o:sinks=4", 0.75).fit(1000, 50)
    assert policy.n_keep == 250
    assert policy.budget == 250 + 256
    assert policy.sinks == 4
    assert Row("recall", budget=128).fit(1000, 50).budget == 128
    assert Row("full").fit(1000, 50).budget == 1280


def test_what_cannot_know_the_question_is_not_asked_twice():
    assert [row.knows("known") for row in (Row("full"), Row("h2o", 0.5), Row("snapkv", 0.5))] == [
        False,
        True,
        True,
    ]
    others = Row("kvzip", 0.5), Row("recall", budget=128), Row("full", type_kv="q4_0")
    assert not any(row.knows("known") for row in others)
    assert all(row.knows("after") for row in others)


def test_the_average_is_that_of_tasks():
    assert ruler.mean({"vt-1": 1.0, "vt-2": 1.0, "vt-3": 1.0, "cwe-1": 0.0}) == 0.5


def test_a_test_tells_who_is_behind(tmp_path, capsys):
    path = tmp_path / "found.jsonl"
    items = [f"{name}-4096-{i}" for name in ("vt", "cwe") for i in range(5)]
    for item in items:
        records.append(path, record(item, 1))
        records.append(path, record(item, 0, "h2o", 0.75))
        records.append(path, record(item, float(item != items[0]), "kvzip", 0.75))
        records.append(path, record(item, 1, "recall", budget=128))
    # what not all rows have is in no table
    records.append(path, record("vt-4096-9", 0))
    ruler.main(["table", str(path), "--removed", "0.75"])
    said = capsys.readouterr().out
    assert "Question after, 10 items of 2 tasks, %:" in said
    assert "| `full` | 100 |  |" in said
    assert "| `h2o` |  | 0 worse |" in said
    assert "| `kvzip` |  | 90 |" in said
    assert "| `recall` 128 cells | 100 |  |" in said
    assert "| `recall` 128 cells | 2 |" in said.partition("MiB on the host")[2]
    assert "| `kvzip` | 80 | 100 |" in said.partition("By task")[2]
    assert "known" not in said


@pytest.mark.engine
def test_it_is_measured_and_goes_on(tiny_model, tmp_path, monkeypatch, capsys):
    path, out = tiny_model(chat_template=tiny.CHAT_TEMPLATE, n_ctx_train=4096), tmp_path / "out.jsonl"
    size = ["--tasks", "niah_single_1,vt", "--length", "1700"]
    command = ["measure", "-m", str(path), *size, "--json", str(out)]
    rows = ["--policies", "h2o,kvzip", "--removed", "0.5", "--others", "recall@128"]
    ruler.main([*command, *rows])
    found = records.read(out)
    labels = [(each["id"], each["question"], each["policy"]) for each in found]
    one = [("after", "full"), ("after", "h2o"), ("after", "kvzip"), ("after", "recall"), ("known", "h2o")]
    ids = ["niah_single_1-1700-0", "vt-1700-0"]
    assert labels == [(item, *how) for item in ids for how in one]
    by_policy = {each["policy"]: each for each in found}
    assert by_policy["recall"]["archive_bytes"] > 0
    assert by_policy["h2o"]["evicted"] > 0
    # each prompt was read once: h2o and kvzip begin where full ended
    before = out.read_bytes()
    ruler.main([*command, *rows])
    assert out.read_bytes() == before
    # nor is it read twice where some rows have an item that others lack
    records.rewrite(
        out, lambda there: [each for each in there if each["policy"] != "full" or "vt" in each["id"]]
    )
    read = []
    of = Whole.of
    monkeypatch.setattr(Whole, "of", lambda *what: (read.append(what), of(*what))[1])
    ruler.main(
        [*command, "--policies", "h2o,snapkv", "--removed", "0.5", "--others", "", "--question", "after"]
    )
    assert len(read) == 2
    capsys.readouterr()
    ruler.main(["table", str(out)])
    assert capsys.readouterr().out.count("2 items of 2 tasks") == 2
    # what is asked in one run is what eval asks
    assert json.loads(before.splitlines()[0])["references"]
