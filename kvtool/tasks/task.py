"""What a task is: items, a way to ask one, and scores of its answer."""

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
    """One thing to ask.

    Attributes
    ----------
    id
        Unique among the items of the task and its files.
    prompt
        Everything that the model reads.
    references
        Right answers.
    choices
        Answers to choose from.
    about
        More fields for the record; a summary may be broken down by them.
    question
        The end of the prompt that may be read after the rest, where a task has such a way to ask.
    opening
        How the answer begins. It is given to the model, and no part of what it writes.
    """

    id: str
    prompt: str
    references: Sequence[str] = ()
    choices: Sequence[str] = ()
    about: dict[str, Any] = field(default_factory=dict)
    question: str = ""
    opening: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of an item.

    Attributes
    ----------
    output
        What the model wrote, or the choice it took.
    scores
        Scores by name; their means are the summary. The task's docstring says what they mean.
    about
        More fields for the record.
    """

    output: Any
    scores: dict[str, float]
    about: dict[str, Any] = field(default_factory=dict)


class Task(ABC):
    """The base class of tasks. A task is a dataclass; its fields are the parameters (`--set name=value`).

    Attributes
    ----------
    source
        Where the task and its scores come from.
    needs_files
        Whether the task reads files that the user names.
    chat
        Whether the prompt is a user's turn by default, and not plain text.
    by
        Names in an item's `about` by which the summary is broken down. Two of them make a heat map.
    packages
        Modules that the task needs, from the extra `eval`.
    draws
        Whether its answers are drawn as `kvtool eval --temp` says.
    one_stream
        Whether its items share one cache. Then they are asked in order, and only a complete set of records
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
    def draws(self) -> bool:
        """A task that writes nothing, or has a way of its own, replaces it."""
        return True

    @abstractmethod
    def items(self, files: Sequence[Path], model: Model) -> Sequence[Item]:
        """All items, always in the same order. Raises InputError if the files have none."""

    @abstractmethod
    def answer(self, item: Item, reader: Reader) -> Answer:
        """Ask one item and score the answer. The cache is empty before, unless all items share one."""

    def summary(self, records: Sequence[Record]) -> dict[str, float]:
        """Numbers about all records together, by name, besides the means of their scores."""
        return {}


class RecordTask(Task):
    """A task that makes its items of one record of its files after the other.

    An item's id is the file's name and the record's number. Its `about` has the file if `by` names it.
    """

    @abstractmethod
    def asked(self, record: data.Record) -> Iterable[Item]:
        """The items of a record, with what their ids add to the record's. Raises what `data.each` catches."""

    def items(self, files: Sequence[Path], model: Model) -> Sequence[Item]:
        name = self.__module__.rpartition(".")[2]
        found = []
        for path, number, asked in data.each(files, name, lambda record: list(self.asked(record))):
            about = {"file": path.name} if "file" in self.by else {}
            for item in asked:
                own = f"{data.stem(path)}-{number}{item.id}"
                found.append(replace(item, id=own, about=about | item.about))
        return found
