"""Repeat the papers' experiments with a model of your choice, and write their tables.

    python benchmarks/papers.py run DATA [ID ...]    measure what is missing of these experiments, or of all
    python benchmarks/papers.py tables               write the tables of the documents from
    docs/papers/*.jsonl

An experiment is a list of `kvtool compare`, `kvtool eval` and `kvtool inspect` commands, which docs/papers.md
shows; the one in docs/eval.md comes from no paper. DATA is a folder with the texts and data sets, in the
folders that benchmarks/experiments.py names. Records are kept in `--work` and not measured again. docs/papers
has the part of them that the tables need: scores of items and of blocks of tokens, and nothing of the data
sets.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from commands import VERSIONS, Line, shell
from common import make_parser, note
from experiments import EXPERIMENTS, RUNS, Place, Table

from kvtool.measure import records, statistics

ROOT = Path(__file__).parent.parent
DOCUMENTS = ROOT / "docs" / "papers.md", ROOT / "docs" / "eval.md"
RESULTS = ROOT / "docs" / "papers"


@dataclass(frozen=True, slots=True)
class Score:
    """How a score is shown.

    Attributes
    ----------
    title
        Heading of the table.
    lower
        Whether lower is better.
    scale
        Factor of the printed number.
    digits
        Its decimal places.
    exp
        Whether the exponential of the mean is printed.
    words
        For a higher number, and for a lower one.
    """

    title: str
    lower: bool = False
    scale: float = 1.0
    digits: int = 2
    exp: bool = False
    words: tuple[str, str] = ("better", "worse")


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
    "held": Score(
        "Share of the rows that hold a token at the end, %", scale=100, digits=1, words=("more", "less")
    ),
}


@dataclass(frozen=True, slots=True)
class Sample:
    """The numbers of which a place of a table shows the mean.

    Attributes
    ----------
    score
        One of SCORES.
    values
        Value and weight of each item, or of each block of tokens, by its name.
    of_text
        Whether they are blocks of a text, in their order, which depend on each other.
    """

    score: str
    values: dict[str, tuple[float, float]] = field(default_factory=dict)
    of_text: bool = False

    def mean(self) -> tuple[float, float]:
        """The mean and its standard error; the error is nan for a single item."""
        return statistics.mean_error(*self._blocks(list(self.values.values())))

    def minus(self, other: Sample) -> Difference | None:
        """The mean of the differences, item by item; None of fewer than two."""
        both = [
            (value - other.values[name][0], w)
            for name, (value, w) in self.values.items()
            if name in other.values
        ]
        if len(both) < 2:
            return None
        sums, weights = self._blocks(both)
        return Difference(float(sums.sum() / weights.sum()), statistics.sign_test(sums))

    def _blocks(self, values: Sequence[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
        value, weight = np.array(values).T
        sums = value * weight
        return statistics.joined(sums, weight) if self.of_text else (sums, weight)


@dataclass(frozen=True, slots=True)
class Difference:
    """A mean difference between two policies on the same items.

    Attributes
    ----------
    mean
        It.
    p
        The chance of one as large without a true difference.
    """

    mean: float
    p: float


def samples(lines: Sequence[Line], table: Table) -> dict[Place, Sample]:
    """The places of a table. A line without a budget is in the column of every budget."""
    lines = [line for line in lines if not table.rows or line["label"] in table.rows]
    budgets = table.budgets or tuple(dict.fromkeys(line["budget"] for line in lines if line["budget"]))
    places: dict[Place, Sample] = {}
    for line in lines:
        score = table.scores.get(line["task"], "") if table.scores else table.score
        if not score:
            continue
        found = _values(line, score)
        for budget in {line["budget"]}.intersection(budgets) if line["budget"] else budgets or [None]:
            shown = line | {"budget": budget}
            column = ", ".join(table.names.get(str(shown[name]), str(shown[name])) for name in table.by)
            for name in dict.fromkeys([column, table.pooled or column]):
                sample = Sample(score, of_text=bool(line.get("weights", {}).get(score)))
                places.setdefault((line["label"], name), sample).values.update(found)
    return {place: sample for place, sample in places.items() if sample.values}


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


def render(name: str, results: Path = RESULTS) -> str:
    """An experiment's commands and tables, with the paper's numbers in brackets."""
    experiment = EXPERIMENTS[name]
    shown = [f"    {line}" for run in experiment.runs for line in RUNS[run].shown().splitlines()]
    if not experiment.tables:
        return "\n".join(shown)
    lines = [line for run in experiment.runs for line in records.read(results / f"{run}.jsonl")]
    if not lines:
        return "\n".join([*shown, "", "Not measured yet."])
    parts = ["\n".join(shown)]
    for table in experiment.tables:
        places = samples(lines, table)
        parts += ["\n".join(_rows(places, table)), _told(places, table, experiment.model)]
    return "\n\n".join([*filter(None, parts), _of_what(lines)])


def _rows(places: Mapping[Place, Sample], table: Table) -> Iterator[str]:
    signs = compared(places, table)
    columns = dict.fromkeys(column for _, column in [*table.paper, *places] if column != table.pooled)
    columns = [*columns, *[table.pooled] * bool(table.pooled)]
    yield f"{table.title or SCORES[table.score].title}:"
    yield ""
    yield f"| policy | {' | '.join(columns)} |"
    yield "| --- |" + " ---: |" * len(columns)
    for row in table.rows or dict.fromkeys(row for row, _ in [*places, *table.paper]):
        yield (
            f"| `{row}` | "
            + " | ".join(_shown(places, table, (row, column), signs) for column in columns)
            + " |"
        )


def _shown(places: Mapping[Place, Sample], table: Table, place: Place, signs: Mapping[Place, int]) -> str:
    parts = []
    if place in places:
        score, (mean, error) = SCORES[places[place].score], places[place].mean()
        if score.exp:
            mean, error = np.exp(mean), np.exp(mean) * error
        parts.append(f"{mean * score.scale:.{score.digits}f}")
        if np.isfinite(error):
            parts.append(f"±{error * score.scale:.{score.digits}f}")
    if place in table.paper:
        parts.append(f"({table.paper[place]})")
    if sign := signs.get(place):
        more, less = SCORES[places[place].score].words
        parts.append(more if sign > 0 else less)
    return " ".join(parts)


def compared(places: Mapping[Place, Sample], table: Table) -> dict[Place, int]:
    """Of each place that a test can compare with the paper's own method: 1 better, -1 worse, 0 not told.

    A table's tests together are wrong with a chance of 5 % (Holm). A single number, such as a Self-BLEU, has
    no test.
    """
    found = {}
    for place in places:
        own = table.against, place[1]
        if place[0] != table.against and own in places and (found_one := places[place].minus(places[own])):
            found[place] = found_one
    adjusted = statistics.holm(np.array([each.p for each in found.values()]))
    return {
        place: int(np.sign(each.mean)) * _sign(places[place].score) * bool(p <= 0.05)
        for (place, each), p in zip(found.items(), adjusted, strict=True)
    }


def _sign(score: str) -> int:
    return -1 if SCORES[score].lower else 1


def _told(places: Mapping[Place, Sample], table: Table, model: str) -> str:
    """In words, how many of the paper's differences from its own method are found here."""
    signs = compared(places, table)
    ordered = dict(_ordered(places, table))
    found = [theirs * signs[place] for place, theirs in ordered.items() if place in signs]
    here, reverse, unclear = (found.count(sign) for sign in (1, -1, 0))
    said = [f"In brackets: the paper's numbers, with {model}."] * bool(table.paper)
    if ordered:
        n, n_test = len(ordered), len(signs)
        verdict = "No difference can be told here."
        if here or reverse:
            verdict = "Where a difference can be told here, it is "
            verdict += (
                "the paper's." if not reverse else "the other way round." if not here else "either way."
            )
        parts = [f"{here} appear{'s' * (here == 1)} here", f"{reverse} {_are(reverse)} reversed"]
        parts.append(f"{unclear} cannot be told ({n_test} test{'s' * (n_test != 1)} in the table)")
        if untested := n - len(found):
            parts.append(f"\n{untested} {_are(untested)} of single numbers, which have no test")
        told = ", ".join(parts).replace(", \n", ",\n")
        said += [verdict, f"Of its {n} difference{'s' * (n > 1)} from `{table.against}`, {told}."]
    # a line each
    return "\n".join(said)


