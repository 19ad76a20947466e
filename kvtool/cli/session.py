"""kvtool session: looks into the file of a chat."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtool.cli import flags as opt
from kvtool.cli.completion import sessions
from kvtool.cli.utf8 import json_text
from kvtool.errors import SessionError

app = typer.Typer(help="Look into session files.", no_args_is_help=True, rich_markup_mode=None)

File = Annotated[
    Path, typer.Argument(help="A file that `kvtool chat --session` wrote.", autocompletion=sessions)
]


@app.command()
def show(file: File, as_json: opt.Json = False) -> None:
    """Show what a chat runs on and how long it is, and whether the file is whole."""
    from kvtool.chats.session import read, read_meta, size

    meta = read_meta(file)
    problem = None
    try:
        read(file)
    except SessionError as error:
        problem = error
    fixed, options = meta["fixed"], meta["options"]
    shown = {
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
        # sessions of earlier versions have none
        "archived": meta.get("archived", 0),
        "archive_bytes": meta.get("archive_bytes", 0),
        "system": meta["system"],
        "problem": str(problem) if problem else None,
    }
    if as_json:
        sys.stdout.write(json_text(shown) + "\n")
    else:
        _print(shown, has_archive="archive_type" in fixed)
    if problem:
        raise problem


def _print(shown: dict[str, Any], has_archive: bool) -> None:
    from kvtool.units import format_bytes

    # the error is a line of its own, and the last
    del shown["problem"]
    for name in ("size", "kv_bytes", "archive_bytes"):
        shown[name] = format_bytes(shown[name])
    if not has_archive:
        del shown["archived"], shown["archive_bytes"]
    shown["parameters"] = " ".join(f"{name}={value}" for name, value in shown["parameters"].items())
    width = max(map(len, shown))
    for name, value in shown.items():
        sys.stdout.write(f"{name:{width}}  {value}\n")


@app.command()
def export(file: File, as_json: opt.Json = False) -> None:
    """Print the chat's text. This works even if the rest of the file is damaged."""
    from kvtool.chats.conversation import transcript
    from kvtool.chats.session import read_meta

    messages = read_meta(file)["messages"]
    if as_json:
        # readable, but where stdout would replace characters
        is_utf8 = sys.stdout.encoding.lower().replace("-", "") == "utf8"
        sys.stdout.write(json.dumps(messages, ensure_ascii=not is_utf8) + "\n")
    else:
        sys.stdout.write(transcript(messages))
