"""The command line, one command per file. This file turns every error into one line and an exit code."""

from __future__ import annotations

import errno
import os
import sys
from collections import UserDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer

import kvtool.models
from kvtool import __version__
from kvtool.cli import near
from kvtool.cli.command import CLICK, BadValue, Group, refusal, shaped
from kvtool.cli.listed import COMMANDS, FUNCTIONS, GROUPS, flag, module_of
from kvtool.errors import InputError, KvtoolError, OutOfMemory, suggestion
from kvtool.system import interrupt

_HANGUP, _PIPE = 128 + 1, 128 + 13
"""Exit codes that a shell reports for a program that was ended by SIGHUP or SIGPIPE."""


class _Commands(UserDict[str, Any]):
    """Commands by name. A command is imported only when it is used.

    Importing all commands would take as long as loading a model.
    """

    def __getitem__(self, name: str) -> Any:
        return _command(name, self.data[name])


# cached, because a check of all settings looks at all commands several times
@cache
def _command(name: str, sentence: str) -> Any:
    module = import_module(module_of(name))
    if name in GROUPS:
        app = module.app
    else:
        app = typer.Typer(rich_markup_mode=None, add_completion=False)
        app.command(name)(getattr(module, FUNCTIONS.get(name, name)))
    command = shaped(app)
    command.name, command.short_help = name, sentence
    return command


class _Group(Group):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # typer's own dictionary is empty: no command is registered with typer
        self.commands = _Commands(COMMANDS)

    def list_commands(self, context: Any) -> list[str]:
        return list(self.commands)

    def format_commands(self, context: Any, formatter: Any) -> None:
        # take the descriptions from COMMANDS, so that no command is imported
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        # click prints the --help text in this call, and printing may fail
        with _one_line():
            return super().make_context(*args, **kwargs)

    def invoke(self, context: Any) -> Any:
        with _one_line():
            result = super().invoke(context)
            # flush here, so that an error is reported in one line; at exit, Python would print a traceback
            sys.stdout.flush()
            return result


def _show_download(name: str) -> Any:
    # imported here, because most commands download nothing
    from kvtool.cli.progress import bytes_progress

    return bytes_progress(f"downloading {name}")


kvtool.models.show_download = _show_download


@contextmanager
def _one_line() -> Iterator[None]:
    """Turn every error that is not a bug into one line, and end the program."""
    try:
        yield
    except KvtoolError as error:
        raise _end(error.exit_code, str(error)) from None
    except CLICK.ClickException as error:
        # compare the name, because click 8.1 does not have this class: it prints the help itself
        if type(error).__name__ == "NoArgsIsHelpError":
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
        # rich raises SystemExit when a pipe is closed
        if isinstance(end.__context__, BrokenPipeError):
            raise _end(_PIPE, "") from None
        raise
    except OSError as error:
        raise _end(*_of_output(error)) from None


def _of_usage(error: Any) -> tuple[int, str]:
    """Return the exit code and the message for a command line that cannot be parsed."""
    line = _plainly(error)
    if getattr(error, "ctx", None) and not isinstance(error, BadValue):
        line += f"{'' if line.endswith('?') else ';'} `{error.ctx.command_path} -h` lists its options"
    return error.exit_code, " ".join(line.split())


def _plainly(error: Any) -> str:
    """Return the message for an error that click raised, in kvtool's wording."""
    param = getattr(error, "param", None)
    if isinstance(error, CLICK.NoSuchOption):
        name, params = error.option_name, error.ctx.command.get_params(error.ctx)
        known = {each.lstrip("-"): each for param in params for each in param.opts if each.startswith("--")}
        line, advice = f"no such option: {name}", near.option_advice(name, error.ctx.command)
        if advice or not name.startswith("--"):
            return line + advice
        hint = suggestion(name.lstrip("-"), known, known)
        return f"{line}.{hint}" if hint else line
    if isinstance(error, CLICK.MissingParameter) and param:
        return f"{param.metavar or param.human_readable_name} is missing"
    if isinstance(error, CLICK.BadOptionUsage) and error.ctx:
        named = (option for option in error.ctx.command.params if error.option_name in option.opts)
        is_flag = any(option.is_flag or option.count for option in named)
        return f"{error.option_name} {'takes no value' if is_flag else 'needs a value'}"
    if isinstance(error, typer.BadParameter) and param:
        return refusal(error, flag(param))
    message = str(error.format_message()).rstrip(".")
    return message[:1].lower() + message[1:]


def _of_output(error: OSError) -> tuple[int, str]:
    """Return the exit code and the message for an error of stdout or of the terminal.

    The message is empty if stdout is a pipe whose reader has ended, or if the terminal is closed. Errors of
    other files never come here, because the functions that read and write files raise KvtoolError.
    """
    if error.errno == errno.EPIPE:
        return _PIPE, ""
    if error.errno == errno.EIO:
        return _HANGUP, ""
    name = f" {error.filename}" if error.filename else ""
    return KvtoolError.exit_code, f"cannot write{name}: {error.strerror or error}"


def _end(exit_code: int, line: str) -> typer.Exit:
    """Print the line, and flush stdout and stderr. Return the exception that ends the program.

    A stream that cannot be flushed is redirected to /dev/null, so that Python's flush at exit does not fail.
    """
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    if line:
        with suppress(OSError, ValueError):
            # a name from a damaged file may contain control characters
            shown = "".join(c if c.isprintable() else "?" for c in " ".join(line.split("\n")))
            after_echo = exit_code == interrupt.EXIT_CODE and sys.stderr.isatty()
            sys.stderr.write("\n" * after_echo)
            # `say` wraps between words; a terminal would wrap inside words
            from kvtool.cli.console import say

            say(f"kvtool: {shown}")
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
    # no panels: drawing them for thirty options takes longer than the rest of --help
    rich_markup_mode=None,
    # all commands inherit these settings
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
