"""Compiles every kernel into the disk cache: `python -m kvtool.warm`, so that no user waits for numba.

Standard library only until there is something to compile.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvtool.paths import kernel_dir


def stamp() -> Path:
    """The file that says: all kernels are compiled, for this Python and this numba."""
    try:
        numba = version("numba")
    except PackageNotFoundError:
        numba = "none"
    return kernel_dir() / f"compiled-{sys.implementation.cache_tag}-numba-{numba}"


def is_warm() -> bool:
    return stamp().is_file()


def warm() -> None:
    """Compiles the kernels of every module that has some, each for its signature."""
    if is_warm() or os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        return
    from kvtool import kernels, policies

    modules = ["kvtool.kernels", "kvtool.cells", *(f"kvtool.policies.{name}" for name in policies.names())]
    tty = sys.stderr.isatty()
    for n_done, module in enumerate(modules, start=1):
        if tty:
            sys.stderr.write(f"\rcompiling kernels (once): {n_done}/{len(modules)} ")
            sys.stderr.flush()
        elif n_done == 1:
            sys.stderr.write(f"compiling the kernels of {len(modules)} modules (once)\n")
        # all of them before one is compiled, which puts it into the place of others
        for kernel in list(kernels.of_module(import_module(module))):
            kernel.compile()
    if tty:
        sys.stderr.write("\n")
    kernel_dir().mkdir(parents=True, exist_ok=True)
    stamp().touch()


if __name__ == "__main__":
    warm()
