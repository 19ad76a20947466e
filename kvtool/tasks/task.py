"""Base of tasks: items, a way to ask one, and scores of its answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kvtool.tasks import data

if TYPE_CHECKING:
    from kvtool.llama.model import Model
    from kvtool.measure.records import Record
    from kvtool.tasks.reader import Reader


@dataclass(frozen=True, slots=True)
class Item:
    """One prompt with its right answers.

    Attributes
    ----------
    id
        Name, unique among the items of the task and its files.
    prompt
        Text that the model reads.
    references
        Right answers.
    choices
        Answers to choose from.
    about
        Additional fields for the record; a summary may be broken down by them.
    question
        End of the prompt, which some tasks can read after the rest.
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

    Attributes
    ----------
    output
        Text that the model wrote, or the choice that it made.
    scores
        Scores by name; their means are the summary. The task's docstring defines them.
    about
        Additional fields for the record.
    """

    output: Any
    scores: dict[str, float]
    about: dict[str, Any] = field(default_factory=dict)


class Task(ABC):
    """Base class of tasks. A task is a dataclass; its fields are the parameters (`--set name=value`).

    Attributes
    ----------
    source
        Source of the task and its scores.
    needs_files
        True if the task reads files that the user names.
    chat
        True if the prompt is by default a user's turn, False for plain text.
    by
        Names in an item's `about` by which the summary is broken down. Two of them make a heat map.
    packages
        Modules that the task needs, from the extra `eval`.
    uses_sampling
        True if answers are sampled with the options of `kvtool eval`, such as --temp.
    one_stream
        True if items share one cache. They are then asked in order, and only a complete set of records
        counts.
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
        """Overridden by tasks that write nothing or sample with their own settings."""
        return True

    @abstractmethod
    def items(self, files: Sequence[Path], model: Model) -> Sequence[Item]:
        """Return all items, always in the same order. Raises InputError if the files have none."""

    @abstractmethod
    def answer(self, item: Item, reader: Reader) -> ScoredAnswer:
        """Ask one item and score the answer. The cache is empty at the start, unless all items share one."""

    def summary(self, records: Sequence[Record]) -> dict[str, float]:
        """Numbers about all records, by name, in addition to the means of their scores."""
        return {}


class RecordTask(Task):
    """Base of tasks that build items from one record at a time.

    An item's id is the file's name and the record's number. Its `about` has the file if `by` names it.
    """

    @abstractmethod
    def items_of(self, record: data.Record) -> Iterable[Item]:
        """Return a record's items, whose ids are only the suffixes of the final ids.

        May raise errors that `data.parse_each` catches.
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
