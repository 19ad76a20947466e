"""RULER under many policies and budgets, each prompt read once: what `kvtool eval ruler` has for one of them.

    python -m papers.ruler measure -m MODEL --essays DIR --squad FILE --hotpotqa FILE --json FILE
    python -m papers.ruler table FILE...

A policy's budget is a share of the prompt, and room for the question and the answer, as in kvpress's
benchmark: what is evicted is evicted once, behind the text (question after) or behind all of the prompt
(question known). `measure` goes on where it has ended; records are those of `kvtool eval`, and `table` prints
what papers/ruler.md shows.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.common import make_parser
from kvtool import policies, tasks
from kvtool.chats.prompt import template_of
from kvtool.engine.settings import Settings
from kvtool.llama.model import Model
from kvtool.measure import records
from kvtool.measure.grid import split_policy
from kvtool.models.download import sha256
from kvtool.models.resolve import resolve
from kvtool.policy import Policy
from kvtool.tasks.reader import N_OUTPUT, Reader
from kvtool.tasks.results import Results
from kvtool.tasks.ruler import PARTS, Ruler
from kvtool.tasks.shared import Shared
from papers import significance

_ROOM = 256
"""Cells beyond a share of the prompt: nothing is evicted for them."""

_BATCH = 512

_LEVEL = 0.05

_POLICIES = "streamingllm,knorm,keydiff,h2o,snapkv,expected,kvzip"

_FULL = ("`full`", 0.0)


@dataclass(frozen=True, slots=True)
class Row:
    """What a prompt is read and kept with.

    Attributes
    ----------
    policy
        Its name, with options as `kvtool compare` has them.
    removed
        The share of the prompt's cells that it evicts, once it has read it whole.
    budget
        In place of that, its budget in cells: it reads the prompt in a stream.
    type_kv
        The number format of keys and values.
    """

    policy: str
    removed: float = 0.0
    budget: int = 0
    type_kv: str = "f16"

    @property
    def is_shared(self) -> bool:
        """Whether it goes on from what has been read for another row."""
        return not self.budget and self.type_kv == "f16"

    def fit(self, n: int, n_answer: int) -> Policy:
        """The policy for a prompt of n tokens."""
        name, options = split_policy(self.policy)
        kind = policies.wanted(name).kind
        if not kind.evicts:
            return policies.wanted(name, None, options).fit(-(-(n + n_answer) // _ROOM) * _ROOM)
        if self.budget:
            return policies.wanted(name, None, options).fit(self.budget)
        return policies.wanted(name, _ROOM, options).fit(round(n * (1 - self.removed)) + _ROOM)

    def settings(self, n_threads: int) -> Settings:
        """How its engine runs."""
        return Settings(
            n_batch=_BATCH,
            n_output=N_OUTPUT,
            n_threads=n_threads,
            type_k=self.type_kv,
            type_v=self.type_kv,
            prefill="whole" if self.is_shared else None,
        )

    def knows(self, question: str) -> bool:
        """Whether its numbers for a question that is known can differ from those for one that comes after.

        They cannot where nothing is forgotten. A rehearsal sees no question.
        """
        is_like_full = not self.is_shared or self.policy == "full"
        return question == "after" or not (is_like_full or self.fit(2 * _ROOM, 1).rehearsal)


def rows(names: Sequence[str], removed: Sequence[float], others: Sequence[str]) -> Iterator[Row]:
    """The full cache; policies with each share; others: "recall@128" in cells, "full@q4_0" by its type."""
    yield Row("full")
    for name in filter(None, names):
        for share in removed:
            yield Row(name, share)
    for other in filter(None, others):
        name, _, how = other.rpartition("@")
        yield Row(name, budget=int(how)) if how.isdecimal() else Row(name, type_kv=how)


def measure(args: Namespace) -> None:
    """Asks each item under all rows, before the next item."""
    first, end = args.items
    path = resolve(args.model)
    of_model = {"model": path.name, "model_sha256": sha256(path), **records.versions()}
    wanted = list(rows(args.policies.split(","), args.removed, args.others.split(",")))
    with closing(Model(path)) as model, ExitStack() as stack:
        template, shared = template_of(model), Shared(model, Row("full").settings(args.threads))
        asked = []
        for question in args.question:
            names = {name: getattr(args, name) for name in ("essays", "squad", "hotpotqa", "tasks")}
            given = {**names, "lengths": args.length, "repeats": end, "question": question}
            task = tasks.make("ruler", [f"{name}={value}" for name, value in given.items() if value])
            assert isinstance(task, Ruler)
            items = task.items([], model)[first * (len(task.tasks) or len(PARTS)) :]
            for row in (row for row in wanted if row.knows(question)):
                reader = Reader(model, row.fit, row.settings(args.threads), template)
                reader.shared = shared if row.is_shared else None
                stack.callback(reader.close)
                about = {"task": "ruler", "question": question, **asdict(row), **of_model}
                asked.append((about, task, items, reader))
        for number in range(len(items)):
            for about, task, items, reader in asked:
                # one item at a time: rows that lack other items must not take turns at reading
                for record in Results(about, items[number : number + 1], args.json).measure(task, reader):
                    sys.stderr.write(f"{number + 1}/{len(items)} {_line(record)}\n")
                # so many caches at once are more than a machine has
                reader.close()


def _line(record: records.Record) -> str:
    score = record["scores"].get("string_match", record.get("error"))
    removed = f" -{100 * record['removed']:g} %" if record["removed"] else ""
    return f"{record['id']} {record['question']}: {_label(record)}{removed}: {score}"


def _label(record: records.Record) -> str:
    how = f"{record['budget']} cells" if record["budget"] else record["type_kv"].replace("f16", "")
    return f"`{record['policy']}` {how}".rstrip()


Place = tuple[str, float]
"""A row's label, and the share that is removed."""

