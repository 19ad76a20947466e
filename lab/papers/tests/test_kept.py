"""Which lines of a run's results are kept in lab/papers/records."""

from __future__ import annotations

import numpy as np
import pytest

from lab.papers.commands import CompareRun, EvalRun, MapRun
from lab.papers.programs import FadingRun, RulerRun
from lab.papers.tests.made_up import VERSIONS, answered, compared, ruled


def test_of_a_comparison_its_own_cells_are_kept_with_the_most_exact_name():
    run = CompareRun(("t.txt",), ("full", "buzz", "buzz:swap=true", "corm"), ("50",), 65)
    nll = np.linspace(1, 2, 32).tolist()
    stored = [
        compared("full", {}, 65, nll),
        compared("corm", {"window": 256}, 8192, nll),
        compared("buzz", {"swap": False}, 50, nll),
        compared("buzz", {"swap": True}, 50, nll),
        compared("corm", {"window": 20}, 50, nll),
        compared("buzz", {"swap": False}, 60, nll),
        compared("h2o", {}, 50, nll),
        {**compared("buzz", {"swap": False}, 50, nll), "error": "no"},
    ]
    kept = list(run.lines(stored))
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


def test_of_a_task_scores_are_kept_and_no_outputs():
    run = EvalRun("qa", ("folder/qa.jsonl",), ("full", "h2o:decay=0.9"), ("10%",))
    stored = [
        answered("full", [], None, 1, {"f1": 1.0}),
        answered("h2o", ["decay=0.9"], "10%", 1, {"f1": 0.25}),
        {**answered("h2o", ["decay=0.9"], "10%", 2, {}), "error": "does not fit"},
    ]
    full, h2o = run.lines(stored)
    assert full == {
        "label": "full",
        "budget": None,
        "task": "qa",
        "of": "qa.jsonl",
        "items": ["i1"],
        "cells": [12],
        "scores": {"f1": [1.0]},
        "seconds": 2,
        **VERSIONS,
    }
    named = EvalRun("qa", ("folder/qa.jsonl",), ("full",), (), named="--temp 0")
    (line,) = named.lines(stored[:1])
    assert line == full | {"label": "--temp 0"}
    assert list(named.missing([], "a")) != list(named.missing([line], "a")) == []
    assert (h2o["label"], h2o["budget"], h2o["items"], h2o["seconds"]) == (
        "h2o:decay=0.9",
        "10%",
        ["i1", "i2"],
        4,
    )
    assert h2o["scores"] == {"f1": [0.25, None]}


def test_of_a_choice_the_right_ones_share_is_kept():
    run = EvalRun("choice", ("c.jsonl",), ("full",), ())
    more = {"task": "choice", "choices": ["a", "b"], "references": ["b"], "logp": [-3.0, -2.0]}
    (line,) = run.lines([answered("full", [], None, 1, {"acc": 1.0}, **more)])
    assert line["scores"]["right"] == [pytest.approx(np.log(np.exp(-2) / (np.exp(-2) + np.exp(-3))))]


def test_of_a_map_its_means_are_kept():
    about = {"file": "a.txt", "tokens": 64, "seconds": 1.0, **VERSIONS}
    share = about | {"layer": [0, 0, 1, 2, 3], "share": [0.5, 0.3, 0.1, 0.04, 0.02]}
    stored = list(MapRun("share", ("a.txt",), 64).lines([share]))
    assert [line["scores"]["share"] for line in stored] == [[pytest.approx(0.3)], [pytest.approx(0.03)]]
    near = {"within_1": 0.5, "within_16": 0.7, "within_256": 1.0}
    chance = {"within_1": 0.1, "within_16": 0.2, "within_256": 0.9}
    queries = MapRun("queries", ("a.txt", "b.txt"), 64)
    stored = list(queries.lines([about | {"mean": near, "chance": chance}]))
    assert {(line["label"], line["part"]): line["scores"]["queries"] for line in stored} == {
        (label, f"within {n}"): [of[f"within_{n}"]]
        for label, of in (("the most similar query", near), ("by chance", chance))
        for n in (1, 16, 256)
    }
    assert [ask.command[2] for ask in queries.missing(stored, "made-up")] == ["b.txt"]
    ranks = {"keys_before": [2, 4], "keys": [4, 4], "values": [6, 8]}
    values = {name: {"rank": rank, "normalised": [1.0] * 10} for name, rank in ranks.items()}
    stored = list(MapRun("values", ("a.txt",), 64).lines([about | values]))
    assert [line["scores"]["values"] for line in stored] == [[0.3], [0.4], [0.7]]


