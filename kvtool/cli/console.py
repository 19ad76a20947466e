"""The one place where rich's consoles are made."""

from __future__ import annotations

import re
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
