"""Names of all commands, and how messages name commands and options."""

from typing import Any

COMMANDS = {
    "chat": "Start a chat of any length, in a cache of a fixed size.",
    "generate": "Answer a prompt, a text on stdin, or both.",
    "serve": "Serve the OpenAI and Anthropic APIs, from caches that never fill.",
    "perplexity": "Stream a text through the cache and print its perplexity; lower is better.",
    "compare": "Stream a text under each policy and budget, and compare the results.",
    "bench": "Measure how fast this machine reads and writes tokens, and how much memory this takes.",
    "eval": "Ask a task's questions under a policy, and score the answers.",
    "inspect": "Stream a text through the cache and show which of its tokens the rows still hold.",
    "policies": "List the policies, or explain one with its parameters, defaults and paper.",
    "models": "List, download, inspect and delete models.",
    "session": "Show and export session files.",
    "config": "Show which defaults are set in the config file and in the environment.",
    "worker": "Lend this machine's GPUs, or its CPU, to another machine that runs kvtool with --rpc.",
    "build": "Build the patched llama.cpp and install it.",
    "doctor": "Check the installation: what is built and cached, what is wrong, and how to fix it.",
    "help": "Show the help of a command.",
}
"""Name and description of each command.

They are not in the files of the commands, because importing these files takes long.
"""

FOLDERS = ("chat", "compare", "bench", "eval", "inspect")
"""Commands that have their own folder, with the command in command.py. Every other command is one file."""

GROUPS = ("models", "session")
"""Groups of commands: their modules define a Typer app named `app`."""

FUNCTIONS = {"eval": "evaluate", "help": "help_"}
"""Functions of two commands. The names `eval` and `help` would hide built-in functions of Python."""


def module_of(command: str) -> str:
    return f"kvtool.cli.{command}" + ".command" * (command in FOLDERS)


def flag(param: Any) -> str:
    """Return the name of an option in messages and documents, chosen as in `Option.name`."""
    return str(next((name for name in param.opts if name.startswith("--")), param.opts[0]))


def words_of(context: Any) -> tuple[str, ...]:
    """Return the words that the user typed for a command, such as ("models", "show")."""
    return (*words_of(context.parent), context.info_name) if context.parent else ()
