"""`kvtool policies`: list the policies, their parameters and papers."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kvtool import parameters
from kvtool.cli.completion import policies as complete
from kvtool.cli.console import table, table_console
from kvtool.cli.declared import Json, options
from kvtool.config.run import RunOptions
from kvtool.errors import UsageError
from kvtool.options import Options, option, redeclared
from kvtool.system.texts import json_text


@dataclass(frozen=True)
class _PolicyOptions(Options):
    budget: str | None = option(
        "--budget N", None, "Show the parameters for a budget of N tokens per KV head."
    )
    evict_every: int | None = redeclared(RunOptions, "evict_every")
    options: tuple[str, ...] = redeclared(RunOptions, "options")


@options
def policies(
    *,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="Show only this policy, and explain its parameters.",
            show_default="all",
            autocompletion=complete,
        ),
    ] = None,
    args: _PolicyOptions,
    as_json: Json = False,
) -> None:
    """List the policies, or explain one with its parameters, defaults and paper."""
    from kvtool import policies as known

    budget = None if args.budget is None else _cells(args.budget)
    if budget is None and (args.options or args.evict_every):
        raise UsageError("-o and --evict-every need --budget: without it they change nothing")
    if args.options and not name:
        raise UsageError(f"-o needs the name of a policy, one of: {', '.join(known.names())}")

    def described(name: str) -> dict[str, Any]:
        policy = known.load(name)
        params = known.params(policy)
        if budget is not None:
            params = known.chosen(known.fit(name, budget, args.evict_every, args.options))
        summary = (sys.modules[policy.__module__].__doc__ or "").split("\n")[0]
        explained = {key: text for key, text in parameters.explained(policy).items() if key in params}
        about = {"name": name, "paper": policy.paper, "params": params, "what": summary}
        return about | {"explained": explained, "required": known.required(policy)}

    listed = [described(policy) for policy in ([name] if name else known.names())]
    if as_json:
        typer.echo(json_text(listed, indent=2))
        return
    if name:
        _print_one(listed[0], budget)
    elif budget is None:
        _print_names(listed)
    else:
        _print_table(listed, budget)


def _cells(budget: str) -> int:
    """Return the number of tokens in a budget. Raises UsageError for shares and bytes: they need a model."""
    from kvtool.units import parse_count

    try:
        n, in_bytes = parse_count(budget)
    except UsageError:
        in_bytes = True
    if in_bytes:
        raise UsageError(
            f"--budget must be a number of tokens here, got {budget!r}; kvtool generate --explain also takes "
            "a share (10%) or bytes (64MiB), because it has a model"
        )
    return n


def _print_one(policy: dict[str, Any], budget: int | None) -> None:
    console = table_console()
    console.print(policy["what"])
    if policy["paper"]:
        console.print(f"paper: {policy['paper']}")
    columns = "parameter (-o)", f"at budget {budget}" if budget else "default", "what it does"
    no_default = dict.fromkeys(policy["required"], "required")
    rows = [
        (
            key,
            no_default.get(key, "automatic") if value is None else str(value),
            policy["explained"].get(key, ""),
        )
        for key, value in policy["params"].items()
    ]
    console.print()
    console.print(table(columns, rows) if rows else "It has no parameters.")


def _print_names(listed: list[dict[str, Any]]) -> None:
    from rich.table import Column

    rows = []
    for policy in listed:
        summary = re.sub(r" *\([^()]*\)\.?$", ".", policy["what"].partition(": ")[2] or policy["what"])
        rows.append([policy["name"], f"{summary[:1].upper()}{summary[1:]}"])
    console = table_console()
    console.print(table([Column("policy", style="bold"), "what it keeps"], rows))
    console.print("\nkvtool policies NAME shows a policy's paper and its parameters.")


def _print_table(listed: list[dict[str, Any]], budget: int) -> None:
    from rich.table import Column

    rows = []
    for policy in listed:
        params = (f"{key}={'(automatic)' if x is None else x}" for key, x in policy["params"].items())
        rows.append([policy["name"], " ".join(params), policy["paper"], policy["what"]])
    columns: list[Column | str] = [
        Column("policy", style="bold"),
        f"parameters at budget {budget}",
        Column("paper", overflow="fold"),
        "what it keeps",
    ]
    table_console().print(table(columns, rows))
