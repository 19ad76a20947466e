"""What to say of a command that kvtool does not have: names that other programs use, and near misses."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

INSTEAD = {
    "kvtool": {
        "run": "chat",
        "start": "chat",
        "prompt": "generate",
        "complete": "generate",
        "cli": "chat",
        "server": "serve",
        "api": "serve",
        "list": "models list",
        "ls": "models list",
        "pull": "models pull",
        "download": "models pull",
        "get": "models pull",
        "show": "models show",
        "info": "models show",
        "rm": "models rm",
        "remove": "models rm",
        "delete": "models rm",
        "bench": "compare",
        "benchmark": "compare",
        "ppl": "perplexity",
        "sessions": "session show",
        "export": "session export",
        "tasks": "eval",
        "rpc-server": "worker",
        "settings": "config",
        "check": "doctor",
        "version": "--version",
    },
    "kvtool models": {
        "ls": "models list",
        "download": "models pull",
        "get": "models pull",
        "info": "models show",
        "remove": "models rm",
        "delete": "models rm",
    },
    "kvtool session": {"cat": "session export", "print": "session export", "info": "session show"},
}
"""The words that call it here, by the group that was asked."""

NOT_HERE = {
    "ps": "nothing of it runs in the background; each command loads its model and frees it at its end",
    "stop": "nothing of it runs in the background; Ctrl-C stops a command",
    "quantize": "it runs GGUF files as they are; llama.cpp's llama-quantize makes smaller ones",
    "convert": "it runs GGUF files as they are; llama.cpp's convert_hf_to_gguf.py makes them",
}
"""Why there is none."""


def missing(path: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that is no command. path: the group that was asked. known: its commands."""
    said = f"{path} has no command {name!r}"
    if instead := INSTEAD.get(path, {}).get(name):
        return f"{said}; use `kvtool {instead}`"
    if path == "kvtool" and name in NOT_HERE:
        return f"{said}; {NOT_HERE[name]}"
    if path == "kvtool" and name.endswith(".gguf"):
        return f"{said}; use `kvtool chat {name}`"
    if path == "kvtool" and " " in name:
        return f'{path} takes a command first; use `kvtool generate "PROMPT"` or `kvtool chat`'
    if meant := get_close_matches(name, list(known), n=1):
        return f"{said}; did you mean `{path} {meant[0]}`?"
    return f"{said}; `{path} -h` lists all"
