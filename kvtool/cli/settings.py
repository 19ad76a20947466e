"""Defaults of options from the file config.toml and from variables KVTOOL_*.

What is typed beats the environment, and that beats the file. In the file a table for a model beats one for a
command, and that beats the top level. A variable for one command beats one for all.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvtool.cli.listed import COMMANDS, GROUPS, flag, words_of
from kvtool.config.generation import GenerationOptions
from kvtool.config.run import RunOptions
from kvtool.errors import UsageError, suggestion
from kvtool.options import declared

VARIABLE = "KVTOOL_"
NOT_OPTIONS = ("KVTOOL_CACHE", "KVTOOL_CONFIG", "KVTOOL_WHEELS")
"""Variables of ours that stand for no option."""

Table = tuple[dict[str, Any], str, bool]
"""Keys and values, how messages name the table, and whether only options of one command may be in it."""

OWN: dict[tuple[str, ...], tuple[str, ...]] = {
    # they say what to show
    ("policies",): ("budget", "evict_every", "options", "as_json"),
    # a chat's drawing is no task's
    ("eval",): ("temp", "seed"),
}
"""Options that only a command's own table and variables are about."""

_MODELS = "models"

_KINDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "int": ("a whole number", (int,)),
    "flo": ("a number", (int, float)),
    "boo": ("true or false", (bool,)),
}
"""How the names begin that click has for types: newer versions shorten them."""


class Setting(NamedTuple):
    """A value that was not typed.

    Attributes
    ----------
    value
        As the command's parser takes it.
    source
        Where it is set: a variable, or the file with its table and key.
    """

    value: Any
    source: str


def of_run(command: Any, context: Any, args: list[str]) -> dict[str, Setting]:
    """What holds for a command that was called with these arguments, by parameter. Raises UsageError."""
    typed, _, _ = command.make_parser(context).parse_args(args=args)
    return of_command(command, words_of(context), typed, context.find_root().command)


def of_command(
    command: Any, words: tuple[str, ...], typed: Mapping[str, Any], root: Any
) -> dict[str, Setting]:
    """The same.

    words: the command's, ("models", "show") for example. typed: parameters with their values. root: the
    command of all commands.
    """
    data, path = read()
    params = {param.name: param for param in options_of(command)}
    shared = {param.name: param for param in options_of(command, but_own=words)}
    # where all options are a command's own, the top level is not about it
    layers = [
        _from_table(*each, params if each[2] else shared, root)
        for of, each in tables(data, path)
        if of == words[: len(of)] and (of or shared or not params)
    ]
    for of, each in tables(data, path):
        if of[:1] == (_MODELS,) and of[2:] == words:
            check_takes_model(command, words, each)
    variables = [dict(_from_variables(params if of else shared, of)) for of in ((), words)]
    if isinstance(data.get(_MODELS), dict) and "model" in params:
        chosen = [layer["model"].value for layer in [*layers, *variables] if "model" in layer]
        model = typed.get("model") or typed.get("model_name") or (chosen[-1] if chosen else None)
        of_model = _tables_of_model(data, path, words, model)
        layers += [_from_table(*each, params if each[2] else shared, root) for each in of_model]
    found: dict[str, Setting] = {}
    for layer in [*layers, *variables]:
        # parameters belong to the policy that stands beside them
        if "policy" in layer:
            found.pop("options", None)
        found |= layer
    if typed.get("policy") is not None:
        found.pop("options", None)
    return found


def read() -> tuple[dict[str, Any], Path]:
    """The file's content, empty without a file, and its path. Raises UsageError."""
    path = config_file()
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        if os.environ.get("KVTOOL_CONFIG"):
            raise UsageError(f"$KVTOOL_CONFIG names {path}, which does not exist") from None
        return {}, path
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 (byte {error.start})") from None

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(text), path
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is not TOML: {error}") from None


def config_file() -> Path:
    """Where the file is, or would be: $KVTOOL_CONFIG, or in the platform's folder for such files."""
    if chosen := os.environ.get("KVTOOL_CONFIG"):
        return Path(chosen).expanduser()

    from platformdirs import user_config_path

    return user_config_path("kvtool", appauthor=False) / "config.toml"


def options_of(command: Any, but_own: tuple[str, ...] = ()) -> list[Any]:
    """A command's options that can have a default. but_own: its words, to leave out its `OWN` ones."""
    options = [each for each in command.params if each.param_type_name == "option" and each.expose_value]
    return [each for each in options if each.name not in OWN.get(but_own, ())]


def variable(param: Any, words: Iterable[str] = ()) -> str:
    """The variable for an option, of one command if its words are given."""
    return VARIABLE + "_".join([*words, flag(param).lstrip("-")]).replace("-", "_").upper()


def checked(param: Any, value: Any, source: str) -> Setting:
    """A value of the file as the parser takes it. Raises UsageError for one of another type."""
    if param.multiple:
        values = value if isinstance(value, list) else [value]
        return Setting(tuple(_scalar("text", each, source) for each in values), source)
    if getattr(param, "count", False):
        return Setting(int(value) if isinstance(value, bool) else _scalar("int", value, source), source)
    return Setting(_scalar(param.type.name.split()[0], value, source), source)


