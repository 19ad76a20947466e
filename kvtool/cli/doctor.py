"""`kvtool doctor`: show the state of the installation, its faults, and the commands that fix them."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from json import dumps
from typing import Any

import typer
from typer.main import get_command

from kvtool.cli.declared import Json
from kvtool.errors import KvtoolError, LibraryError, UsageError
from kvtool.system.files import can_write
from kvtool.system.paths import build_command, cache_dir, checkout, kernel_dir
from kvtool.units import format_bytes

_BUILD = build_command()
_COMPILE = f"{sys.executable} -m kvtool.build.kernels"


def doctor(json: Json = False) -> None:
    """Check the installation: what is built and cached, what is wrong, and how to fix it.

    It also checks the config file and the variables, as `kvtool config` does. The exit code is 1 if anything
    is wrong.
    """
    state = examine()
    typer.echo(dumps(state, indent=2) if json else _text(state))
    raise typer.Exit(0 if state["ok"] else 1)


def examine() -> dict[str, Any]:
    """Return everything that doctor shows. `problems` is a list of {wrong, command}."""
    from kvtool.build.kernels import are_compiled, are_linked

    problems: list[dict[str, str]] = []

    def wrong(fault: str, command: str) -> None:
        problems.append({"wrong": fault, "command": command})

    if not can_write(cache_dir()):
        wrong(f"cannot write to the cache folder {cache_dir()}", "export KVTOOL_CACHE=FOLDER")
    _settings(wrong)
    library = _library(wrong)
    kernels = {"path": str(kernel_dir()), "compiled": are_compiled(), "linked": are_linked()}
    models = cache_dir() / "models"
    paths = [path for path in sorted(models.rglob("*.gguf")) if path.exists()]
    files = [{"name": path.name, "bytes": path.stat().st_size} for path in paths]
    return {
        "ok": not problems,
        "problems": problems,
        "python": platform.python_version(),
        "cache": str(cache_dir()),
        "library": library,
        "kernels": kernels,
        "models": {"path": str(models), "files": files},
    }


def _settings(wrong: Callable[[str, str], None]) -> None:
    from kvtool.cli import app
    from kvtool.cli.config import all_rows, report_unknown_models

    def mistake(error: KvtoolError) -> None:
        # the message begins with the name of a wrong variable, or says which variables have set an option
        name = re.search(r"(?:^|is set by )\$(\w+)", str(error))
        wrong(str(error), f"unset {name[1]}" if name else '$EDITOR "$(kvtool config --path)"')

    root = get_command(app)
    for _ in all_rows(root, mistake):
        pass
    # the rows have reported a file that cannot be read
    with suppress(UsageError):
        report_unknown_models(root)


def _library(wrong: Callable[[str, str], None]) -> dict[str, Any] | None:
    from kvtool.build import wheel
    from kvtool.build.flags import asked_cmake_args
    from kvtool.build.sources import patch_digest, patches_dir

    try:
        from kvtool.llama.libllama.devices import library_info

        library = library_info()
    except LibraryError as error:
        # the line below the fault has the command
        wrong(str(error).removesuffix(f"; build it: {_BUILD}"), _BUILD)
        return None
    cmake_args = asked_cmake_args()
    key = wheel.installed_key()
    portable = bool(key and key.startswith("portable-"))
    library |= {"build": key, "portable": portable, "cmake_args": cmake_args, "digest_wanted": None}
    try:
        folder = patches_dir()
        library["digest_wanted"] = patch_digest(folder)
        keys_wanted = wheel.fitting_keys(folder, cmake_args)
    except (KvtoolError, OSError) as error:
        again = "git checkout -- patches" if checkout() else "pip install --force-reinstall kvtool"
        wrong(f"the patch files cannot be read: {error}", again)
        return library
    if library["abi"] != library["abi_wanted"]:
        has = f"the library has version {library['abi']} of kvtool's C API"
        wrong(f"{has}, this kvtool needs {library['abi_wanted']}", _BUILD)
    elif library["digest"] != library["digest_wanted"]:
        wrong("the library was built from different patch files", _BUILD)
    elif key is not None and key not in keys_wanted:
        wrong("the library was built for a different CPU, version or set of flags", _BUILD)
    return library


def _text(state: dict[str, Any]) -> str:
    lines = []
    if library := state["library"]:
        lines.append(f"llama.cpp   llama-cpp-python {library['version']}, patched, C API {library['abi']}")
        lines.append(f"            {library['path']}")
        lines.append(f"            digest {library['digest'][:16]}")
        if library["portable"]:
            lines.append("            built for all CPUs; llama.cpp chooses the fitting code when it starts")
        if library["cmake_args"]:
            lines.append(f"            built with {library['cmake_args']}")
        for device in library["devices"]:
            free, total = (format_bytes(device[name]) for name in ("memory_free", "memory_total"))
            lines.append(f"device      {device['name']}: {device['description']}, {free} of {total} free")
        lines.append(f"features    {library['system_info']}")
    kernels, models = state["kernels"], state["models"]
    built = "compiled"
    if not kernels["compiled"]:
        cost = "a policy's first run takes longer, and numba takes 100 MiB more memory"
        built = f"not all compiled: {cost}; {_COMPILE} compiles them"
    elif not kernels["linked"]:
        built += f", not linked: numba takes 100 MiB more memory; {_COMPILE} says why"
    lines.append(f"kernels     {built}, {kernels['path']}")
    names = ", ".join(f"{file['name']} ({format_bytes(file['bytes'])})" for file in models["files"])
    lines.append(f"models      {names or 'none yet'}, {models['path']}")
    lines.append("")
    for problem in state["problems"]:
        lines += [f"problem: {problem['wrong']}", f"  fix it with: {problem['command']}"]
    return "\n".join(lines if state["problems"] else [*lines, "no problems found"])
