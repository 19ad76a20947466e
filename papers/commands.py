"""The commands that an experiment is made of, and the lines that papers/records keeps of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtool import policies
from kvtool.measure import records, statistics
from kvtool.measure.grid import split_policy
from papers.parts import PARTS, item_scores

Line = dict[str, Any]
"""A line of papers/records: one policy with one budget on one file.

label
    The policy as it was asked for.
budget
    As it was asked for; None for a policy that keeps all it needs.
of
    The file or the data set.
scores
    By name a list with a number for each item, or for each block of tokens.
weights
    By name the tokens of each block.
cells
    The budget of each item, in cells.
bytes
    Of keys and values on the device, and of the archive on the host.
seconds, and VERSIONS
    The time that it took, and what it was measured with.
"""

VERSIONS = ("model", "kvtool", "llama_cpp_python", "patch")

_QUARTERS = ("first quarter", "second quarter", "third quarter", "last quarter")


@dataclass(frozen=True, slots=True)
class Ask:
    """A command that is still to be run.

    Attributes
    ----------
    command
        Its words after `kvtool`, or after `python benchmarks/`, without the model.
    store
        The name of its file of records.
    """

    command: tuple[str, ...]
    store: str


@dataclass(frozen=True, slots=True)
class Compare:
    """A `kvtool compare` for each text. Without budgets only policies run that need none.

    Attributes
    ----------
    files, policies, budgets, max_tokens
        What is compared, on how many tokens.
    more
        Further options.
    model
        The file of the model; empty for kvtool's default.
    upto
        Shorter beginnings of the texts whose scores are kept, too.
    types
        Types of keys and values; of all but the first only for `full`.
    minutes
        What it takes on one core of a small machine, about.
    """

    files: tuple[str, ...]
    policies: tuple[str, ...]
    budgets: tuple[str, ...]
    max_tokens: int
    more: tuple[str, ...] = ()
    model: str = ""
    upto: tuple[int, ...] = ()
    types: tuple[str, ...] = ("f16",)
    minutes: int = 0

    def missing(self, kept: Sequence[Line], name: str) -> Iterator[Ask]:
        """A command for each text of which lines are missing, with the policies that it lacks."""
        kept = [line for line in kept if line["tokens"] == self.max_tokens]
        for file in self.files:
            there = {(line["label"], line["budget"]) for line in kept if line["of"] == Path(file).name}
            lacking = tuple(label for label in self.policies if not self._places(label) <= there)
            if lacking:
                # all on the same tokens share a file: no run is done twice
                store = "-".join([Path(file).stem, str(self.max_tokens), *self.more])
                yield Ask(self._command(file, lacking), store)

    def commands(self) -> Iterator[tuple[str, ...]]:
        for file in self.files:
            yield self._command(file, self.policies)

    def shown(self) -> str:
        if len(self.files) == 1:
            return shell(self._command(self.files[0], self.policies), self.model)
        return shell(self._command("FILE", self.policies), self.model) + _each(self.files)

    def lines(self, found: Iterable[records.Record]) -> Iterator[Line]:
        texts = {Path(file).name for file in self.files}
        for record in found:
            # without a budget there is a cell for each token of the text, or of the context
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
            line = {
                "label": _typed(label, record["type_k"]),
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
                **_about(record),
            }
            yield line
            for tokens in self.upto:
                n = int((counts.cumsum() <= tokens).sum())
                scores, weights = {"nll": nll[:n]}, {"nll": line["weights"]["nll"][:n]}
                yield line | {"tokens": tokens, "scores": scores, "weights": weights, "seconds": 0}

    def _places(self, label: str) -> set[tuple[str, str | None]]:
        """What a policy's runs on a text are kept as."""
        name, _ = split_policy(label)
        if not policies.load(name).evicts:
            return {(_typed(label, type_k), None) for type_k in self.types}
        capped = f"{label}, capped" if label == "corm" else label
        return {(capped, budget) for budget in self.budgets} or {(label, None)}

    def _command(self, file: str, labels: Sequence[str]) -> tuple[str, ...]:
        return (
            *("compare", file, "--policies", ",".join(labels)),
            *("--budgets", ",".join(self.budgets), "--types", ",".join(self.types)),
            *("--max-tokens", str(self.max_tokens), *self.more),
        )


