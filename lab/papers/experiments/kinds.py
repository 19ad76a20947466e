"""Experiments and their tables, the models, and the papers' own numbers.

The numbers in lab/papers/numbers are copied from the papers' text; some figures have no numbers.
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
"""Row and column of a table. A row is usually a policy, and a column a budget or a text."""


@dataclass(frozen=True, slots=True)
class ScoreTable:
    """A table of an experiment, usually with a policy in each row.

    Attributes
    ----------
    score
        One of samples.SCORES.
    by
        Fields of a line. Lines with equal values are in the same column.
    against
        Name of the row that other rows are compared with, usually the paper's own method.
    rows
        Names of the rows, in their order; all rows if empty.
    row
        Field of a line that has the name of its row; "label" is the policy.
    budgets
        The budgets that the table has; all if empty.
    of
        The files or data sets that the table uses; all if empty.
    apart
        Name of a row that is not shown. Its values are subtracted from the other rows, item by item.
    names
        Headings of columns, by the value of the field in `by`.
    pooled
        Columns that join the lines of several other columns, by heading. The set has the values of the first
        field in `by` whose lines are joined. None joins all lines.
    late
        True to use only tokens after the first `budget` tokens. Before that, a policy with a budget evicts
        nothing.
    only_pooled
        True to show and compare only pooled columns, because other columns have too few units.
    same_item
        True if items with the same number in several files are one unit of a pooled column.
    strata
        The category of each data set. A pooled column is then a mean over categories, each of which is the
        mean over its data sets.
    paper
        The paper's numbers, as it prints them.
    worse
        Rows that the paper calls worse than its own method. Only for a paper that prints no numbers.
    theirs
        Like `worse`, for single places of the table: 1 where the paper calls the number higher than its own
        method's number, -1 where it calls it lower.
    scores
        A score for each task, instead of `score`.
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
        True if one table shows all models. Its tests are then corrected together.
    commands
        True if this section shows the commands. If False, another page shows them.
    unequal
        True if the paper's method holds more cells than its rivals, so that a better score says little about
        the method.
    """

    runs: tuple[str, ...]
    tables: tuple[ScoreTable, ...] = ()
    model: str = ""
    together: bool = False
    commands: bool = True
    unequal: bool = False


ALL: Mapping[str, frozenset[str] | None] = {"all": None}
"""One pooled column of all texts or data sets."""


def of_map(kind: str, head: str, against: str, theirs: Mapping[Place, int]) -> ScoreTable:
    """The table of a map. head, theirs: as in `ScoreTable`."""
    return ScoreTable(kind, ("part",), against, theirs=theirs, head=head)


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
    """Compare each number of a paper with the number of the paper's own method.

    Return 1 for a higher number, -1 for a lower number.
    """
    return {
        (row, column): 1 if float(number) > float(paper[method, column]) else -1
        for (row, column), number in paper.items()
        if row not in (method, "full") and (method, column) in paper and number != paper[method, column]
    }


def columns(paper: Mapping[Place, str], names: Sequence[str]) -> dict[Place, str]:
    """The paper's numbers in these columns."""
    return {place: number for place, number in paper.items() if place[1] in names}


def each(*scores: str, **how: Any) -> tuple[ScoreTable, ...]:
    """Return a table for each score. The tables differ only in the score."""
    return tuple(ScoreTable(score, **how) for score in scores)
