"""The commands that an experiment is made of, and the lines that docs/papers keeps of their records."""

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

Line = dict[str, Any]
"""A line of docs/papers: one policy with one budget on one file.

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
seconds, and VERSIONS
    The time that it took, and what it was measured with.
"""

VERSIONS = ("model", "kvtool", "llama_cpp_python", "patch")

_QUARTERS = ("first quarter", "second quarter", "third quarter", "last quarter")


@dataclass(frozen=True, slots=True)
class Compare:
    """One `kvtool compare`. Without budgets only policies run that need none."""

    file: str
    policies: tuple[str, ...]
    budgets: tuple[str, ...]
    max_tokens: int
    more: tuple[str, ...] = ()

    def commands(self) -> Iterator[list[str]]:
        yield [
            *("compare", self.file, "--policies", ",".join(self.policies)),
            *("--budgets", ",".join(self.budgets), "--types", "f16"),
            *("--max-tokens", str(self.max_tokens), *self.more),
        ]

    def shown(self) -> str:
        return shell(*self.commands())

    @property
    def store(self) -> str:
        """The name of its file of records, shared by all on the same tokens: no run is done twice."""
        return "-".join([Path(self.file).stem, str(self.max_tokens), *self.more])

    def lines(self, found: Iterable[records.Record]) -> Iterator[Line]:
        for record in found:
            # without a budget there is a cell for each token of the text, or of the context
            has_all = record["budget"] >= record["tokens"]
            label = _label(self.policies, record)
            if "error" in record or not label or not (has_all or str(record["budget"]) in self.budgets):
                continue
            counts = statistics.block_counts(record["n_scored"])
            yield {
                "label": label if has_all or label != "corm" else "corm, capped",
                "budget": None if has_all else str(record["budget"]),
                "of": record["text"],
                "tokens": record["tokens"],
                "scores": {
                    "nll": (np.array(record["nll_blocks"]) / counts).tolist(),
                    "evicted": [1 - record["cells"] / record["tokens"]],
                    "ms": [1000 * record["cpu_s"] / record["tokens"]],
                },
                "weights": {"nll": counts.astype(int).tolist()},
                **_about(record),
            }


@dataclass(frozen=True, slots=True)
class Eval:
    """A `kvtool eval` for each policy ("h2o:decay=0.9") and each budget; `full` has one, without a budget."""

    task: str
    files: tuple[str, ...]
    policies: tuple[str, ...]
    budgets: tuple[str, ...]
    more: tuple[str, ...] = ()

    def commands(self) -> Iterator[list[str]]:
        for label in self.policies:
            for budget in [None] if label == "full" else self.budgets:
                yield self._command(label, ["--budget", budget] if budget else [])

    def shown(self) -> str:
        command = shell(self._command("POLICY", ["--budget", "BUDGET"]))
        chosen = ", ".join(
            " -o ".join([name, *options]) for name, options in map(split_policy, self.policies)
        )
        return f"{command}\n    # POLICY: {chosen}\n    # BUDGET: {', '.join(self.budgets)}"

    def lines(self, found: Iterable[records.Record]) -> Iterator[Line]:
        groups = defaultdict(list)
        for record in found:
            of = record.get("dataset", record.get("file", self._of))
            groups[":".join([record["policy"], *record["options"]]), record["budget"], of].append(record)
        for (label, budget, of), items in groups.items():
            scored = [_scores(record) for record in items]
            names = dict.fromkeys(name for scores in scored for name in scores)
            yield {
                "label": label,
                "budget": budget,
                "task": self.task,
                "of": of,
                "items": [record["id"] for record in items],
                "scores": {name: [scores.get(name) for scores in scored] for name in names},
                **_about(*items),
            }

    @property
    def _of(self) -> str:
        return Path(self.files[0]).name if self.files else self.task

    def _command(self, label: str, budget: Sequence[str]) -> list[str]:
        return ["eval", self.task, *self.files, "--policy", *_options(label), *budget, *self.more]


@dataclass(frozen=True, slots=True)
class Inspect:
    """A `kvtool inspect` for each file and policy. Its score is the share of rows that hold a token."""

    files: tuple[str, ...]
    policies: tuple[str, ...]
    budget: str
    max_tokens: int

    def commands(self) -> Iterator[list[str]]:
        for file in self.files:
            for label in self.policies:
                size = ["--budget", self.budget, "--max-tokens", str(self.max_tokens)]
                yield ["inspect", file, "--policy", *_options(label), *size, "--json"]

    def shown(self) -> str:
        size = f"--budget {self.budget} --max-tokens {self.max_tokens}"
        chosen = ", ".join(" ".join(_options(label)) for label in self.policies)
        return f"kvtool inspect FILE --policy POLICY {size} --png POLICY.png\n    # POLICY: {chosen}"

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
                    **_about(record),
                }


Run = Compare | Eval | Inspect


def shell(command: Sequence[str]) -> str:
    """The command as one types it: without folders, with quotes around an empty argument."""
    return "kvtool " + " ".join(Path(part).name if "/" in part else part or "''" for part in command)


def _options(label: str) -> list[str]:
    """A policy as kvtool's commands take it: its name, and -o for each parameter."""
    name, options = split_policy(label)
    return [name, *(part for option in options for part in ("-o", option))]


def _label(policies: Sequence[str], record: records.Record) -> str:
    """The policy asked for that names the most of the record's parameters; "" if none matches."""
    named = [label for label in policies if _names(label, record)]
    return max(named, key=lambda label: len(split_policy(label)[1]), default="")


def _names(label: str, record: records.Record) -> bool:
    """Whether the record's policy has this name and these parameters."""
    name, options = split_policy(label)
    if name != record["policy"]:
        return False
    asked = policies.parse_options(policies.load(name), list(options))
    return asked.items() <= record["params"].items()


def _scores(record: records.Record) -> dict[str, float]:
    """An item's scores; for `choice` also the log-probability of the right choice among all, in nats."""
    scores = dict(record["scores"])
    if scores and record["task"] == "choice":
        logp = np.array(record["logp"])
        right = record["choices"].index(record["references"][0])
        scores["right"] = float(logp[right] - np.logaddexp.reduce(logp))
    return scores


def _about(*found: records.Record) -> Line:
    """The total time of these records, and the versions that they were measured with."""
    versions = {name: found[0][name] for name in VERSIONS} | {"model": Path(found[0]["model"]).name}
    # CPU time if it is known: it does not depend on what else was running
    seconds = sum(record.get("cpu_s", record.get("seconds", 0)) for record in found)
    return {"seconds": seconds, **versions}
