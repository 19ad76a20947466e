"""Compile all kernels, so that users do not wait for numba: `python -m kvtool.build.kernels`.

Each kernel is written to numba's disk cache. In addition, all kernels are linked into one shared library,
which kvtool/kernels/load.py loads. Third-party packages are imported only if there is something to compile.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvtool.build.process import Progress
from kvtool.errors import LibraryError
from kvtool.system.paths import kernel_dir, kernel_files, kernel_library


def stamp() -> Path:
    """Return the path of a file that exists once all kernels are compiled for this Python and numba."""
    try:
        numba = version("numba")
    except PackageNotFoundError:
        numba = "none"
    return kernel_dir() / f"compiled-{sys.implementation.cache_tag}-numba-{numba}"


def are_compiled() -> bool:
    """True if numba's disk cache has every kernel."""
    return stamp().is_file()


def are_linked() -> bool:
    return kernel_library().is_file()


def modules() -> list[str]:
    return [f"kvtool.{path.parent.name}.{path.stem}" for path in kernel_files()]


def compile_all() -> None:
    """Compile and link the kernels of all modules, unless this is already done."""
    if (are_compiled() and are_linked()) or os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        return
    from kvtool.kernels.kernel import of_module
    from kvtool.kernels.link import link

    kernels = {kernel.name: kernel for name in modules() for kernel in of_module(import_module(name))}
    progress = Progress(f"compiling {len(kernels)} kernels (once)")
    for n_done, kernel in enumerate(kernels.values()):
        progress.show(n_done, len(kernels))
        kernel.compile()
    progress.show(len(kernels), len(kernels))
    try:
        link(kernels.values(), kernel_library())
    except LibraryError as error:
        sys.stderr.write(f"kvtool: {error}; kernels run from numba, which takes 100 MiB more memory\n")
    progress.close()
    stamp().touch()


if __name__ == "__main__":
    compile_all()
