"""`kvtool build`: build the patched llama.cpp for a device and install it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Annotated, Any

import typer

from kvtool.errors import LibraryError, UsageError
from kvtool.system import interrupt


def build(
    cuda: Annotated[bool, typer.Option("--cuda", help="For NVIDIA GPUs; needs the CUDA toolkit.")] = False,
    metal: Annotated[bool, typer.Option("--metal", help="For Macs.")] = False,
    vulkan: Annotated[bool, typer.Option("--vulkan", help="For any GPU; needs the Vulkan SDK.")] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="For the CPU alone.")] = False,
) -> None:
    """Build the patched llama.cpp and install it.

    Without an option it builds for the device of the last build. Flags for CMake go into $CMAKE_ARGS.
    Each build is kept and reused: nothing is compiled twice.
    """
    from kvtool.build import kernels, needs, sources, wheel
    from kvtool.build.flags import asked_cmake_args, device_args

    devices = [name for name, on in (("cuda", cuda), ("metal", metal), ("vulkan", vulkan)) if on]
    if cpu and devices:
        raise UsageError(f"--cpu and --{devices[0]} exclude each other; choose one")
    cmake_args = device_args(devices) if cpu or devices else asked_cmake_args()
    try:
        needs.check_environment()
        # raise KeyboardInterrupt at Ctrl-C, so that a half-finished build is removed
        with interrupt.raising():
            built = wheel.find_or_build(sources.patches_dir(), cmake_args)
            is_new = wheel.install(built, cmake_args)
        kernels.compile_all()
    except LibraryError as error:
        line, *log = str(error).splitlines()
        sys.stderr.writelines(f"{entry}\n" for entry in log)
        raise LibraryError(line) from None
    state = _examined()
    if state["library"] is None:
        raise LibraryError(state["problems"][0]["wrong"])
    names = [device["description"] for device in state["library"]["devices"]]
    flags = f" with {cmake_args}" if cmake_args else ""
    typer.echo(
        f"{'installed' if is_new else 'already installed'}: llama.cpp{flags} for {', '.join(names)}; "
        "kvtool doctor shows details"
    )


def _examined() -> dict[str, Any]:
    """Return the output of `kvtool doctor --json`.

    It runs in a new process, because this process may have loaded the old library. Raises LibraryError if the
    new library does not load.
    """
    done = subprocess.run(
        [sys.executable, "-m", "kvtool", "doctor", "--json"],
        # `python -m` first searches the current folder, so use a folder that contains no other kvtool
        cwd=sys.prefix,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    try:
        state: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        errors = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise LibraryError(f"llama.cpp is built, but does not load: {errors[-1]}") from None
    return state
