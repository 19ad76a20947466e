"""Defaults of options from the file config.toml and from environment variables KVTOOL_*.

Typed options override variables, and variables override the file. In the file, a model's table overrides a
command's table, and a command's table overrides the top level. A variable for one command overrides a
variable for all commands.

This file finds the values and gives them to click. click can also read defaults, but it lacks some features:
click has no tables for models and no keys for all commands, it names variables after parameters and not after
flags, and its errors do not say where a value comes from.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvtool.cli.listed import COMMANDS, GROUPS, flag
from kvtool.config.generation import GenerationOptions
from kvtool.config.run import RunOptions
from kvtool.errors import KvtoolError, UsageError, suggestion
from kvtool.options import declared
from kvtool.system.paths import expanded
from kvtool.system.texts import exists

VARIABLE = "KVTOOL_"
NOT_OPTIONS = ("KVTOOL_CACHE", "KVTOOL_CONFIG", "KVTOOL_WHEELS")
"""Environment variables of kvtool that do not set an option."""

Wrong = Callable[[KvtoolError], None]
"""Function that gets a mistake in the settings. It raises the error or collects it."""

Words = tuple[str, ...]
"""The words that name a command, such as ("models", "show")."""

OPTIONS_OF_ONE: dict[Words, tuple[str, ...]] = {
    # settings that are meant for chats would change the results of tasks
    ("eval",): ("temp", "seed"),
}
"""Parameters that only the command's own table and its own variables can set, by command.

Settings for all commands do not change them.
"""

_IGNORED: dict[Words, tuple[str, ...]] = {("policies",): ("budget", "evict-every", "option", "o")}
"""Keys of options that a command no longer has, by command. Files may still have them."""

_MODELS = "models"
_MAX_WORDS = 4
"""Maximum number of parts of a table's name: "models", the model, and at most two words of a command."""


class Setting(NamedTuple):
    """A value of an option that comes from a variable or from the file.

    value: the text that the command's parser gets, or a tuple of texts for a repeatable option.
    source: where the value was set, for messages: a variable, or the file with table and key.
    """

    value: Any
    source: str


class Table(NamedTuple):
    """A table of the file.

    words: the words in the table's name. They are the words of a command, or () for the top level. The words
    of a model's table begin with "models" and the name of the model.
    title: the file and the table's name. Messages use this text for the table.
    is_own: True if the table belongs to one command and may contain only options of this command.
    """

    words: Words
    values: dict[str, Any]
    title: str
    is_own: bool

    @property
    def model(self) -> str | None:
        """Name of the model whose table this is, without .gguf. None for tables of commands.

        A table of a subcommand of `models` also has one, which is the subcommand.
        """
        is_in_models = self.words[:1] == (_MODELS,) and len(self.words) > 1
        return self.words[1].removesuffix(".gguf") if is_in_models else None


def of_command(command: Any, words: Words, typed: Mapping[str, Any], root: Any) -> dict[str, Setting]:
    """Return the settings that apply to a command, by parameter name. Raises UsageError.

    typed: the parameters that the user typed, with their values. root: the command `kvtool`, which contains
    all other commands.
    """
    options, shared = options_of(command), options_of(command, without=words)
    all_tables = list(tables())
    for table in all_tables:
        if table.model and table.words[2:] == words:
            check_takes_model(command, words, table)
    chosen = [table for table in all_tables if table.words == words[: len(table.words)]]
    layers = [_from_table(table, options if table.is_own else shared, root) for table in chosen]
    variables = [_from_variables(shared), _from_variables(options, words)]
    if any(table.model for table in all_tables) and any(p.name == "model" for p in options):
        names = [layer["model"].value for layer in [*layers, *variables] if "model" in layer]
        model = typed.get("model") or typed.get("model_name") or (names[-1] if names else None)
        of_model = _tables_of_model(all_tables, words, model)
        layers += [_from_table(table, options if table.is_own else shared, root) for table in of_model]
    result: dict[str, Setting] = {}
    for layer in [*layers, *variables]:
        # if a table or variable sets the policy, drop earlier values of -o: they may be for another policy
        if "policy" in layer:
            result.pop("options", None)
        result |= layer
    if typed.get("policy") is not None:
        result.pop("options", None)
    # the argument that names a model replaces the model of a setting
    if typed.get("model_name") is not None:
        result.pop("model", None)
    return result


