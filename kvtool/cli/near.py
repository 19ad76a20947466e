"""Advice for command lines with names from other programs, misspelt names, or prompts without quotes.

click alone is not enough. It suggests names that are similar, but not names that mean the same. It also reads
an unknown name with one dash as several options. For example, it reads `-hf` as `-h -f`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from kvtool.cli.listed import flag
from kvtool.errors import UsageError, suggestion

_OTHER_NAMES = {
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
"""Names that other programs use for our commands."""

INSTEAD = {
    "kvtool": {name: ours for ours, names in _OTHER_NAMES.items() for name in names},
    "kvtool models": {
        **{"ls": "models list", "download": "models pull", "get": "models pull"},
        **{"info": "models show", "remove": "models rm", "delete": "models rm"},
    },
    "kvtool session": {"cat": "session export", "print": "session export", "info": "session show"},
}
"""For each group of commands, a map from the names in other programs to our commands."""

ADVICE = {
    "use -m hf:{value}": ("-hf", "-hfr", "--hf-repo"),
    "use -m hf:OWNER/REPO:{value}": ("-hff", "--hf-file"),
    "use --api-key-file": ("--api-key",),
    "use --predict": ("--max-tokens",),
    "use --batch-size": ("-ub", "--ubatch-size"),
    "use --threads": ("-tb", "--threads-batch"),
    "`kvtool chat` is a conversation, without this option": ("-cnv", "--conversation"),
    "`kvtool generate` answers a prompt": ("-p", "--prompt"),
    "kvtool always runs chat templates with Jinja; leave it out": ("--jinja",),
    "models are mapped into memory, and not locked there; leave it out": ("--mlock", "--no-mmap"),
    "sinks and the system prompt always stay; leave it out": ("--keep",),
    "the eviction policy (--policy) makes room in a full cache; leave it out": (
        *("--context-shift", "--no-context-shift"),
    ),
    "kvtool takes no images; leave it out": ("-mm", "--mmproj"),
}
"""Maps advice to the options of other programs, mostly of llama.cpp, to which it applies.

A command gives the advice if it does not have the option. Options that mean the same in kvtool are in
`Option.aliases`.
"""

_ADVICE = {name: advice for advice, names in ADVICE.items() for name in names}


def no_command(path: str, name: str, known: Iterable[str]) -> str:
    """Return the message for a word that is not a command.

    path: the group of commands, such as "kvtool models". known: the commands of this group.
    """
    group = "" if path == "kvtool" else f"`{path}`: "
    line = f"{group}there is no command {name!r}"
    if instead := INSTEAD.get(path, {}).get(name):
        return f"{line}; use `kvtool {instead}`"
    if not group and name.endswith(".gguf"):
        from shlex import quote

        return f"{line}; use `kvtool chat {quote(name)}`"
    if not group and " " in name:
        return f"name a command first: `kvtool generate {_prompt(name)}` or `kvtool chat`"
    shown = {each: f"`{path} {each}`" for each in known}
    hint = suggestion(name, shown, shown)
    return f"{line}.{hint}" if hint else f"{line}; `{path} -h` lists them"


def translated(context: Any, args: Sequence[str]) -> list[str]:
    """Return the arguments, in which each alias of an option is replaced by the option's own name.

    Raises UsageError for an option in `ADVICE`. Values of our own options are not examined.
    """
    options = [p for p in context.command.get_params(context) if p.param_type_name == "option"]
    known = {name: option for option in options for name in (*option.opts, *option.secondary_opts)}
    own = {alias: flag(option) for option in options for alias in getattr(option, "aliases", ())}
    words, result = iter(args), list[str]()
    for word in words:
        name, equals, value = word.partition("=")
        if word == "--":
            return [*result, word, *words]
        if name not in known and name in _ADVICE:
            advice = _ADVICE[name].format(value=value if equals else next(words, "..."))
            raise UsageError(f"no such option: {name}; {advice}")
        name = own.get(name, name)
        result.append(f"{name}{equals}{value}")
        if name in known and not (equals or known[name].is_flag or known[name].count):
            result += islice(words, 1)
    return result


def option_advice(name: str, command: Any) -> str:
    """Return advice about an unknown option, or "".

    There is advice for -o in `compare`, for --session in `generate`, for -f if the file is an argument, and
    for the start of an argument such as "-5 + 3 = ?". name: the unknown option. command: the command that
    refused it.
    """
    if name == "--session" and command.name == "generate":
        return "; chats have sessions: `echo PROMPT | kvtool chat --session FILE`"
    if name in ("-o", "--option") and command.name == "compare":
        return "; write parameters after their policy, as in --policies h2o:window=64"
    arguments = [param.name for param in command.params if param.param_type_name == "argument"]
    if name in ("-f", "--file") and "file" in arguments:
        return f"; name the file without {name}"
    if not (arguments and name[1:2].isdigit()):
        return ""
    if command.name == "generate":
        return "; if a text begins with -, put -- before it, or use -p"
    return "; if a name begins with -, put -- before it"


def too_many(context: Any, surplus: Sequence[str]) -> str:
    """Return the message for arguments that a command does not take."""
    from shlex import quote

    path, command = context.command_path, context.command
    if command.name == "generate":
        prompt = " ".join([context.params["argument"], *surplus])
        return f"put the prompt into quotes: `{path} {_prompt(prompt)}`"
    if command.name in ("chat", "serve"):
        return not_a_model(" ".join([context.params["model_name"], *surplus]))
    names = [param.metavar for param in command.params if param.param_type_name == "argument"]
    takes = f"takes only {' '.join(names)}" if names else "takes only options"
    return f"`{path}` {takes}; leave out {' '.join(map(quote, surplus))}"


def not_a_model(text: str) -> str:
    """Return the message for a prompt that was typed where a model was expected."""
    return (
        f"{text!r} is not a model; `kvtool generate {_prompt(text)}` answers a prompt, and `kvtool chat` "
        "starts a chat in which you type it"
    )


def _prompt(text: str) -> str:
    """Quote a prompt for a shell. Use double quotes, unless the shell would change the text inside them.

    If the prompt would be read as an option, -- precedes it.
    """
    from shlex import quote

    before = "-- " if text.startswith("-") else ""
    return before + (quote(text) if set(text) & set('"$`\\!') else f'"{text}"')
