"""The tables of the documents, from the records: numbers with their errors, and tests of differences."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path

import numpy as np

from kvtool.measure import records
from lab.papers.experiments import EXPERIMENTS, RUNS
from lab.papers.experiments.kinds import LARGE, SMALL, UNGROUPED, Experiment, Place, Run, ScoreTable
from lab.papers.lines import Line
from lab.papers.places import is_about, is_pooled, samples
from lab.papers.samples import SCORES, Measurements
from lab.papers.verdicts import compared, size

LABORATORY = Path(__file__).parent
ROOT = LABORATORY.parents[1]
RESULTS = LABORATORY / "records"

MODELS = {"": "SmolLM2-135M-Instruct", LARGE: "Qwen2.5-Coder-1.5B-Instruct"}
NAMES = MODELS | {
    SMALL: "Qwen2.5-Coder-0.5B-Instruct",
    UNGROUPED: "SmolLM2-135M-Instruct without groups",
}
"""The names of the models that the papers' experiments run with."""

SHORT = {"": "135M", LARGE: "1.5B", SMALL: "0.5B", UNGROUPED: "135M without groups"}
"""Short names of the same models."""


def models_of(name: str) -> tuple[str, ...]:
    """The models of an experiment's runs."""
    return tuple(dict.fromkeys(RUNS[run].model for run in EXPERIMENTS[name].runs))


def of_model(experiment: Experiment, model: str) -> tuple[str, ...]:
    """The runs of an experiment with a model; "" is the default."""
    return tuple(name for name in experiment.runs if RUNS[name].model == model)


def kept(names: Sequence[str], results: Path = RESULTS) -> list[Line]:
    """The lines of these runs in the records."""
    return [line for name in names for line in records.read(results / f"{name}.jsonl")]


def render(name: str, results: Path = RESULTS, others: bool = False, shown: set[str] | None = None) -> str:
    """An experiment's commands and tables with each model, with the paper's numbers in brackets.

    others: True if the results are of another model, which ran instead of the experiment's first model.
    shown: commands that the document already shows; the experiment's commands are added.
    """
    experiment, models = EXPERIMENTS[name], models_of(name)
    shown = set() if shown is None else shown
    if experiment.together or others:
        runs = of_model(experiment, models[0]) if others else experiment.runs
        return _of_model(experiment, runs, results, shown, others=others).text()
    parts = {model: _of_model(experiment, of_model(experiment, model), results, shown) for model in models}
    if len(parts) > 1 and (together := _together(parts)):
        return together.text()
    titles = {model: f"**{NAMES[model]}**\n\n" if len(models) > 1 else "" for model in models}
    return "\n\n".join(titles[model] + part.text() for model, part in parts.items())


_NO_RESULTS = "No results yet: the results of a command are kept when all of its runs are done."


@dataclass(frozen=True, slots=True)
class _Part:
    """Text of an experiment with one or all models: its commands, its tables, and a line about their size."""

    commands: tuple[str, ...]
    grids: tuple[_ShownTable, ...]
    sizes: str

    def text(self) -> str:
        commands = ["\n".join(f"    {line}" for line in self.commands)] if self.commands else []
        grids = ("\n".join(grid.lines()) for grid in self.grids)
        return "\n\n".join([*commands, *grids, self.sizes])


def _of_model(
    experiment: Experiment,
    runs: Sequence[str],
    results: Path,
    shown: set[str],
    others: bool = False,
) -> _Part:
    lines = kept(runs, results)
    asked = [replace(RUNS[run], model=_model(run, results)) if others else RUNS[run] for run in runs]
    commands = tuple(_commands(asked, shown)) if experiment.commands else ()
    grids: list[_ShownTable] = []
    for table in experiment.tables:
        if places := samples(lines, table):
            grid = _grid(places, table, experiment.model)
            if grids and (both := grids[-1].next_to(grid)):
                grids[-1] = both
            else:
                grids.append(grid)
    counted = [line for line in lines if any(is_about(table, line) for table in experiment.tables)]
    return _Part(commands, tuple(grids), _sizes(counted or lines) if lines else _NO_RESULTS)


