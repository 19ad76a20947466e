"""The tasks, found by file name: kvtool/tasks/NAME.py with a TASK in it is `kvtool eval NAME`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool import parameters
from kvtool.errors import UsageError

if TYPE_CHECKING:
    from kvtool.tasks.task import Task


_SHARED = ("__init__", "task", "reader", "run", "haystack", "data", "metrics")
"""Files that are no task."""


def names() -> list[str]:
    """Every task's name, sorted."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in _SHARED)


def load(name: str) -> type[Task]:
    """The task class of that name. Raises UsageError with the names that there are."""
    if name not in names():
        raise UsageError(f"no task {name!r}; there are: {', '.join(names())}")
    task: type[Task] = import_module(f"kvtool.tasks.{name}").TASK
    return task


def params(kind: type[Task]) -> dict[str, object]:
    """The parameters that `--set name=value` sets, with their defaults."""
    return parameters.defaults(kind)


def make(name: str, given: list[str]) -> Task:
    """The task with ["name=value", ...] set. Raises UsageError."""
    kind = load(name)
    try:
        return kind(**parameters.parse(kind, given, "--set"))
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from None