@dataclass(frozen=True, slots=True)
class Eval:
    """A `kvtool eval` for each policy ("h2o:decay=0.9") and each budget; `full` has one, without a budget.

    Attributes
    ----------
    task, files, policies, budgets
        What is asked, with what.
    more
        Further options.
    limit
        The first items of all; 0 for all.
    example
        The item whose outputs are kept; none if empty.
    model
        The file of the model; empty for kvtool's default.
    named
        What a table's row is called, in place of its only policy.
    minutes
        As in Compare.
    """

    task: str
    files: tuple[str, ...]
    policies: tuple[str, ...]
    budgets: tuple[str, ...]
    more: tuple[str, ...] = ()
    limit: int = 0
    model: str = ""
    example: str = ""
    named: str = ""
    minutes: int = 0

    def missing(self, kept: Sequence[Line], name: str) -> Iterator[Ask]:
        """A command for each policy and budget of which items are missing, or what was written of one."""
        there = defaultdict(int)
        for line in kept:
            if not self.example or "output" in line:
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
            return command.replace("--policy POLICY --budget BUDGET", f"--policy {chosen}")
        return f"{command}\n    # POLICY: {chosen}\n    # BUDGET: {', '.join(self.budgets)}"

    def lines(self, found: Iterable[records.Record]) -> Iterator[Line]:
        groups = defaultdict(list)
        for record in found:
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
                **self._example(items),
                **_about(*items),
            }

    def _example(self, items: Sequence[records.Record]) -> Line:
        """What was written of the item whose outputs are kept, and its place among the items."""
        found = [(i, record) for i, record in enumerate(items) if record["id"] == self.example]
        return {"example": found[0][0], "output": found[0][1]["output"]} if found else {}

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
        return ("eval", self.task, *self.files, "--policy", *_options(label), *size, *self.more, *limit)


@dataclass(frozen=True, slots=True)
class Inspect:
    """A `kvtool inspect` for each file and policy. Its score is the share of rows that hold a token."""

    files: tuple[str, ...]
    policies: tuple[str, ...]
    budget: str
    max_tokens: int
    model: str = ""
    minutes: int = 0

    def missing(self, kept: Sequence[Line], name: str) -> Iterator[Ask]:
        there = {(line["of"], line["label"]) for line in kept}
        for file in self.files:
            for label in self.policies:
                if (Path(file).name, label) not in there:
                    yield Ask(self._command(file, label), name)

    def commands(self) -> Iterator[tuple[str, ...]]:
        for file in self.files:
            for label in self.policies:
                yield self._command(file, label)

    def shown(self) -> str:
        size = f"--budget {self.budget} --max-tokens {self.max_tokens}"
        chosen = ", ".join(" ".join(_options(label)) for label in self.policies)
        command = shell(("inspect", "FILE", "--policy", "POLICY", *size.split()), self.model)
        return f"{command} --png POLICY.png\n    # POLICY: {chosen}"

    def lines(self, found: Iterable[records.Record]) -> Iterator[Line]:
        for record in found:
            shares = np.array(record["share"])
            for part, of_part in zip(_QUARTERS, np.array_split(shares, len(_QUARTERS)), strict=True):
                yield {
                    "label": _label(self.policies, record),
                    "budget": str(record["budget"]),
                    "of": record["file"],
                    "part": part,
                    "scores": {"held": [of_part.mean()]},
                    **_about(record, lines=len(_QUARTERS)),
                }

    def _command(self, file: str, label: str) -> tuple[str, ...]:
        size = ("--budget", self.budget, "--max-tokens", str(self.max_tokens))
        return ("inspect", file, "--policy", *_options(label), *size, "--json")


class _ByText:
    """A run of one command for each text."""

    __slots__ = ()

    files: tuple[str, ...]
    max_tokens: int

    def missing(self, kept: Sequence[Line], name: str) -> Iterator[Ask]:
        there = {line["of"] for line in kept if line["tokens"] == self.max_tokens}
        for file in self.files:
            if Path(file).name not in there:
                yield Ask(self._command(file), name)

    def commands(self) -> Iterator[tuple[str, ...]]:
        for file in self.files:
            yield self._command(file)

    def _command(self, file: str) -> tuple[str, ...]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Map(_ByText):
    """A `kvtool inspect --map` for each text; instead of policies, a line has a part of what the map says.

    Attributes
    ----------
    kind
        "attention", "queries", "share" or "values".
    files, max_tokens, model, minutes
        As in Compare.
    """

    kind: str
    files: tuple[str, ...]
    max_tokens: int
    model: str = ""
    minutes: int = 0

    @property
    def policies(self) -> tuple[str, ...]:
        return ()

    def shown(self) -> str:
        command = shell(self._command("FILE")[:-1], self.model)
        return f"{command} --png {self.kind}.png{_each(self.files)}"

    def lines(self, found: Iterable[records.Record]) -> Iterator[Line]:
        for record in found:
            parts = list(PARTS[self.kind](record))
            for part, label, value in parts:
                yield {
                    "label": label,
                    "budget": None,
                    "of": record["file"],
                    "part": part,
                    "tokens": record["tokens"],
                    "scores": {self.kind: [value]},
                    **_about(record, lines=len(parts)),
                }

    def _command(self, file: str) -> tuple[str, ...]:
        return ("inspect", file, "--map", self.kind, "--max-tokens", str(self.max_tokens), "--json")


