"""Progress on stderr. A terminal shows bars. A pipe gets single lines or nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvtool.cli.console import plain_console, say
from kvtool.system import interrupt

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, TaskID

    from kvtool.llama.cache.archive import Archive
    from kvtool.measure.grid import Run

_SOON_S = 0.5
"""A progress line shows the remaining time only after the work has taken this many seconds."""


@contextmanager
def bytes_progress(label: str, *, piped: bool = True) -> Iterator[Callable[[int, int | None], None]]:
    """Yield a callback that shows the progress of a download or of hashing. The first call draws the bar.

    The callback takes the number of bytes that are done and the total number of bytes. The total may grow,
    because a model may have several files.

    label: the text next to the bar. piped: True to print this text as a line if stderr is not a terminal.
    """
    bar: Progress | None = None

    def step(done: int, total: int | None) -> None:
        nonlocal bar
        if bar is None:
            bar = _bytes_bar()
            bar.add_task(label, total=total)
            if bar.console.is_terminal:
                bar.start()
            elif piped:
                bar.console.print(label, soft_wrap=True)
        bar.update(bar.task_ids[0], completed=done, total=total)

    try:
        with interrupt.raising():
            yield step
    finally:
        if bar and bar.live.is_started:
            bar.stop()


def hashing_progress(name: str) -> AbstractContextManager[Callable[[int, int | None], None]]:
    """Return a context as of `bytes_progress` for hashing the file of this name. A pipe gets no line."""
    return bytes_progress(f"hashing {name}", piped=False)


def _bytes_bar() -> Progress:
    # import rich only here, because the import is slow and a file in the cache needs no bar
    from rich.progress import BarColumn, DownloadColumn, TransferSpeedColumn

    return _bars(BarColumn(), DownloadColumn(True), TransferSpeedColumn())


def _bars(*columns: ProgressColumn, **how: Any) -> Progress:
    """Return bars on stderr, each next to its text. If stderr is a pipe, nothing is drawn."""
    from rich.progress import Progress, TextColumn

    console, text = plain_console(stderr=True), TextColumn("{task.description}", markup=False)
    return Progress(text, *columns, console=console, transient=True, disable=not console.is_terminal, **how)


@dataclass
class ProgressLine:
    """A line about work in progress. It shows how much is done and the remaining time.

    started: time of the monotonic clock at which the work started, in seconds.
    """

    label: str
    unit: str = "tokens"
    started: float = field(default_factory=time.monotonic)

    @property
    def is_slow(self) -> bool:
        """True if the work has taken long enough to show the remaining time."""
        return time.monotonic() - self.started >= _SOON_S

    def line(self, done: int, n: int) -> str:
        """Return the text of the line when `done` of n units are done."""
        seconds = time.monotonic() - self.started
        if not done or not self.is_slow:
            return self.label
        left = seconds / done * (n - done)
        minutes = f"{left // 60:.0f} min {left % 60:.0f} s" if left >= 60 else f"{left:.0f} s"
        return f"{self.label} {done:,} of {n:,} {self.unit}, {done / n:.0%}, {minutes} left"


@contextmanager
def stopping(worker: Any) -> Iterator[None]:
    """Inside the block, Ctrl-C sets `worker.stop`, and a second Ctrl-C ends the process.

    The first Ctrl-C also prints a line at once, because the work stops only after the current step.
    """
    with interrupt.notifying(lambda: say("stopping after the current step ...")):
        interrupt.stops(worker)
        try:
            yield
        finally:
            interrupt.ends()


@contextmanager
def restoring_progress(archive: Archive | None) -> Iterator[None]:
    """Show a line while the archive of a chat is restored, if stderr is a terminal and this takes long."""
    if not archive:
        yield
        return
    with line_progress("opening the archive:", "rows") as step:
        before, archive.while_sealing = archive.while_sealing, step
        try:
            yield
        finally:
            archive.while_sealing = before


@contextmanager
def line_progress(label: str, unit: str = "tokens") -> Iterator[Callable[[int, int], None]]:
    """Yield a callback that takes the number of finished units and the number of all units.

    It draws a line if stderr is a terminal and the work takes long.
    """
    progress, status = ProgressLine(label, unit), None

    def step(done: int, n: int) -> None:
        nonlocal status
        if not progress.is_slow or not sys.stderr.isatty():
            return
        # imported here, because only slow work shows a line
        from rich.text import Text

        line = Text(progress.line(done, n))
        if status is None:
            status = plain_console(stderr=True).status(line)
            status.start()
        status.update(line)

    try:
        yield step
    finally:
        if status is not None:
            status.stop()


@contextmanager
def tokens_progress(label: str, n: int, n_done: int = 0) -> Iterator[Callable[..., None]]:
    """Yield a callback that takes the number of finished tokens and, optionally, a new text for the bar.

    n_done: number of tokens that are finished at the start.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(elapsed_when_finished=True)
    # if stdout is a pipe or a file, rich must not redirect it to the terminal
    redirect = sys.stdout is not None and sys.stdout.isatty()
    with _bars(*columns, redirect_stdout=redirect, speed_estimate_period=600) as bar:
        task = bar.add_task(label, total=n, completed=n_done)
        # rich measures the speed from one call to the next, so record the start by advancing 0
        bar.advance(task, 0)
        yield lambda done, label=label: bar.update(task, completed=done, description=label)


@contextmanager
def runs_progress(n_run: int, n_token: int) -> Iterator[Callable[..., None]]:
    """Yield a callback for the progress of runs, one at a time. It prints a line for each finished run.

    The callback takes a run with the number of tokens scored so far and the sum of their nll in nats, or with
    its record when it has ended. In a terminal, it also draws bars below the lines: one for the current run,
    and one for all runs.

    n_token: number of tokens that each run scores.
    """
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from kvtool.measure.statistics import perplexity_of

    words_column = TextColumn("{task.fields[words]}", markup=False)
    columns = BarColumn(bar_width=20), TaskProgressColumn(), words_column, TimeRemainingColumn()
    start, n_done = time.monotonic(), 0
    with _bars(*columns, speed_estimate_period=600) as bars:
        whole = bars.add_task("all", total=n_run * n_token, words=f"0 of {n_run} runs")
        task: TaskID | None = None

        def show(run: Run, n: int = 0, nll: float = 0.0, record: dict[str, Any] | None = None) -> None:
            nonlocal n_done, task
            if task is None:
                task = bars.add_task(run.name, total=n_token, words="")
            if record:
                n_done += 1
                bars.remove_task(task)
                task = None
                left = (time.monotonic() - start) / n_done * (n_run - n_done)
                end = "" if bars.console.is_terminal else f" ({n_done}/{n_run}, {left / 60:.0f} min left)"
                bars.console.print(f"{run.name}: {_in_short(record)}{end}", soft_wrap=True)
            else:
                words = f"{n:,} tokens, perplexity {perplexity_of(nll / n):.3f}" if n else ""
                bars.update(task, completed=n, words=words)
            bars.update(whole, completed=n_done * n_token + n, words=f"{n_done} of {n_run} runs")

        yield show


def _in_short(record: dict[str, Any]) -> str:
    if "error" in record:
        return f"failed: {' '.join(record['error'].split())}"
    return f"perplexity {record['perplexity']:.3f}, {record['tokens_per_s']:.0f} tokens/s"
