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
