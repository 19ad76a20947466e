"""`kvtool config`: show which defaults are set, and where."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from kvtool.cli import settings
from kvtool.cli.command import default_of, refusal, source_of
from kvtool.cli.completion import models
from kvtool.cli.console import say
from kvtool.cli.declared import Json, command_words
from kvtool.cli.listed import flag
from kvtool.cli.settings import Setting, Words
from kvtool.errors import KvtoolError, ModelError, UsageError, suggestion
from kvtool.options import about, declared
from kvtool.system.texts import json_text

Row = dict[str, Any]


def config(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        command_words(
            "Show every option of this command with its current value.", "all settings, of all commands"
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "-m",
            "--model",
            metavar="MODEL",
            help="With a command: show its values for this model.",
            autocompletion=models,
        ),
    ] = None,
    path: Annotated[
        bool, typer.Option("--path", help="Print the path of the file, which need not exist yet.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show which defaults are set in the config file and in the environment.

    Every option can have a default in the file, for example budget = "10%". Write it at the top level for all
    commands, into a table [chat] for one command, or into a table [models."NAME"] for one model. A variable
    overrides the file: KVTOOL_BUDGET for all commands, KVTOOL_CHAT_BUDGET for one command. An option that you
    type overrides both.
    """
    if path:
        typer.echo(settings.config_file())
        return
    # use only a typed -m: a default of -m is meant for commands that run a model
    model = model if source_of(context, "model") == "COMMANDLINE" else None
    if model and not words:
        raise UsageError("-m needs a command: kvtool config chat -m MODEL")
    file = settings.read()[1]
    root = context.find_root().command
    rows = list(_of_command(tuple(words), model, root) if words else all_rows(root))
    report_unknown_models(root)
    if as_json:
        typer.echo(json_text({"file": str(file), "exists": file.exists(), "settings": rows}, indent=2))
        return
    typer.echo(f"file: {file}{'' if file.exists() else ' (does not exist)'}\n")
    if rows:
        _print(rows)
    else:
        typer.echo("nothing is set: every option has the default that -h shows")


def _of_command(words: Words, model: str | None, root: Any) -> Iterator[Row]:
    """Yield a row for each option of a command, with its current value."""
    known = dict(settings.all_commands(root))
    if words not in known:
        names = [" ".join(each) for each in known]
        raise UsageError(f"there is no command {' '.join(words)!r}.{suggestion(' '.join(words), names)}")
    current = settings.of_command(known[words], words, {"model": model}, root)
    params = settings.options_of(known[words])
    values = _values(params, current)
    _check_policy(params, current)
    if model:
        current["model"], values["model"] = Setting(model, "-m"), model
    for param in params:
        if param.name in current:
            yield _row(words, param, values[param.name], current[param.name].source)
        else:
            yield _row(words, param, param.default, "default") | {"default": default_of(param)}


def all_rows(root: Any, wrong: settings.Wrong = settings.refuse) -> Iterator[Row]:
    """Yield a row for each setting.

    wrong: function that gets an error for each key or value that is wrong.
    """
    known = dict(settings.all_commands(root))
    models: dict[str | None, None] = {None: None}
    try:
        for table in settings.tables(wrong):
            models[table.model] = None
            yield from _of_table(table, known, wrong)
    except UsageError as error:
        # the file cannot be read; the variables can still be checked
        wrong(error)
    yield from _of_variables(known, wrong)
    # the same settings can be wrong for several commands and models
    found: dict[str, KvtoolError] = {}
    for words, command in known.items():
        for model in models if any(param.name == "policy" for param in command.params) else ():
            try:
                current = settings.of_command(command, words, {"model": model}, root)
                _values(command.params, current)
            except KvtoolError:
                # reported above: it is a mistake in a table or in a single value
                continue
            try:
                _check_policy(command.params, current)
            except KvtoolError as error:
                found[str(error)] = error
    for mistake in found.values():
        wrong(mistake)


def report_unknown_models(root: Any) -> None:
    """Write a line to stderr for each model that has tables in the file, but is not known on this machine.

    This is not an error, because the file of a model can have any name. Raises UsageError if the config file
    cannot be read.
    """
    from kvtool.models import resolve, stored
    from kvtool.models.catalogue import registry

    commands = {words for words, _ in settings.all_commands(root)}
    files = [entry.file for entry in registry().values()]
    files += [path.name for other in stored.downloads() for path in other.files]
    known = [*registry(), *(file.removesuffix(".gguf") for file in files)]
    for table in settings.tables(lambda error: None):
        name = table.model
        if not name or len(table.words) > 2 or table.words in commands or name in known:
            continue
        try:
            resolve.check_name(table.words[1])
        except ModelError:
            hint = suggestion(name, known)
            say(f"kvtool: {table.title} is for no model known here, only for a file {name}.gguf.{hint}")