def _are(n: int) -> str:
    return "is" if n == 1 else "are"


def _ordered(places: Mapping[Place, Sample], table: Table) -> Iterator[tuple[Place, int]]:
    """Places that were measured here, and whether the paper calls them better (1) or worse (-1).

    Compared is with the paper's own method; `full` does not count, unless the paper says that it is worse.
    """
    for place in places:
        own = table.against, place[1]
        if own not in places:
            continue
        if place[0] in table.worse:
            yield place, -1
        elif place[0] != "full" and {place, own} <= table.paper.keys():
            theirs = int(np.sign(float(table.paper[place]) - float(table.paper[own]))) * _sign(table.score)
            if theirs:
                yield place, theirs


def _of_what(lines: Sequence[Line]) -> str:
    """Sizes, time and versions."""
    items = {f"{line['of']} {item}" for line in lines for item in line.get("items", ())}
    sizes = [f"{len(items)} items"] if items else []
    if tokens := {line["tokens"] for line in lines if "tokens" in line}:
        sizes.append(f"{max(tokens):,} tokens")
    made_by = dict.fromkeys(tuple(line[name] for name in VERSIONS) for line in lines)
    # a line each
    versions = ";\n".join(
        f"{Path(model).stem}, kvtool {own}, llama-cpp-python {llama}, patch {str(patch)[:12]}"
        for model, own, llama, patch in made_by
    )
    minutes = round(sum(line["seconds"] for line in lines) / 60)
    took = f"{minutes} minute{'s' * (minutes > 1)}" if minutes else "less than a minute"
    return f"*{', '.join([*sizes, took])}; {versions}.*"


