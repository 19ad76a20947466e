"""`kvtool config`: show which defaults are set, and where."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from kvtool.cli import settings
from kvtool.cli.command import default_of, refusal, source_of
from kvtool.cli.completion import models
from kvtool.cli.declared import Json, command_words
from kvtool.cli.listed import flag
from kvtool.cli.settings import Words
from kvtool.errors import KvtoolError, UsageError, suggestion
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
    typed = {"model": settings.Setting(model, "-m")} if model else {}
    current = settings.of_command(known[words], words, {"model": model}, root)
    params = settings.options_of(known[words])
    for param in params:
        if param.name in current:
            _check(param, *current[param.name])
    current |= typed
    for param in params:
        if param.name in current:
            yield _row(words, param, *current[param.name])
        else:
            yield _row(words, param, param.default, "default") | {"default": default_of(param)}


def all_rows(root: Any, wrong: settings.Wrong = settings.refuse) -> Iterator[Row]:
    """Yield a row for each setting.

    wrong: function that gets an error for each key or value that is wrong.
    """
    known = dict(settings.all_commands(root))
    try:
        for table in settings.tables(wrong):
            yield from _of_table(table, known, wrong)
    except UsageError as error:
        # the file cannot be read; the variables can still be checked
        wrong(error)
    yield from _of_variables(known, wrong)


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
            for param in options:
                _check(param, settings.checked(param, value, source), source)
        except KvtoolError as error:
            wrong(error)
        else:
            yield _row(table.words, options[0], value, source)


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
                _check(param, *setting)
            except KvtoolError as error:
                wrong(error)
            else:
                yield _row(words, param, os.environ[name], setting.source)


def _check(param: Any, value: Any, source: str) -> None:
    """Raise KvtoolError for a value that an option does not accept."""
    values = value if isinstance(value, (list, tuple)) else (value,)
    try:
        read = tuple(param.type.convert(each, param, None) for each in values)
    except typer.BadParameter as error:
        raise UsageError(refusal(error, source)) from None
    if kind := param.options:
        option = declared(kind)[param.name]
        try:
            value = option.parse(read if param.multiple else read[0], source)
            option.check(value, source)
            # the class may check more
            kind(**{param.name: value})
            if option.find:
                for each in values:
                    option.find(each)
        except KvtoolError as error:
            raise about(error, source) from None


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
