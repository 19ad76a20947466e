"""The progress of kvtool compare on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvtool.cli.console import plain_console

if TYPE_CHECKING:
    from rich.progress import TaskID

    from kvtool.measure.grid import Run
    from kvtool.measure.runner import Event


@contextmanager
def runs_progress(n_run: int, n_token: int) -> Iterator[Callable[[Event], None]]:
    """A callback for events. It prints a line per finished run, and on a terminal draws bars below.

    n_run: runs to be done. n_token: tokens that each scores.
    """
    from math import exp

    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = plain_console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TextColumn("{task.fields[words]}", markup=False),
        TimeRemainingColumn(),
    )
    start, n_done = time.monotonic(), 0
    with Progress(
        *columns,
        console=console,
        transient=True,
        disable=not console.is_terminal,
        speed_estimate_period=600,
    ) as bars:
        whole = bars.add_task("all", total=n_run * n_token, words=f"0 of {n_run} runs")
        tasks: dict[Run, TaskID] = {}
        seen: dict[Run, int] = {}

        def show(event: Event) -> None:
            nonlocal n_done
            run = event.run
            if run not in tasks:
                tasks[run] = bars.add_task(run.name, total=n_token, words="")
            n = n_token if event.record else event.n
            bars.update(whole, advance=n - seen.get(run, 0))
            seen[run] = n
            if not event.record:
                words = f"{event.n:,} tokens, perplexity {exp(event.nll):.3f}" if event.n else ""
                bars.update(tasks[run], completed=n, words=words)
                return
            n_done += 1
            bars.remove_task(tasks[run])
            bars.update(whole, words=f"{n_done} of {n_run} runs")
            left = (time.monotonic() - start) / n_done * (n_run - n_done)
            ends = f"{n_done}/{n_run}, {left / 60:.0f} min left" if not console.is_terminal else ""
            console.print(_line(run.name, event.record, ends), markup=False, soft_wrap=True)

        yield show


def _line(name: str, record: dict[str, Any], end: str) -> str:
    if "error" in record:
        said = f"failed: {' '.join(record['error'].split())}"
    else:
        said = f"perplexity {record['perplexity']:.3f}, {record['tokens_per_s']:.0f} tokens/s"
    return f"{name}: {said}" + (f" ({end})" if end else "")
