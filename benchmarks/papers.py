"""The papers' experiments on whatever model one has: measures them, and writes their tables.

    python benchmarks/papers.py run DATA [ID ...]    what is missing of these experiments, or of all
    python benchmarks/papers.py tables               the tables of the documents from docs/papers/*.jsonl

An experiment is a list of `kvtool compare`, `kvtool eval` and `kvtool inspect` commands, which docs/papers.md
shows; one that is no paper's is in docs/eval.md. DATA has the texts and data sets in folders as
benchmarks/experiments.py names them. What was measured is in `--work`, and is not measured again; docs/papers
has of it what the tables need: scores of items and of blocks of tokens, nothing of the data sets themselves.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from common import note
from experiments import EXPERIMENTS, RUNS, VERSIONS, Cell, Line, Table, shell

from kvtool.measure import records, statistics

ROOT = Path(__file__).parent.parent
DOCUMENTS = ROOT / "docs" / "papers.md", ROOT / "docs" / "eval.md"
RESULTS = ROOT / "docs" / "papers"


@dataclass(frozen=True, slots=True)
class Score:
    """title: above the table. lower: whether less is better. scale, digits: of what is printed.

    exp: the mean's exponential is printed.
    """

    title: str
    lower: bool = False
    scale: float = 1.0
    digits: int = 2
    exp: bool = False


SCORES = {
    "found": Score("Found, %", scale=100, digits=1),
    "nll": Score("Perplexity", lower=True, exp=True),
    "rouge": Score("Geometric mean of ROUGE-1, ROUGE-2 and ROUGE-L, %", scale=100, digits=1),
    "logp": Score("Log-probability of the right answer, nats a token"),
    "rouge1": Score("ROUGE-1, %", scale=100, digits=1),
    "rouge2": Score("ROUGE-2, %", scale=100, digits=1),
    "rougeL": Score("ROUGE-L, %", scale=100, digits=1),
    "f1": Score("F1, %", scale=100, digits=1),
    "em": Score("Exact match, %", scale=100, digits=1),
    "subspan_em": Score("Right answer somewhere in the output, %", scale=100, digits=1),
    "acc": Score("Accuracy, %", scale=100, digits=1),
    "right": Score("Log-probability of the right choice among all choices, nats"),
    "score": Score("LongBench's metrics, %", scale=100, digits=1),
    "self_bleu": Score("Self-BLEU", digits=1),
    "distance": Score("Distance of Self-BLEU from the full cache's", lower=True, digits=1),
    "evicted": Score("Tokens evicted at the end, %, the mean over rows", scale=100, digits=1),
    "ms": Score("CPU time of a token, ms", lower=True, digits=2),
    "held": Score("Share of the rows that hold a token at the end, %", scale=100, digits=1),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """What a cell is the mean of: value and weight of each item, or of each block of tokens, by its name.

    score: one of SCORES.
    """

    score: str
    values: dict[str, tuple[float, float]] = field(default_factory=dict)

    def mean(self) -> tuple[float, float]:
        """And its standard error; nan of a single item's."""
        return self._mean(list(self.values.values()))

    def minus(self, other: Sample) -> tuple[float, float]:
        """The mean of the differences, item by item, and its standard error."""
        both = [
            (value - other.values[name][0], w)
            for name, (value, w) in self.values.items()
            if name in other.values
        ]
        return self._mean(both) if both else (float("nan"), float("nan"))

    @staticmethod
    def _mean(values: Sequence[tuple[float, float]]) -> tuple[float, float]:
        value, weight = np.array(values).T
        return statistics.mean_error(value * weight, weight)


def samples(lines: Sequence[Line], table: Table) -> dict[Cell, Sample]:
    """The table's cells. What has no budget is in the column of each."""
    lines = [line for line in lines if not table.rows or line["label"] in table.rows]
    budgets = table.budgets or tuple(dict.fromkeys(line["budget"] for line in lines if line["budget"]))
    cells: dict[Cell, Sample] = {}
    for line in lines:
        score = table.scores.get(line["task"], "") if table.scores else table.score
        if not score:
            continue
        found = _values(line, score)
        for budget in {line["budget"]}.intersection(budgets) if line["budget"] else budgets or [None]:
            shown = line | {"budget": budget}
            column = ", ".join(table.names.get(str(shown[name]), str(shown[name])) for name in table.by)
            for name in dict.fromkeys([column, table.pooled or column]):
                cells.setdefault((line["label"], name), Sample(score)).values.update(found)
    return {cell: sample for cell, sample in cells.items() if sample.values}


