"""Typer parameters for commands whose functions take dataclasses of options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from kvtool.cli import completion
from kvtool.cli.command import BadValue, source_of
from kvtool.errors import UsageError
from kvtool.options import OUTPUT, Option, Options, declared

Json = Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel=OUTPUT)]
"""The option --json of a command that prints a single JSON value."""

JsonLines = Annotated[
    bool, typer.Option("--json", help="Print JSON: one JSON object a line.", rich_help_panel=OUTPUT)
]
"""The option --json of a command that prints several results."""

ModelName = Annotated[
    str | None,
    typer.Argument(
        metavar="[MODEL]", help="Model, as for --model.", show_default=False, autocompletion=completion.models
    ),
]
"""An argument that names the model. The user may type it instead of -m."""


def command_words(help: str, default: str) -> Any:
    """Return a Typer argument for a command's name, which may have several words."""
    return typer.Argument(
        metavar="[COMMAND]...", help=help, show_default=default, autocompletion=completion.commands
    )


def options(command: Callable[..., None]) -> Callable[..., None]:
    """Return the function that Typer calls for a command.

    Parameters whose type is a subclass of `Options` are replaced: each field that the class does not hide
    becomes an option, and the command gets an instance of the class.
    """
    hints = get_type_hints(command, include_extras=True)
    classes = {name: hint for name, hint in hints.items() if _is_options(hint)}
    params = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for each in inspect.signature(command).parameters.values():
        if each.name in classes:
            params += parameters(classes[each.name])
        else:
            params.append(each.replace(annotation=hints[each.name], kind=inspect.Parameter.KEYWORD_ONLY))

    def run(context: typer.Context, **values: Any) -> None:
        sources = {name: source_of(context, name) for name in values}
        typed = {name for name, source in sources.items() if source == "COMMANDLINE"}
        given = {name for name, source in sources.items() if source != "DEFAULT"}
        filled = {name: kind.from_values(values, typed, given) for name, kind in classes.items()}
        other = {name: value for name, value in values.items() if name in hints.keys() - classes.keys()}
        command(**other, **filled)

    run.__name__, run.__doc__, run.__module__ = command.__name__, command.__doc__, command.__module__
    run.__annotations__ = {each.name: each.annotation for each in params} | {"return": None}
    run.classes = {name: kind for kind in classes.values() for name in declared(kind)}  # type: ignore[attr-defined]
    run.__signature__ = inspect.Signature(params)  # type: ignore[attr-defined]
    return run


def parameters(kind: type[Options]) -> Iterator[inspect.Parameter]:
    """Yield a Typer parameter for each field that the class does not hide."""
    hints = get_type_hints(kind)
    for name, option in declared(kind).items():
        if name in kind.hidden:
            continue
        default = getattr(kind, name)
        hint: Any = hints[name]
        if get_origin(hint) is tuple:
            default, hint = None, (list[int] if get_args(hint)[0] is int else list[str]) | None
        annotation = Annotated[hint, _typer_option(kind, hint, option)]
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _is_options(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Options)


def _typer_option(kind: type[Options], hint: Any, option: Option) -> Any:
    number = next((each for each in (int, float) if each.__name__ in str(hint)), None)
    is_list = "list" in str(hint)
    default = option.default_text
    if isinstance(default, str) and "{default_" in default:
        default = default.format(**{name: getattr(kind, name) for name in dir(kind) if "default_" in name})
    return typer.Option(
        *option.flags,
        help=option.help,
        metavar=option.metavar,
        # click should not check files: the commands check them, and name the right fault
        readable=False,
        show_default=default,
        count=option.is_count,
        rich_help_panel=option.group,
        parser=_number_parser(option, number, is_list) if number and not option.is_count else None,
        autocompletion=_completer(option),
    )


def _number_parser(
    option: Option, number: type[int] | type[float], is_list: bool
) -> Callable[[Any], int | float]:
    """Return a function that click calls to read and check a number.

    The number is checked while click parses the command line. An error can then name the setting from which
    the number comes.

    is_list: True for a repeatable option. click calls the function once for each number. `Option.parse` takes
    all numbers at once, so the function does not call it.
    """

    def parse(raw: Any) -> int | float:
        try:
            value = option.words[raw] if raw in option.words else number(raw)
        except ValueError:
            kind = "a whole number" if number is int else "a number"
            raise BadValue(f"must be {' or '.join([kind, *option.words])}, got {raw!r}") from None
        try:
            option.check(value, option.name)
            if not is_list:
                option.parse(value)
        except UsageError as error:
            raise BadValue(str(error).removeprefix(f"{option.name} ")) from None
        return value

    # this is the name of the type for click, and `settings` uses it to look up the allowed Python types
    parse.__name__ = number.__name__
    return parse


def _completer(option: Option) -> Callable[..., list[str]] | None:
    if option.choices:
        return lambda incomplete: [each for each in option.choices if each.startswith(incomplete)]
    return getattr(completion, option.completes) if option.completes else None
