"""Check the requirements of a build: Python, compilers, SDKs, pip, and a writable environment."""

from __future__ import annotations

import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from kvtool.build import pack
from kvtool.build.flags import asks_for
from kvtool.errors import LibraryError


def check_tools(cmake_args: str = "") -> None:
    """Raise LibraryError if Python is too old or a compiler is missing. The error says how to install it."""
    if sys.version_info < (3, 10):  # noqa: UP036  (runs before pip could check requires-python)
        raise LibraryError(
            f"kvtool needs Python 3.10 or newer, this is {platform.python_version()}; "
            "name another: make setup PYTHON=python3.12"
        )
    if asks_for(cmake_args, "metal") and sys.platform != "darwin":
        raise LibraryError("Metal exists on Macs only; build with --cuda, --vulkan or --cpu")
    for device, check in (("cuda", _check_cuda), ("vulkan", _check_vulkan)):
        if asks_for(cmake_args, device):
            check(cmake_args)
    if sys.platform == "win32":
        return
    for variable, usual in (("CXX", ("c++", "g++", "clang++")), ("CC", ("cc", "gcc", "clang"))):
        if f"-DCMAKE_{'CXX' if variable == 'CXX' else 'C'}_COMPILER" in cmake_args:
            continue
        if not any(map(_runs, [os.environ[variable]] if os.environ.get(variable) else usual)):
            # suggest a prebuilt wheel only if there are no flags, because it supports only the CPU
            wheels = f", or a folder with a {pack.PACKAGE}-*.whl in KVTOOL_WHEELS" if not cmake_args else ""
            raise LibraryError(
                f"no working {'C++' if variable == 'CXX' else 'C'} compiler; install one "
                "(Debian, Ubuntu: sudo apt install g++; Fedora: sudo dnf install gcc-c++; "
                f"macOS: xcode-select --install) or name it in {variable}{wheels}"
            )


def check_pip() -> None:
    """Raise LibraryError if there is no pip, which builds and installs the wheel."""
    if importlib.util.find_spec("pip") is None:
        raise LibraryError(
            f"{sys.prefix} has no pip; add it: {sys.executable} -m ensurepip (or: uv pip install pip)"
        )


def check_environment() -> None:
    """Raise LibraryError if packages cannot be installed into the running environment."""
    site = sysconfig.get_path("purelib")
    managed = Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"
    if sys.prefix == sys.base_prefix and managed.is_file():
        why = f"the system manages {site}"
    elif not all(os.access(folder, os.W_OK) for folder in (site, sys.prefix)):
        why = f"{site} is not writable"
    else:
        return
    raise LibraryError(
        f"{why}; install kvtool into a virtual environment (python3 -m venv FOLDER) and build from there"
    )


def _runs(program: str) -> bool:
    try:
        words = shlex.split(program)
    except ValueError:
        # a variable that names the program has an unclosed quote
        return False
    if not words or not shutil.which(words[0]):
        return False
    # a compiler that exists may not work: on a Mac without the command line tools, c++ only prints a hint
    return subprocess.run([*words, "--version"], capture_output=True, check=False).returncode == 0


def _check_cuda(cmake_args: str) -> None:
    if "-DCMAKE_CUDA_COMPILER" in cmake_args or _runs(os.environ.get("CUDACXX") or "nvcc"):
        return
    usual = Path(os.environ.get("CUDA_PATH", "/usr/local/cuda")) / "bin" / "nvcc"
    if usual.is_file():
        raise LibraryError(f"CMake does not look for nvcc in {usual.parent}; name it: CUDACXX={usual}")
    raise LibraryError(
        "no nvcc, the CUDA compiler; install NVIDIA's CUDA toolkit, or name its nvcc in CUDACXX"
    )


def _check_vulkan(cmake_args: str) -> None:
    sdk = os.environ.get("VULKAN_SDK")
    paths = os.pathsep.join([os.environ.get("PATH", ""), *([str(Path(sdk) / "bin")] if sdk else [])])
    if "-DVulkan_GLSLC_EXECUTABLE" not in cmake_args and not shutil.which("glslc", path=paths):
        raise LibraryError(
            "no glslc, the Vulkan shader compiler; install the Vulkan SDK (Debian, Ubuntu: sudo apt install "
            "glslc libvulkan-dev spirv-headers) or name its folder in VULKAN_SDK"
        )
