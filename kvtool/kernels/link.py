"""Link compiled kernels into a shared library. load.py opens the library; kvtool/build/kernels.py builds it.

numba compiles each kernel to LLVM IR, as a function with a C signature. The IR is compiled to an object file.
The object file is linked with numba's allocator, because kernels call the allocator for local arrays.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtool.errors import LibraryError

if TYPE_CHECKING:
    from kvtool.kernels.kernel import Kernel

_ALLOCATOR = Path(__file__).with_name("allocator.cpp")


def link(kernels: Iterable[Kernel[..., Any]], path: Path) -> None:
    """Write the kernels to a shared library. Raises LibraryError if this machine cannot build it."""
    if sys.platform == "win32":
        raise LibraryError("kernels are not linked on Windows")
    compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    if not shutil.which(compiler[0]):
        raise LibraryError(f"there is no C++ compiler {compiler[0]} to link kernels with")

    import llvmlite.binding as llvm
    import numba

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly("")
    for kernel in kernels:
        for signature in kernel.signatures:
            # leave out a kernel that returns a tuple: only other kernels call it, so it needs no symbol
            if not signature.startswith("Tuple"):
                module.link_in(_with_c_signature(kernel, signature))
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, reloc="pic"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as name:
        folder = Path(name)
        (folder / "kernels.o").write_bytes(target.emit_object(module))
        command = [*compiler, "-O2", "-shared", "-fPIC", str(_ALLOCATOR), "kernels.o", "-o", path.name]
        command.append(f"-I{Path(numba.__file__).parent / 'core' / 'runtime'}")
        # leave Python's symbols undefined: the Python process that loads the library has them
        command += ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-lm"]
        done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", check=False)
        if done.returncode:
            errors = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
            raise LibraryError(f"{compiler[0]} does not link the kernels: {errors[-1]}")
        try:
            ctypes.CDLL(str(folder / path.name), os.RTLD_NOW)
        except OSError as error:
            raise LibraryError(f"the kernels, linked, do not load: {error}") from None
        (folder / path.name).replace(path)


def _with_c_signature(kernel: Kernel[..., Any], signature: str) -> Any:
    """Return an LLVM module that exports the kernel under its symbol.

    In the exported function, each array is a pointer followed by the sizes of the array.
    """
    import llvmlite.binding as llvm
    import numpy as np

    from kvtool.kernels.load import parse, symbol

    # import numba by name, so that its type stubs are not used: they lack functions that are called here
    numba: Any = import_module("numba")

    result, arguments = parse(signature)
    parameters: list[str] = []
    c_types: list[Any] = []
    values: list[str] = []
    for i, (dtype, n_dim) in enumerate(arguments):
        sizes = [f"n{i}_{j}" for j in range(n_dim)]
        parameters += [f"x{i}", *sizes]
        one = numba.from_dtype(dtype)
        c_types += [numba.types.CPointer(one), *[numba.int64] * n_dim] if n_dim else [one]
        values.append(f"carray(x{i}, ({', '.join(sizes)},))" if n_dim else f"x{i}")
    names: dict[str, Any] = {"carray": numba.carray, "kernel": kernel.compile()}
    # generate the function, because numba cannot compile a C function with *args
    exec(f"def entry({', '.join(parameters)}): return kernel({', '.join(values)})", names)
    c_result = numba.void if result == "void" else numba.from_dtype(np.dtype(result))
    entry = numba.cfunc(c_result(*c_types), error_model="numpy")(names["entry"])
    module = llvm.parse_assembly(entry.inspect_llvm())
    module.get_function(entry.native_name).name = symbol(kernel.name, signature)
    return module
