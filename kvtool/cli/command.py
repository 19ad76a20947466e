"""What all commands share: -h and -V, help in groups with examples, defaults from elsewhere, near misses."""

from __future__ import annotations

import os
import re
import sys
from functools import cached_property
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from kvtool.cli.listed import words_of
from kvtool.errors import KvtoolError, UsageError
from kvtool.options.field import ARCHIVES, DRAWS, KEEPS, RUNS, SERVES, SHOWS

if TYPE_CHECKING:
    from kvtool.cli.settings import Setting

CLICK_ERROR: type[Exception] = typer.BadParameter.__mro__[2]
"""The base class of what click raises; newer versions of typer bring their own click."""

_ORDER = ("Arguments", "Options", KEEPS, DRAWS, SERVES, RUNS, ARCHIVES, SHOWS, "Help")
"""All groups. "Options" has those that only one command has."""

_HELP = ("help", "version", "install_completion", "show_completion")

_METAVARS = {"<str>": "TEXT", "<path>": "FILE", "<int>": "N", "<float>": "X"}

_AT_LEAST = re.compile(r"; x>=-?\d+(?=])|  \[x>=-?\d+\]$")
"""What a number must be at least: an error says it to those who need it."""

_WIDEST = 32
"""The widest name of an option that has its text beside it."""


class _Shared:
    """The help of a command, and -V."""

    def get_params(self, ctx: Any) -> list[Any]:
        root = ctx.find_root()
        version = [] if root is ctx else [each for each in root.command.params if each.name == "version"]
        return [*super().get_params(ctx), *version]  # type: ignore[misc]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self.get_params(ctx), ctx, formatter)
        if isinstance(self, Group):
            self.format_commands(ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from kvtool.cli.examples import EXAMPLES

        if examples := EXAMPLES.get(" ".join(words_of(ctx))):
            with formatter.section("Examples"):
                # as they are: a command that is wrapped cannot be copied
                indent = " " * formatter.current_indent
                formatter.write("".join(f"{indent}{example}\n" for example in examples))


class Command(_Shared, TyperCommand):
    """A command that runs something."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:
            # completion does without
            return super().parse_args(ctx, args)
        ctx.default_map = found = _Defaults(self, ctx, list(args))
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            name = str(getattr(error.param, "name", ""))
            if name in found and ctx.get_parameter_source(name).name == "DEFAULT_MAP":
                said = plain(error.message).rstrip(".")
                said = re.sub(r"^(\S+) is not in the range x>=(\S+)$", r"must be at least \2, got \1", said)
                raise UsageError(f"{found.settings[name].source}: {said}") from None
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KvtoolError as error:
            if ctx.params.get("verbose"):
                _show_own_traceback(error)
            if isinstance(error, UsageError) and (origins := _origins(ctx, str(error))):
                error.args = (f"{error} ({origins})",)
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        # kvtool config shows what holds; help works whatever is set
        ctx.default_map = None
        super().format_help(ctx, formatter)


class Group(_Shared, TyperGroup):
    """A command of several commands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        command = self.get_command(ctx, name)
        if command is None and not ctx.resilient_parsing:
            from kvtool.cli.near import missing

            path = " ".join(("kvtool", *words_of(ctx)))
            raise UsageError(missing(path, name, self.list_commands(ctx)))
        return name if command else None, command, args[1:]


def shaped(app: typer.Typer) -> Any:
    """The command of a Typer app, with what all commands share."""
    app.info.cls = Group
    for each in app.registered_commands:
        each.cls = Command
    return get_command(app)


def plain(message: str) -> str:
    """A message of click without its names for types."""
    message = re.sub(r"valid int(eger)?( range)?\b", "whole number", message)
    return re.sub(r"valid float( range)?\b", "number", message)


def default_of(param: Any) -> str | None:
    """A default in words, where a command's signature has words for it."""
    words = param.show_default if isinstance(param.show_default, str) else None
    if words and "{model}" in words:
        from kvtool.models.catalogue import registry

        words = words.replace("{model}", next(iter(registry())))
    return words


def title_of(param: Any) -> str:
    """The group of a parameter in the help."""
    if param.param_type_name == "argument":
        return "Arguments"
    return getattr(param, "rich_help_panel", None) or ("Help" if param.name in _HELP else "Options")


def place_of(title: str) -> int:
    """Where a group stands in the help."""
    return _ORDER.index(title) if title in _ORDER else _ORDER.index("Options")


def _write_options(params: list[Any], ctx: Any, formatter: Any) -> None:
    groups: dict[str, list[tuple[str, str]]] = {}
    for param in params:
        record = param.get_help_record(ctx)
        if record is None:
            continue
        names, text = record
        for metavar, plain in _METAVARS.items():
            names = names.replace(metavar, plain)
        text = _AT_LEAST.sub("", text)
        if words := default_of(param):
            # typer puts words in parentheses
            text = text.replace(f"({param.show_default})", words)
        groups.setdefault(title_of(param), []).append((names, text))
    for title in sorted(groups, key=place_of):
        with formatter.section(title):
            formatter.write_dl(groups[title], col_max=_WIDEST)


class _Defaults(dict[str, Any]):
    """The values from the environment and the file, looked up when the first option was not typed."""

    def __init__(self, command: Command, ctx: Any, args: list[str]) -> None:
        super().__init__()
        self._of = command, ctx, args

    @cached_property
    def settings(self) -> dict[str, Setting]:
        """What was found, by the name of the parameter. Raises UsageError."""
        from kvtool.cli import settings

        return settings.of_run(*self._of)

    def __contains__(self, name: object) -> bool:
        return name in self.settings

    def get(self, name: str, default: Any = None) -> Any:
        return self.settings[name].value if name in self.settings else default


def _origins(ctx: Any, said: str) -> str:
    """Where the options come from that an error names and nobody typed; empty if there are none."""
    from kvtool.cli.settings import flag

    found = ctx.default_map.settings if isinstance(ctx.default_map, _Defaults) else {}
    return "; ".join(
        f"{flag(param)} is set by {found[param.name].source}"
        for param in ctx.command.params
        if param.name in found
        and ctx.get_parameter_source(param.name).name == "DEFAULT_MAP"
        and any(re.search(rf"(?<![\w-]){name}(?![\w-])", said) for name in param.opts)
    )


def _show_own_traceback(error: BaseException) -> None:
    """Writes the traceback from the first line in a file that is not kvtool's on, for a policy's author."""
    import traceback
    from pathlib import Path

    if not (cause := error.__cause__):
        return
    shown = traceback.TracebackException.from_exception(cause)
    package = f"{Path(__file__).parent.parent}{os.sep}"
    while shown.stack and shown.stack[0].filename.startswith((package, "<")):
        shown.stack.pop(0)
    if shown.stack or isinstance(cause, SyntaxError):
        sys.stderr.writelines(shown.format(chain=False))
