"""Write docs/cli.md from the commands themselves.

python docs/make_cli.py            # or: make docs
python docs/make_cli.py --check    # exit code 1 if docs/cli.md is not up to date
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from kvtool import errors
from kvtool.cli import app
from kvtool.cli.command import default_of, place_of, title_of
from kvtool.cli.examples import EXAMPLES
from kvtool.system import interrupt

TARGET = Path(__file__).with_name("cli.md")

INTRO = """\
# The command line

<!-- Made from the commands by `make docs`. Do not edit: change the help texts in kvtool/cli. -->

Every command with its options and their defaults. `kvtool COMMAND --help` prints the same.
[how-it-works.md](how-it-works.md#words) explains the words.

- The result goes to stdout, everything else to stderr. With `--json` the result is JSON.
  Results of `compare`, `bench` and `eval` are one JSON object a line.
- An error is one line on stderr that says what to do. The [exit code](#exit-codes) tells its kind.
- `-h` works on every command, and so does `kvtool help COMMAND`. `-V` prints the version.
- Options can have [defaults of your own](#defaults-of-your-own), in a file or in variables.
- Sizes in bytes are written the same everywhere (`--budget`, `--archive`, `--fit`, `--mem`): `64MiB`, `64M`
  and `64m` are 64 x 1024 x 1024 bytes, as in dd and ulimit; `64MB` is 64 million. So are K, G and T. A
  number without a unit is tokens where tokens make sense.

[Tab completion](#tab-completion) knows commands, options, policies, models, tasks, cache types and
sessions.
"""

DEFAULTS = """\
## Defaults of your own

`kvtool config --path` prints where the file is (`~/.config/kvtool/config.toml` on Linux). Every option can
have a default there, under its long name without the dashes (`budget`, `ctx-size`, `cache-type-k`) or its
short one (`t`, `o`):

```toml
budget = "10%"               # all commands that have the option
threads = 4

[chat]                       # one command
system = "Answer in one sentence."
policy = "h2o"
option = ["window=64"]       # -o, once for each

[session.show]               # a command of two words
json = true

[models."smollm2-135m"]      # a model: what -m says, or its file's name, in quotes
ctx-size = 4096

[models."smollm2-135m".chat] # a model in one command
temp = 0.5
```

Environment variables set the same defaults, under the same names: `KVTOOL_BUDGET=10%` for all commands,
`KVTOOL_CHAT_BUDGET=10%` for one command. An empty variable has no effect. For options that can be repeated,
such as `-o`, separate the values by spaces.

A wrong value, and a key of the file that is not an option, end a command with exit code 2. A variable
`KVTOOL_...` that belongs to no option is only reported, on stderr.

An option on the command line overrides a variable, and a variable overrides the file. A variable for one
command overrides a variable for all commands. In the file, the order from strongest to weakest is: a model in
one command, a model, a command, the top level. A chat that continues a `--session` keeps the options with
which it was started; only the command line changes them. Parameters (`-o`) belong to the policy in the same
place: if another policy is chosen, they are ignored.

`kvtool config` checks the file and shows which defaults are set. `kvtool config chat` shows every option of a
command, its value, and where the value comes from.
"""

COMPLETION = """\
## Tab completion

`kvtool --install-completion` sets up completion for your shell (bash, zsh, fish or PowerShell). It works in
new shells. To set it up by hand, add one line to a file:

| shell | line | file |
| --- | --- | --- |
| bash | `eval "$(_KVTOOL_COMPLETE=source_bash kvtool)"` | `~/.bashrc` |
| zsh | `eval "$(_KVTOOL_COMPLETE=source_zsh kvtool)"`, after `compinit` | `~/.zshrc` |
| fish | `_KVTOOL_COMPLETE=source_fish kvtool \\| source` | `~/.config/fish/config.fish` |
"""

VARIABLES = """\
## Environment variables

| variable | what it does |
| --- | --- |
| `KVTOOL_MODEL` | the default of `-m`: a name or a GGUF file |
| `KVTOOL_...` | the default of any option: [defaults of your own](#defaults-of-your-own) |
| `KVTOOL_CONFIG` | path of another file with defaults; to use no defaults, name an empty file |
| `KVTOOL_CACHE` | folder for builds, models and kernels; default: `kvtool` in the per-user cache |
| `CMAKE_ARGS` | more flags for CMake when llama.cpp is built |
| `NO_COLOR` | if set, no colours on a terminal |
"""

EXITS = {
    0: "Success.",
    interrupt.EXIT_CODE: "Stopped by Ctrl-C.",
    129: "Stopped by SIGHUP: the terminal was closed.",
    141: "Whoever read stdout stopped reading (a closed pipe).",
    143: "Stopped by SIGTERM.",
}
"""Exit codes that do not come from a class of kvtool.errors."""


def page() -> str:
    root: Any = get_command(app)
    commands = dict(_commands(root, "kvtool"))
    index = [f"| [`{name}`](#{_anchor(name)}) | {_summary(command)} |" for name, command in commands.items()]
    parts = [INTRO, "\n".join(["| command | what it does |", "| --- | --- |", *index]) + "\n"]
    parts += [_section(name, command) for name, command in commands.items()]
    return "\n".join([*parts, DEFAULTS, COMPLETION, VARIABLES, _exit_codes()])


def _commands(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield every command that has no subcommands, with its full name."""
    for name in group.commands:
        command = group.commands[name]
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix} {name}")
        else:
            yield f"{prefix} {name}", command


def _anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return heading.lower().replace(" ", "-")


def _help(command: Any) -> str:
    return inspect.cleandoc(command.help or "").partition("\f")[0]


def _summary(command: Any) -> str:
    """The command's short help, or the first sentence of its help."""
    if command.short_help:
        return _cell(command.short_help)
    return _cell(_help(command).split("\n\n")[0].replace("\n", " ").partition(". ")[0].rstrip(".") + ".")


def _section(name: str, command: Any) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    shown = [_argument(each) for each in arguments]
    parts = [f"## {name}\n\n{_wrapped(_help(command))}\n", f"    {' '.join([name, *shown, '[OPTIONS]'])}\n"]
    examples = EXAMPLES[name.partition(" ")[2]]
    parts.append("For example:\n\n" + "".join(f"    {example}\n" for example in examples))
    groups: dict[str, list[tuple[str, Any]]] = {}
    for each in arguments:
        groups.setdefault("argument", []).append((re.sub(r"[\[\]]", "", _argument(each)), each))
    for each in sorted(options, key=lambda each: place_of(title_of(each))):
        title = title_of(each).replace("Options", "option")
        groups.setdefault(title, []).append((_option(each), each))
    for title, rows in groups.items():
        lines = [f"| {title} | default | what it does |", "| --- | --- | --- |"]
        for shown_as, each in rows:
            lines.append(f"| {_cell(shown_as)} | {_cell(_default(each))} | {_cell(each.help or '')} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _wrapped(text: str) -> str:
    """Paragraphs in lines of at most 120 characters."""
    import textwrap

    return "\n\n".join(
        textwrap.fill(" ".join(part.split()), 120, break_long_words=False) for part in text.split("\n\n")
    )


def _argument(param: Any) -> str:
    if param.metavar:
        return str(param.metavar)
    name = param.name.upper().replace("_", "-") + ("..." if param.nargs != 1 else "")
    return name if param.required else f"[{name}]"


def _option(param: Any) -> str:
    """Return an option's names as code, then its placeholder unless it is a flag: `-m`, `--model` TEXT."""
    names = ", ".join(f"`{name}`" for name in [*param.opts, *param.secondary_opts])
    return names if param.is_flag or param.count else f"{names} {_metavar(param)}"


def _metavar(param: Any) -> str:
    kinds = {"int": "N", "integer": "N", "float": "X", "path": "FILE", "file": "FILE"}
    kind = param.type.name.split()[0].strip("<>").lower()
    return str(param.metavar or kinds.get(kind, "TEXT"))


def _default(param: Any) -> str:
    """Return the option's default as text: a description if there is one, else the value.

    Return "" if there is no default, or if it is not shown.
    """
    if words := default_of(param):
        return words
    if param.show_default is False:
        return ""
    if param.required:
        return "required"
    # compare with False and None instead of `not param.default`, because 0 is shown
    if param.default is False or param.default in (None, (), []) or callable(param.default):
        return ""
    return f"`{param.default}`"


def _cell(text: str) -> str:
    """Return a text as a cell of a Markdown table, on one line."""
    return " ".join(text.split()).replace("|", "\\|")


def _exit_codes() -> str:
    lines = ["## Exit codes", "", "| code | when |", "| ---: | --- |"]
    codes = EXITS | {kind.exit_code: (kind.__doc__ or "").split("\n\n")[0] for kind in _errors()}
    codes[errors.KvtoolError.exit_code] = "Any other failure."
    lines += [f"| {code} | {_cell(codes[code])} |" for code in sorted(codes)]
    return "\n".join(lines) + "\n"


def _errors() -> Iterator[type[errors.KvtoolError]]:
    """Yield the classes of errors in kvtool.errors. Each class has an exit code."""
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.KvtoolError):
            yield kind


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the page is out of date")
    text = page()
    if not parser.parse_args().check:
        TARGET.write_text(text, encoding="utf-8")
    elif TARGET.read_text(encoding="utf-8") != text:
        sys.exit("docs/cli.md is out of date; run: make docs")


if __name__ == "__main__":
    main()
