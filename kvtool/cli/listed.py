"""The commands that there are, and the names of commands and options in messages."""

from typing import Any

COMMANDS = {
    "chat": "Start a chat of any length, in a cache of a fixed size.",
    "generate": "Answer a prompt, a text on stdin, or both.",
    "serve": "Serve the OpenAI and Anthropic APIs, from caches that never fill.",
    "perplexity": "Stream a text through the cache and print its perplexity; lower is better.",
    "compare": "Stream a text under each policy and budget, and compare the results.",
    "bench": "Measure how fast this machine reads and writes, and the memory that takes.",
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
"""The sentence about each command. It stands here because importing all commands takes long."""

FOLDERS = ("chat", "compare", "bench", "inspect")
"""Commands with a folder: the command is in its command.py. The others are one file each."""

GROUPS = ("models", "session")
"""Those that are several commands: a Typer app of the name `app` in their module."""

FUNCTIONS = {"eval": "evaluate", "help": "help_"}
"""Names of the functions of commands whose own names Python reserves."""


def module_of(command: str) -> str:
    """The name of the module with a command."""
    return f"kvtool.cli.{command}" + ".command" * (command in FOLDERS)


def flag(param: Any) -> str:
    """The name of an option in messages and documents: the first long one, or its only one."""
    return str(next((name for name in param.opts if name.startswith("--")), param.opts[0]))


def words_of(context: Any) -> tuple[str, ...]:
    """The words that called a command."""
    return (*words_of(context.parent), context.info_name) if context.parent else ()
