"""Output for people: consoles of rich, tables, and notes on stderr."""

from __future__ import annotations

import os
import re
import sys
from textwrap import fill
from typing import IO, TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text


_NARROW = 40
"""Width of a terminal, in columns, below which tables leave out columns."""


def plain_console(**how: Any) -> Console:
    """Return a console that prints texts without markup, emoji codes and highlighting.

    Names, paths, errors and typed texts may contain brackets and colons, which have no special meaning here.
    To print a text with a style, pass a `rich.text.Text`.
    """
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False, **how)


def table_console(**how: Any) -> Console:
    """Return a `plain_console` for a table. In a pipe or a file, no cell is cut, wrapped or padded."""
    console = plain_console(**how)
    if not console.is_terminal:
        console.width = 10_000
        console.file = cast("IO[str]", _Unpadded(console.file))
    return console


class _Unpadded:
    """File that removes spaces at the ends of lines."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(re.sub(" +$", "", text, flags=re.MULTILINE))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def table(
    columns: Iterable[str | Column], rows: Iterable[Iterable[str | Text]], left: int | None = None, **how: Any
) -> Table:
    """Return a table without borders. Columns after the first `left` are aligned right, unless it is None."""
    from rich.table import Table

    aligned = Table(*columns, box=None, pad_edge=False, **how)
    for column in [] if left is None else aligned.columns[left:]:
        column.justify = "right"
    for row in rows:
        aligned.add_row(*row)
    return aligned


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], least: int = 2) -> None:
    """Print a table on stdout without cutting texts.

    A terminal narrower than _NARROW shows only the first columns of the table: those that fit without
    breaking words, and at least `least`.

    columns: the titles. If there are no titles, each row has two texts: a name and a value.
    """
    from rich.measure import Measurement
    from rich.table import Column

    console, rows, n = table_console(), list(rows), len(columns) or 2
    # without this width, the measured minimum would not exceed the terminal's width
    unlimited = console.options.update_width(10_000)
    while True:
        folding = [Column(name, overflow="fold") for name in columns[:n] or ("what", "value")]
        shown = table(folding, (row[:n] for row in rows), show_header=bool(columns))
        fits = Measurement.get(console, unlimited, shown).minimum <= console.width
        if fits or n <= least or console.width >= _NARROW:
            break
        n -= 1
    console.print(shown)


def say(*notes: str | None, indent: int = 0) -> None:
    """Write each note to stderr, as a line. In a terminal, long lines are wrapped between words.

    indent: number of spaces with which continuation lines begin.
    """
    lines = [note for note in notes if note]
    # some terminals report a width of 0
    width = os.get_terminal_size(sys.stderr.fileno()).columns if sys.stderr.isatty() else 0
    if width > 2 * indent:
        how: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
        lines = [fill(line, width, subsequent_indent=" " * indent, **how) for line in lines]
    sys.stderr.writelines(f"{line}\n" for line in lines)
    sys.stderr.flush()
