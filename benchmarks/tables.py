"""The tables of the documents: numbers with their errors, and tests of differences, from the records kept."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from commands import VERSIONS, Line
from experiments import EXPERIMENTS, RUNS
from experiments.kinds import LARGE, SMALL, UNGROUPED, Examples, Experiment, Place, Table
from samples import SCORES, Sample

from kvtool.measure import records, statistics

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "papers" / "records"

MODELS = {"": "SmolLM2-135M-Instruct", LARGE: "Qwen2.5-Coder-1.5B-Instruct"}
NAMES = MODELS | {
    SMALL: "Qwen2.5-Coder-0.5B-Instruct",
    UNGROUPED: "SmolLM2-135M-Instruct without groups",
}
"""The names of the models that the papers' experiments run with."""


def samples(lines: Sequence[Line], table: Table) -> dict[Place, Sample]:
    """The places of a table. A line without a budget is in the column of every budget."""
    lines = [line for line in lines if not table.rows or line["label"] in (*table.rows, table.apart)]
    budgets = table.budgets or tuple(dict.fromkeys(line["budget"] for line in lines if line["budget"]))
    places: dict[Place, Sample] = {}
    for line in lines:
        score = table.scores.get(line["task"], "") if table.scores else table.score
        if not score:
            continue
        found, of_text = _values(line, score), bool(line.get("weights", {}).get(SCORES[score].of or score))
        for budget in {line["budget"]}.intersection(budgets) if line["budget"] else budgets or [None]:
            for column, is_pooled in _columns(line | {"budget": budget}, table):
                strata = table.strata if is_pooled else {}
                sample = Sample(score, of_text, table.same_item and is_pooled, strata)
                places.setdefault((line["label"], column), sample).values.update(found)
    places = {place: sample for place, sample in places.items() if _is_whole(place, sample, table)}
    if table.apart:
        return {
            (row, column): sample.apart(places[table.apart, column])
            for (row, column), sample in places.items()
            if row != table.apart and (table.apart, column) in places
        }
    return places


def _is_whole(place: Place, sample: Sample, table: Table) -> bool:
    """Whether a place has all that its column is to have: an average of LongBench all of its data sets."""
    asked = table.pooled.get(place[1].partition(", ")[0]) or frozenset()
    return bool(sample.values) and asked <= {of for of, _ in sample.values}


def _columns(line: Line, table: Table) -> Iterator[tuple[str, bool]]:
    """The columns that a line is in, and whether they are pooled ones."""
    first, *rest = (table.names.get(str(line[name]), str(line[name])) for name in table.by)
    yield ", ".join([first, *rest]), False
    for heading, members in table.pooled.items():
        if members is None or str(line[table.by[0]]) in members:
            yield ", ".join([heading, *rest]), True


def is_pooled(column: str, table: Table) -> bool:
    """Whether a column has what is in several others."""
    return column.partition(", ")[0] in table.pooled


def _values(line: Line, score: str) -> dict[tuple[str, str], tuple[float, float]]:
    score = SCORES[score].of or score
    found = _rouge(line["scores"]) if score == "rouge" else _of_line(line).get(score, [])
    weights = line.get("weights", {}).get(score, [1] * len(found))
    items = line.get("items", range(len(found)))
    return {
        (line["of"], str(item)): (value, weight)
        for item, value, weight in zip(items, found, weights, strict=True)
        if value is not None
    }


def _of_line(line: Line) -> dict[str, list[float | None]]:
    """The scores of a line, and its bytes in MiB."""
    sizes = zip(("device", "host"), line.get("bytes", ()), strict=False)
    return line["scores"] | {name: [size / 2**20] for name, size in sizes}


def _rouge(scores: Mapping[str, Sequence[float | None]]) -> list[float | None]:
    """What each item adds to the geometric mean of three means, to the first order (the delta method).

    The mean of these numbers is that geometric mean, and their error is its error. If one of the means is 0,
    the result is a single 0: no error is known.
    """
    items = list(zip(*(scores[name] for name in ("rouge1", "rouge2", "rougeL")), strict=True))
    means = np.mean([item for item in items if None not in item], axis=0)
    if not means.all():
        return [0.0] + [None] * (len(items) - 1)
    whole = np.prod(means) ** (1 / 3)
    return [None if None in item else float(whole * np.mean(item / means)) for item in items]


# what is compared


def compared(places: Mapping[Place, Sample], table: Table) -> dict[Place, int]:
    """Of each place that a test can compare with the paper's own method: 1 better, -1 worse, 0 not told.

    A table's tests together are wrong with a chance of 5 % (Holm). A single number, such as a Self-BLEU, has
    no test.
    """
    found = {}
    for place in places:
        own = table.against, place[1]
        if place[0] == table.against or own not in places:
            continue
        if table.only_pooled and not is_pooled(place[1], table):
            continue
        if found_one := places[place].minus(places[own]):
            found[place] = found_one
    adjusted = statistics.holm(np.array([each.p for each in found.values()]))
    return {
        place: int(np.sign(each.mean)) * _sign(places[place].score) * bool(p <= 0.05)
        for (place, each), p in zip(found.items(), adjusted, strict=True)
    }


