"""What a task is: items to ask, a way to ask one, and what its answer scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from kvtool.llama.model import Model
    from kvtool.measure.records import Record
    from kvtool.tasks.reader import Reader


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to ask.

    id: unique among the items of the task and its files. prompt: all that the model reads. references: right
    answers. choices: the answers there are to choose from. about: what the record says of the item besides,
    and what a summary may be broken down by.
    """

    id: str
    prompt: str
    references: Sequence[str] = ()
    choices: Sequence[str] = ()
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """output: what the model wrote, or which choice it took. scores: by name, the higher the better or not,
    as the task's docstring says; their means are the summary. about: more for the record."""

    output: Any
    scores: dict[str, float]
    about: dict[str, Any] = field(default_factory=dict)


class Task(ABC):
    """A dataclass of parameters (`--set name=value`).

    source: where the task and its metric are from. needs_files: whether it is nothing without a text. chat:
    whether the prompt is a user's turn unless asked otherwise. n_max: the most tokens of an answer. by: names
    in an item's `about` whose values the summary is broken down by. plots: a heat map needs two of them.
    packages: modules of the extra `eval` that it needs. one_stream: its items share one cache, so that they
    are asked in order, and all or none of their records count.
    """

    if TYPE_CHECKING:
        # what its dataclass brings along
        __dataclass_fields__: ClassVar[dict[str, Any]]

    source: ClassVar[str] = ""
    needs_files: ClassVar[bool] = True
    chat: ClassVar[bool] = False
    by: ClassVar[tuple[str, ...]] = ()
    packages: ClassVar[tuple[str, ...]] = ()
    one_stream: ClassVar[bool] = False

    @property
    def n_max(self) -> int:
        """A property, so that a task may have a constant or a parameter in its place."""
        return 64

    @abstractmethod
    def items(self, files: Sequence[Path], model: Model) -> Sequence[Item]:
        """All items, in an order that is always the same. Raises InputError for files that hold none."""

    @abstractmethod
    def answer(self, item: Item, reader: Reader) -> Answer:
        """Asks one item, from an empty cache unless all share one."""

    def summary(self, records: Sequence[Record]) -> dict[str, float]:
        """What is said of all records together besides the means of their scores, by name."""
        return {}
