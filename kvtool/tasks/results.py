"""Records of a task's items, and means of their scores. Each record is written as soon as it exists."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtool.errors import InputError, StreamEnd
from kvtool.measure import records, statistics
from kvtool.measure.records import Record
from kvtool.tasks.reader import Reader
from kvtool.tasks.task import Item, Task

_HITS = {"acc", "acc_norm", "em", "found", "string_match", "subspan_em"}
"""Scores whose values are 1 for a hit, 0 for a miss, or the share of several hits."""

_RANGES = {
    **dict.fromkeys(("f1", "rouge1", "rouge2", "rougeL", "score"), (0.0, 1.0)),
    "nll": (0.0, math.inf),
    "logp": (-math.inf, 0.0),
}
"""Lowest and highest possible values of the other scores. Student's t alone would exceed them."""

_SAME_TASK = ("task", "task_params", "chat", "max_prompt", "temp", "seed", "model_sha256")
"""Fields that two evaluations must share to be compared item by item."""

POLICY = ("policy", "options", "budget")
"""Fields that describe the policy of an evaluation."""


@dataclass(frozen=True, slots=True)
class Mean:
    """Mean of n items' scores.

    low, high: ends of its 95 % interval; None for a single item, and if scores other than hits or misses are
    fewer than three, or equal.
    """

    mean: float
    low: float | None
    high: float | None
    n: int


class TaskResults:
    """Records of a task's items.

    about: fields that all records share. Records of other evaluations in the same file have other values in
    these fields.
    items: items in the task's order.
    path: file to which records are appended. Items that already have a record in it are not asked again. If
    None, records are only kept in memory.
    one_stream: True to ignore an incomplete set of records in the file, and to ask all items again.

    Raises InputError for two items with the same id and text, and for a file that cannot be read.
    """

    def __init__(
        self, about: Record, items: Sequence[Item], path: Path | None = None, *, one_stream: bool = False
    ) -> None:
        self.about = about
        self.path = path
        self._names = (*about, "id", "item_sha256")
        self._items = {records.key(self._what(item), self._names): item for item in items}
        if len(self._items) < len(items):
            raise InputError("two items of the task have the same id and text; remove one")
        self._found: dict[str, Record] = {}
        self._first: list[Record] = []
        if path:
            stored = {records.key(record, self._names): record for record in records.read(path)}
            self._found = {key: stored[key] for key in self._items if key in stored}
            self._first = _first_of_task(stored.values(), about)
        if one_stream and len(self._found) < len(items):
            self._found = {}

    def __len__(self) -> int:
        return len(self._found)

    @property
    def records(self) -> list[Record]:
        """Return the records so far, in the task's order."""
        return [self._found[key] for key in self._items if key in self._found]

    def measure(self, task: Task, reader: Reader) -> Iterator[Record]:
        """Ask the items that have no record yet. Yield each record after it was written.

        If an item does not fit, its record has an error and no scores. Raises KvtoolError; if a record cannot
        be written, NotStored is raised after this record was yielded.
        """
        missing = {key: item for key, item in self._items.items() if key not in self._found}
        for key, item in missing.items():
            started = time.monotonic()
            record = self._what(item) | item.about
            try:
                answer = task.answer(item, reader)
            except (InputError, StreamEnd) as error:
                record |= {"scores": {}, "error": str(error)}
            else:
                record |= {
                    "scores": answer.scores,
                    "output": answer.output,
                    "references": list(item.references),
                    **answer.about,
                    "prompt_tokens": reader.n_read,
                    "is_cut": reader.is_cut,
                    "asked_cells": reader.engine.policy.n_asked,
                    "budget_cells": reader.engine.policy.budget,
                    "cells": reader.engine.mean_kv,
                    "evicted": reader.engine.n_evicted,
                    "kv_bytes": reader.engine.cache_bytes,
                    "archive_bytes": reader.engine.archive_bytes,
                    "seconds": time.monotonic() - started,
                }
            not_stored = None
            try:
                if self.path:
                    records.append(self.path, record)
            except records.NotStored as error:
                not_stored = error
            self._found[key] = record
            yield record
            if not_stored:
                raise not_stored

    def differences(self) -> tuple[Record, dict[str, Mean]] | None:
        """Compare with the first evaluation of the task in the file, over the items that both have answered.

        An item is left out if one evaluation has cut more out of its prompt.

        Return fields of the first evaluation, and the mean difference of each score. The fields are `POLICY`
        and all in which the two evaluations differ. Return None if there is no earlier evaluation with these
        items.
        """
        before = {_read(record): record["scores"] for record in self._first}
        pairs = [(record["scores"], before.get(_read(record), {})) for record in self.records]
        found = {}
        for name in scores(self.records):
            values = [ours[name] - first[name] for ours, first in pairs if name in ours and name in first]
            if values:
                least, most = _RANGES.get(name, (-math.inf, math.inf))
                found[name] = _mean(name, values, statistics.paired_interval, least - most, most - least)
        if not found:
            return None
        first, about = self._first[0], self.about
        differ = [name for name in about if records.key(first, [name]) != records.key(about, [name])]
        return {name: first.get(name) for name in (*POLICY, *differ)}, found

    def _what(self, item: Item) -> dict[str, Any]:
        """Fields that identify an item's record. The hash is needed if two files have equal ids."""
        parts = [item.prompt, list(item.references), list(item.choices), *filter(None, [item.opening])]
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
        return {**self.about, "id": item.id, "item_sha256": digest}


def means(finished: Sequence[Record]) -> dict[str, Mean]:
    """Mean of each score, by name."""
    return {
        name: _mean(name, of, statistics.item_interval, *_RANGES.get(name, (-math.inf, math.inf)))
        for name, of in scores(finished).items()
    }


def _mean(
    name: str, values: list[float], interval: Callable[..., tuple[Any, Any]], least: float, most: float
) -> Mean:
    """Mean of values, with its interval. least, most: limits of the interval."""
    low, high = interval(np.array(values), are_hits=name in _HITS)
    if low is not None:
        low, high = max(low, least), min(high, most)
    return Mean(float(np.mean(values)), low, high, len(values))


def _read(record: Record) -> tuple[str, str, int | None]:
    """Return the fields that identify a record's item and the part of it that was read."""
    return record["id"], record["item_sha256"], record.get("prompt_tokens")


def _first_of_task(stored: Iterable[Record], about: Record) -> list[Record]:
    """Return the records of a file's first evaluation of the task. [] if this is the evaluation `about`."""
    task = records.key(about, _SAME_TASK)
    evaluations = defaultdict(list)
    for record in stored:
        if records.key(record, _SAME_TASK) == task:
            evaluations[records.key(record, about)].append(record)
    key, first = next(iter(evaluations.items()), ("", []))
    return [] if key == records.key(about, about) else first


def scores(finished: Sequence[Record]) -> dict[str, list[float]]:
    """All values of each score, by name."""
    values = defaultdict(list)
    for record in finished:
        for name, score in record["scores"].items():
            values[name].append(score)
    return values


Groups = dict[tuple[Any, ...], dict[str, Mean]]
"""Means of the scores of each group of records. The keys are the values that all records of a group share."""


def broken_down(finished: Sequence[Record], by: Sequence[str]) -> Groups:
    """Group the records by the values of the fields `by`. Return each group's means, sorted by value."""
    groups = defaultdict(list)
    for record in finished:
        groups[tuple(record[name] for name in by)].append(record)
    return {values: means(groups[values]) for values in sorted(groups)}