def read() -> tuple[dict[str, Any], Path]:
    """Return the file's content and its path. The content is {} if there is no file. Raises UsageError."""
    path = config_file()
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (FileNotFoundError, NotADirectoryError):
        if os.environ.get("KVTOOL_CONFIG"):
            raise UsageError(f"$KVTOOL_CONFIG names {path}, which does not exist") from None
        return {}, path
    except OSError as error:
        instead = "name another file in $KVTOOL_CONFIG"
        raise UsageError(f"cannot read {path}: {error.strerror}; {instead}") from None
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
    except (ValueError, RecursionError):
        raise UsageError(f"{path} has a number of too many digits, or too many nested brackets") from None


def default_model() -> str | None:
    """Return the model that a variable or the file sets for all commands, or None. Raises UsageError."""
    data, names = read()[0], [name.lstrip("-") for name in declared(RunOptions)["model"].flags]
    values = [os.environ.get(VARIABLE + name.upper()) for name in names] + [data.get(name) for name in names]
    return next((str(value) for value in values if value), None)


def config_file() -> Path:
    """Return the path of the file, which may not exist: $KVTOOL_CONFIG or the platform's config.toml."""
    if chosen := os.environ.get("KVTOOL_CONFIG"):
        return expanded(chosen)

    from platformdirs import user_config_path

    return user_config_path("kvtool", appauthor=False) / "config.toml"


def options_of(command: Any, without: Words = ()) -> list[Any]:
    """Return the options of a command that settings can change, and an argument that is in place of -m.

    without: words of a command. The options that `OPTIONS_OF_ONE` lists for it are left out.
    """
    options = [
        param
        for param in command.params
        if (param.param_type_name == "option" or param.name == "model") and param.expose_value
    ]
    return [param for param in options if param.name not in OPTIONS_OF_ONE.get(without, ())]


def names(param: Any) -> list[str]:
    """Return all names of an option, without dashes. The first is the one that documents and messages use."""
    return list(dict.fromkeys(name.lstrip("-") for name in (flag(param), *param.opts, *param.aliases)))


def variables(param: Any, words: Iterable[str] = ()) -> list[str]:
    """Return the variables that set an option for the command `words`, or for all commands.

    They are in the order of the option's `names`.
    """
    return [VARIABLE + "_".join([*words, name]).replace("-", "_").upper() for name in names(param)]


def from_file(param: Any, value: Any, source: str) -> Setting:
    """Return the setting that a value of the file is. Raises UsageError for a type that no option accepts.

    The value becomes the text that a user would type, so the option itself reads and checks it.
    """
    is_list = param.multiple and isinstance(value, list)
    texts = tuple(_typed(param, each, source) for each in (value if is_list else [value]))
    return Setting(texts if param.multiple else texts[0], source)


def check_takes_model(command: Any, words: Words, table: Table) -> None:
    """Raise UsageError if a model's table is for a command that has no -m, because it would never apply."""
    if table.values and all(param.name != "model" for param in command.params):
        raise UsageError(f"{table.title} never applies: `kvtool {' '.join(words)}` has no -m")


def refuse(error: KvtoolError) -> None:
    """Raise the error. This is the default of functions that get a function for mistakes."""
    raise error


def tables(wrong: Wrong = refuse) -> Iterator[Table]:
    """Yield the tables of the file. Raises UsageError if the file cannot be read.

    wrong: function that gets an error for each table that does not belong to a command.
    """
    data, path = read()
    yield from _tables((), data, path, wrong)


