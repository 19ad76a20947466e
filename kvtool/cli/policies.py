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
from kvtool.errors import UsageError
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
        package = known.owners(name) if known.package(name) else None
        explained = {key: text for key, text in parameters.explained(policy).items() if key in params}
        about = {"name": name, "paper": policy.paper, "params": params, "what": summary, "package": package}
        return about | {"explained": explained, "required": known.required(policy)}

    built_in = known.names()
    listed = [described(policy) for policy in ([name] if name else built_in)]
    for policy in [] if name else known.installed():
        # if a policy of another package is faulty, still list all other policies
        try:
            if policy in built_in:
                hidden = f"policy {policy!r} of {known.owners(policy)} is ignored"
                raise UsageError(f"{hidden}: kvtool has a policy of that name")
            listed.append(described(policy))
        except UsageError as error:
            sys.stderr.write(f"kvtool: {error}\n")
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
    paper = f"paper: {policy['paper']}" if policy["paper"] else ""
    if about := ", ".join(filter(None, [paper, policy["package"] and f"from {policy['package']}"])):
        console.print(about)
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

    rows = []
    for policy in listed:
        summary = re.sub(r" *\([^()]*\)\.?$", ".", policy["what"].partition(": ")[2] or policy["what"])
        package = f" From {policy['package']}." if policy["package"] else ""
        rows.append([policy["name"], f"{summary[:1].upper()}{summary[1:]}{package}"])
    console = table_console()
    console.print(table([Column("policy", style="bold"), "what it keeps"], rows))
    console.print("\nkvtool policies NAME shows a policy's paper and its parameters.")
