"""The tables of kvtool eval."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvtool.cli.console import table, table_console

if TYPE_CHECKING:
    from rich.console import Console

    from kvtool.measure.records import Record
    from kvtool.tasks.results import Groups, Mean, TaskResults
    from kvtool.tasks.task import Task


def shown(value: object) -> str:
    return ",".join(map(shown, value)) if isinstance(value, tuple) else str(value)


def counted(n: int) -> str:
    return f"{n} item{'s' * (n != 1)}"


def _differing(baseline: Record) -> str:
    """Return the settings in which the first evaluation of a file differs from this one.

    None means the default. But None in a field of `_ABSENT` means that the evaluation has no such setting.
    """
    from kvtool.tasks.results import POLICY

    # a policy that never evicts has no budget
    absent = _ABSENT if baseline["budget"] else (*_ABSENT, "evict_every", "prefill")
    return "".join(
        f", {name} {'default' if value is None else shown(value)}"
        for name, value in baseline.items()
        if name not in POLICY and not (value is None and name in absent)
    )


_ABSENT = ("archive", "archive_type", "lora", "policy_sha256")


def _policy(about: Record) -> str:
    budget = f", budget {about['budget']}" if about["budget"] else ""
    return " ".join([about["policy"], *about["options"]]) + budget


def show(
    task: Task,
    results: TaskResults,
    means: dict[str, Mean],
    groups: Groups,
    compared: tuple[Record, dict[str, Mean]] | None,
) -> None:
    """Print the means of the scores, their differences to the first policy of the file, and their groups."""
    console, about = table_console(), results.about
    drawn = f", temperature {about['temp']:g}, seed {about['seed']}" if about["temp"] else ""
    console.print(f"{about['task']}, {counted(len(results))}, {about['model']}, {_policy(about)}{drawn}\n")
    _print_means(console, means)
    if compared:
        baseline, differences = compared
        first = f"{_policy(baseline)}{_differing(baseline)}"
        console.print(f"\nminus {first} (first in the file), over the same items:\n")
        _print_means(console, differences)
    if more := task.summary(results.records):
        console.print()
        for name, value in more.items():
            console.print(f"{name}: {value:.4g}")
    if not task.by or not means:
        return
    console.print()
    if len(task.by) == 1:
        columns, n_left, digits = list(means), 1, 3
        lines = [(value, [group.get(name) for name in means]) for (value,), group in groups.items()]
    else:
        first, digits = next(iter(means)), 2
        down, columns, grid = _grid(groups, first)
        n_left = int(isinstance(down[0], str))
        lines = list(zip(down, grid, strict=True))
        console.print(f"{first} by {task.by[0]} and {task.by[1]}\n")
    head = (task.by[0], *map(str, columns))
    if len(columns) == 1:
        # also show intervals and numbers of items, because a table with a single score has room for them
        head = (*head, *_MEAN_COLUMNS[1:])
        cells = [[str(name), *(_mean_cells(each) if each else ())] for name, (each,) in lines]
    else:
        cells = [
            [str(name), *(f"{each.mean:.{digits}f}" if each else "" for each in of)] for name, of in lines
        ]
    console.print(table(head, cells, n_left))


def _print_means(console: Console, means: dict[str, Mean]) -> None:
    rows = [(name, *_mean_cells(score)) for name, score in means.items()]
    console.print(table(("score", *_MEAN_COLUMNS), rows, 1))


_MEAN_COLUMNS = ("mean", "95 % interval", "items")


def _mean_cells(score: Mean) -> tuple[str, str, str]:
    """Return the table cells of a mean, in the order of `_MEAN_COLUMNS`."""
    between = "-" if score.low is None else f"{score.low:.3f} to {score.high:.3f}"
    return f"{score.mean:.3f}", between, f"{score.n}"


def _grid(groups: Groups, score: str) -> tuple[list[Any], list[Any], list[list[Mean | None]]]:
    """Return a score's means as a table, for a task that groups its items by two fields (`task.by`).

    The result is (row titles, column titles, rows). Row titles are the values of the first field, and column
    titles are the values of the second field. A mean is None if no item has both values.
    """
    down, across = (sorted({values[i] for values in groups}) for i in range(2))
    return down, across, [[groups.get((row, column), {}).get(score) for column in across] for row in down]
