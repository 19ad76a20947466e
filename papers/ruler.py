"""RULER under many policies and budgets, each prompt read once: what `kvtool eval ruler` has for one of them.

    python -m papers.ruler measure -m MODEL --essays DIR --squad FILE --hotpotqa FILE --json FILE
    python -m papers.ruler table FILE...

A policy's budget is a share of the prompt, and room for the question and the answer, as in kvpress's
benchmark: what is evicted is evicted once, behind the text (question after) or behind all of the prompt
(question known). `measure` goes on where it has ended; its records are in the form of those of `kvtool eval`.
`table` prints the scores of one model, length and patch, the memory and, if asked, the scores by task.
"""

from __future__ import annotations

import sys
from argparse import ArgumentTypeError, Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.common import make_parser
from kvtool import policies, tasks
from kvtool.chats.prompt import template_of
from kvtool.engine.settings import Settings
from kvtool.engine.stream import pad
from kvtool.errors import InputError, KvtoolError, UsageError
from kvtool.llama.model import Model
from kvtool.measure import records
from kvtool.measure.grid import split_policy
from kvtool.models.download import sha256
from kvtool.models.resolve import resolve
from kvtool.policy import Policy
from kvtool.system import interrupt
from kvtool.tasks.reader import N_OUTPUT, Reader
from kvtool.tasks.results import Results
from kvtool.tasks.ruler import PARTS, Ruler
from kvtool.tasks.shared import Shared
from papers import significance

_ROOM = 256
"""Cells beyond a share of the prompt: nothing is evicted for them."""

_BATCH = 512

_LEVEL = 0.05

_POLICIES = "streamingllm,knorm,keydiff,h2o,tova,snapkv,expected:epsilon=0.02,kvzip"
"""`epsilon` is kvpress's."""

_QUESTIONS = ("after", "known")

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

    def check(self, n: int) -> None:
        """Raises UsageError for what cannot be measured, and what `fit` raises for a prompt of n tokens."""
        name, _ = split_policy(self.policy)
        kind = policies.load(name)
        if kind.evicts and self.type_kv != "f16":
            raise UsageError(f"--others: only full takes a type; {name} takes a budget, as in {name}@128")
        if not kind.evicts and (self.budget or self.removed):
            raise UsageError(f"{name} evicts nothing; leave it out of --policies, and of POLICY@CELLS")
        if self.is_shared and (policies.recalls(kind) or self.fit(n, 1, n + 1).ragged):
            raise UsageError(
                f"--policies: {self.policy} cannot compress a prompt that was read whole; "
                f"choose --others {self.policy}@128, with a budget in cells"
            )
        self.settings(1)
        self.fit(n, 1, n + 1)

    def fit(self, n: int, n_answer: int, n_ctx: int) -> Policy:
        """The policy for a prompt of n tokens. n_ctx: the model's trained context.

        Raises InputError for a prompt of which it would evict nothing, or that does not fit in the context,
        and UsageError for a policy that there is not.
        """
        name, options = split_policy(self.policy)
        wanted = policies.wanted(name, _ROOM if self.removed else None, options)
        if self.budget:
            return wanted.fit(self.budget)
        if n >= n_ctx:
            raise InputError(f"a prompt of {n:,} tokens and its answer do not fit in a context of {n_ctx:,}")
        if not wanted.kind.evicts:
            return wanted.fit(min(pad(n + n_answer), n_ctx))
        n_kept = round(n * (1 - self.removed))
        if n - n_kept <= _ROOM:
            raise InputError(
                f"{100 * self.removed:g} % of {n:,} tokens are within the {_ROOM} cells beyond the budget: "
                "nothing would be evicted; choose a longer --length or more --removed"
            )
        return wanted.fit(n_kept + _ROOM)

    def settings(self, n_threads: int) -> Settings:
        """How its engine runs."""
        return Settings(
            n_batch=_BATCH,
            n_output=N_OUTPUT,
            n_threads=n_threads,
            type_k=self.type_kv,
            type_v=self.type_kv,
            prefill="whole" if self.is_shared else None,
            # no more than _ROOM tokens follow a prompt that was read whole
            over_budget=not self.is_shared,
        )

    def knows(self, question: str) -> bool:
        """Whether its numbers for a question that is known can differ from those for one that comes after.

        They cannot where nothing is evicted, or what is evicted is recalled.
        """
        kind = policies.load(split_policy(self.policy)[0])
        return question == "after" or (kind.evicts and not policies.recalls(kind))


