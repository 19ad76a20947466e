"""Write docs/cli.md from the commands themselves.

    python docs/make_cli.py            # or: make docs
    python docs/make_cli.py --check    # exit code 1 if docs/cli.md is not up to date
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from kvtool import errors
from kvtool.cli import app
from kvtool.system import interrupt

TARGET = Path(__file__).with_name("cli.md")

INTRO = """\
# The command line

<!-- Made from the commands by `make docs`. Do not edit: change the help texts in kvtool/cli. -->

Every command with its options and their defaults. `kvtool COMMAND --help` prints the same.
[terms.md](terms.md) explains the words.

- The result goes to stdout, everything else to stderr. With `--json` the result is JSON.
- An error is one line on stderr that says what to do. The [exit code](#exit-codes) tells its kind.
- `kvtool --install-completion` adds tab completion to your shell.
"""

VARIABLES = """\
## Environment variables

| variable | what it does |
| --- | --- |
| `KVTOOL_MODEL` | the model when `-m` is not given: a name or a GGUF file |
| `KVTOOL_CACHE` | folder for builds, models and kernels; default: `kvtool` in the per-user cache |
| `CMAKE_ARGS` | more flags for CMake when llama.cpp is built |
| `NO_COLOR` | if set, no colours on a terminal |
"""

EXITS = {
    0: "Success.",
    interrupt.EXIT_CODE: "Stopped by Ctrl-C.",
    129: "The terminal went away.",
    141: "Whoever read stdout stopped reading (a closed pipe).",
}
"""Exit codes that no error of ours stands for."""


def page() -> str:
    """The whole document."""
    root: Any = get_command(app)
    commands = dict(_commands(root, "kvtool"))
    index = [f"| [`{name}`](#{_anchor(name)}) | {_summary(command)} |" for name, command in commands.items()]
    parts = [INTRO, "\n".join(["| command | what it does |", "| --- | --- |", *index]) + "\n"]
    parts += [_section(name, command) for name, command in commands.items()]
    return "\n".join([*parts, VARIABLES, _exit_codes()])


def _commands(group: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Every command that runs something, with the words that call it."""
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
    """The first sentence of a command's help."""
    return _cell(_help(command).split("\n\n")[0].replace("\n", " ").partition(". ")[0].rstrip(".") + ".")


def _section(name: str, command: Any) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option"]
    shown = [_argument(each) for each in arguments]
    parts = [f"## {name}\n\n{_wrapped(_help(command))}\n", f"    {' '.join([name, *shown, '[OPTIONS]'])}\n"]
    for title, rows in (
        ("argument", [(_argument(each).strip("[]"), each) for each in arguments]),
        ("option", [(_option(each), each) for each in options]),
    ):
        if rows:
            lines = [f"| {title} | default | what it does |", "| --- | --- | --- |"]
            for shown, each in rows:
                lines.append(f"| {_cell(shown)} | {_cell(_default(each))} | {_cell(each.help or '')} |")
            parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _wrapped(text: str) -> str:
    """Paragraphs in lines of at most 120 characters."""
    import textwrap

    return "\n\n".join(
        textwrap.fill(" ".join(part.split()), 120, break_long_words=False) for part in text.split("\n\n")
    )


def _argument(param: Any) -> str:
    name = param.name.upper().replace("_", "-") + ("..." if param.nargs != 1 else "")
    return name if param.required else f"[{name}]"


def _option(param: Any) -> str:
    """-m, --model TEXT, each name as code."""
    names = ", ".join(f"`{name}`" for name in [*param.opts, *param.secondary_opts])
    return names if param.is_flag else f"{names} {_metavar(param)}"


def _metavar(param: Any) -> str:
    """What is to be put for the value."""
    kinds = {"int": "N", "integer": "N", "float": "X", "path": "FILE", "file": "FILE"}
    kind = param.type.name.split()[0].strip("<>").lower()
    return str(param.metavar or kinds.get(kind, "TEXT"))


def _default(param: Any) -> str:
    """What is taken unless the option is given: a value, or words for it."""
    if isinstance(param.show_default, str):
        return param.show_default
    if param.required:
        return "required"
    if param.default in (None, False, (), []) or callable(param.default):
        return ""
    return f"`{param.default}`"


def _cell(text: str) -> str:
    """In one line of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def _exit_codes() -> str:
    lines = ["## Exit codes", "", "| code | when |", "| ---: | --- |"]
    codes = EXITS | {kind.exit_code: (kind.__doc__ or "").split("\n\n")[0] for kind in _errors()}
    codes[errors.KvtoolError.exit_code] = "Any other failure."
    lines += [f"| {code} | {_cell(codes[code])} |" for code in sorted(codes)]
    return "\n".join(lines) + "\n"


def _errors() -> Iterator[type[errors.KvtoolError]]:
    """The kinds of error that users meet; each has its exit code."""
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
