"""Load the patched llama.cpp from the package kvtool-llama, and give access to its functions."""

from __future__ import annotations

import ctypes
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.errors import LibraryError
from kvtool.system.paths import build_command

_CPU = 0
"""ggml's type number of a CPU."""


def _load() -> Any:
    """Import the bindings. Raises LibraryError if llama.cpp is missing, broken, or not patched."""
    try:
        bindings = import_module("kvtool_llama.llama_cpp")
    except (ImportError, OSError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "kvtool_llama":
            raise LibraryError(f"there is no llama.cpp yet; build it: {build_command()}") from None
        # ggml's CUDA library needs NVIDIA's driver, libcuda
        cuda = "libcuda." in str(error)
        how = "install NVIDIA's driver, or: kvtool build --cpu" if cuda else build_command()
        raise LibraryError(f"llama.cpp does not load ({error}); repair it with: {how}") from None
    if not hasattr(bindings._lib, "llama_kvtool_abi"):
        raise LibraryError(
            f"this llama.cpp was built without kvtool's patch; build the one that has it: {build_command()}"
        )
    return bindings


class Parts:
    """Group of libraries that works like a single library.

    This is for Windows, where a library does not export the functions of the libraries that it depends on.
    """

    def __init__(self, *parts: Any) -> None:
        self._parts = parts
        self._name = parts[0]._name

    def __getattr__(self, name: str) -> Any:
        for part in self._parts:
            if hasattr(part, name):
                return getattr(part, name)
        raise AttributeError(f"llama.cpp has no function {name}")


def _functions() -> Any:
    if sys.platform != "win32":
        return api._lib
    folder = Path(api._lib._name).parent
    return Parts(api._lib, *(ctypes.CDLL(str(folder / name)) for name in ("ggml.dll", "ggml-base.dll")))


if TYPE_CHECKING:
    import kvtool_llama.llama_cpp

    api = kvtool_llama.llama_cpp
else:
    api = _load()

lib = _functions()


def bind(name: str, result: type | None, *arguments: object) -> None:
    """Declare a function's types to ctypes."""
    function = getattr(lib, name)
    function.restype = result
    function.argtypes = list(arguments)


def library_path() -> Path:
    return Path(lib._name)


def load_parts() -> None:
    """Load ggml's backend for this CPU if it is a separate library. Raises LibraryError if no backend fits.

    A portable build has a library for each kind of CPU, in llama.cpp's folder. Without this call, ggml
    searches only Python's folder.
    """
    bind("ggml_backend_dev_by_type", ctypes.c_void_p, ctypes.c_int)
    if lib.ggml_backend_dev_by_type(_CPU):
        return
    bind("ggml_backend_load_all_from_path", None, ctypes.c_char_p)
    lib.ggml_backend_load_all_from_path(os.fsencode(library_path().parent))
    if not lib.ggml_backend_dev_by_type(_CPU):
        folder = library_path().parent
        raise LibraryError(f"no part of llama.cpp in {folder} runs here; repair it with: {build_command()}")


def upstream() -> str:
    """Return the version of llama-cpp-python that this llama.cpp comes from."""
    version: str = import_module("kvtool_llama").UPSTREAM
    return version
