"""`kvtool session`: show a chat's session file, and export its text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtool.cli.completion import sessions
from kvtool.cli.declared import Json
from kvtool.cli.listed import COMMANDS
from kvtool.errors import SessionError
from kvtool.system.texts import first_words, json_text, shown
from kvtool.units import format_bytes

app = typer.Typer(help=COMMANDS["session"], no_args_is_help=True, rich_markup_mode=None, add_completion=False)

File = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        # click should not check the file: the commands report an unreadable file as a SessionError
        readable=False,
        help="A session file, which `kvtool chat --session` has written.",
        autocompletion=sessions,
    ),
]


@app.command()
def show(file: File, as_json: Json = False) -> None:
    """Show a chat's model, policy and length, and check that the file is whole."""
    from kvtool.chats.session import read, read_chat, size

    meta = read_chat(file)
    problem = None
    try:
        read(file)
    except SessionError as error:
        problem = error
    fixed, options = meta["fixed"], meta["options"]
    info = {
        "file": str(file),
        "size": size(file),
        "saved": meta["saved"],
        "kvtool": meta["kvtool"],
        "llama_cpp": fixed["llama_cpp"],
        "model": options["model"],
        "model_sha256": fixed["model_sha256"],
        "policy": fixed["policy"],
        "parameters": fixed["parameters"],
        "turns": meta["n_turn"],
        "tokens": meta["n_past"],
        "cells": meta["cells"],
        "kv_bytes": meta["kv_bytes"],
        # sessions of earlier versions do not have these values
        **{name: meta.get(name, 0) for name in ("archived", "archive_bytes")},
        "system": meta["system"],
        "problem": str(problem) if problem else None,
    }
    if as_json:
        sys.stdout.write(json_text(info) + "\n")
    else:
        _print(info, has_archive="archive_type" in fixed)
    if problem:
        raise problem


def _print(info: dict[str, Any], has_archive: bool) -> None:
    """Print the values as a table, without the problem, and only the first words of the system prompt."""
    from kvtool.cli.console import print_table

    parameters = dict(info["parameters"])
    budget, slack = parameters.pop("budget"), parameters.pop("slack")
    rows = {
        "file": shown(info["file"]),
        "size": format_bytes(info["size"]),
        "saved": info["saved"],
        "kvtool": info["kvtool"],
        "llama.cpp": info["llama_cpp"],
        "model": shown(info["model"]),
        "sha256": info["model_sha256"],
        "policy": " ".join([shown(info["policy"]), *(f"{name}={parameters[name]}" for name in parameters)]),
        "eviction": f"every {slack:,} tokens" if slack else "never",
        "turns": f"{info['turns']:,}",
        "tokens so far": f"{info['tokens']:,}",
        "cells": f"{info['cells']:,.0f} of {budget:,} per row",
        "cache": format_bytes(info["kv_bytes"]),
    }
    if has_archive:
        rows["archive"] = f"{info['archived']:,} tokens, {format_bytes(info['archive_bytes'])}"
    rows["system prompt"] = first_words(info["system"] or "none")
    print_table([], list(rows.items()))


@app.command()
def export(file: File, as_json: Json = False) -> None:
    """Print the text of a chat; `kvtool chat --reread` reads the output of --json.

    If the file is damaged, print what can be read.
    """
    from kvtool.chats.conversation import transcript
    from kvtool.chats.session import read_chat, readable_messages

    problem = None
    try:
        messages = read_chat(file)["messages"]
    except SessionError as error:
        if not (messages := readable_messages(file)):
            raise
        fault = str(error).rpartition(";")[0]
        problem = SessionError(f"{fault}; messages may be missing or have wrong characters: restore a copy")
    if as_json:
        # do not escape characters if stdout can encode them
        is_utf8 = sys.stdout.encoding.lower().replace("-", "") == "utf8"
        sys.stdout.write(json.dumps(messages, ensure_ascii=not is_utf8) + "\n")
    else:
        sys.stdout.write(transcript(messages))
    if problem:
        raise problem
