"""`kvtool policies`: list the policies, their parameters and papers."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any

import typer

from kvtool import parameters
from kvtool.cli.completion import policies as complete
from kvtool.cli.console import table, table_console
from kvtool.cli.declared import Json
from kvtool.system.texts import json_text


def policies(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="Show only this policy, and explain its parameters.",
            show_default="all",
            autocompletion=complete,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the policies, or explain one with its parameters, defaults and paper."""
    from kvtool import policies as known

    def described(name: str) -> dict[str, Any]:
        policy = known.load(name)
        params = known.params(policy)
        summary = (sys.modules[policy.__module__].__doc__ or "").split("\n")[0]
        explained = {key: text for key, text in parameters.explained(policy).items() if key in params}
        about = {"name": name, "paper": policy.paper, "params": params, "what": summary}
        return about | {"explained": explained, "required": known.required(policy)}

    listed = [described(policy) for policy in ([name] if name else known.names())]
    if as_json:
        typer.echo(json_text(listed, indent=2))
        return
    if name:
        _print_one(listed[0])
    else:
        _print_names(listed)


def _print_one(policy: dict[str, Any]) -> None:
    console = table_console()
    console.print(policy["what"])
    if policy["paper"]:
        console.print(f"paper: {policy['paper']}")
    columns = "parameter (-o)", "default", "what it does"
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

    from kvtool.config.run import POLICY

    rows = []
    for policy in listed:
        summary = re.sub(r" *\([^()]*\)\.?$", ".", policy["what"].partition(": ")[2] or policy["what"])
        name = policy["name"] + " (default)" * (policy["name"] == POLICY)
        rows.append([name, f"{summary[:1].upper()}{summary[1:]}"])
    console = table_console()
    console.print(table([Column("policy", style="bold"), "what it keeps"], rows))
    console.print("\nkvtool policies NAME shows a policy's paper and its parameters.")
