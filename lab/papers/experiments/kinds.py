"""What an experiment is made of, where its data lie, and the papers' own numbers.

The numbers are in lab/papers/numbers, copied from the papers' text; figures that print none have none there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.papers.commands import Compare, Eval, Map
from lab.papers.programs import Fading, Ruler

NUMBERS = Path(__file__).parents[1] / "numbers"

LARGE = "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
"""The second model; the first is kvtool's default."""

UNGROUPED = "SmolLM2-135M-Instruct.Q4_1-ungrouped.gguf"
"""The first model without groups, as the papers' models are: lab/papers/ungroup.py makes it."""

SMALL = "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"
"""A third model, for docs/which-policy.md."""

Run = Compare | Eval | Map | Fading | Ruler
"""What measures, a command for each part of it."""

Place = tuple[str, str]
"""Row and column of a table: a policy, and a budget or a text."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of an experiment: a policy per row.

    Attributes
    ----------
    score
        One of samples.SCORES.
    by
        Fields of a line whose values are the columns.
    against
        The paper's own method, which the other rows are compared with.
    rows
        The rows in their order; all if empty.
    row
        The field of a line whose values are the rows; its label is its policy.
    budgets
        The budgets that count; all if empty.
    of
        The files or data sets that count; all if empty.
    apart
        A row that is not shown, but taken off all others, pair by pair.
    names
        Headings in place of the columns' values.
    pooled
        Headings of further columns, with what they have of the first of `by`: None for all.
    late
        Whether only tokens count that come after as many as the column's budget; before, a policy with it
        holds all.
    only_pooled
        Whether only pooled columns are shown and compared: the others have too few units for a test.
    same_item
        Whether the same number of an item in several files is one unit of a pooled column.
    strata
        The category of each data set. Pooled columns are then means of categories' means of data sets' means.
    paper
        The paper's numbers, as it prints them.
    worse
        If it prints none: the rows that it says are worse than its own method.
    theirs
        The same for single places: 1 for a number that it says is higher than its own method's, -1 for lower.
    scores
        In place of score, a score for each task.
    title
        Heading of the table; by default the score's title.
    head
        What the rows are.
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
    """What a section of the documents shows.

    Attributes
    ----------
    runs
        Names of runs: those of one model are shown together, under its name.
    tables
        What is shown of their results.
    model
        The paper's model; its numbers are in brackets.
    together
        Whether one table has all models.
    commands
        Whether the commands are shown; not where another experiment of the same runs shows them.
    unequal
        Whether the paper's method holds more cells than its rivals: then being ahead of them says nothing.
    """

    runs: tuple[str, ...]
    tables: tuple[Table, ...] = ()
    model: str = ""
    together: bool = False
    commands: bool = True
    unequal: bool = False


ALL: Mapping[str, frozenset[str] | None] = {"all": None}
"""One pooled column with everything."""


def of_map(kind: str, head: str, against: str, theirs: Mapping[Place, int]) -> tuple[Table, ...]:
    """The table of a map. head: what its rows are. theirs: as in `Table`."""
    return (Table(kind, ("part",), against, theirs=theirs, head=head),)


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


def directions(paper: Mapping[Place, str], own: str) -> dict[Place, int]:
    """Of each of a paper's numbers whether it is higher (1) or lower (-1) than that of its own method."""
    return {
        (row, column): 1 if float(number) > float(paper[own, column]) else -1
        for (row, column), number in paper.items()
        if row not in (own, "full") and (own, column) in paper and number != paper[own, column]
    }


def columns(paper: Mapping[Place, str], names: Sequence[str]) -> dict[Place, str]:
    """The numbers of these columns."""
    return {place: number for place, number in paper.items() if place[1] in names}


def each(*scores: str, **how: Any) -> tuple[Table, ...]:
    """The same table for several scores."""
    return tuple(Table(score, **how) for score in scores)