def _tables(words: Words, table: Mapping[str, Any], path: Path, wrong: Wrong) -> Iterator[Table]:
    """Yield a table and all tables inside this table. wrong: see `tables`."""
    title = f"{path}: {_header(words)}" if words else f"{path}:"
    is_in_group = not words or words[0] in GROUPS
    mistake = None
    if words and words[0] not in COMMANDS:
        mistake = f"{title} is not a command.{suggestion(words[0], COMMANDS)}"
    elif len(words) > _MAX_WORDS:
        mistake = f"{path}: a table's name has at most {_MAX_WORDS} parts, such as [models.NAME.chat]"
    elif words[:1] == (_MODELS,) and len(words) == 3 and words[2] not in COMMANDS:
        hint = suggestion(words[2], COMMANDS)
        mistake = f"{title} is not a command{hint and '.'}{hint or _quote_advice(words, table)}"
    elif len(words) > 1 and not is_in_group:
        mistake = f"{title} is not a command; `kvtool {words[0]}` has no subcommands"
    if mistake:
        wrong(UsageError(mistake))
        return
    # three kinds of tables apply to several commands: the top level, a group's table and a model's table
    is_shared = is_in_group and (len(words) < 2 or len(words) == 2 and words[0] == _MODELS)
    inner = {name: value for name, value in table.items() if isinstance(value, dict)}
    ignored = _IGNORED.get(words, ())
    values = {
        name: value
        for name, value in table.items()
        if name not in inner and name.replace("_", "-") not in ignored
    }
    yield Table(words, values, title, not is_shared)
    for name, value in inner.items():
        yield from _tables((*words, name), value, path, wrong)


def _tables_of_model(all_tables: list[Table], words: Words, model: str | None) -> Iterator[Table]:
    """Yield the tables of a model.

    Tables with the name of the model's file come first. Tables with the model's name follow. Both names may
    have the ending .gguf. model: the value of -m that the user typed or set, or None for the default model.
    """
    from kvtool.models.catalogue import registry

    known = registry()
    model = model or next(iter(known))
    file = known[model].file if model in known else os.path.basename(model)
    for name in dict.fromkeys((file.removesuffix(".gguf"), model.removesuffix(".gguf"))):
        for table in all_tables:
            if table.model == name and table.words[2:] in ((), words):
                if "model" in table.values and len(table.words) == 2:
                    raise UsageError(f"{table.title} model: a model's table cannot name another model")
                yield table


def _from_table(table: Table, params: list[Any], root: Any) -> dict[str, Setting]:
    """Return the settings that a table has for the given options, by parameter name.

    Raises UsageError if a key is not an option, or if two keys set the same option. In a command's own table,
    a key has to be an option of this command.
    """
    check_set_once(table, params)
    result = {}
    for key, value in table.values.items():
        options = named(key, params)
        source = f"{table.title} {key}"
        for param in options:
            result[param.name] = from_file(param, value, source)
        if not options and (table.is_own or not _is_known(key, root)):
            raise unknown(table, key, params if table.is_own else all_options(root))
    return result


def _from_variables(params: list[Any], words: Words = ()) -> dict[str, Setting]:
    """Return the settings that variables have for the given options. Empty variables are ignored."""
    result = {}
    for param in params:
        if name := next(filter(os.environ.get, variables(param, words)), None):
            result[param.name] = from_variable(param, name)
    return result


def from_variable(param: Any, name: str) -> Setting:
    """Return the setting that a variable has for an option."""
    text = os.environ[name]
    # the name of a file may have blanks
    values = (text,) if exists(text) else tuple(text.split())
    return Setting(values if param.multiple else text, f"${name}")


