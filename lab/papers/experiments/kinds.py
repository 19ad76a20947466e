"""Experiments and their tables, the models, and the papers' own numbers.

The numbers in lab/papers/numbers are copied from the papers' text; some figures print none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.papers.commands import CompareRun, EvalRun, MapRun
from lab.papers.programs import FadingRun, RulerRun

NUMBERS = Path(__file__).parents[1] / "numbers"

LARGE = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
"""The second model; the first is kvtool's default."""

UNGROUPED = "SmolLM2-135M-Instruct.Q4_1-ungrouped.gguf"
"""The default model with a KV head for each query head, as in the papers' models; ungroup.py writes it."""

SMALL = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
"""A third model, for docs/which-policy.md."""

Run = CompareRun | EvalRun | MapRun | FadingRun | RulerRun
"""Kinds of runs. A run has a command for each text or task, or for each policy and budget."""

Place = tuple[str, str]
"""Row and column of a table: a policy, and a budget or a text."""


@dataclass(frozen=True, slots=True)
class ScoreTable:
    """A table of an experiment: a policy per row.

    Attributes
    ----------
    score
        One of samples.SCORES.
    by
        Fields of a line whose values are the columns.
    against
        The paper's own method. Other rows are compared with it.
    rows
        The rows in their order; all if empty.
    row
        The field of a line whose values are the rows; "label" is the policy.
    budgets
        The budgets that count; all if empty.
    of
        The files or data sets that count; all if empty.
    apart
        A row that is not shown. Its values are subtracted from those of the other rows, item by item.
    names
        Headings of columns, by the value that a heading replaces.
    pooled
        Columns that join others. Each heading has the values to join, of the first field in `by`; None joins
        all values.
    late
        Whether only tokens after the first `budget` tokens count; before, a policy with a budget evicts none.
    only_pooled
        Whether only pooled columns are shown and compared, because other columns have too few units.
    same_item
        Whether items with the same number in several files are one unit of a pooled column.
    strata
        The category of each data set. A pooled column is then a mean over categories, each of which is the
        mean over its data sets.
    paper
        The paper's numbers, as it prints them.
    worse
        If the paper prints no numbers: rows that it calls worse than its own method.
    theirs
        Like `worse`, for single numbers: 1 for a number above that of the paper's method, -1 for one below.
    scores
        A score for each task, in place of score.
    title
        Heading of the table; by default the score's title.
    head
        Heading of the column of row names.
    """

    score: str
    by: tuple[str, ...] = ("budget",)
    against: str = ""
    rows: tuple[str, ...] = ()
    row: str = "label"
    budgets: tuple[str, ...] = ()
    of: tuple[str, ...] = ()
    apart: str = ""
    names: Mapping[str, str] = field(default_factory=dict)
    pooled: Mapping[str, frozenset[str] | None] = field(default_factory=dict)
    late: bool = False
    only_pooled: bool = False
    same_item: bool = False
    strata: Mapping[str, str] = field(default_factory=dict)
    paper: Mapping[Place, str] = field(default_factory=dict)
    worse: tuple[str, ...] = ()
    theirs: Mapping[Place, int] = field(default_factory=dict)
    scores: Mapping[str, str] = field(default_factory=dict)
    title: str = ""
    head: str = "policy"


@dataclass(frozen=True, slots=True)
class Experiment:
    """A section of the documents.

    Attributes
    ----------
    runs
        Names of runs.
    tables
        Tables of their results.
    model
        The paper's model, whose numbers are in brackets.
    together
        Whether one table shows all models, and its tests are corrected together.
    commands
        Whether the commands are shown here. If not, another page shows them.
    unequal
        Whether the paper's method holds more cells than its rivals, so that being ahead says little.
    """

    runs: tuple[str, ...]
    tables: tuple[ScoreTable, ...] = ()
    model: str = ""
    together: bool = False
    commands: bool = True
    unequal: bool = False


ALL: Mapping[str, frozenset[str] | None] = {"all": None}
"""One pooled column of all texts or data sets."""


def of_map(kind: str, head: str, against: str, theirs: Mapping[Place, int]) -> tuple[ScoreTable, ...]:
    """The table of a map. head, theirs: as in `ScoreTable`."""
    return (ScoreTable(kind, ("part",), against, theirs=theirs, head=head),)


def numbers(paper: str, *tables: str) -> dict[Place, str]:
    """The numbers of a paper's tables as it prints them. Raises ValueError for a row of the wrong length."""
    read = json.loads((NUMBERS / f"{paper}.json").read_text(encoding="utf-8"))["tables"]
    return {
        (policy, column): number
        for table in tables
        for policy, row in read[table]["rows"].items()
        for column, number in zip(read[table]["columns"], row, strict=True)
        if number is not None
    }


def directions(paper: Mapping[Place, str], method: str) -> dict[Place, int]:
    """1 for each of a paper's numbers that is higher than its method's number, -1 for lower ones."""
    return {
        (row, column): 1 if float(number) > float(paper[method, column]) else -1
        for (row, column), number in paper.items()
        if row not in (method, "full") and (method, column) in paper and number != paper[method, column]
    }


def columns(paper: Mapping[Place, str], names: Sequence[str]) -> dict[Place, str]:
    """The paper's numbers in these columns."""
    return {place: number for place, number in paper.items() if place[1] in names}


def each(*scores: str, **how: Any) -> tuple[ScoreTable, ...]:
    """Return one table for each score, otherwise equal."""
    return tuple(ScoreTable(score, **how) for score in scores)
