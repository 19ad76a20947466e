"""CMake flags: ours, the user's, and those of the last build."""

from __future__ import annotations

import os
import re
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
"""The flags of every build: the library alone, with RPC."""

PORTABLE = ("-DGGML_BACKEND_DL=ON", "-DGGML_CPU_ALL_VARIANTS=ON", "-DGGML_NATIVE=OFF")
"""For one wheel that serves every CPU: a library for each kind of CPU, chosen when llama.cpp starts."""

DEVICES = {"cuda": "GGML_CUDA", "metal": "GGML_METAL", "vulkan": "GGML_VULKAN"}
"""The devices that a build can support besides the CPU, and their CMake options."""


def asked_cmake_args() -> str:
    """$CMAKE_ARGS if it is set, even if empty; otherwise the flags of this environment's last build.

    So `make chat` keeps the GPU after `make chat CMAKE_ARGS=-DGGML_CUDA=on`.
    """
    if (asked := os.environ.get("CMAKE_ARGS")) is not None:
        return asked.strip()
    try:
        return _memory_file().read_text().strip()
    except OSError:
        return ""


def remember(cmake_args: str) -> None:
    """Make these the flags of this environment's last build. Raises OSError."""
    files.write(_memory_file(), f"{cmake_args}\n".encode())


def device_args(devices: Collection[str]) -> str:
    """$CMAKE_ARGS plus the flags for these of DEVICES; with none, the flags for the CPU alone.

    The flags of the last build do not count. Raises UsageError if $CMAKE_ARGS contradicts.
    """
    given = os.environ.get("CMAKE_ARGS", "").strip()
    asked = [device for device in DEVICES if asks_for(given, device)]
    wanted = [f"-D{DEVICES[device]}=on" for device in devices if device not in asked]
    if not devices:
        if asked:
            raise UsageError(
                f"$CMAKE_ARGS asks for {asked[0]} ({given}); unset it to build for the CPU alone"
            )
        # on a Mac, Metal is on by default
        wanted = ["-DGGML_METAL=off"] if sys.platform == "darwin" else []
    return " ".join([given, *wanted]).strip()


def asks_for(cmake_args: str, device: str) -> bool:
    """Whether the flags turn on this one of DEVICES. The last mention counts, as in CMake."""
    values = re.findall(rf"-D{DEVICES[device]}(?::\w+)?=(\S*)", cmake_args)
    return bool(values) and values[-1].lower() not in ("", "0", "off", "false", "no", "n")


def _memory_file() -> Path:
    return Path(sys.prefix) / "kvtool-cmake-args"