def _together(parts: Mapping[str, _Part]) -> _Part | None:
    """Join the parts of all models: their tables' columns are side by side. None if their tables differ."""
    heads = [[(grid.title, grid.head) for grid in part.grids] for part in parts.values()]
    if any(head != heads[0] for head in heads) or not all(title for title, _ in heads[0]):
        return None
    grids = []
    for of_models in zip(*(part.grids for part in parts.values()), strict=True):
        named = [
            replace(grid, columns=tuple(f"{SHORT[model]}: {column}" for column in grid.columns))
            for model, grid in zip(parts, of_models, strict=True)
        ]
        grids.append(reduce(_ShownTable.beside, named))
    commands = tuple(line for part in parts.values() for line in part.commands)
    sizes = {SHORT[model]: part.sizes.strip("*.") for model, part in parts.items()}
    if len(set(sizes.values())) == 1:
        return _Part(commands, tuple(grids), next(iter(parts.values())).sizes)
    listed = "; ".join(f"{name}: {size}" for name, size in sizes.items())
    return _Part(commands, tuple(grids), f"*{listed}.*")


def _commands(runs: Sequence[Run], shown: set[str]) -> Iterator[str]:
    """Yield the lines of the runs' commands that are not yet in `shown`.

    Equal commands, or equal comments, of successive runs are written once.
    """
    commands: list[tuple[str, str]] = []
    for run in runs:
        command, _, comments = run.shown().partition("\n")
        if run.shown() in shown:
            continue
        shown.add(run.shown())
        if commands and commands[-1][0] == command:
            commands[-1] = command, f"{commands[-1][1]}\n{comments}"
        else:
            commands.append((command, comments))
    for (command, comments), (_, following) in zip(commands, [*commands, ("", "")][1:], strict=True):
        yield command
        if comments != following:
            yield from comments.splitlines()


def _model(run: str, results: Path) -> str:
    """Return the model that the run's records name. If there are no records, return the model of the run."""
    return next((str(line["model"]) for line in kept([run], results)), RUNS[run].model)


@dataclass(frozen=True, slots=True)
class _ShownTable:
    """The texts of a table, which `lines` writes in Markdown.

    Attributes
    ----------
    title
        The text above the table; empty if each column is a score.
    head
        Heading of the column of row names.
    columns
        Headings of the other columns.
    rows
        The cells of each row, by the row's name.
    """

    title: str
    head: str
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[str, ...]]

    def lines(self) -> Iterator[str]:
        if self.title:
            yield f"{self.title}:"
            yield ""
        yield f"| {self.head} | {' | '.join(self.columns)} |"
        yield "| --- |" + " ---: |" * len(self.columns)
        for name, cells in self.rows.items():
            yield f"| {name} | {' | '.join(cells)} |"

    def next_to(self, other: _ShownTable) -> _ShownTable | None:
        """Return one table with the columns of this table and of another table.

        Returns None if one of the tables has a title and several columns, or if their heads differ.
        """
        mine, theirs = self.by_score(), other.by_score()
        return mine.beside(theirs) if mine and theirs and mine.head == theirs.head else None

    def beside(self, other: _ShownTable) -> _ShownTable:
        """Append the columns of another table to the columns of this table."""
        empty = ("",) * len(self.columns), ("",) * len(other.columns)
        rows = {
            name: self.rows.get(name, empty[0]) + other.rows.get(name, empty[1])
            for name in {**self.rows, **other.rows}
        }
        return replace(self, columns=self.columns + other.columns, rows=rows)

    def by_score(self) -> _ShownTable | None:
        """Return a table without a title, whose only column has this table's title as its heading.

        A table without a title is returned unchanged. None if there are a title and several columns.
        """
        if not self.title:
            return self
        if len(self.columns) > 1:
            return None
        return _ShownTable("", f"{self.head}, {self.columns[0]}", (self.title,), self.rows)