def _values(line: Line, score: str) -> dict[str, tuple[float, float]]:
    found = _rouge(line["scores"]) if score == "rouge" else line["scores"].get(score, [])
    weights = line.get("weights", {}).get(score, [1] * len(found))
    items = line.get("items", range(len(found)))
    return {
        f"{line['of']} {item}": (value, weight)
        for item, value, weight in zip(items, found, weights, strict=True)
        if value is not None
    }


def _rouge(scores: Mapping[str, Sequence[float | None]]) -> list[float | None]:
    """What each item adds to the geometric mean of three means, to the first order: their mean is that one,
    and their error its error (the delta method). Where a mean is 0 no error is known: a single 0."""
    items = list(zip(*(scores[name] for name in ("rouge1", "rouge2", "rougeL")), strict=True))
    means = np.mean([item for item in items if None not in item], axis=0)
    if not means.all():
        return [0.0] + [None] * (len(items) - 1)
    whole = np.prod(means) ** (1 / 3)
    return [None if None in item else float(whole * np.mean(item / means)) for item in items]


def render(name: str, results: Path = RESULTS) -> str:
    """An experiment's commands and tables: ours, and the paper's in brackets."""
    experiment = EXPERIMENTS[name]
    shown = [f"    {line}" for run in experiment.runs for line in RUNS[run].shown().splitlines()]
    if not experiment.tables:
        return "\n".join(shown)
    lines = [line for run in experiment.runs for line in records.read(results / f"{run}.jsonl")]
    if not lines:
        return "\n".join([*shown, "", "Not measured yet."])
    parts = ["\n".join(shown)]
    for table in experiment.tables:
        cells = samples(lines, table)
        parts += ["\n".join(_rows(cells, table)), _told(cells, table, experiment.model)]
    return "\n\n".join([*filter(None, parts), _of_what(lines)])


def _rows(cells: Mapping[Cell, Sample], table: Table) -> Iterator[str]:
    columns = dict.fromkeys(column for _, column in [*table.paper, *cells] if column != table.pooled)
    columns = [*columns, *[table.pooled] * bool(table.pooled)]
    yield f"{table.title or SCORES[table.score].title}:"
    yield ""
    yield f"| policy | {' | '.join(columns)} |"
    yield "| --- |" + " ---: |" * len(columns)
    for row in table.rows or dict.fromkeys(row for row, _ in [*cells, *table.paper]):
        yield f"| `{row}` | " + " | ".join(_shown(cells, table, (row, column)) for column in columns) + " |"


def _shown(cells: Mapping[Cell, Sample], table: Table, cell: Cell) -> str:
    parts = []
    if cell in cells:
        score, (mean, error) = SCORES[cells[cell].score], cells[cell].mean()
        if score.exp:
            mean, error = np.exp(mean), np.exp(mean) * error
        parts.append(f"{mean * score.scale:.{score.digits}f}")
        if np.isfinite(error):
            parts.append(f"±{error * score.scale:.{score.digits}f}")
    if cell in table.paper:
        parts.append(f"({table.paper[cell]})")
    return " ".join([*parts, *filter(None, [("", "better", "worse")[_compared(cells, table, cell)]])])


def _compared(cells: Mapping[Cell, Sample], table: Table, cell: Cell) -> int:
    """1 where it is better than the paper's own method beyond two standard errors, -1 worse, 0 neither."""
    own = table.against, cell[1]
    if cell[0] == table.against or not {cell, own} <= cells.keys():
        return 0
    mean, error = cells[cell].minus(cells[own])
    return int(np.sign(mean)) * _sign(cells[cell].score) if abs(mean) > 2 * error else 0


def _sign(score: str) -> int:
    return -1 if SCORES[score].lower else 1


def _told(cells: Mapping[Cell, Sample], table: Table, model: str) -> str:
    """Whether the paper's ordering is there: of each difference between its own method and another."""
    found = [theirs * _compared(cells, table, cell) for cell, theirs in _ordered(cells, table)]
    here, reverse, unclear = (found.count(sign) for sign in (1, -1, 0))
    said = [f"In brackets: the paper's numbers, with {model}."] * bool(table.paper)
    if found:
        verdict = "The paper's ordering does not hold here." if reverse else "No difference can be told here."
        if here:
            verdict = f"The paper's ordering holds here {'in part' if reverse else 'as far as we can tell'}."
        said += [
            verdict,
            f"Of its {len(found)} differences from `{table.against}`, {here} appear here, {reverse} are "
            f"reversed, {unclear} are within two standard errors.",
        ]
    # a line each
    return "\n".join(said)


