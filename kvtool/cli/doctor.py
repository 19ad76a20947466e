"""`kvtool doctor`: what is built and cached, what is wrong, and the command that mends it."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from json import dumps
from typing import Annotated, Any

import typer

from kvtool.errors import KvtoolError, LibraryError
from kvtool.system.paths import build_command, cache_dir, checkout, kernel_dir

_BUILD = build_command()
_WARM = f"{sys.executable} -m kvtool.kernels.link"


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what is built and cached, what is wrong, and the command that mends it."""
    found = examine()
    typer.echo(dumps(found, indent=2) if json else _text(found))
    raise typer.Exit(0 if found["ok"] else 1)


def examine() -> dict[str, Any]:
    """Everything doctor knows; problems: [{wrong, command}], empty when all is well."""
    from kvtool.kernels import link as warm

    problems: list[dict[str, str]] = []

    def wrong(what: str, command: str) -> None:
        problems.append({"wrong": what, "command": command})

    library = _library(wrong)
    kernels = {"path": str(kernel_dir()), "compiled": warm.is_warm(), "linked": warm.is_linked()}
    if not kernels["compiled"]:
        wrong("the kernels are not compiled: the first start would take seconds longer", _WARM)
    models = cache_dir() / "models"
    return {
        "ok": not problems,
        "problems": problems,
        "python": platform.python_version(),
        "cache": str(cache_dir()),
        "library": library,
        "kernels": kernels,
        "models": {
            "path": str(models),
            "files": [
                {"name": path.name, "bytes": path.stat().st_size} for path in sorted(models.rglob("*.gguf"))
            ],
        },
    }


def _library(wrong: Callable[[str, str], None]) -> dict[str, Any] | None:
    from kvtool.build import wheel as build

    try:
        from kvtool.llama.devices import library_info

        library = library_info()
    except LibraryError as error:
        wrong(str(error), _BUILD)
        return None
    cmake_args = build.asked_cmake_args()
    key = build.installed_key()
    library |= {"build": key, "cmake_args": cmake_args, "digest_wanted": None}
    try:
        folder = build.patches_dir()
        library["digest_wanted"] = build.patch_digest(folder)
        key_wanted = build.wheel_key(folder, cmake_args)
    except (KvtoolError, OSError) as error:
        again = "git checkout -- patches" if checkout() else "pip install --force-reinstall kvtool"
        wrong(f"the patch files cannot be read: {error}", again)
        return library
    if not library["patched"]:
        wrong("llama.cpp is not patched: only policies that need no attention run", _BUILD)
    elif library["abi"] != library["abi_wanted"]:
        wrong(
            f"the library speaks kvtool's ABI {library['abi']}, this kvtool {library['abi_wanted']}", _BUILD
        )
    elif library["digest"] != library["digest_wanted"]:
        wrong("the library was built from other patch files than these", _BUILD)
    elif key is not None and key != key_wanted:
        wrong("the library was built for another CPU, version or set of flags", _BUILD)
    return library


def _text(found: dict[str, Any]) -> str:
    lines = []
    if library := found["library"]:
        patch = f"patched, ABI {library['abi']}" if library["patched"] else "not patched"
        lines += [
            f"llama.cpp   llama-cpp-python {library['version']}, {patch}",
            f"            {library['path']}",
        ]
        if library["digest"]:
            lines.append(f"            digest {library['digest'][:16]}")
        if library["cmake_args"]:
            lines.append(f"            built with {library['cmake_args']}")
        for device in library["devices"]:
            lines.append(
                f"device      {device['name']}: {device['description']}, {_gib(device['memory_free'])} of "
                f"{_gib(device['memory_total'])} GiB free"
            )
        lines.append(f"features    {library['system_info']}")
    kernels, models = found["kernels"], found["models"]
    state = "compiled" if kernels["compiled"] else "not compiled"
    if kernels["compiled"] and not kernels["linked"]:
        state += f", not linked: numba takes 100 MiB beside them; {_WARM} says why"
    lines.append(f"kernels     {state}, {kernels['path']}")
    names = ", ".join(f"{file['name']} ({file['bytes'] / 1e6:.0f} MB)" for file in models["files"])
    lines.append(f"models      {names or 'none yet'}, {models['path']}")
    lines.append("")
    for problem in found["problems"]:
        lines += [f"wrong: {problem['wrong']}", f"  mend it with: {problem['command']}"]
    return "\n".join([*lines, *([] if found["problems"] else ["all is well"])])


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f}"
