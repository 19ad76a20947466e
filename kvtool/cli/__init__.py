"""The command line, one command per file. Here, every error becomes one line and an exit code."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections import UserDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Annotated, Any

import typer

from kvtool import __version__
from kvtool.cli.command import CLICK_ERROR, Group, plain, shaped
from kvtool.cli.listed import COMMANDS, FUNCTIONS, GROUPS
from kvtool.errors import InputError, KvtoolError, OutOfMemory
from kvtool.system import interrupt

# what a shell shows for a program that the signal has killed
_HANGUP, _PIPE = 128 + 1, 128 + 13

_OURS = (
    (r"a ((?:whole )?number)", r"\1 must be a \3, got \2"),
    (r"in the range x>=(\S+)", r"\1 must be at least \3, got \2"),
    (r"in the range (\S+)<=x<=(\S+)", r"\1 must be in \3..\4, got \2"),
)
"""How click says that a value is wrong, and how kvtool does."""

_ALIKE = 0.75
"""How much like an option that is suggested another one must be: difflib's ratio."""


class _Commands(UserDict[str, Any]):
    """Imports a command when it is asked for: importing all takes as long as loading a small model."""

    def __getitem__(self, name: str) -> Any:
        sentence, module = self.data[name], import_module(f"kvtool.cli.{name}")
        if name in GROUPS:
            found = module.app
        else:
            found = typer.Typer(rich_markup_mode=None, add_completion=False)
            found.command(name)(getattr(module, FUNCTIONS.get(name, name)))
        command = shaped(found)
        command.name, command.short_help = name, sentence
        return command


class _Group(Group):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # typer wants a dictionary, but adds nothing to it
        self.commands = _Commands(COMMANDS)

    def list_commands(self, context: Any) -> list[str]:
        return list(self.commands)

    def format_commands(self, context: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        # --help prints here
        with _one_line():
            return super().make_context(*args, **kwargs)

    def invoke(self, context: Any) -> Any:
        with _one_line():
            result = super().invoke(context)
            # a failure here is one line; at exit it would be a traceback
            sys.stdout.flush()
            return result


@contextmanager
def _one_line() -> Iterator[None]:
    """Ends the program with one line for every error that is not a bug."""
    try:
        yield
    except KvtoolError as error:
        raise _end(error.exit_code, str(error)) from None
    except CLICK_ERROR as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            # older versions of click print it themselves, and end well
            typer.echo(str(error))
            raise typer.Exit(0) from None
        raise _end(*_of_usage(error)) from None
    except UnicodeError as error:
        raise _end(InputError.exit_code, f"a text is not UTF-8; convert it first ({error})") from None
    except KeyboardInterrupt:
        raise _end(interrupt.EXIT_CODE, "stopped") from None
    except MemoryError:
        raise _end(OutOfMemory.exit_code, str(OutOfMemory())) from None
    except SystemExit as end:
        # what rich does when a pipe is closed
        if isinstance(end.__context__, BrokenPipeError):
            raise _end(_PIPE, "") from None
        raise
    except OSError as error:
        raise _end(*_of_output(error)) from None


def _of_usage(error: Any) -> tuple[int, str]:
    """The exit code and the line for what does not parse."""
    said = _plainly(error)
    for theirs, ours in _OURS:
        said = re.sub(f"^Invalid value for '(?:.* / ')?(.*?)': (.*) is not {theirs}$", ours, said)
    said = said if said.startswith("-") else said[:1].lower() + said[1:]
    where = f"; `{error.ctx.command_path} -h` says what it takes" if getattr(error, "ctx", None) else ""
    return error.exit_code, " ".join(f"{said}{where}".split())


def _plainly(error: Any) -> str:
    """What click says of it, or better words for that."""
    if (name := getattr(error, "option_name", None)) and hasattr(error, "possibilities"):
        # imported here: only a failing command needs it
        from difflib import get_close_matches

        # all that are a little like it would make a longer list than help
        alike = [each for each in error.possibilities or () if name.startswith(each) or each.startswith(name)]
        meant = alike or get_close_matches(name, error.possibilities or (), n=1, cutoff=_ALIKE)
        return f"no such option: {name}" + (f" (did you mean {meant[0]}?)" if meant else "")
    if type(error).__name__ == "MissingParameter" and getattr(error.param, "name", "") == "file":
        return "give a text: a file, or - for stdin"
    return plain(error.format_message()).rstrip(".")


def _of_output(error: OSError) -> tuple[int, str]:
    """The exit code and the line for an error of stdout or of the terminal.

    The line is empty where nobody can read it. Errors of files are raised as KvtoolError by what reads and
    writes them.
    """
    if error.errno == errno.EPIPE:
        return _PIPE, ""
    if error.errno == errno.EIO:
        return _HANGUP, ""
    name = f" {error.filename}" if error.filename else ""
    return KvtoolError.exit_code, f"cannot write{name}: {error.strerror or error}"


def _end(exit_code: int, line: str) -> typer.Exit:
    """Says why, and makes sure that Python has nothing left to write at exit."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    if line:
        with suppress(OSError, ValueError):
            # a name in a damaged file may hold any character
            shown = "".join(c if c.isprintable() else "?" for c in " ".join(line.split("\n")))
            after_echo = exit_code == interrupt.EXIT_CODE and sys.stderr.isatty()
            sys.stderr.write("\n" * after_echo)
            # a terminal would wrap it within words
            from kvtool.cli.console import say

            say([f"kvtool: {shown}"])
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return typer.Exit(exit_code)


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # plain help: drawing panels around thirty options takes longer than the rest of --help
    rich_markup_mode=None,
    # all commands take what the root takes
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Run endless chats and streams with llama.cpp in constant memory, with KV-cache eviction policies.",
)


def _print_version(on: bool) -> None:
    if on:
        typer.echo(f"kvtool {__version__}")
        raise typer.Exit


_VERSION = typer.Option(
    "--version", "-V", callback=_print_version, is_eager=True, expose_value=False, help="Print the version."
)


@app.callback()
def _root(version: Annotated[bool, _VERSION] = False) -> None:
    pass


def main() -> None:
    app(prog_name="kvtool")