Scores = dict[str, float]
"""The scores of items, by their ids."""


def places(found: Sequence[records.Record]) -> dict[Place, Scores]:
    """The scores of each place of a table."""
    of: dict[Place, Scores] = defaultdict(dict)
    for record in found:
        if "string_match" in record["scores"]:
            of[_label(record), record["removed"]][record["id"]] = record["scores"]["string_match"]
    return dict(of)


def mean(scores: Scores) -> float:
    """RULER's average: of the means of tasks."""
    of = defaultdict(list)
    for item, score in scores.items():
        of[item.partition("-")[0]].append(score)
    return fmean(map(fmean, of.values()))


def behind(here: Mapping[Place, Scores], full: Scores) -> dict[Place, bool]:
    """Which places a test tells from the full cache, all of them together wrong with a chance of 5 %."""
    gaps = {
        place: np.array([score - full[item] for item, score in sorted(scores.items())])
        for place, scores in here.items()
        if scores is not full
    }
    adjusted = significance.holm(np.array([significance.sign_flip_test(gap) for gap in gaps.values()]))
    return {
        place: p <= _LEVEL and gap.mean() < 0 for (place, gap), p in zip(gaps.items(), adjusted, strict=True)
    }


def table(args: Namespace) -> None:
    """Prints the tables of these records, of the items that all rows have."""
    every = [record for path in args.records for record in records.read(path)]
    for question in ("after", "known"):
        found = [record for record in every if record["question"] == question or _label(record) == _FULL[0]]
        here = places(found)
        if len(here) < 2:
            continue
        ids = set.intersection(*map(set, here.values()))
        here = {place: {i: score for i, score in of.items() if i in ids} for place, of in here.items()}
        n_task = len({i.partition("-")[0] for i in ids})
        print(f"\nQuestion {question}, {len(ids)} items of {n_task} tasks, %:\n")
        is_behind = behind(here, here[_FULL])
        cells = {
            place: f"{100 * mean(of):.0f}{' worse' if is_behind.get(place) else ''}"
            for place, of in here.items()
        }
        _print("policy", cells, lambda share: f"-{100 * share:g} %" if share else "all")
        for name, title in (("kv_bytes", "device"), ("archive_bytes", "host")):
            sizes = defaultdict(list)
            for record in found:
                if record["id"] in ids and name in record:
                    sizes[_label(record), record["removed"]].append(record[name] / 2**20)
            print(f"\nMiB on the {title}:\n")
            _print("policy", {place: f"{fmean(of):.0f}" for place, of in sizes.items()}, str)
        if args.removed is not None:
            at = {place[0]: of for place, of in here.items() if place[1] in (0, args.removed)}
            print(f"\nBy task, {100 * args.removed:g} % removed, %:\n")
            _print(
                "policy",
                {(label, part): score for label, of in at.items() for part, score in _parts(of)},
                str,
            )


def _parts(scores: Scores) -> Iterator[tuple[str, str]]:
    for part in PARTS:
        if of := [score for item, score in scores.items() if item.partition("-")[0] == part]:
            yield part, f"{100 * fmean(of):.0f}"


def _print(head: str, cells: Mapping[tuple[str, Any], str], named: Callable[[Any], str]) -> None:
    """Prints a table in Markdown of cells by their rows and columns."""
    columns = list(dict.fromkeys(column for _, column in cells))
    print("| " + " | ".join([head, *map(named, columns)]) + " |")
    print("| --- |" + " ---: |" * len(columns))
    for label in dict.fromkeys(label for label, _ in cells):
        print("| " + " | ".join([label, *(cells.get((label, column), "") for column in columns)]) + " |")


def _numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


def _range(text: str) -> tuple[int, int]:
    first, end = text.split(":")
    return int(first), int(end)


def main(words: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("measure", help="ask, and append to records")
    one.add_argument("-m", "--model", required=True, help="a name of models.txt or a path")
    one.add_argument("-t", "--threads", type=int, default=1)
    for name in ("essays", "squad", "hotpotqa", "tasks"):
        one.add_argument(f"--{name}", default="", help="as in kvtool eval ruler --set")
    one.add_argument("--length", type=int, default=4096)
    one.add_argument("--items", type=_range, default=(0, 1), metavar="FROM:TO", help="samples of each task")
    one.add_argument("--question", type=lambda text: text.split(","), default=["after", "known"])
    one.add_argument("--policies", default=_POLICIES)
    one.add_argument("--removed", type=_numbers, default=_numbers("0.25,0.5,0.75,0.875,0.97"))
    one.add_argument("--others", default="recall@128", help="POLICY@CELLS or full@TYPE, separated by commas")
    one.add_argument("--json", type=Path, required=True)
    one.set_defaults(run=measure)
    other = commands.add_parser("table", help="print the tables")
    other.add_argument("records", type=Path, nargs="+")
    other.add_argument("--removed", type=float, help="also by task, with this share removed")
    other.set_defaults(run=table)
    args = parser.parse_args(words)
    args.run(args)


if __name__ == "__main__":
    main()