def ordered(places: Mapping[Place, Sample], table: Table) -> Iterator[tuple[Place, int]]:
    """Places that were measured here, and whether the paper calls them better (1) or worse (-1).

    Compared is with the paper's own method; `full` does not count, unless the paper says that it is worse.
    """
    for place in places:
        own = table.against, place[1]
        if own not in places or (table.only_pooled and not is_pooled(place[1], table)):
            continue
        if place[0] in table.worse:
            yield place, -1
        elif place in table.theirs:
            yield place, table.theirs[place] * _sign(places[place].score)
        elif place[0] != "full":
            theirs = _theirs(place, table) * _sign(places[place].score)
            if theirs:
                yield place, theirs


def _theirs(place: Place, table: Table) -> int:
    """The sign of the paper's difference; of a pooled column without numbers that of the others' mean."""
    row, column = place
    if {place, (table.against, column)} <= table.paper.keys():
        return int(np.sign(float(table.paper[place]) - float(table.paper[table.against, column])))
    if not is_pooled(column, table):
        return 0
    rest = column.partition(", ")[2]
    both = [
        float(table.paper[row, other]) - float(number)
        for (own, other), number in table.paper.items()
        if own == table.against and other.partition(", ")[2] == rest and (row, other) in table.paper
    ]
    return int(np.sign(round(sum(both), 9)))


def _sign(score: str) -> int:
    return -1 if SCORES[score].lower else 1


# what is shown


def models_of(name: str) -> tuple[str, ...]:
    """The models that an experiment has runs with."""
    return tuple(dict.fromkeys(RUNS[run].model for run in EXPERIMENTS[name].runs))


def of_model(experiment: Experiment, model: str) -> tuple[str, ...]:
    """The runs of an experiment with a model; "" is the default."""
    return tuple(name for name in experiment.runs if RUNS[name].model == model)


def kept(names: Sequence[str], results: Path = RESULTS) -> list[Line]:
    """The lines kept of these runs."""
    return [line for name in names for line in records.read(results / f"{name}.jsonl")]


def render(name: str, results: Path = RESULTS) -> str:
    """An experiment's commands and tables with each model, with the paper's numbers in brackets."""
    experiment = EXPERIMENTS[name]
    models = models_of(name)
    parts = []
    for model in models:
        title = [f"**{NAMES[model]}**"] if len(models) > 1 else []
        # what the paper has and nobody measured is shown once, with the first model
        only = model != models[0]
        parts += [*title, *_of_model(experiment, of_model(experiment, model), results, only)]
    return "\n\n".join(parts)


def _of_model(experiment: Experiment, runs: Sequence[str], results: Path, only: bool) -> Iterator[str]:
    yield "\n".join(f"    {line}" for run in runs for line in RUNS[run].shown().splitlines())
    lines = kept(runs, results)
    if not lines:
        yield "Not measured yet."
        return
    for table in experiment.tables:
        places = samples(lines, table)
        if places:
            yield "\n".join(_drawn(places, table, only))
            if told := _told(places, table, experiment.model):
                yield told
    if experiment.examples:
        yield from _examples(lines, experiment.examples)
    yield _of_what(lines)


def _examples(lines: Sequence[Line], shown: Examples) -> Iterator[str]:
    """What each policy wrote of one item, and its ROUGE scores."""
    written = {(line["label"], line["budget"]): line for line in lines if "output" in line}
    for label in shown.rows:
        for budget in (*shown.budgets, None):
            if line := written.get((label, budget)):
                scores = (
                    f"{100 * line['scores'][name][line['example']]:.1f}"
                    for name in ("rouge1", "rouge2", "rougeL")
                )
                head = f"`{label}`" + f", {budget}" * bool(budget)
                said = " ".join(line["output"].split())
                yield f"{head}, ROUGE-1, -2 and -L {', '.join(scores)}:\n\n{fill_lines(said)}"
                break


def fill_lines(text: str) -> str:
    """A quotation in lines that are not too long."""
    return textwrap.fill(text, 130, initial_indent="> ", subsequent_indent="> ")


def _drawn(places: Mapping[Place, Sample], table: Table, only: bool) -> Iterator[str]:
    """A table. only: whether it has only columns of which something was measured."""
    signs = compared(places, table)
    asked = dict.fromkeys(column for _, column in ([] if only else [*table.paper]) + [*places])
    heads = [column for column in asked if not is_pooled(column, table)]
    heads += [column for column in asked if is_pooled(column, table)]
    rows = list(table.rows or dict.fromkeys(row for row, _ in [*places, *table.paper]))
    cells = {(row, column): _shown(places, table, (row, column), signs) for row in rows for column in heads}
    yield f"{table.title or SCORES[table.score].title}:"
    yield ""
    if table.transposed:
        yield f"| | {' | '.join(f'`{row}`' for row in rows)} |"
        yield "| --- |" + " ---: |" * len(rows)
        for column in heads:
            yield f"| {column} | {' | '.join(cells[row, column] for row in rows)} |"
    else:
        yield f"| {table.head} | {' | '.join(heads)} |"
        yield "| --- |" + " ---: |" * len(heads)
        for row in rows:
            name = f"`{row}`" if table.head == "policy" else row
            yield f"| {name} | {' | '.join(cells[row, column] for column in heads)} |"