def _grid(places: Mapping[Place, Measurements], table: ScoreTable, model: str) -> _ShownTable:
    """Write a table's numbers and the results of their tests as texts. model: the paper's model."""
    signs = compared(places, table)
    measured = list(dict.fromkeys(column for _, column in places))
    if table.by == ("budget",) and not table.budgets:
        measured.sort(key=size)
    columns = [column for column in measured if not table.only_pooled and not is_pooled(column, table)]
    columns += [column for column in measured if is_pooled(column, table)]
    filled = dict.fromkeys(row for row, column in [*places, *table.paper] if column in columns)
    has_paper = any(column in columns for _, column in table.paper)
    brackets = f" (in brackets: the paper's, with {model})" * has_paper
    rows = {
        f"`{row}`" if table.head == "policy" else row: tuple(
            _shown(places, table, (row, column), signs) for column in columns
        )
        for row in table.rows or filled
        if row in filled
    }
    return _ShownTable(
        f"{table.title or SCORES[table.score].title}{brackets}", table.head, tuple(columns), rows
    )


def _shown(
    places: Mapping[Place, Measurements], table: ScoreTable, place: Place, signs: Mapping[Place, int]
) -> str:
    parts = []
    if place in places:
        score, (mean, error) = SCORES[places[place].score], places[place].mean()
        if score.exp:
            mean, error = np.exp(mean) - score.less, np.exp(mean) * error
        parts.append(f"{mean * score.scale:.{score.digits}f}")
        # if all numbers are equal, the error is 0 and is not shown
        if np.isfinite(error) and error:
            parts.append(f"±{error * score.scale:.{score.digits}f}")
    if place in table.paper:
        parts.append(f"({table.paper[place]})")
    if sign := signs.get(place):
        more, less = SCORES[places[place].score].words
        parts.append(more if sign > 0 else less)
    return " ".join(parts)


def _sizes(lines: Sequence[Line]) -> str:
    """Return the line below an experiment's tables: the number of items or tokens, and budgets in cells."""
    items = {f"{line['of']} {item}" for line in lines for item in line.get("items", ())}
    sizes = [f"{len(items)} item{'s' * (len(items) > 1)}"] if items else []
    shares = [line for line in lines if str(line["budget"]).endswith("%") and line["budget"] != "100%"]
    if cells := [n for line in shares for n in line.get("cells", ()) if n]:
        sizes.append(f"budgets of {min(cells):,} to {max(cells):,} cells")
    if texts := {(line["tokens"], line["model"], line["of"]) for line in lines if "tokens" in line}:
        lengths = sorted({tokens for tokens, _, _ in texts})
        counts = Counter((tokens, model) for tokens, model, _ in texts).values()
        most = max(counts)
        each = f" of each of {most} texts" if min(counts) == most else f" of up to {most} texts"
        span = f"{lengths[0]:,} to {lengths[-1]:,}" if len(lengths) > 1 else f"{lengths[0]:,}"
        sizes.append(f"{span} tokens" + each * (most > 1))
    return f"*{', '.join(sizes)}.*" if sizes else ""


def fill_between(text: str, mark: str, rows: Callable[[], Iterable[str]]) -> str:
    """Replace the lines between the comments `<!-- mark -->` and `<!-- end -->` of a document."""
    marks = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- end -->)", re.S)
    return marks.sub(lambda match: match[1] + "\n".join(rows()) + "\n" + match[2], text)


def fill(text: str, results: Path = RESULTS) -> str:
    """Replace the commands and tables of each experiment in a document. A command is shown once.

    The comments `<!-- experiment ID -->` and `<!-- end -->` enclose the text that is replaced.

    Raises ValueError for an unknown experiment.
    """
    mark = re.compile(r"(<!-- experiment (\S+) -->\n).*?(<!-- end -->)", re.S)
    if unknown := [name for _, name, _ in mark.findall(text) if name not in EXPERIMENTS]:
        raise ValueError(f"no experiment {', '.join(unknown)}; there are: {', '.join(EXPERIMENTS)}")
    shown: set[str] = set()
    return mark.sub(lambda match: f"{match[1]}{render(match[2], results, shown=shown)}\n{match[3]}", text)
