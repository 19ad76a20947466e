"""The one place where rich's consoles are made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
