"""Asking all items of a task: one record each, kept as it comes, and the means of their scores."""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtool.errors import InputError, StreamEnd
from kvtool.measure import records, statistics
from kvtool.measure.records import Record
from kvtool.tasks.reader import Reader
from kvtool.tasks.task import Item, Task


@dataclass(frozen=True, slots=True)
class Mean:
    """Of n items' scores, with the interval of 95 %."""

    mean: float
    low: float
    high: float
    n: int


class Results:
    """The records of a task's items. about: what all of them share, and are found again by.

    path: where each is added as it comes, and which of them are there is read; None keeps them in memory.
    one_stream: some of them are as good as none, and give way to new ones.
    """

    def __init__(
        self, about: Record, items: Sequence[Item], path: Path | None = None, *, one_stream: bool = False
    ) -> None:
        self.about = about
        self.path = path
        self._names = (*about, "id", "item_sha256")
        self._items = {_key(about, item): item for item in items}
        if len(self._items) < len(items):
            raise InputError("two items of the task are the same in id and text; remove one")
        self._found: dict[str, Record] = {}
        if path:
            there = {records.key(record, self._names): record for record in records.read(path)}
            self._found = {key: there[key] for key in self._items if key in there}
        self._half_done = one_stream and 0 < len(self._found) < len(items)
        if self._half_done:
            self._found = {}

    def __len__(self) -> int:
        return len(self._found)

    @property
    def records(self) -> list[Record]:
        """Those that there are, in the task's order."""
        return [self._found[key] for key in self._items if key in self._found]

    def measure(self, task: Task, reader: Reader) -> Iterator[Record]:
        """Asks what is missing, and gives each record once it is kept. Raises KvtoolError and OSError.

        An item that does not fit is recorded with its error and no scores.
        """
        if self._half_done and self.path:
            records.rewrite(
                self.path, lambda there: [r for r in there if records.key(r, self._names) not in self._items]
            )
        missing = {key: item for key, item in self._items.items() if key not in self._found}
        for key, item in missing.items():
            started = time.monotonic()
            record = {**self.about, "id": item.id, "item_sha256": _digest(item), **item.about}
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
                    "budget_cells": reader.engine.policy.budget,
                    "evicted": reader.engine.n_evicted,
                    "kv_bytes": reader.engine.cache_bytes,
                    "seconds": time.monotonic() - started,
                }
            if self.path:
                records.append(self.path, record)
            self._found[key] = record
            yield record


def means(found: Sequence[Record]) -> dict[str, Mean]:
    """Of each score of these records, in the order in which they have them."""
    return {
        name: Mean(float(np.mean(values)), *statistics.item_interval(np.array(values)), len(values))
        for name, values in scores(found).items()
    }


def scores(found: Sequence[Record]) -> dict[str, list[float]]:
    """Of all these records, by the score's name."""
    values = defaultdict(list)
    for record in found:
        for name, score in record["scores"].items():
            values[name].append(score)
    return values


Groups = dict[tuple[Any, ...], dict[str, Mean]]
"""Means by what their records share."""


def broken_down(found: Sequence[Record], by: Sequence[str]) -> Groups:
    """The means of records that share their values under these names, by those values, in rising order."""
    groups = defaultdict(list)
    for record in found:
        groups[tuple(record[name] for name in by)].append(record)
    return {values: means(groups[values]) for values in sorted(groups)}


def _digest(item: Item) -> str:
    """What tells an item from another one of the same id, in other files or under other parameters."""
    parts = [item.prompt, list(item.references), list(item.choices)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _key(about: Record, item: Item) -> str:
    record = {**about, "id": item.id, "item_sha256": _digest(item)}
    return records.key(record, record)
