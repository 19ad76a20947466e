"""The tables of the documents: numbers with their errors, and tests of differences, from the records kept."""

from __future__ import annotations

import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvtool.measure import records
from lab.papers.experiments import EXPERIMENTS, RUNS
from lab.papers.experiments.kinds import LARGE, SMALL, UNGROUPED, Examples, Experiment, Place, Table
from lab.papers.lines import VERSIONS, Line
from lab.papers.places import is_about, is_pooled, samples
from lab.papers.samples import SCORES, Sample
from lab.papers.verdicts import compared, listed, size, verdict

LABORATORY = Path(__file__).parent
ROOT = LABORATORY.parents[1]
RESULTS = LABORATORY / "records"

MODELS = {"": "SmolLM2-135M-Instruct", LARGE: "Qwen2.5-Coder-1.5B-Instruct"}
NAMES = MODELS | {
    SMALL: "Qwen2.5-Coder-0.5B-Instruct",
    UNGROUPED: "SmolLM2-135M-Instruct without groups",
}
"""The names of the models that the papers' experiments run with."""


def models_of(name: str) -> tuple[str, ...]:
    """The models that an experiment has runs with."""
    return tuple(dict.fromkeys(RUNS[run].model for run in EXPERIMENTS[name].runs))


def of_model(experiment: Experiment, model: str) -> tuple[str, ...]:
    """The runs of an experiment with a model; "" is the default."""
    return tuple(name for name in experiment.runs if RUNS[name].model == model)


def kept(names: Sequence[str], results: Path = RESULTS) -> list[Line]:
    """The lines kept of these runs."""
    return [line for name in names for line in records.read(results / f"{name}.jsonl")]


def render(name: str, results: Path = RESULTS, others: bool = False) -> str:
    """An experiment's commands and tables with each model, with the paper's numbers in brackets.

    others: the results are another model's, which ran in place of the experiment's first.
    """
    experiment, models = EXPERIMENTS[name], models_of(name)
    if experiment.together or others:
        runs = of_model(experiment, models[0]) if others else experiment.runs
        return "\n\n".join(_of_model(experiment, runs, results, others=others))
    parts = []
    for model in models:
        title = [f"**{NAMES[model]}**"] if len(models) > 1 else []
        # what the paper has and nobody measured is shown once, with the first model
        only = model != models[0]
        parts += [*title, *_of_model(experiment, of_model(experiment, model), results, only)]
    return "\n\n".join(parts)


def _of_model(
    experiment: Experiment, runs: Sequence[str], results: Path, only: bool = False, others: bool = False
) -> Iterator[str]:
    lines = kept(runs, results)
    asked = [replace(RUNS[run], model=_model(run, results)) if others else RUNS[run] for run in runs]
    if experiment.commands:
        yield "\n".join(f"    {line}" for run in asked for line in run.shown().splitlines())
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
    counted = [line for line in lines if any(is_about(table, line) for table in experiment.tables)]
    yield _of_what(counted or lines)


def _model(run: str, results: Path) -> str:
    """The model that a run had; its own, where nothing was measured."""
    return next((str(line["model"]) for line in kept([run], results)), RUNS[run].model)


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
    if table.by == ("budget",) and not table.budgets:
        asked = dict.fromkeys(sorted(asked, key=size))
    heads = [column for column in asked if not is_pooled(column, table)]
    heads += [column for column in asked if is_pooled(column, table)]
    there = dict.fromkeys(row for row, _ in [*places, *table.paper])
    rows = [row for row in table.rows or there if row in there]
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
        # where all are the same, nothing says how much others would differ
        if np.isfinite(error) and error:
            parts.append(f"±{error * score.scale:.{score.digits}f}")
    if place in table.paper:
        parts.append(f"({table.paper[place]})")
    if sign := signs.get(place):
        more, less = SCORES[places[place].score].words
        parts.append(more if sign > 0 else less)
    return " ".join(parts)


def _told(places: Mapping[Place, Sample], table: Table, model: str) -> str:
    """In words, how many of the paper's differences from its own method are found here."""
    found = verdict(places, table)
    said = [f"In brackets: the paper's numbers, with {model}."] * bool(table.paper)
    if found.n:
        parts = [f"{_counted(found.same)} the same direction here", f"{_counted(found.other)} the other"]
        told = zip(parts, (found.same, found.other), strict=True)
        parts = [f"{part} [{listed(rivals)}]" if rivals else part for part, rivals in told]
        parts.append(f"{found.unclear} cannot be told")
        if found.untested:
            parts.append(f"{found.untested} {_are(found.untested)} of too few numbers for a test")
        own = f"`{table.against}`" if table.head == "policy" else table.against
        differences = f"{found.n} difference{'s' * (found.n > 1)}"
        said.append(textwrap.fill(f"Of the paper's {differences} from {own}, {', '.join(parts)}.", 130))
    # a line each
    return "\n".join(said)


def _counted(rivals: Sequence[Place]) -> str:
    return f"{len(rivals)} {'has' if len(rivals) == 1 else 'have'}"


def _are(n: int) -> str:
    return "is" if n == 1 else "are"


def _of_what(lines: Sequence[Line]) -> str:
    """Sizes, time and versions."""
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
    minutes = round(sum(line["seconds"] for line in lines) / 60)
    took = f"{minutes} minute{'s' * (minutes > 1)}" if minutes else "less than a minute"
    said = f"*{', '.join([*sizes, took])}; {'; '.join(_made_by(lines))}.*"
    return textwrap.fill(said, 140, break_on_hyphens=False)


def _made_by(lines: Sequence[Line]) -> Iterator[str]:
    """For each version of kvtool and of llama-cpp-python the models that ran, and their patches."""
    patches: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for model, own, llama, patch in dict.fromkeys(tuple(line[name] for name in VERSIONS) for line in lines):
        patches[own, llama][Path(model).stem].append(str(patch)[:12])
    for (own, llama), of_models in patches.items():
        models = (f"{model} with patch {' and '.join(each)}" for model, each in of_models.items())
        yield f"{', '.join(models)}, kvtool {own}, llama-cpp-python {llama}"


def fill_between(text: str, mark: str, rows: Callable[[], Iterable[str]]) -> str:
    """The document with the lines between the marks of this name made anew, once for each of them."""
    marks = re.compile(rf"(<!-- {mark} -->\n).*?(<!-- end -->)", re.S)
    return marks.sub(lambda found: found[1] + "\n".join(rows()) + "\n" + found[2], text)


def fill(text: str, results: Path = RESULTS) -> str:
    """The document with the text between the two marks of each experiment made anew. Raises ValueError."""
    mark = re.compile(r"(<!-- experiment (\S+) -->\n).*?(<!-- end -->)", re.S)
    if unknown := [name for _, name, _ in mark.findall(text) if name not in EXPERIMENTS]:
        raise ValueError(f"no experiment {', '.join(unknown)}; there are: {', '.join(EXPERIMENTS)}")
    return mark.sub(lambda found: f"{found[1]}{render(found[2], results)}\n{found[3]}", text)
