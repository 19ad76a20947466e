"""Typer parameters for the dataclasses of options that a command's function takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NewType, get_args, get_origin, get_type_hints

import typer

from kvtool.cli import completion
from kvtool.cli.command import BadValue
from kvtool.cli.listed import flag
from kvtool.errors import UsageError
from kvtool.options import OUTPUT, Option, Options, declared

Typed = NewType("Typed", Mapping[str, str])
"""The typed options: the names of parameters, each with its flag."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=OUTPUT)]
"""--json of the commands that print one result."""

ModelName = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]", help="Model, as for --model.", show_default=False, autocompletion=completion.models
    ),
]
"""The model, where it may be typed without -m."""


def command_words(help: str, default: str) -> Any:
    """An argument that takes the words of a command."""
    return typer.Argument(
        metavar="[COMMAND]...", help=help, show_default=default, autocompletion=completion.commands
    )


def options(command: Callable[..., None]) -> Callable[..., None]:
    """The command as Typer takes it: each parameter of a class of `Options` becomes an option a field.

    The command gets the dataclasses filled. Fields that a class hides are left out. A parameter of the type
    `Typed` gets the options that were typed.
    """
    hints = get_type_hints(command, include_extras=True)
    kinds: dict[str, type[Options]] = {}
    params = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    asks = [name for name, hint in hints.items() if hint is Typed]
    for each in inspect.signature(command).parameters.values():
        hint = hints[each.name]
        if isinstance(hint, type) and issubclass(hint, Options):
            kinds[each.name] = hint
            params += parameters(hint)
        elif each.name not in asks:
            params.append(each.replace(annotation=hint, kind=inspect.Parameter.KEYWORD_ONLY))

    def run(context: typer.Context, **values: Any) -> None:
        given = {name: str(getattr(context.get_parameter_source(name), "name", "")) for name in values}
        typed = {name for name, source in given.items() if source == "COMMANDLINE"}
        set_or_typed = {name for name, source in given.items() if source != "DEFAULT"}
        flags = {str(each.name): flag(each) for each in context.command.params if each.name in typed}
        filled = {name: kind.from_values(values, typed, set_or_typed) for name, kind in kinds.items()}
        own = {name: value for name, value in values.items() if name in hints.keys() - kinds.keys()}
        command(**own, **filled, **{name: Typed(flags) for name in asks})

    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
    run.__annotations__ = {each.name: each.annotation for each in params} | {"return": None}
    run.__signature__ = inspect.Signature(params)  # type: ignore[attr-defined]
    return run


def parameters(kind: type[Options]) -> Iterator[inspect.Parameter]:
    """A Typer parameter for each field that the class does not hide."""
    hints = get_type_hints(kind)
    for name, its in declared(kind).items():
        if name in kind.hidden:
            continue
        default, hint = getattr(kind, name), hints[name]
        if get_origin(hint) is tuple:
            each = get_args(hint)[0]
            default, hint = None, (list[int] if each is int else list[str]) | None
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[hint, _typer_option(kind, hint, its)],
        )


def _typer_option(kind: type[Options], hint: Any, its: Option) -> Any:
    number = next((each for each in (int, float) if each.__name__ in str(hint)), None)
    return typer.Option(
        *its.flags,
        help=_with_range(its),
        metavar=its.metavar,
        show_default=_words(kind, its.default_text),
        count=its.is_count,
        rich_help_panel=its.group,
        parser=_parser(its, number, of_list="list" in str(hint)) if number and not its.is_count else None,
        autocompletion=_completer(its),
    )


def _parser(its: Option, number: type[int] | type[float], *, of_list: bool) -> Callable[[Any], Any]:
    """Reads a number while the line is parsed, so that an error can name the setting that it comes from.

    of_list: the option may be repeated, and `Option.read` takes all its numbers.
    """

    def parse(raw: Any) -> Any:
        try:
            value = number(raw)
        except ValueError:
            kind = "a whole number" if number is int else "a number"
            raise BadValue(f"must be {kind}, got {raw!r}") from None
        try:
            its.check(value, its.name)
            if not of_list:
                its.parse(value)
        except UsageError as error:
            raise BadValue(str(error).removeprefix(f"{its.name} ")) from None
        return value

    # the kind of value that a file of settings must have
    parse.__name__ = number.__name__
    return parse


def _with_range(its: Option) -> str:
    """The help of an option, with the range of a number that is limited at both ends."""
    if its.least is None or its.most is None:
        return its.help
    return f"{its.help.removesuffix('.')} ({its.least} to {its.most})."


def _words(kind: type[Options], words: str | bool) -> str | bool:
    """The default in words, with the class's numbers in it."""
    if isinstance(words, str) and "{default_" in words:
        return words.format(**{name: getattr(kind, name) for name in dir(kind) if "default_" in name})
    return words


def _completer(its: Option) -> Callable[..., list[str]] | None:
    if its.choices:
        return lambda incomplete: [each for each in its.choices if each.startswith(incomplete)]
    return getattr(completion, its.completes) if its.completes else None
