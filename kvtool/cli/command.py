"""Parts that all commands share: -h and -V, the layout of the help, and default values from settings."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from inspect import cleandoc
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from kvtool.cli import near
from kvtool.cli.listed import flag, words_of
from kvtool.errors import InputError, KvtoolError, ModelError, UsageError, users_traceback
from kvtool.options import ARCHIVE, CACHE, HARDWARE, OUTPUT, SAMPLING, SERVER, declared

CLICK: Any = sys.modules[typer.BadParameter.__module__]
"""The module with click's exceptions. Newer versions of typer contain their own copy of click."""

_ORDER = ("Arguments", "Options", CACHE, SAMPLING, SERVER, HARDWARE, ARCHIVE, OUTPUT, "Help")
"""The groups of a command's help, in order. Options without a group are shown in "Options"."""

_HELP = ("help", "version", "install_completion", "show_completion")

_METAVARS = {"<str>": "TEXT", "<path>": "FILE"}

_WIDEST = 32
"""Maximum width of option names, in columns. If a name is longer, its help begins on the next line."""


class BadValue(typer.BadParameter):
    """Error for a value that an option does not accept.

    reason: end of the message, such as "must be at least 1, got 0". The option's name precedes it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def refusal(error: typer.BadParameter, name: str) -> str:
    """Return the message for a value that an option does not accept. name: name of the option or setting."""
    if isinstance(error, BadValue):
        return f"{name} {error.reason}"
    # remove the empty text, which click lists as one of the values of a boolean
    return f"{name}: {error.message.rstrip('.').replace('values: , ', 'values: ')}"


class _Shared:
    """Mixin for commands and groups: the layout of the help, and the option -V."""

    def get_params(self, ctx: Any) -> list[Any]:
        root = ctx.find_root()
        version = [] if root is ctx else [param for param in root.command.params if param.name == "version"]
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
                # do not wrap, because a wrapped command cannot be copied
                indent = " " * formatter.current_indent
                formatter.write("".join(f"{indent}{example}\n" for example in examples))


class Command(_Shared, TyperCommand):
    """A command that is not a group.

    After the arguments are parsed, `ctx.obj` maps names of parameters to the settings that apply to them.
    Each parameter has two more attributes: `options` is the class that declares it as a field, or None, and
    `aliases` are its `Option.aliases`. An argument that is in place of -m has the alias -m.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        classes = getattr(self.callback, "classes", {})
        params: list[Any] = self.params
        for param in params:
            param.options = classes.get(param.name)
            if param.options:
                param.aliases = declared(param.options)[param.name].aliases
            else:
                is_argument = param.param_type_name == "argument"
                param.aliases = ("-m",) if is_argument and param.name == "model" else ()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.obj = {}
        # shell completion needs no defaults
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        # let click accept surplus arguments, because `near` refuses them below with better advice
        ctx.allow_extra_args = True
        try:
            args = near.translated(ctx, args)
            typed, _, _ = self.make_parser(ctx).parse_args(args=list(args))
            # do not read the settings for -h and -V, which must work even if a setting is wrong
            if not (typed.get("help") or typed.get("version")):
                _check_paths(self, typed)
                from kvtool.cli import settings

                root = ctx.find_root().command
                for line in settings.unknown_variables(self, words_of(ctx), root):
                    sys.stderr.write(f"kvtool: {line}\n")
                try:
                    ctx.obj = settings.of_command(self, words_of(ctx), typed, root)
                except UsageError:
                    if not _repairs_settings(words_of(ctx), typed):
                        raise
                ctx.default_map = {name: setting.value for name, setting in ctx.obj.items()}
            surplus = super().parse_args(ctx, args)
            for name in (param.name for param in self.params if param.type.name == "path"):
                ctx.params[name] = _expanded(ctx.params[name])
        except CLICK.UsageError as error:
            error.ctx = ctx
            name = getattr(getattr(error, "param", None), "name", None)
            if name and name in ctx.obj and source_of(ctx, name) == "DEFAULT_MAP":
                raise UsageError(refusal(error, ctx.obj[name].source)) from None
            raise
        if surplus:
            raise UsageError(near.too_many(ctx, surplus))
        return surplus

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KvtoolError as error:
            if ctx.params.get("verbose"):
                sys.stderr.writelines(users_traceback(error))
            is_of_option = isinstance(error, (UsageError, InputError, ModelError))
            origins = _origins(ctx, str(error)) if is_of_option else ""
            if isinstance(error, ModelError):
                origins = origins or _origin_of_model(ctx, str(error))
            if origins:
                error.args = (f"{error} ({origins})",)
            raise


