"""`kvtool help`: show the same help as -h."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kvtool.cli.declared import command_words
from kvtool.errors import UsageError


def help_(
    context: typer.Context,
    words: Annotated[
        list[str] | None, command_words("A command, for example chat or models show.", "all commands")
    ] = None,
) -> None:
    """Show the help of a command."""
    at: Any = context.find_root()
    for word in words or []:
        group = at.command
        if not hasattr(group, "commands"):
            raise UsageError(f"`{at.command_path}` has no subcommands; `{at.command_path} -h` shows its help")
        _, command, _ = group.resolve_command(at, [word])
        at = type(at)(command, info_name=word, parent=at)
    typer.echo(at.command.get_help(at))