def _of_table(table: settings.Table, known: dict[Words, Any], wrong: settings.Wrong) -> Iterator[Row]:
    """Yield the rows for a table of the file. wrong: see `all_rows`."""
    is_model = table.words[:1] == ("models",) and len(table.words) > 1 and table.words not in known
    # the first words of the commands to which the table applies
    start = table.words[2:] if is_model else table.words
    reached = [words for words in known if words[: len(start)] == start]
    params = [
        param for words in reached for param in settings.options_of(known[words], () if start else words)
    ]
    try:
        if is_model and start in known:
            settings.check_takes_model(known[start], start, table)
        if not reached or (table.values and table.is_own and start not in known):
            raise UsageError(f"{table.title} is not a command of kvtool")
        settings.check_set_once(table, params)
    except UsageError as error:
        wrong(error)
        return
    for key, value in table.values.items():
        source, options = f"{table.title} {key}", settings.named(key, params)
        try:
            if not options:
                raise settings.unknown(table, key, params)
            values = [_check(param, settings.from_file(param, value, source)) for param in options]
        except KvtoolError as error:
            wrong(error)
        else:
            yield _row(table.words, options[0], values[0], source)


def _of_variables(known: dict[Words, Any], wrong: settings.Wrong) -> Iterator[Row]:
    """Yield a row for each environment variable that sets an option. wrong: see `all_rows`."""
    params: dict[str, tuple[Words, Any]] = {}
    for words, command in known.items():
        for param in settings.options_of(command):
            for name in settings.variables(param):
                params.setdefault(name, ((), param))
            params |= dict.fromkeys(settings.variables(param, words), (words, param))
    for name in sorted(os.environ):
        if name in params and os.environ[name]:
            words, param = params[name]
            setting = settings.from_variable(param, name)
            try:
                value = _check(param, setting)
            except KvtoolError as error:
                wrong(error)
            else:
                yield _row(words, param, value, setting.source)


def converted(param: Any, setting: Setting) -> Any:
    """Return a setting's value in the type of the option. Raises UsageError."""
    texts = setting.value if param.multiple else (setting.value,)
    try:
        values = tuple(param.type.convert(text, param, None) for text in texts)
    except typer.BadParameter as error:
        raise UsageError(refusal(error, setting.source)) from None
    return values if param.multiple else values[0]


def _values(params: list[Any], current: Mapping[str, Setting]) -> dict[str, Any]:
    """Return the values of settings for the output, by parameter name. Raises KvtoolError if one is wrong."""
    return {param.name: _check(param, current[param.name]) for param in params if param.name in current}


def _check(param: Any, setting: Setting) -> Any:
    """Return a setting's value for the output. Raises KvtoolError if the option does not accept it."""
    source, result = setting.source, converted(param, setting)
    if kind := param.options:
        option = declared(kind)[param.name]
        try:
            value = option.parse(result, source)
            option.check(value, source)
            # the class may check more
            kind(**{param.name: value})
            if option.find:
                for each in result if param.multiple else (result,):
                    option.find(each)
        except KvtoolError as error:
            raise about(error, source) from None
        if setting.value in option.words:
            # show the word, not the number for which it stands
            return setting.value
    return result


def _check_policy(params: list[Any], current: Mapping[str, Setting]) -> None:
    """Raise KvtoolError if a policy does not work with the parameters or the budget that are set with it."""
    chosen = [each for each in params if each.name in ("policy", "options", "budget", "evict_every")]
    chosen = [param for param in chosen if param.name in current]
    if not chosen or all(param.name != "policy" for param in params):
        return
    from kvtool import policies
    from kvtool.config import sizes
    from kvtool.config.run import RunOptions

    try:
        run = RunOptions.from_values({param.name: converted(param, current[param.name]) for param in chosen})
        spec = policies.spec(run.policy, run.evict_every, run.options)
        if run.budget and spec.kind.evicts:
            # a share or a size in bytes is only known with the model; assume that it is large enough
            budget = sizes.parse(run.budget, sys.maxsize)
            spec.fit(sys.maxsize if budget.in_bytes else budget.n)
    except KvtoolError as error:
        sources = (f"{flag(param)} is set by {current[param.name].source}" for param in chosen)
        error.args = (f"{error} ({'; '.join(sources)})",)
        raise


def _row(words: Words, param: Any, value: Any, source: str) -> Row:
    return {"command": " ".join(words) or "all", "option": flag(param), "value": value, "source": source}


def _print(rows: list[Row]) -> None:
    from kvtool.cli.console import print_table

    table = []
    for row in rows:
        value = row.get("default") or row["value"]
        values = value if isinstance(value, (list, tuple)) else () if value is None else (value,)
        table.append([row["command"], row["option"], " ".join(map(str, values)), row["source"]])
    print_table(["command", "option", "value", "set by"], table, least=3)