class Group(_Shared, TyperGroup):
    """A command that has subcommands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = args[0].partition("=")[0] if args else ""
        known = {name for param in self.get_params(ctx) for name in param.opts}
        if first.startswith("-") and first not in known and not ctx.resilient_parsing:
            path = ctx.command_path
            before = f"name a command before its options: `{path} COMMAND {args[0]}`"
            raise UsageError(f"{before}; `{path} -h` lists the commands")
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        command = self.get_command(ctx, name)
        if command is None and not ctx.resilient_parsing:
            path = " ".join(("kvtool", *words_of(ctx)))
            raise UsageError(near.no_command(path, name, self.list_commands(ctx)))
        return name if command else None, command, args[1:]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        # click's own list would cut each sentence at the end of the line
        with formatter.section("Commands"):
            commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
            formatter.write_dl([(name, sentence_of(command)) for name, command in commands.items()])


def shaped(app: typer.Typer) -> Any:
    """Return the click command of a Typer app. It has the parts that all commands share."""
    app.info.cls = Group
    for registered in app.registered_commands:
        registered.cls = Command
    return get_command(app)


def source_of(ctx: Any, name: str) -> str:
    """Return the source of a parameter's value: "COMMANDLINE", "DEFAULT_MAP" (a setting) or "DEFAULT"."""
    return str(getattr(ctx.get_parameter_source(name), "name", ""))


def sentence_of(command: Any) -> str:
    """Return the first sentence of a command's help."""
    text = command.short_help or cleandoc(command.help or "").split("\n\n")[0]
    return " ".join(text.split()).partition(". ")[0].rstrip(".") + "."


def default_of(param: Any) -> str | None:
    """Return the text that the help shows as an option's default, or None if the option declares no text."""
    text = param.show_default if isinstance(param.show_default, str) else None
    if text and "{model}" in text:
        from kvtool.models.catalogue import registry

        text = text.replace("{model}", next(iter(registry())))
    return text


def title_of(param: Any) -> str:
    """Return the title of the group in which the help lists a parameter."""
    if param.param_type_name == "argument":
        return "Arguments"
    return getattr(param, "rich_help_panel", None) or ("Help" if param.name in _HELP else "Options")


def place_of(title: str) -> int:
    """Return the position of a group among all groups of the help."""
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
        if default := default_of(param):
            # remove the parentheses that typer puts around the text of a default
            text = text.replace(f"({param.show_default})", default)
        groups.setdefault(title_of(param), []).append((names, text))
    for title in sorted(groups, key=place_of):
        with formatter.section(title):
            formatter.write_dl(groups[title], col_max=_WIDEST)


def _origins(ctx: Any, message: str) -> str:
    """Return a text such as "--budget is set by $KVTOOL_BUDGET" for the options that a message names.

    Options that no setting has set are left out.
    """
    names = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", message))
    return "; ".join(
        f"{flag(param)} is set by {ctx.obj[param.name].source}"
        for param in _set_params(ctx)
        if names & {*param.opts}
    )


def _origin_of_model(ctx: Any, message: str) -> str:
    """Return a text such as "--model is set by $KVTOOL_MODEL" if a message names the model of a setting.

    Otherwise return "".
    """
    for param in _set_params(ctx):
        value, source = ctx.obj[param.name]
        name = os.path.basename(str(value))
        if param.name in ("draft", "model") and name and name in message and source not in message:
            return f"{flag(param)} is set by {source}"
    return ""


def _set_params(ctx: Any) -> list[Any]:
    """Return the parameters whose values come from settings."""
    return [
        param
        for param in ctx.command.params
        if param.name in ctx.obj and source_of(ctx, param.name) == "DEFAULT_MAP"
    ]


def _repairs_settings(words: Sequence[str], typed: Mapping[str, Any]) -> bool:
    """Return True if a command helps to repair wrong settings, so that it must also run with them."""
    return words == ("doctor",) or (words == ("config",) and bool(typed.get("path")))


def _expanded(path: Any) -> Any:
    """Return a path, or a tuple of paths, with the user's home folder for ~.

    A shell does not expand the ~ in --option=~/file, in a variable or in a list.
    """
    if isinstance(path, (str, os.PathLike)):
        return os.path.expanduser(path)
    return path and tuple(map(os.path.expanduser, path))


def _check_paths(command: Any, typed: Mapping[str, Any]) -> None:
    """Raise UsageError if a typed path is empty, because click would read it as the current folder."""
    for param in command.params:
        is_path = param.param_type_name == "option" and param.type.name == "path"
        if is_path and typed.get(param.name) == "":
            raise UsageError(f"the {flag(param).lstrip('-')}'s name is empty; name a file")