def _shown(places: Mapping[Place, Sample], table: Table, place: Place, signs: Mapping[Place, int]) -> str:
    parts = []
    if place in places:
        score, (mean, error) = SCORES[places[place].score], places[place].mean()
        if score.exp:
            mean, error = np.exp(mean) - score.less, np.exp(mean) * error
        parts.append(f"{mean * score.scale:.{score.digits}f}")
        if score.has_error and np.isfinite(error):
            parts.append(f"±{error * score.scale:.{score.digits}f}")
    if place in table.paper:
        parts.append(f"({table.paper[place]})")
    if sign := signs.get(place):
        more, less = SCORES[places[place].score].words
        parts.append(more if sign > 0 else less)
    return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many of the paper's differences are found here.

    Attributes
    ----------
    here
        A test tells them, as the paper has them.
    reverse
        A test tells the reverse.
    unclear
        A test tells nothing.
    untested
        Single numbers, or too few units for a test.
    n_test
        Tests of the table.
    """

    here: int = 0
    reverse: int = 0
    unclear: int = 0
    untested: int = 0
    n_test: int = 0

    def __add__(self, other: Verdict) -> Verdict:
        return Verdict(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    @property
    def n(self) -> int:
        """All of the paper's differences that were looked at."""
        return self.here + self.reverse + self.unclear + self.untested


def verdict(places: Mapping[Place, Sample], table: Table) -> Verdict:
    """The verdict on a table."""
    signs = compared(places, table)
    theirs = dict(ordered(places, table))
    found = [sign * signs[place] for place, sign in theirs.items() if place in signs]
    return Verdict(*(found.count(sign) for sign in (1, -1, 0)), len(theirs) - len(found), len(signs))


def _told(places: Mapping[Place, Sample], table: Table, model: str) -> str:
    """In words, how many of the paper's differences from its own method are found here."""
    found = verdict(places, table)
    said = [f"In brackets: the paper's numbers, with {model}."] * bool(table.paper)
    if found.n:
        words = "No difference can be told here."
        if found.here or found.reverse:
            words = "Where a difference can be told here, it is "
            words += "either way."
            if not (found.here and found.reverse):
                words = words.replace("either way", "the paper's" if found.here else "the other way round")
        tests = f"{found.n_test} test{'s' * (found.n_test != 1)} in the table"
        parts = [f"{found.here} appear{'s' * (found.here == 1)} here"]
        parts += [
            f"{found.reverse} {_are(found.reverse)} reversed",
            f"{found.unclear} cannot be told ({tests})",
        ]
        if found.untested:
            parts.append(f"\n{found.untested} {_are(found.untested)} of too few numbers for a test")
        told = ", ".join(parts).replace(", \n", ",\n")
        own = f"`{table.against}`" if table.head == "policy" else table.against
        said += [words, f"Of its {found.n} difference{'s' * (found.n > 1)} from {own}, {told}."]
    # a line each
    return "\n".join(said)


def _are(n: int) -> str:
    return "is" if n == 1 else "are"


def _of_what(lines: Sequence[Line]) -> str:
    """Sizes, time and versions."""
    items = {f"{line['of']} {item}" for line in lines for item in line.get("items", ())}
    sizes = [f"{len(items)} items"] if items else []
    shares = [line for line in lines if str(line["budget"]).endswith("%") and line["budget"] != "100%"]
    if cells := [n for line in shares for n in line.get("cells", ()) if n]:
        sizes.append(f"budgets of {min(cells):,} to {max(cells):,} cells")
    if tokens := {line["tokens"] for line in lines if "tokens" in line}:
        texts = len({line["of"] for line in lines})
        sizes.append(f"{max(tokens):,} tokens" + f" of each of {texts} texts" * (texts > 1))
    made_by = dict.fromkeys(tuple(line[name] for name in VERSIONS) for line in lines)
    # a line each
    versions = ";\n".join(
        f"{Path(model).stem}, kvtool {own}, llama-cpp-python {llama}, patch {str(patch)[:12]}"
        for model, own, llama, patch in made_by
    )
    minutes = round(sum(line["seconds"] for line in lines) / 60)
    took = f"{minutes} minute{'s' * (minutes > 1)}" if minutes else "less than a minute"
    return f"*{', '.join([*sizes, took])}; {versions}.*"


def fill(text: str, results: Path = RESULTS) -> str:
    """The document with the text between the two marks of each experiment made anew. Raises ValueError."""
    mark = re.compile(r"(<!-- experiment (\S+) -->\n).*?(<!-- end -->)", re.S)
    if unknown := [name for _, name, _ in mark.findall(text) if name not in EXPERIMENTS]:
        raise ValueError(f"no experiment {', '.join(unknown)}; there are: {', '.join(EXPERIMENTS)}")
    return mark.sub(lambda found: f"{found[1]}{render(found[2], results)}\n{found[3]}", text)