def test_of_rules_the_means_of_blocks_and_the_bytes_are_kept():
    run = FadingRun(("a.txt", "b.txt"), ("full", "h2o+2"), 8, 65)
    stored = {
        "nll_blocks": {"full": [1.0] * 32, "h2o+2": [2.0] * 32},
        "bytes": {"full": 2**20, "h2o+2": 2**18},
        "cpu_s": {"full": 3.0, "h2o+2": 4.0},
    }
    record = {"file": "a.txt", "tokens": 65, "budget": 8, "seconds": 9.0, **stored, **VERSIONS}
    first, second = run.lines([record])
    assert (first["label"], first["budget"], first["bytes"], first["seconds"]) == (
        "full",
        None,
        [2**20, 0],
        3,
    )
    assert (second["label"], second["budget"], second["bytes"]) == ("h2o+2", "8", [2**18, 0])
    assert second["scores"]["nll"] == [1.0] * 32
    assert second["weights"]["nll"] == [2] * 32
    (ask,) = run.missing([first, second], "made-up")
    assert ask.command == (
        *("lab.papers.fading", "b.txt", "--rules", "full,h2o+2"),
        *("--budget", "8", "--max-tokens", "65"),
    )
    assert run.shown().startswith("python -m lab.papers.fading FILE --rules full,h2o+2 --budget 8")


RULER = RulerRun(
    *(("vt", "cwe"), ("full", "recall", "h2o", "kvzip"), ("0.5", "0.875"), 128, ("f16", "q4_0")),
    *(("after", "known"), 4096, 2),
)


def test_of_rulers_items_what_both_protocols_share_is_in_both():
    # `stored` has two items for each policy and share in these lists
    after = [("full", {}), ("full", {"type_kv": "q4_0"}), ("recall", {"budget": 128})]
    after += [(label, {"removed": share}) for label in ("h2o", "kvzip") for share in (0.5, 0.875)]
    known = [("h2o", {"removed": share, "question": "known"}) for share in (0.5, 0.875)]
    stored = [ruled(label, i, i / 2, **how) for label, how in [*after, *known] for i in range(2)]
    others = [
        {**ruled("h2o", 2, 1, removed=0.5), "error": "too short"},
        ruled("h2o", 2, 1, removed=0.5, length=512),
        ruled("h2o", 2, 1, removed=0.5, part="fwe"),
        ruled("snapkv", 2, 1, removed=0.5),
        ruled("h2o", 2, 1, removed=0.25),
    ]
    kept = list(RULER.lines(stored + others))
    assert {(line["task"], line["label"], line["budget"], line["seconds"]) for line in kept} == {
        ("after", "full", None, 4),
        ("after", "full q4_0", None, 4),
        ("after", "recall", None, 4),
        ("known", "full", None, 0),
        ("known", "full q4_0", None, 0),
        ("known", "recall", None, 0),
        ("after", "h2o", "50 % removed", 4),
        ("after", "h2o", "87.5 % removed", 4),
        ("after", "kvzip", "50 % removed", 4),
        ("after", "kvzip", "87.5 % removed", 4),
        ("known", "h2o", "50 % removed", 4),
        ("known", "h2o", "87.5 % removed", 4),
    }
    for line in kept:
        host = 2.0 * (line["label"] == "recall")
        assert line["of"] == "vt"
        assert line["items"] == ["vt-4096-0", "vt-4096-1"]
        assert line["scores"] == {"string_match": [0, 0.5], "device": [1, 1], "host": [host, host]}
    # vt is complete, so only the command of cwe is missing
    (ask,) = RULER.missing(kept, "made-up")
    assert ask.goes_on
    assert ask.command[:3] == ("lab.papers.ruler", "--tasks", "cwe")
    for i, line in enumerate(kept):
        fewer = [*kept[:i], line | {"items": line["items"][:1]}, *kept[i + 1 :]]
        assert len(list(RULER.missing(fewer, "made-up"))) == 2


def test_of_rulers_tasks_each_has_a_command():
    assert [command[2] for command in RULER.commands()] == ["vt", "cwe"]
    assert RULER.shown() == (
        "python -m lab.papers.ruler --tasks TASK --length 4096 --items 0:2 --question after,known "
        "--policies h2o,kvzip --removed 0.5,0.875 --others recall@128,full@q4_0 --essays paul_graham_essays "
        "--squad dev-v2.0.json --hotpotqa hotpotqa_distractor_100.jsonl\n    # TASK: vt, cwe"
    )
