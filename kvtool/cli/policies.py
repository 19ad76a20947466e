"""`kvtool policies`: the policies, their parameters and papers."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kvtool import parameters
from kvtool.cli.completion import policies as complete
from kvtool.cli.console import table_console
from kvtool.cli.declared import Json, options
from kvtool.errors import UsageError
from kvtool.options.field import Options, again
from kvtool.options.run import Run
from kvtool.system.texts import json_text


@dataclass(frozen=True)
class _Fitted(Options):
    evict_every: int | None = again(Run, "evict_every")
    options: tuple[str, ...] = again(Run, "options")


@options
def policies(
    *,
    name: Annotated[
        str | None,
        typer.Argument(
            help="Show this policy alone, and explain its parameters.",
            show_default="all",
            autocompletion=complete,
        ),
    ] = None,
    budget: Annotated[
        int | None,
        typer.Option(
            "--budget", metavar="N", help="Show the parameters for a budget of N tokens per KV head."
        ),
    ] = None,
    given: _Fitted,
    as_json: Json = False,
) -> None:
    """List the policies with their parameters, defaults and papers."""
    from kvtool import policies as known

    if budget is None and (given.options or given.evict_every):
        raise UsageError("-o and --evict-every need a --budget; without one they change nothing")
    if given.options and not name:
        raise UsageError(f"-o needs the name of a policy, one of: {', '.join(known.names())}")

    def described(name: str) -> dict[str, Any]:
        policy = known.load(name)
        params = known.params(policy)
        if budget is not None:
            params = known.chosen(known.fit(name, budget, given.evict_every, given.options))
        what = (sys.modules[policy.__module__].__doc__ or "").split("\n")[0]
        package = known.owners(name) if known.package(name) else None
        explained = {key: text for key, text in parameters.explained(policy).items() if key in params}
        return {
            **{"name": name, "paper": policy.paper, "params": params, "what": what, "package": package},
            "explained": explained,
        }

    own = known.names()
    listed = [described(each) for each in ([name] if name else own)]
    for each in [] if name else known.installed():
        # whatever is wrong with another package's policy, the others are shown
        try:
            if each in own:
                hidden = f"policy {each!r} of {known.owners(each)} is ignored"
                raise UsageError(f"{hidden}: kvtool has a policy of that name")
            listed.append(described(each))
        except UsageError as error:
            sys.stderr.write(f"kvtool: {error}\n")
    if as_json:
        typer.echo(json_text(listed, indent=2))
        return
    (_print_one if name else _print)(listed, budget)


def _print_one(listed: list[dict[str, Any]], budget: int | None) -> None:
    """A policy with a line for every parameter."""
    from rich.table import Table

    (policy,) = listed
    console = table_console()
    console.print(policy["what"])
    paper = f"paper: {policy['paper']}" if policy["paper"] else ""
    if about := ", ".join(filter(None, [paper, policy["package"] and f"from {policy['package']}"])):
        console.print(about)
    table = Table(box=None, pad_edge=False)
    for column in ("parameter (-o)", f"at budget {budget}" if budget else "default", "what it does"):
        table.add_column(column)
    for key, value in policy["params"].items():
        table.add_row(key, "by budget" if value is None else str(value), policy["explained"].get(key, ""))
    console.print()
    console.print(table if policy["params"] else "It has no parameters.")


def _print(listed: list[dict[str, Any]], budget: int | None) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("policy", style="bold")
    table.add_column(f"parameters at budget {budget}" if budget else "parameters (-o name=value)")
    table.add_column("paper", overflow="fold")
    table.add_column("what it keeps")
    if has_package := any(policy["package"] for policy in listed):
        table.add_column("package")
    for policy in listed:
        params = " ".join(
            f"{key}={'(by budget)' if value is None else value}" for key, value in policy["params"].items()
        )
        package = [policy["package"] or ""] if has_package else []
        table.add_row(policy["name"], params, policy["paper"], policy["what"], *package)
    table_console().print(table)
