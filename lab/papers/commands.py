"""Runs that are commands of kvtool."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtool import policies
from kvtool.measure import records, statistics
from kvtool.measure.grid import split_policy
from lab.papers.lines import Ask, ByText, Line, about, each_of, option_words, shell, typed
from lab.papers.parts import PARTS, item_scores


@dataclass(frozen=True, slots=True)
class CompareRun:
    """A `kvtool compare` for each text. Without budgets, it runs only policies that need no budget.

    Attributes
    ----------
    files, policies, budgets, max_tokens
        As in the command.
    more
        Further options.
    model
        The file of the model; empty for kvtool's default.
    types
        Types of keys and values. `full` runs with all of them. Other policies run only with the first type.
    minutes
        Approximate time on one core of a small machine.
    """

    files: tuple[str, ...]
    policies: tuple[str, ...]
    budgets: tuple[str, ...]
    max_tokens: int
    more: tuple[str, ...] = ()
    model: str = ""
    types: tuple[str, ...] = ("f16",)
    minutes: int = 0

    def missing(self, kept: Sequence[Line], name: str) -> Iterator[Ask]:
        """Yield a command for each text that lacks lines. A command runs only the missing policies."""
        kept = [line for line in kept if line["tokens"] == self.max_tokens]
        for file in self.files:
            there = {(line["label"], line["budget"]) for line in kept if line["of"] == Path(file).name}
            lacking = tuple(label for label in self.policies if not self._places(label) <= there)
            if lacking:
                # runs of one text with the same tokens and options share a file of results, so that a policy
                # that several experiments use runs only once
                store = "-".join([Path(file).stem, str(self.max_tokens), *self.more])
                yield Ask(self._command(file, lacking), store)

    def commands(self) -> Iterator[tuple[str, ...]]:
        for file in self.files:
            yield self._command(file, self.policies)

    def shown(self) -> str:
        if len(self.files) == 1:
            return shell(self._command(self.files[0], self.policies), self.model)
        return shell(self._command("FILE", self.policies), self.model) + each_of(self.files)

    def lines(self, stored: Iterable[records.Record]) -> Iterator[Line]:
        texts = {Path(file).name for file in self.files}
        for record in stored:
            # without a budget, the record's budget is at least the number of tokens
            has_all = record["budget"] >= record["tokens"]
            label = _label(self.policies, record)
            if "error" in record or not label or record["text"] not in texts:
                continue
            if not has_all and str(record["budget"]) not in self.budgets:
                continue
            counts = statistics.block_counts(record["n_scored"])
            nll = (np.array(record["nll_blocks"]) / counts).tolist()
            if label == "corm" and not has_all:
                label = "corm, capped"
            yield {
                "label": typed(label, record["type_k"]),
                "budget": None if has_all else str(record["budget"]),
                "of": record["text"],
                "tokens": record["tokens"],
                "scores": {
                    "nll": nll,
                    "evicted": [1 - record["cells"] / record["tokens"]],
                    "ms": [1000 * record["cpu_s"] / record["tokens"]],
                },
                "weights": {"nll": counts.astype(int).tolist()},
                "bytes": [record["kv_bytes"], record["archive_bytes"]],
                **about(record),
            }

    def _places(self, label: str) -> set[tuple[str, str | None]]:
        """Return the label and budget of each line that this policy needs in the records of a text."""
        name, _ = split_policy(label)
        if not policies.load(name).evicts:
            return {(typed(label, type_k), None) for type_k in self.types}
        capped = f"{label}, capped" if label == "corm" else label
        return {(capped, budget) for budget in self.budgets} or {(label, None)}

    def _command(self, file: str, labels: Sequence[str]) -> tuple[str, ...]:
        return (
            *("compare", file, "--policies", ",".join(labels)),
            *("--budgets", ",".join(self.budgets), "--types", ",".join(self.types)),
            *("--max-tokens", str(self.max_tokens), *self.more),
        )


@dataclass(frozen=True, slots=True)
class EvalRun:
    """A `kvtool eval` for each policy ("h2o:decay=0.9") and budget.

    `full` has no budget, so it has one command.

    Attributes
    ----------
    task, files, policies, budgets
        As in the command.
    more
        Further options.
    limit
        Number of items, from the first on; 0 for all.
    model
        The file of the model; empty for kvtool's default.
    named
        Name of the table's row if it is not the name of the policy. The run then has only one policy.
    minutes
        As in CompareRun.
    """

    task: str
    files: tuple[str, ...]
    policies: tuple[str, ...]
    budgets: tuple[str, ...]
    more: tuple[str, ...] = ()
    limit: int = 0
    model: str = ""
    named: str = ""
    minutes: int = 0

    def missing(self, kept: Sequence[Line], name: str) -> Iterator[Ask]:
        """A command for each policy and budget with missing items."""
        there = defaultdict(int)
        for line in kept:
            there[line["label"], line["budget"]] += len(line["items"])
        for label, budget in self._runs():
            if there[self.named or label, budget] < max(self.limit, 1):
                yield Ask(self._command(label, budget), name)

    def commands(self) -> Iterator[tuple[str, ...]]:
        for label, budget in self._runs():
            yield self._command(label, budget)

    def shown(self) -> str:
        command = shell(self._command("POLICY", "BUDGET"), self.model)
        chosen = ", ".join(
            " -o ".join([name, *options]) for name, options in map(split_policy, self.policies)
        )
        if self.named:
            command = command.replace("--policy POLICY --budget BUDGET", f"--policy {chosen}")
            return f"{command.replace(f' {self.named}', '')}\n    # with {self.named}"
        return f"{command}\n    # POLICY: {chosen}\n    # BUDGET: {', '.join(self.budgets)}"

    def lines(self, stored: Iterable[records.Record]) -> Iterator[Line]:
        groups = defaultdict(list)
        for record in stored:
            of = record.get("dataset", record.get("file", self._of))
            groups[":".join([record["policy"], *record["options"]]), record["budget"], of].append(record)
        for (label, budget, of), items in groups.items():
            if label not in self.policies or budget not in (None, *self.budgets):
                continue
            scored = [item_scores(record) for record in items]
            names = dict.fromkeys(name for scores in scored for name in scores)
            yield {
                "label": self.named or label,
                "budget": budget,
                "task": self.task,
                "of": of,
                "items": [record["id"] for record in items],
                "cells": [record.get("asked_cells", record.get("budget_cells")) for record in items],
                "scores": {name: [scores.get(name) for scores in scored] for name in names},
                **about(*items),
            }

    def _runs(self) -> Iterator[tuple[str, str | None]]:
        for label in self.policies:
            for budget in [None] if label == "full" else self.budgets:
                yield label, budget

    @property
    def _of(self) -> str:
        return Path(self.files[0]).name if self.files else self.task

    def _command(self, label: str, budget: str | None) -> tuple[str, ...]:
        size = ["--budget", budget] if budget else []
        limit = ["--limit", str(self.limit)] if self.limit else []
        return ("eval", self.task, *self.files, "--policy", *option_words(label), *size, *self.more, *limit)


@dataclass(frozen=True, slots=True)
class MapRun(ByText):
    """A run of `lab.papers.maps` for each text. The records get a line for each mean of a map.

    The label of this line names the mean, such as "a random query", instead of a policy.

    Attributes
    ----------
    kind
        "attention", "queries", "share" or "values".
    files, max_tokens, model, minutes
        As in CompareRun.
    """

    kind: str
    files: tuple[str, ...]
    max_tokens: int
    model: str = ""
    minutes: int = 0

    def shown(self) -> str:
        command = shell(self._command("FILE"), self.model)
        return f"{command} --plot {self.kind}.png{each_of(self.files)}"

    def lines(self, stored: Iterable[records.Record]) -> Iterator[Line]:
        for record in stored:
            parts = list(PARTS[self.kind](record))
            for part, label, value in parts:
                yield {
                    "label": label,
                    "budget": None,
                    "of": record["file"],
                    "part": part,
                    "tokens": record["tokens"],
                    "scores": {self.kind: [value]},
                    **about(record, lines=len(parts)),
                }

    def _command(self, file: str) -> tuple[str, ...]:
        return ("lab.papers.maps", self.kind, file, "--max-tokens", str(self.max_tokens))


def _label(labels: Sequence[str], record: records.Record) -> str:
    """Return the label that names most of the record's parameters, or "" if no label matches."""
    named = [label for label in labels if _names(label, record)]
    return max(named, key=lambda label: len(split_policy(label)[1]), default="")


def _names(label: str, record: records.Record) -> bool:
    """True if the record's policy has this name and these parameters."""
    name, options = split_policy(label)
    if name != record["policy"]:
        return False
    asked = policies.parse_options(name, policies.load(name), list(options))
    return asked.items() <= record["params"].items()
