"""The one place where rich's consoles are made, and what is said without one."""

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


def plain_console(**how: Any) -> Console:
    """A console that prints texts as they are: no markup, no emoji codes, no highlighting.

    Names, paths, errors and what a user types may hold anything. Styled parts are `rich.text.Text`.
    """
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False, **how)


def table_console(**how: Any) -> Console:
    """The same for a table. A pipe or a file gets no cell cut, wrapped or padded: programs read it."""
    console = plain_console(**how)
    if not console.is_terminal:
        console.width = 10_000
        console.file = cast("IO[str]", _Unpadded(console.file))
    return console


class _Unpadded:
    """A file whose lines end where their text does."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(re.sub(" +$", "", text, flags=re.MULTILINE))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def table(
    columns: Iterable[str | Column], rows: Iterable[Iterable[str | Text]], left: int | None = None, **how: Any
) -> Table:
    """A table without lines.

    left: how many columns stand at the left; those behind have numbers, which stand at the right. None: all.
    """
    from rich.table import Table

    made = Table(*columns, box=None, pad_edge=False, **how)
    for column in [] if left is None else made.columns[left:]:
        column.justify = "right"
    for row in rows:
        made.add_row(*row)
    return made


def print_table(columns: Sequence[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a table on stdout, no text of it cut; without names of columns, rows of a name and a value."""
    from rich.table import Column

    folding = [Column(name, overflow="fold") for name in columns or ("what", "value")]
    table_console().print(table(folding, rows, show_header=bool(columns)))


def say(notes: Iterable[str | None], indent: int = 0) -> None:
    """Writes notes to stderr, a line each; a terminal gets them wrapped between words.

    indent: blanks before the lines that wrapping adds.
    """
    lines = [note for note in notes if note]
    # a terminal that does not know its width says 0
    width = os.get_terminal_size(sys.stderr.fileno()).columns if sys.stderr.isatty() else 0
    if width > 2 * indent:
        how: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
        lines = [fill(line, width, subsequent_indent=" " * indent, **how) for line in lines]
    sys.stderr.writelines(f"{line}\n" for line in lines)
    sys.stderr.flush()
