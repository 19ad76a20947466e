"""Base classes of tasks. A task has items, asks the model each item, and scores the answer."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from kvtool.tasks import data

if TYPE_CHECKING:
    from kvtool.llama.loaded.model import Model
    from kvtool.measure.records import Record
    from kvtool.tasks.reader import Reader

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt with its right answers.

    Attributes
    ----------
    id
        Name, which is unique among all items of the task, from all files.
    about
        Additional fields for the record. Means can be computed for each value of a field: see `Task.by`.
    question
        End of the prompt. Some tasks can read it separately, after the rest of the prompt.
    opening
        Beginning of the answer. The model reads it, so it is not part of the output.
    """

    id: str
    prompt: str
    references: Sequence[str] = ()
    choices: Sequence[str] = ()
    about: dict[str, Any] = field(default_factory=dict)
    question: str = ""
    opening: str = ""


@dataclass(frozen=True, slots=True)
class ScoredAnswer:
    """Answer to an item, with its scores.

    output: text that the model wrote, or the choice that it made.
    scores: scores by name. The summary has their means. The task's docstring defines the scores.
    """

    output: Any
    scores: dict[str, float]
    about: dict[str, Any] = field(default_factory=dict)


class Task(ABC):
    """Base class of tasks. A task is a dataclass; its fields are the parameters (`--set name=value`).

    Attributes
    ----------
    chat
        True if, by default, a prompt is a user's turn in the chat template. False if it is plain text.
    by
        Names of fields in an item's `about`. The summary has means for each value of these fields. Two fields
        make a table.
    packages
        Modules that the task needs. The extra `eval` installs them.
    uses_sampling
        True if answers are sampled with the options of `kvtool eval`, such as --temp.
    one_stream
        True if all items share one cache. They are then asked in order, and an incomplete set of records is
        ignored.
    """

    if TYPE_CHECKING:
        # every subclass is a dataclass
        __dataclass_fields__: ClassVar[dict[str, Any]]

    source: ClassVar[str] = ""
    needs_files: ClassVar[bool] = True
    chat: ClassVar[bool] = False
    by: ClassVar[tuple[str, ...]] = ()
    one_stream: ClassVar[bool] = False

    @property
    def packages(self) -> tuple[str, ...]:
        return ()

    @property
    def uses_sampling(self) -> bool:
        """True by default. Tasks that write nothing override this property."""
        return True

    @abstractmethod
    def items(self, files: Sequence[Path], model: Model) -> Sequence[Item]:
        """Return all items, always in the same order. Raises InputError if the files have none."""

    @abstractmethod
    def answer(self, item: Item, reader: Reader) -> ScoredAnswer:
        """Ask one item and score the answer. The cache is empty at the start, unless `one_stream` is True."""

    def summary(self, records: Sequence[Record]) -> dict[str, float]:
        """Return further numbers about all records, by name. Means of scores are computed elsewhere."""
        return {}


class RecordTask(Task):
    """Base class of tasks that build items from one record at a time.

    The id of an item is the file's name, the record's number, and the id from `items_of` as a suffix. The
    item's `about` has the file's name if `by` has "file".
    """

    @abstractmethod
    def items_of(self, record: data.Record) -> Iterable[Item]:
        """Return the items of a record. Their ids are only suffixes here, and `items` completes them.

        If the layout is unknown, this raises an error that `data.parse_each` catches.
        """

    def items(self, files: Sequence[Path], model: Model) -> Sequence[Item]:
        task = self.__module__.rpartition(".")[2]
        items = []
        parsed = data.parse_each(files, task, lambda record: list(self.items_of(record)))
        for path, number, record_items in parsed:
            about = {"file": path.name} if "file" in self.by else {}
            for item in record_items:
                name = f"{data.stem(path)}-{number}{item.id}"
                items.append(replace(item, id=name, about=about | item.about))
        return items


def in_turn(first: Sequence[A], second: Sequence[B], repeats: int) -> Iterator[tuple[A, B, int]]:
    """Yield every pair of values of two lists `repeats` times. Also yield the number of the repetition.

    The values of each list take turns, so that the first items of a task are spread over its grid.
    """
    n, m = len(first), len(second)
    for number in range(repeats):
        for i in range(n * m):
            # after lcm(n, m) pairs, the same pairs would follow: shift the second list by one
            yield first[i % n], second[(i + i // math.lcm(n, m)) % m], number
