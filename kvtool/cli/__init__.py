"""The command line: one command a file; a KvtoolError becomes one line and an exit code here."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer
from typer.core import TyperGroup

from kvtool import __version__
from kvtool.cli import chat, doctor, generate, inspect, models, perplexity, policies, session
from kvtool.errors import KvtoolError


class _Group(TyperGroup):
    def invoke(self, context):
        try:
            return super().invoke(context)
        except KvtoolError as error:
            sys.stderr.write(f"kvtool: {error}\n")
            raise typer.Exit(error.exit_code) from None
        except BrokenPipeError:
            # the reader has what it wanted; nothing may be flushed into the closed pipe at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # plain help: drawing panels around thirty options takes longer than all the rest of --help
    rich_markup_mode=None,
    help="Endless llama.cpp chats and streams in a fixed number of bytes, under a KV-cache policy.",
)


def _print_version(on: bool) -> None:
    if on:
        typer.echo(f"kvtool {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


app.command("chat")(chat.chat)
app.command("generate")(generate.generate)
app.command("perplexity")(perplexity.perplexity)
app.command("inspect")(inspect.inspect)
app.command("policies")(policies.policies)
app.add_typer(models.app, name="models")
app.add_typer(session.app, name="session")
app.command("doctor")(doctor.doctor)


def main() -> None:
    app(prog_name="kvtool")