def rows(names: Sequence[str], removed: Sequence[float], others: Sequence[str]) -> Iterator[Row]:
    """The full cache; policies with each share; others: "recall@128" in cells, "full@q4_0" by its type."""
    yield Row("full")
    for name in filter(None, names):
        for share in removed:
            yield Row(name, share)
    for other in others:
        name, _, how = other.rpartition("@")
        yield Row(name, budget=int(how)) if how.isdecimal() else Row(name, type_kv=how)


def measure(args: Namespace) -> None:
    """Asks each item under all rows, before the next item."""
    first, end = args.items
    wanted = list(rows(args.policies.split(","), args.removed, args.others))
    for row in wanted:
        row.check(args.length)
    path = resolve(args.model)
    of_model = {"model": path.name, "model_sha256": sha256(path), **records.versions()}
    with closing(Model(path)) as model, ExitStack() as stack:
        if args.length > model.n_ctx_train:
            raise UsageError(f"--length must be at most the trained context, {model.n_ctx_train}")
        template, shared = template_of(model), Shared(model, Row("full").settings(args.threads))
        asked = []
        for question in args.question:
            names = {name: getattr(args, name) for name in ("essays", "squad", "hotpotqa", "tasks")}
            given = {**names, "lengths": args.length, "repeats": end, "question": question}
            task = tasks.make("ruler", [f"{name}={value}" for name, value in given.items() if value])
            assert isinstance(task, Ruler)
            items = [item for item in task.items([], model) if int(item.id.rpartition("-")[2]) >= first]
            for row in (row for row in wanted if row.knows(question)):
                fit = partial(row.fit, n_ctx=model.n_ctx_train)
                reader = Reader(model, fit, row.settings(args.threads), template)
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
    return f"{record['id']} {record['question']}: {_named((_label(record), record['removed']))}: {score}"


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
    """Prints the tables of these records, of the items that all rows have. Raises InputError."""
    every = [record for path in args.records for record in _read(path)]
    _check_alike(every)
    shares = sorted({record["removed"] for record in every} - {0})
    if args.removed not in (None, *shares):
        raise InputError(f"no row has --removed {args.removed:g}; there are: {', '.join(map(str, shares))}")
    asked = [question for question in _QUESTIONS if _table(every, question, args.removed)]
    if not asked:
        raise InputError("no row has scores beside `full`")


_NEEDED = {"id", "question", "policy", "removed", "budget", "type_kv", "scores"}


def _read(path: Path) -> list[dict[str, Any]]:
    """The records of `measure` in a file. Raises InputError."""
    if not path.is_file():
        raise InputError(f"no file {path}")
    found = records.read(path)
    if lacking := [name for record in found for name in sorted(_NEEDED - record.keys())]:
        raise InputError(f"{path} has records that are not of `measure`: without {lacking[0]}")
    return found


def _check_alike(found: Sequence[records.Record]) -> None:
    """Raises InputError for records that are not of one model, length and patch."""
    for name in ("model", "model_sha256", "length", "patch"):
        # a record of an item that did not fit has these, too
        if len(values := {str(record.get(name)) for record in found}) > 1:
            raise InputError(f"records of more than one {name}: {', '.join(sorted(values))}")


def _table(every: Sequence[records.Record], question: str, removed: float | None) -> bool:
    """Prints the tables of a question; returns whether there are rows to compare. Raises InputError."""
    found = [record for record in every if record["question"] == question or _label(record) == _FULL[0]]
    here = places(found)
    if not here.keys() - {_FULL}:
        return False
    if _FULL not in here:
        raise InputError(f"question {question}: no scores of `full`, which the others are compared with")
    ids = set.intersection(*map(set, here.values()))
    if not ids:
        few = min(here, key=lambda place: len(here[place]))
        raise InputError(f"question {question}: no item is in all rows; {_named(few)} has the fewest")
    n_left = len(set().union(*here.values())) - len(ids)
    here = {place: {i: score for i, score in of.items() if i in ids} for place, of in here.items()}
    n_task = len({i.partition("-")[0] for i in ids})
    left = f" ({n_left} left out: not in all rows)" if n_left else ""
    print(f"\nQuestion {question}, {len(ids)} items of {n_task} tasks{left}, %:\n")
    is_behind = behind(here, here[_FULL])
    cells = {
        place: f"{100 * mean(of):.0f}{' worse' if is_behind.get(place) else ''}" for place, of in here.items()
    }
    _print("policy", cells, _share)
    if none := {(_label(record), record["removed"]) for record in found} - here.keys():
        print(f"\nWithout any score: {', '.join(map(_named, sorted(none)))}.")
    for name, title in (("kv_bytes", "device"), ("archive_bytes", "host")):
        sizes = defaultdict(list)
        for record in found:
            if record["id"] in ids and name in record:
                sizes[_label(record), record["removed"]].append(record[name] / 2**20)
        print(f"\nMiB on the {title}:\n")
        _print("policy", {place: f"{fmean(of):.0f}" for place, of in sizes.items()}, _share)
    if removed is not None:
        at = {place[0]: of for place, of in here.items() if place[1] in (0, removed)}
        print(f"\nBy task, {100 * removed:g} % removed, %:\n")
        parts = {(label, part): score for label, of in at.items() for part, score in _parts(of)}
        _print("policy", parts, str)
    return True


