"""Experiments of lab/papers/ruler.md: RULER under many policies, from one reading of each prompt."""

from __future__ import annotations

from typing import Any

from kvtool.tasks.ruler import PARTS
from lab.papers.experiments.kinds import LARGE, Experiment, Run, ScoreTable
from lab.papers.programs import RulerRun
from lab.papers.ruler import EQUAL, POLICIES, REMOVED, STREAMS

_TYPES = ("f16", "q8_0", "q4_0")
_PROTOCOLS = {"after": "question after the text was compressed", "known": "question known"}

_OWN = ("full", "full q8_0", "full q4_0", "recall")

# policies whose rows or layers share a budget are in another table (lab/papers/sharing.py)
ROWS = (*_OWN, *EQUAL)

COUNTED = tuple(task for task in PARTS if task != "qa_2")
"""The tasks in which the model's score with the full cache is at least 20 %."""

RUNS: dict[str, Run] = {
    "ruler": RulerRun(
        *(tuple(PARTS), ("full", "recall", *POLICIES), REMOVED, 128, _TYPES),
        *(tuple(_PROTOCOLS), 4096, 1),
        model=LARGE,
        minutes=520,
    ),
    # one task of each kind: needles, variables, frequent words
    "ruler-long": RulerRun(
        *(("niah_multikey_1", "vt", "fwe"), ("full", "recall"), (), 128, ("f16",), ("after",), 32768, 1),
        model=LARGE,
        minutes=240,
    ),
}


def _scores(question: str, score: str = "string_match", title: str = "", **how: Any) -> ScoreTable:
    """Return a table of scores with one protocol. question: "after" (the text) or "known"."""
    title = title or f"RULER's score, %, {_PROTOCOLS[question]}"
    return ScoreTable("", **{"rows": ROWS, "of": COUNTED, **how}, scores={question: score}, title=title)


EXPERIMENTS = {
    "ruler": Experiment(
        ("ruler",),
        (
            _scores("after", against="full"),
            _scores("known", against="full"),
        ),
    ),
    # separate tables, because p-values are corrected for all tests of a table
    "ruler-streams": Experiment(
        ("ruler",),
        tuple(_scores(question, rows=("full", *STREAMS), against="full") for question in _PROTOCOLS),
    ),
    "ruler-long": Experiment(
        ("ruler-long",),
        (ScoreTable("", ("of",), scores={"after": "string_match"}, title="RULER's score, %"),),
    ),
    # the table of docs/which-policy.md
    "ruler-short": Experiment(
        ("ruler",),
        (
            ScoreTable(
                "",
                ("task", "budget"),
                rows=ROWS,
                of=COUNTED,
                scores=dict.fromkeys(_PROTOCOLS, "string_match"),
                budgets=("50 % removed", "87.5 % removed"),
                names={"after": "question after", "known": "known"},
                title="RULER's score, %",
            ),
        ),
        commands=False,
    ),
}
