"""Flags for CMake: from kvtool, from the user, and from the last build."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Collection
from pathlib import Path

from kvtool.errors import UsageError
from kvtool.system import files

FLAGS = (
    "-DLLAVA_BUILD=OFF",
    *(f"-DLLAMA_BUILD_{part}=OFF" for part in ("TESTS", "EXAMPLES", "TOOLS", "SERVER", "APP")),
    "-DLLAMA_CURL=OFF",
    "-DGGML_RPC=ON",
)
"""Flags of every build: llama.cpp's libraries with the RPC backend, and no programs."""

PORTABLE = ("-DGGML_BACKEND_DL=ON", "-DGGML_CPU_ALL_VARIANTS=ON", "-DGGML_NATIVE=OFF")
"""Flags of a wheel for every CPU.

Such a wheel has a library for each kind of CPU. llama.cpp chooses one of the libraries when it starts.
"""

DEVICES = {"cuda": "GGML_CUDA", "metal": "GGML_METAL", "vulkan": "GGML_VULKAN"}
"""Devices that a build can support in addition to the CPU, each with its CMake option."""


def asked_cmake_args() -> str:
    """Return $CMAKE_ARGS, or the flags of this environment's last build if the variable is not set.

    For example, after `make chat CMAKE_ARGS=-DGGML_CUDA=on`, a plain `make chat` also uses the GPU. If the
    variable is empty, there are no flags. Raises UsageError if the variable has an unclosed quote.
    """
    if "CMAKE_ARGS" in os.environ:
        return _given()
    try:
        return _memory_file().read_text().strip()
    except OSError:
        return ""


def remember(cmake_args: str) -> None:
    """Store the flags of this environment's last build. Raises OSError."""
    files.write(_memory_file(), f"{cmake_args}\n".encode())


def device_args(devices: Collection[str]) -> str:
    """Return $CMAKE_ARGS and the flags for `devices`, which are keys of DEVICES.

    The flags of the last build are ignored, even if $CMAKE_ARGS is not set. If `devices` is empty, the build
    supports only the CPU, and UsageError is raised if $CMAKE_ARGS asks for a device. UsageError is also
    raised if $CMAKE_ARGS has an unclosed quote.
    """
    given = _given()
    requested = [device for device in DEVICES if asks_for(given, device)]
    wanted = [f"-D{DEVICES[device]}=on" for device in devices if device not in requested]
    if not devices:
        if requested:
            raise UsageError(
                f"$CMAKE_ARGS asks for {requested[0]} ({given}); unset it to build for the CPU alone"
            )
        # on a Mac, Metal is on by default
        wanted = ["-DGGML_METAL=off"] if sys.platform == "darwin" else []
    return " ".join([given, *wanted]).strip()


def asks_for(cmake_args: str, device: str) -> bool:
    """True if the flags enable a device of DEVICES. If flags contradict, the last decides, as in CMake."""
    values = re.findall(rf"-D{DEVICES[device]}(?::\w+)?=(\S*)", cmake_args)
    return bool(values) and values[-1].lower() not in ("", "0", "off", "false", "no", "n")


def _given() -> str:
    """Return $CMAKE_ARGS, or "". Raises UsageError if it has an unclosed quote."""
    cmake_args = os.environ.get("CMAKE_ARGS", "").strip()
    try:
        shlex.split(cmake_args)
    except ValueError as error:
        raise UsageError(f"$CMAKE_ARGS is not a list of flags ({error}), got {cmake_args!r}") from None
    return cmake_args


def _memory_file() -> Path:
    return Path(sys.prefix) / "kvtool-cmake-args"