def _share(removed: float) -> str:
    return f"-{100 * removed:g} %" if removed else "all"


def _named(place: Place) -> str:
    label, removed = place
    return f"{label} {_share(removed)}" if removed else label


def _parts(scores: Scores) -> Iterator[tuple[str, str]]:
    for part in PARTS:
        if of := [score for item, score in scores.items() if item.partition("-")[0] == part]:
            yield part, f"{100 * fmean(of):.0f}"


def _print(head: str, cells: Mapping[tuple[str, Any], str], named: Callable[[Any], str]) -> None:
    """Prints a table in Markdown of cells by their rows and columns; columns that are numbers are sorted."""
    columns = list(dict.fromkeys(column for _, column in cells))
    if not any(isinstance(column, str) for column in columns):
        columns.sort()
    print("| " + " | ".join([head, *map(named, columns)]) + " |")
    print("| --- |" + " ---: |" * len(columns))
    for label in dict.fromkeys(label for label, _ in cells):
        print("| " + " | ".join([label, *(cells.get((label, column), "") for column in columns)]) + " |")


def _removed(text: str) -> float:
    with suppress(ValueError):
        if 0 < (share := float(text)) < 1:
            return share
    raise ArgumentTypeError(f"a share must be between 0 and 1, such as 0.75, got {text!r}")


def _shares(text: str) -> list[float]:
    return [_removed(each) for each in text.split(",")]


def _range(text: str) -> tuple[int, int]:
    first, _, end = text.partition(":")
    if first.isdecimal() and end.isdecimal() and int(first) < int(end):
        return int(first), int(end)
    raise ArgumentTypeError(f"must be FROM:TO with FROM less than TO, such as 0:5, got {text!r}")


def _questions(text: str) -> list[str]:
    if unknown := [each for each in text.split(",") if each not in _QUESTIONS]:
        raise ArgumentTypeError(f"must be after, known or both, as in after,known, got {unknown[0]!r}")
    return text.split(",")


def _others(text: str) -> list[str]:
    found = [each for each in text.split(",") if each]
    for each in found:
        name, _, how = each.rpartition("@")
        if not (name and how):
            raise ArgumentTypeError(f"must be POLICY@CELLS or full@TYPE, such as recall@128, got {each!r}")
    return found


def main(words: Sequence[str] | None = None) -> None:
    parser = make_parser(__doc__)
    parser.prog = "python -m papers.ruler"
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("measure", help="ask, and append to records")
    one.add_argument("-m", "--model", required=True, help="a name of models.txt or a path")
    one.add_argument("-t", "--threads", type=int, default=1)
    for name in ("essays", "squad", "hotpotqa", "tasks"):
        one.add_argument(f"--{name}", default="", help="as in kvtool eval ruler --set")
    one.add_argument("--length", type=int, default=4096)
    one.add_argument("--items", type=_range, default=(0, 1), metavar="FROM:TO", help="samples of each task")
    one.add_argument("--question", type=_questions, default=_QUESTIONS, help="after, known or both")
    one.add_argument("--policies", default=_POLICIES)
    one.add_argument("--removed", type=_shares, default="0.25,0.5,0.75,0.875,0.97")
    help_ = "POLICY@CELLS or full@TYPE, separated by commas"
    one.add_argument("--others", type=_others, default="recall@128", help=help_)
    one.add_argument("--json", type=Path, required=True)
    one.set_defaults(run=measure)
    other = commands.add_parser("table", help="print the tables")
    other.add_argument("records", type=Path, nargs="+")
    other.add_argument("--removed", type=_removed, help="also by task, with this share removed")
    other.set_defaults(run=table)
    args = parser.parse_args(words)
    with interrupt.ending(lambda: "stopped; what was measured is kept"):
        try:
            args.run(args)
        except (KvtoolError, OSError) as error:
            parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
