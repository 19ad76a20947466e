"""Find tasks by file name: `kvtool eval NAME` runs the TASK in kvtool/tasks/NAME.py."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from kvtool import parameters
from kvtool.errors import UsageError, suggestion

if TYPE_CHECKING:
    from kvtool.tasks.task import Task


_SHARED = ("__init__", "task", "reader", "results", "haystack", "data", "metrics")
"""Files of this folder that are not tasks."""


def names() -> list[str]:
    """Return every task's name, sorted."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in _SHARED)


def load(name: str) -> type[Task]:
    """Return the task class of that name. Raises UsageError."""
    if name not in names():
        raise UsageError(f"unknown task {name!r}.{suggestion(name, names())} See `kvtool eval`.")
    task: type[Task] = import_module(f"kvtool.tasks.{name}").TASK
    return task


def make(name: str, given: Iterable[str]) -> Task:
    """Return the task with the parameters ["name=value", ...]. Raises UsageError."""
    kind = load(name)
    try:
        return kind(**parameters.parse(kind, given, "--set", name))
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from None