def _ordered(cells: Mapping[Cell, Sample], table: Table) -> Iterator[tuple[Cell, int]]:
    """Cells measured here, and whether they are better (1) or worse (-1) than the paper's own method there.

    No method competes with `full`, unless it is said to be worse.
    """
    for cell in cells:
        own = table.against, cell[1]
        if own not in cells:
            continue
        if cell[0] in table.worse:
            yield cell, -1
        elif cell[0] != "full" and {cell, own} <= table.paper.keys():
            theirs = int(np.sign(float(table.paper[cell]) - float(table.paper[own]))) * _sign(table.score)
            if theirs:
                yield cell, theirs


def _of_what(lines: Sequence[Line]) -> str:
    """Sizes, time and versions."""
    items = {f"{line['of']} {item}" for line in lines for item in line.get("items", ())}
    sizes = [f"{len(items)} items"] if items else []
    if tokens := {line["tokens"] for line in lines if "tokens" in line}:
        sizes.append(f"{max(tokens):,} tokens")
    made_by = dict.fromkeys(tuple(line[name] for name in VERSIONS) for line in lines)
    versions = "; ".join(
        f"{Path(model).stem}, kvtool {own}, llama-cpp-python {llama}, patch {str(patch)[:12]}"
        for model, own, llama, patch in made_by
    )
    minutes = round(sum(line["seconds"] for line in lines) / 60)
    took = f"{minutes} minute{'s' * (minutes > 1)}" if minutes else "less than a minute"
    return f"*{', '.join([*sizes, took])}; {versions}.*"


# running


def run(
    data: Path, work: Path, names: Sequence[str], more: Sequence[str] = (), results: Path = RESULTS
) -> None:
    """Measures what is missing, and keeps what tables need. Ends the program where a command fails."""
    work.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = work / f"{getattr(RUNS[name], 'store', name)}.jsonl"
        for command in RUNS[name].commands():
            note(f"{name}: {shell(command)}")
            there = [str(data / part) if "/" in part else part for part in command]
            if command[0] == "inspect":
                _inspected(path, command, [*there, *more])
            else:
                _kvtool(*there, *more, "--json", str(path), "--resume")
        _keep(results / f"{name}.jsonl", RUNS[name].lines(records.read(path)))


def _keep(path: Path, lines: Iterable[records.Record]) -> None:
    records.rewrite(path, lambda _: map(_rounded, lines))


def _kvtool(*arguments: str) -> str:
    """What it says on stdout."""
    done = subprocess.run(
        [sys.executable, "-m", "kvtool", *arguments], stdout=subprocess.PIPE, check=False, text=True
    )
    if done.returncode:
        sys.exit(f"kvtool {' '.join(arguments)}: exit code {done.returncode}")
    return done.stdout


def _inspected(path: Path, command: Sequence[str], arguments: Sequence[str]) -> None:
    """kvtool inspect keeps no file of results."""
    if all(record["command"] != list(command) for record in records.read(path)):
        found = json.loads(_kvtool(*arguments))
        about = {"command": list(command), "file": Path(command[1]).name, **records.versions()}
        records.append(path, found | about)


def _rounded(line: Line) -> Line:
    """Six digits tell more than any error."""
    scores = {
        name: [value if value is None else float(f"{value:.6g}") for value in values]
        for name, values in line["scores"].items()
    }
    return line | {"scores": scores, "seconds": round(line["seconds"], 1)}


def tables(text: str, results: Path = RESULTS) -> str:
    """The document with what stands between an experiment's two marks made anew."""
    mark = re.compile(r"(<!-- experiment (\S+) -->\n).*?(<!-- end -->)", re.S)
    unknown = [name for _, name, _ in mark.findall(text) if name not in EXPERIMENTS]
    if unknown:
        sys.exit(f"no experiment {', '.join(unknown)}; there are: {', '.join(EXPERIMENTS)}")
    return mark.sub(lambda found: f"{found[1]}{render(found[2], results)}\n{found[3]}", text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("data", type=Path)
    running.add_argument("names", nargs="*", metavar="ID", help="; ".join(EXPERIMENTS))
    running.add_argument("-m", "--model", help="a name of models.txt or a path (default: as kvtool itself)")
    running.add_argument("-t", "--threads", default="1")
    running.add_argument("--work", type=Path, default=ROOT / "build" / "papers", help="where all results are")
    commands.add_parser("tables")
    args = parser.parse_args()
    if args.command == "run":
        if unknown := [name for name in args.names if name not in EXPERIMENTS]:
            parser.error(f"no experiment {', '.join(unknown)}; there are: {', '.join(EXPERIMENTS)}")
        names = args.names or [name for name, each in EXPERIMENTS.items() if not each.long]
        runs = dict.fromkeys(run for name in names for run in EXPERIMENTS[name].runs)
        model = ["-m", args.model] if args.model else []
        work = args.work / Path(args.model or "default").stem
        run(args.data, work, list(runs), [*model, "-t", args.threads])
    for path in DOCUMENTS:
        path.write_text(tables(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
