"""The one place where rich's consoles are made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console


def plain_console(**how: Any) -> Console:
    """A console that prints texts as they are: no markup, no emoji codes, no highlighting.

    Names, paths, errors and what a user types may hold anything. Styled parts are `rich.text.Text`.
    """
    from rich.console import Console

    return Console(markup=False, emoji=False, highlight=False, **how)


def table_console(**how: Any) -> Console:
    """The same for a table. In a pipe or a file no cell is cut or wrapped: another program reads it."""
    console = plain_console(**how)
    if not console.is_terminal:
        console.width = 10_000
    return console


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on stdout; without names of columns, rows of a name and a value."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=bool(columns), pad_edge=False)
    for column in columns or ("what", "value"):
        table.add_column(column, overflow="fold")
    for row in rows:
        # Text: a path may contain what rich takes for markup
        table.add_row(*(Text(cell) for cell in row))
    table_console().print(table)