@dataclass(frozen=True, slots=True)
class Chosen(_ByText):
    """A `papers.chosen_keys` for each text: how near the keys of all tokens are to those that stay."""

    files: tuple[str, ...]
    policies: tuple[str, ...]
    max_tokens: int
    model: str = ""
    minutes: int = 0

    def shown(self) -> str:
        return f"{shell(self._command('FILE'), self.model)} --png chosen.png{_each(self.files)}"

    def lines(self, found: Iterable[records.Record]) -> Iterator[Line]:
        for record in found:
            for label in self.policies:
                yield {
                    "label": label,
                    "budget": None,
                    "of": record["file"],
                    "tokens": record["tokens"],
                    "scores": {"nearest": [float(np.mean(record["nearest"][label]))]},
                    **_about(record, lines=len(self.policies)),
                }

    def _command(self, file: str) -> tuple[str, ...]:
        labels = ",".join(self.policies)
        return ("papers.chosen_keys", file, "--policies", labels, "--max-tokens", str(self.max_tokens))


@dataclass(frozen=True, slots=True)
class Fading(_ByText):
    """A `papers.fading` for each text: what rows predict that keep means, by rule."""

    files: tuple[str, ...]
    rules: tuple[str, ...]
    budget: int
    max_tokens: int
    model: str = ""
    minutes: int = 0

    @property
    def policies(self) -> tuple[str, ...]:
        return ()

    def shown(self) -> str:
        return shell(self._command("FILE"), self.model) + _each(self.files)

    def lines(self, found: Iterable[records.Record]) -> Iterator[Line]:
        for record in found:
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
                    **_about(record | {"cpu_s": record["cpu_s"][label]}),
                }

    def _command(self, file: str) -> tuple[str, ...]:
        size = ("--budget", str(self.budget), "--max-tokens", str(self.max_tokens))
        return ("papers.fading", file, "--rules", ",".join(self.rules), *size)


Run = Compare | Eval | Inspect | Map | Chosen | Fading


def is_program(command: Sequence[str]) -> bool:
    """Whether it is a module of this folder and no command of kvtool."""
    return command[0].startswith("papers.")


def shell(command: Sequence[str], model: str = "") -> str:
    """The command as one types it: without folders, with quotes around an empty argument."""
    program = "python -m " if is_program(command) else "kvtool "
    words = [*command, *(("-m", model) if model else ())]
    return program + " ".join(Path(part).name if "/" in part else part or "''" for part in words)


def _each(files: Sequence[str]) -> str:
    """The line below a command that stands for one of each text."""
    return f"\n    # FILE: {', '.join(Path(file).name for file in files)}"


def _typed(label: str, type_k: str) -> str:
    """The policy with the type of its cache, if that is not f16."""
    return label if type_k == "f16" else f"{label} {type_k}"


def _options(label: str) -> list[str]:
    """A policy as kvtool's commands take it: its name, and -o for each parameter."""
    name, options = split_policy(label)
    return [name, *(part for option in options for part in ("-o", option))]


def _label(labels: Sequence[str], record: records.Record) -> str:
    """The policy asked for that names the most of the record's parameters; "" if none matches."""
    named = [label for label in labels if _names(label, record)]
    return max(named, key=lambda label: len(split_policy(label)[1]), default="")


def _names(label: str, record: records.Record) -> bool:
    """Whether the record's policy has this name and these parameters."""
    name, options = split_policy(label)
    if name != record["policy"]:
        return False
    asked = policies.parse_options(name, policies.load(name), list(options))
    return asked.items() <= record["params"].items()


def _about(*found: records.Record, lines: int = 1) -> Line:
    """The time of these records, of which so many lines have a part each, and what measured them."""
    versions = {name: found[0][name] for name in VERSIONS} | {"model": Path(found[0]["model"]).name}
    # CPU time if it is known: it does not depend on what else was running
    seconds = sum(record.get("cpu_s", record.get("seconds", 0)) for record in found)
    return {"seconds": seconds / lines, **versions}