def unknown_variables(command: Any, words: Words, root: Any) -> Iterator[str]:
    """Yield a line for each variable KVTOOL_* that does not belong to an option.

    command, words: the command that runs. If all variables belong to options of this command, the
    other commands are not imported.
    """
    own = options_of(command)
    known = {
        *NOT_OPTIONS,
        *(name for param in own for each in ((), words) for name in variables(param, each)),
    }
    ours = {name for name, text in os.environ.items() if name.startswith(VARIABLE) and text}
    if not ours - known:
        return
    right = {
        name: first
        for their_words, each in all_commands(root)
        for param in options_of(each)
        for start in ((), their_words)
        for first, *others in [variables(param, start)]
        for name in (first, *others)
    }
    # compare names without the prefix, because all variables have the same prefix
    meant = {name.removeprefix(VARIABLE): first for name, first in right.items()}
    for name in sorted(ours - known):
        if name not in right:
            hint = suggestion(name.removeprefix(VARIABLE), meant, meant)
            yield f"${name} does not belong to an option.{hint}"


def named(key: str, params: Iterable[Any]) -> list[Any]:
    """Return the options that a key of the file sets. key: an option's name without the leading dashes."""
    return [param for param in params if key.replace("_", "-") in names(param)]


def check_set_once(table: Table, params: Iterable[Any]) -> None:
    """Raise UsageError if two keys of a table are names of the same option."""
    for param in params:
        keys = [key for key in table.values if named(key, [param])]
        if len(keys) > 1:
            raise UsageError(f"{table.title} {keys[0]} and {keys[1]} set the same option; remove one of them")


def unknown(table: Table, key: str, params: Iterable[Any]) -> UsageError:
    """Return the error for a key that is not an option. params: the options that the table may contain."""
    meant = {name: names(param)[0] for param in params for name in names(param)}
    return UsageError(f"{table.title} {key} is not an option.{suggestion(key, sorted(meant), meant)}")


def _is_known(key: str, root: Any) -> bool:
    # search the shared options first: importing all commands takes as long as loading a small model
    shared = [option for kind in (RunOptions, GenerationOptions) for option in declared(kind).values()]
    return any(option.is_called(key) for option in shared) or bool(named(key, all_options(root)))


def all_options(root: Any) -> list[Any]:
    """Import all commands, which is slow, and return their options."""
    return [param for _, command in all_commands(root) for param in options_of(command)]


def all_commands(group: Any, words: Words = ()) -> Iterator[tuple[Words, Any]]:
    """Yield (words, command) for each command in a group and its subgroups. words: the words of the group."""
    for name in group.commands:
        command = group.commands[name]
        if hasattr(command, "commands"):
            yield from all_commands(command, (*words, name))
        else:
            yield (*words, name), command


def _typed(param: Any, value: Any, source: str) -> str:
    """Return a value of the file as the user would type it. Raises UsageError."""
    is_path, is_switch = param.type.name == "path", isinstance(value, bool)
    has_choices = param.options and declared(param.options)[param.name].choices
    if is_switch and (is_path or param.type.name in ("str", "text") and not has_choices):
        raise UsageError(f"{source} must be a text, got {str(value).lower()}")
    if not isinstance(value, (str, int, float)):
        raise UsageError(f"{source} must be one value, got {value!r}")
    text = str(value).lower() if is_switch else str(value)
    if is_switch and getattr(param, "count", False):
        text = str(int(value))
    return text


def _header(words: Words) -> str:
    """Return the line with which a table of the file begins."""
    names = (name if name.replace("-", "").replace("_", "").isalnum() else f'"{name}"' for name in words)
    return f"[{'.'.join(names)}]"


def _quote_advice(words: Words, table: Mapping[str, Any]) -> str:
    """Return the advice to quote a model's name. Without quotes, TOML reads a name with dots as many tables.

    words, table: the first table that is not a command. The rest of the name is from the tables inside it.
    """
    while inner := next(((name, value) for name, value in table.items() if isinstance(value, dict)), None):
        words, table = (*words, inner[0]), inner[1]
    command = words[-1:] if words[-1] in COMMANDS else ()
    name = ".".join(words[1 : len(words) - len(command)])
    return f"; if this is a model's name, quote it: {_header((_MODELS, name, *command))}"
