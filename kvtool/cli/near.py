"""What to say of a command that kvtool does not have: names that other programs use, and near misses."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_CALLED = {
    "chat": ("run", "start", "cli"),
    "generate": ("prompt", "complete"),
    "serve": ("server", "api"),
    "models list": ("list", "ls"),
    "models pull": ("pull", "download", "get"),
    "models show": ("show", "info"),
    "models rm": ("rm", "remove", "delete"),
    "bench": ("benchmark", "llama-bench"),
    "perplexity": ("ppl",),
    "session show": ("sessions",),
    "session export": ("export",),
    "eval": ("tasks",),
    "worker": ("rpc-server",),
    "config": ("settings",),
    "doctor": ("check",),
    "--version": ("version",),
}
"""What other programs call our commands."""

_ALL = {name: ours for ours, names in _CALLED.items() for name in names}

INSTEAD = {
    "kvtool": _ALL,
    "kvtool models": {
        name: ours
        for name, ours in _ALL.items()
        if ours.startswith("models ") and not ours.endswith(f" {name}")
    },
    "kvtool session": {"cat": "session export", "print": "session export", "info": "session show"},
}
"""Our command for the name of another program, by the group that was asked."""

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