# running


def run(
    data: Path,
    work: Path,
    names: Sequence[str],
    more: Sequence[str] = (),
    results: Path = RESULTS,
    only: Sequence[str] = (),
) -> None:
    """Measure what is missing, and keep what the tables need. Ends the program if a command fails.

    only: labels of the policies that are measured. Lines of the others stay as they are.
    """
    work.mkdir(parents=True, exist_ok=True)
    for name in names:
        asked = RUNS[name]
        path = work / f"{getattr(asked, 'store', name)}.jsonl"
        if only:
            asked = replace(asked, policies=tuple(label for label in asked.policies if label in only))
        for command in asked.commands():
            note(f"{name}: {shell(command)}")
            there = [str(data / part) if "/" in part else part for part in command]
            if command[0] == "inspect":
                _inspected(path, command, [*there, *more])
            else:
                _kvtool(*there, *more, "--json", str(path), "--resume")
        found = list(asked.lines(records.read(path)))
        _keep(results / f"{name}.jsonl", found, {line["label"] for line in found} if only else None)


def _keep(path: Path, lines: Iterable[Line], labels: Container[str] | None) -> None:
    """Writes these lines instead of those of the labels, or of all."""
    new = [_rounded(line) for line in lines]
    records.rewrite(path, lambda old: [line for line in old if labels and line["label"] not in labels] + new)


def _kvtool(*arguments: str) -> str:
    """The stdout of a kvtool command."""
    done = subprocess.run(
        [sys.executable, "-m", "kvtool", *arguments], stdout=subprocess.PIPE, check=False, text=True
    )
    if done.returncode:
        sys.exit(f"kvtool {' '.join(arguments)}: exit code {done.returncode}")
    return done.stdout


def _inspected(path: Path, command: Sequence[str], arguments: Sequence[str]) -> None:
    """Run `kvtool inspect`, which keeps no file of records itself, unless it was run before."""
    if all(record["command"] != list(command) for record in records.read(path)):
        found = json.loads(_kvtool(*arguments))
        about = {"command": list(command), "file": Path(command[1]).name, **records.versions()}
        records.append(path, found | about)


def _rounded(line: Line) -> Line:
    """The line with six digits per number, which is more than any error tells."""
    scores = {
        name: [value if value is None else float(f"{value:.6g}") for value in values]
        for name, values in line["scores"].items()
    }
    return line | {"scores": scores, "seconds": round(line["seconds"], 1)}


def tables(text: str, results: Path = RESULTS) -> str:
    """The document with the text between the two marks of each experiment made anew."""
    mark = re.compile(r"(<!-- experiment (\S+) -->\n).*?(<!-- end -->)", re.S)
    unknown = [name for _, name, _ in mark.findall(text) if name not in EXPERIMENTS]
    if unknown:
        sys.exit(f"no experiment {', '.join(unknown)}; there are: {', '.join(EXPERIMENTS)}")
    return mark.sub(lambda found: f"{found[1]}{render(found[2], results)}\n{found[3]}", text)


def main() -> None:
    parser = make_parser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("data", type=Path)
    running.add_argument("names", nargs="*", metavar="ID", help="; ".join(EXPERIMENTS))
    running.add_argument("-m", "--model", help="a name of models.txt or a path (default: as kvtool itself)")
    running.add_argument("-t", "--threads", default="1")
    running.add_argument("--work", type=Path, default=ROOT / "build" / "papers", help="where all results are")
    running.add_argument(
        "--only", default="", metavar="POLICY,...", help="measure these, keep the others' lines"
    )
    commands.add_parser("tables")
    args = parser.parse_args()
    if args.command == "run":
        if unknown := [name for name in args.names if name not in EXPERIMENTS]:
            parser.error(f"no experiment {', '.join(unknown)}; there are: {', '.join(EXPERIMENTS)}")
        names = args.names or [name for name, each in EXPERIMENTS.items() if not each.long]
        runs = dict.fromkeys(run for name in names for run in EXPERIMENTS[name].runs)
        model = ["-m", args.model] if args.model else []
        work = args.work / Path(args.model or "default").stem
        only = list(filter(None, args.only.split(",")))
        run(args.data, work, list(runs), [*model, "-t", args.threads], only=only)
    for path in DOCUMENTS:
        path.write_text(tables(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