def check_takes_model(command: Any, words: tuple[str, ...], table: Table) -> None:
    """Raises UsageError for a model's table of a command that takes no model: it would never apply."""
    values, where, _ = table
    if values and all(param.name != "model" for param in command.params):
        raise UsageError(f"{where} never applies: `kvtool {' '.join(words)}` has no -m")


def tables(data: Mapping[str, Any], path: Path) -> Iterator[tuple[tuple[str, ...], Table]]:
    """Each table with the words of its command, () for the top level. Raises UsageError for no command's.

    A model's tables have the words "models" and its name, and then those of a command.
    """
    yield (), (_values(data), f"{path}:", False)
    for name, top in data.items():
        if not isinstance(top, dict):
            continue
        if name not in COMMANDS:
            raise UsageError(f"{path}: [{name}] is not a command.{suggestion(name, COMMANDS)}")
        for of, table, title in _nested((name,), top, f"{path}: [{name}"):
            if len(of) > 1 and name not in GROUPS:
                raise UsageError(f"{title} is not a command; `kvtool {name}` has no subcommands")
            is_shared = len(of) == 1 and name in GROUPS or len(of) == 2 and name == _MODELS
            yield of, (_values(table), title, not is_shared)


def _nested(
    of: tuple[str, ...], table: Mapping[str, Any], title: str
) -> Iterator[tuple[tuple[str, ...], Mapping[str, Any], str]]:
    """A table and all in it, each with the words that lead to it and with its title."""
    yield of, table, f"{title}]"
    for name, inner in table.items():
        if isinstance(inner, dict):
            yield from _nested((*of, name), inner, f"{title}.{_quoted(name)}")


def _tables_of_model(
    data: Mapping[str, Any], path: Path, words: tuple[str, ...], model: str | None
) -> Iterator[Table]:
    """The tables of a model: those of its file's name without the ending, and then those of its name."""
    from kvtool.models.catalogue import registry

    known = registry()
    model = model or next(iter(known))
    stem = known[model].path.stem if model in known else Path(model).stem
    for name in dict.fromkeys((stem, model)):
        for of, table in tables(data, path):
            if of[:2] == (_MODELS, name) and of[2:] in ((), words):
                if "model" in table[0] and not of[2:]:
                    raise UsageError(f"{table[1]} model: a model's table cannot name another model")
                yield table


def _from_table(
    table: Mapping[str, Any], where: str, is_own: bool, params: Mapping[str, Any], root: Any
) -> dict[str, Setting]:
    """The settings of a table. is_own: it is the command's alone, so each key must be an option of it."""
    by_name = {name: param for param in params.values() for name in names_of(param)}
    found = {}
    for name, value in table.items():
        param = by_name.get(name.replace("_", "-"))
        if param:
            found[param.name] = checked(param, value, f"{where} {name}")
        elif is_own or not _is_known(name.replace("_", "-"), root):
            known = by_name if is_own else all_names(root)
            raise UsageError(f"{where} {name} is not an option.{suggestion(name, sorted(known))}")
    return found


def _from_variables(params: Mapping[str, Any], words: tuple[str, ...]) -> Iterator[tuple[str, Setting]]:
    for name, param in params.items():
        each = variable(param, words)
        # empty counts as not set, as everywhere
        if text := os.environ.get(each):
            yield name, Setting(tuple(text.split()) if param.multiple else text, f"${each}")


def names_of(param: Any) -> list[str]:
    """What the file may call an option: its names without the dashes."""
    return [name.lstrip("-") for name in param.opts]


def _is_known(name: str, root: Any) -> bool:
    """Whether any command has an option of that name."""
    # most are here; importing all commands takes as long as loading a small model
    flags = (
        flag
        for kind in (RunOptions, GenerationOptions)
        for its in declared(kind).values()
        for flag in its.flags
    )
    return name in {flag.lstrip("-") for flag in flags} or name in all_names(root)


def all_names(root: Any) -> set[str]:
    """What the file may call the options of any command. Slow: it imports all commands."""
    return {
        name for _, command in all_commands(root) for each in options_of(command) for name in names_of(each)
    }


def all_commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command of a group that runs something, with its words."""
    for name in group.commands:
        command = group.commands[name]
        if hasattr(command, "commands"):
            yield from all_commands(command, (*words, name))
        else:
            yield (*words, name), command


def _values(table: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in table.items() if not isinstance(value, dict)}


def _scalar(kind: str, value: Any, source: str) -> Any:
    words, right = _KINDS.get(kind[:3], ("a text", (str, int, float)))
    # Python's true is a whole number, too
    if not isinstance(value, right) or isinstance(value, bool) != (bool in right):
        shown = str(value).lower() if isinstance(value, bool) else repr(value)
        raise UsageError(f"{source} must be {words}, got {shown}")
    if kind[:3] in _KINDS:
        return value
    # 512 and "512" are the same budget
    return os.path.expanduser(str(value)) if kind == "path" else str(value)


def _quoted(name: str) -> str:
    return name if name.replace("-", "").replace("_", "").isalnum() else f'"{name}"'
