"""Parts that all commands share: -h and -V, help in groups with examples, settings, wrong command lines."""

from __future__ import annotations

import os
import re
import sys
from functools import cached_property
from inspect import cleandoc
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from kvtool.cli import near
from kvtool.cli.listed import flag, words_of
from kvtool.errors import KvtoolError, UsageError
from kvtool.options import ARCHIVE, CACHE, HARDWARE, OUTPUT, SAMPLING, SERVER

if TYPE_CHECKING:
    from kvtool.cli.settings import Setting

CLICK: Any = sys.modules[typer.BadParameter.__module__]
"""The module with click's exceptions; newer versions of typer bring their own click."""

_ORDER = ("Arguments", "Options", CACHE, SAMPLING, SERVER, HARDWARE, ARCHIVE, OUTPUT, "Help")
"""All groups. "Options" has the options of a single command."""

_HELP = ("help", "version", "install_completion", "show_completion")

_METAVARS = {"<str>": "TEXT", "<path>": "FILE"}

_EARLIER = ("--png", "--type-k", "--type-v")
"""Names of options that still work, and that help and documents no longer show."""

_WIDEST = 32
"""Columns of the widest name of an option whose text begins on the same line."""


class BadValue(typer.BadParameter):
    """A value that an option does not take.

    Attributes
    ----------
    said
        The reason, as it follows the option's name: "must be at least 1, got 0".
    """

    def __init__(self, said: str) -> None:
        super().__init__(said)
        self.said = said


class _Shared:
    """The help of a command, and -V."""

    def get_params(self, ctx: Any) -> list[Any]:
        root = ctx.find_root()
        version = [] if root is ctx else [each for each in root.command.params if each.name == "version"]
        return [*super().get_params(ctx), *version]  # type: ignore[misc]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        # newer versions of typer put braces around required arguments
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]  # type: ignore[misc]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_options(self.get_params(ctx), ctx, formatter)
        if isinstance(self, Group):
            self.format_commands(ctx, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from kvtool.cli.examples import EXAMPLES

        if examples := EXAMPLES.get(" ".join(words_of(ctx))):
            with formatter.section("Examples"):
                # without wrapping: a wrapped command cannot be copied
                indent = " " * formatter.current_indent
                formatter.write("".join(f"{indent}{example}\n" for example in examples))


class Command(_Shared, TyperCommand):
    """A command that runs something."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:
            # completion does without
            return super().parse_args(ctx, args)
        if any(param.name == "records" for param in self.params):
            from kvtool.cli.output import with_records

            args = with_records(args)
        ctx.default_map = found = _Defaults(self, ctx, list(args))
        # click would name arguments that are too many, and nothing to do about them
        ctx.allow_extra_args = True
        try:
            if advice := near.other_option(ctx, args):
                raise UsageError(advice)
            spare = super().parse_args(ctx, args)
        except CLICK.UsageError as error:
            error.ctx = ctx
            name = getattr(getattr(error, "param", None), "name", None)
            if name and name in found and ctx.get_parameter_source(name).name == "DEFAULT_MAP":
                raise UsageError(_wrong_setting(error, found.settings[name].source)) from None
            raise
        if spare:
            raise UsageError(near.too_many(ctx, spare))
        return spare

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

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = args[0].partition("=")[0] if args else ""
        known = {name for param in self.get_params(ctx) for name in param.opts}
        if first.startswith("-") and first not in known and not ctx.resilient_parsing:
            raise UsageError(near.no_command_yet(ctx, args))
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        command = self.get_command(ctx, name)
        if command is None and not ctx.resilient_parsing:
            path = " ".join(("kvtool", *words_of(ctx)))
            raise UsageError(near.no_command(path, name, self.list_commands(ctx)))
        return name if command else None, command, args[1:]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        # click would cut each sentence to what one line holds
        with formatter.section("Commands"):
            commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
            formatter.write_dl([(name, sentence_of(each)) for name, each in commands.items()])


def shaped(app: typer.Typer) -> Any:
    """The command of a Typer app, with what all commands share."""
    app.info.cls = Group
    for each in app.registered_commands:
        each.cls = Command
    return get_command(app)


def sentence_of(command: Any) -> str:
    """The first sentence of a command's help."""
    said = command.short_help or cleandoc(command.help or "").split("\n\n")[0]
    return " ".join(said.split()).partition(". ")[0].rstrip(".") + "."


def flags_of(param: Any) -> list[str]:
    """The names of an option that help and documents show."""
    return [name for name in param.opts if name not in _EARLIER]


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
    """Return the place of a group in the help."""
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
        for name in _EARLIER:
            names = names.replace(f", {name}", "")
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
        """The settings by the names of their parameters. Raises UsageError."""
        from kvtool.cli import settings

        return settings.of_run(*self._of)

    def __contains__(self, name: object) -> bool:
        return name in self.settings

    def get(self, name: str, default: Any = None) -> Any:
        return self.settings[name].value if name in self.settings else default


def _wrong_setting(error: Any, source: str) -> str:
    """Return the line for a wrong value in a setting. source: the file with its key, or the variable."""
    if isinstance(error, BadValue):
        return f"{source} {error.said}"
    return f"{source}: {error.message.rstrip('.')}"


def _origins(ctx: Any, said: str) -> str:
    """Name the settings behind options in an error that were not typed; "" without such options."""
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
