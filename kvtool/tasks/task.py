"""What a task is: items to ask, a way to ask one, and what its answer scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from kvtool.llama import Model
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
    """

    source: ClassVar[str] = ""
    needs_files: ClassVar[bool] = True
    chat: ClassVar[bool] = False
    n_max: ClassVar[int] = 64
    by: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def items(self, files: Sequence[Path], model: Model) -> Sequence[Item]:
        """All items, in an order that is always the same. Raises InputError for files that hold none."""

    @abstractmethod
    def answer(self, item: Item, reader: Reader) -> Answer:
        """Asks one item, from an empty cache."""

    def answers(self, items: Sequence[Item], reader: Reader) -> Iterator[Answer]:
        """Asks them one after the other; a task whose items share one cache has its own."""
        for item in items:
            yield self.answer(item, reader)
