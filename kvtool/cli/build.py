"""`kvtool build`: the patched llama.cpp, built for a device and installed beside kvtool."""

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
    cpu: Annotated[bool, typer.Option("--cpu", help="For the CPU alone again.")] = False,
) -> None:
    """Build the patched llama.cpp and install it beside kvtool.

    Without an option, for what it was built for here the last time. $CMAKE_ARGS may hold more flags for
    CMake. What was built once for this machine is kept, and not compiled again.
    """
    from kvtool.build import wheel as builder
    from kvtool.kernels import link as warm

    devices = [name for name, on in (("cuda", cuda), ("metal", metal), ("vulkan", vulkan)) if on]
    if cpu and devices:
        raise UsageError(f"--cpu is for the CPU alone; choose it or --{devices[0]}")
    cmake_args = builder.device_args(devices) if cpu or devices else builder.asked_cmake_args()
    try:
        builder.check_environment()
        # what is half done is removed
        with interrupt.raising():
            wheel = builder.build(builder.patches_dir(), cmake_args)
            is_new = builder.install(wheel, cmake_args)
        warm.warm()
    except LibraryError as error:
        line, *log = str(error).splitlines()
        sys.stderr.writelines(f"{each}\n" for each in log)
        raise LibraryError(line) from None
    found = _examined()
    if found["library"] is None:
        raise LibraryError(found["problems"][0]["wrong"])
    names = [device["description"] for device in found["library"]["devices"]]
    flags = f" with {cmake_args}" if cmake_args else ""
    typer.echo(
        f"llama.cpp{flags} is {'installed' if is_new else 'there already'}, for {', '.join(names)}; "
        "kvtool doctor shows it"
    )


def _examined() -> dict[str, Any]:
    """What `kvtool doctor --json` says, in a process that has the new library."""
    done = subprocess.run(
        [sys.executable, "-m", "kvtool", "doctor", "--json"],
        # not where some other kvtool lies
        cwd=sys.prefix,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise LibraryError(f"llama.cpp is built, but cannot be loaded: {said[-1]}") from None
    return found
