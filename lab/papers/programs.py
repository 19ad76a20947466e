"""Runs that are programs of this folder."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from kvtool import policies
from kvtool.measure import records, statistics
from kvtool.measure.grid import split_policy
from lab.papers.lines import Ask, ByText, Line, about, each_of, shell, typed
from lab.papers.ruler import rows


@dataclass(frozen=True, slots=True)
class FadingRun(ByText):
    """A run of `lab.papers.fading` for each text, which measures perplexity under each of the rules."""

    files: tuple[str, ...]
    rules: tuple[str, ...]
    budget: int
    max_tokens: int
    model: str = ""
    minutes: int = 0

    def shown(self) -> str:
        return shell(self._command("FILE"), self.model) + each_of(self.files)

    def lines(self, stored: Iterable[records.Record]) -> Iterator[Line]:
        for record in stored:
            counts = statistics.block_counts(record["tokens"] - 1)
            for label in self.rules:
                yield {
                    "label": label,
                    "budget": None if label == "full" else str(record["budget"]),
                    "of": record["file"],
                    "tokens": record["tokens"],
                    "scores": {"nll": (np.array(record["nll_blocks"][label]) / counts).tolist()},
                    "weights": {"nll": counts.astype(int).tolist()},
                    "bytes": [record["bytes"][label], 0],
                    **about(record | {"cpu_s": record["cpu_s"][label]}),
                }

    def _command(self, file: str) -> tuple[str, ...]:
        size = ("--budget", str(self.budget), "--max-tokens", str(self.max_tokens))
        return ("lab.papers.fading", file, "--rules", ",".join(self.rules), *size)


_Where = tuple[str, str, str | None]
"""Key of a result: protocol ("after" or "known"), policy and budget."""


@dataclass(frozen=True, slots=True)
class RulerRun:
    """Runs of `lab.papers.ruler`, one for each task. A run reads each text once and compares policies on it.

    Attributes
    ----------
    tasks
        Names of some of RULER's thirteen tasks.
    policies
        The compared policies. A policy with an archive (`recall`) has the budget `cells`. Every other policy
        that evicts is tried with each share in `removed`.
    removed
        The shares of a prompt that are evicted.
    cells
        The budget of a policy with an archive.
    types
        Types of keys and values; only `full` runs with all of them.
    questions
        The protocols: "after", "known".
    length
        Tokens of a prompt and its answer.
    n_item
        Items of each task.
    model, minutes
        As in CompareRun.
    """

    tasks: tuple[str, ...]
    policies: tuple[str, ...]
    removed: tuple[str, ...]
    cells: int
    types: tuple[str, ...]
    questions: tuple[str, ...]
    length: int
    n_item: int
    model: str = ""
    minutes: int = 0

    def missing(self, kept: Sequence[Line], name: str) -> Iterator[Ask]:
        """A command for each task with missing items."""
        there: dict[str, set[_Where]] = defaultdict(set)
        for line in kept:
            if len(line["items"]) >= self.n_item:
                there[line["of"]].add((line["task"], line["label"], line["budget"]))
        for task in self.tasks:
            if not set(self._places()) <= there[task]:
                yield Ask(self._command(task), name, goes_on=True)

    def commands(self) -> Iterator[tuple[str, ...]]:
        for task in self.tasks:
            yield self._command(task)

    def shown(self) -> str:
        return f"{shell(self._command('TASK'), self.model)}\n    # TASK: {', '.join(self.tasks)}"

    def lines(self, stored: Iterable[records.Record]) -> Iterator[Line]:
        """Yield a line for each task, protocol, policy and budget.

        If a result does not depend on the protocol, it is repeated in a line for each protocol.
        """
        items: dict[tuple[str, _Where], list[records.Record]] = defaultdict(list)
        for record in stored:
            if "error" in record or record["length"] != self.length:
                continue
            for place in self._places_of(record):
                items[record["part"], place].append(record)
        asked = set(self._places())
        for (task, place), of_place in items.items():
            if place not in asked or task not in self.tasks:
                continue
            question, label, budget = place
            # if a result is in the lines of both protocols, its time is counted only in the first line
            is_first = of_place[0]["question"] == question
            yield {
                "label": label,
                "budget": budget,
                "task": question,
                "of": task,
                "items": [record["id"] for record in of_place],
                "scores": {
                    "string_match": [record["scores"]["string_match"] for record in of_place],
                    "device": [record["kv_bytes"] / 2**20 for record in of_place],
                    "host": [record["archive_bytes"] / 2**20 for record in of_place],
                },
                **about(*of_place),
                **({} if is_first else {"seconds": 0}),
            }

    def _places(self) -> Iterator[_Where]:
        forget, others = self._asked()
        for row in rows(forget, tuple(map(float, self.removed)), others):
            for question in filter(row.knows, self.questions):
                yield from self._places_of(asdict(row) | {"question": question})

    def _places_of(self, record: records.Record) -> Iterator[_Where]:
        budget = _removed(record["removed"]) if record["removed"] else None
        label = typed(record["policy"], record["type_kv"])
        for question in self.questions if budget is None else (record["question"],):
            yield question, label, budget

    def _asked(self) -> tuple[list[str], list[str]]:
        """Return the values of the options --policies and --others for `lab.papers.ruler`."""
        kinds = {label: policies.load(split_policy(label)[0]) for label in self.policies}
        recall = [label for label, kind in kinds.items() if kind.has_recall()]
        forget = [label for label, kind in kinds.items() if kind.evicts and label not in recall]
        others = [f"{label}@{self.cells}" for label in recall]
        return forget, others + [f"full@{type_kv}" for type_kv in self.types[1:]]

    def _command(self, task: str) -> tuple[str, ...]:
        forget, others = self._asked()
        return (
            *("lab.papers.ruler", "--tasks", task, "--length", str(self.length)),
            *("--items", f"0:{self.n_item}"),
            *("--question", ",".join(self.questions)),
            *("--policies", ",".join(forget)),
            *(("--removed", ",".join(self.removed)) if self.removed else ()),
            *("--others", ",".join(others)),
            *("--essays", "paul_graham_essays/", "--squad", "squad/dev-v2.0.json"),
            *("--hotpotqa", "hotpotqa_distractor/hotpotqa_distractor_100.jsonl"),
        )


def _removed(share: float) -> str:
    return f"{100 * share:g} % removed"
