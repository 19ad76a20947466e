"""Load compiled kernels from the shared library. A process then needs no numba, which takes 100 MiB.

link.py builds the library. If there is no library, numba compiles each kernel at its first call.
"""

import ctypes
import os
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from kvtool.system.paths import kernel_library

# find the library at import, because the environment may change later
LIBRARY = kernel_library()

_C_TYPES = {
    np.dtype(name): getattr(ctypes, f"c_{c_type}")
    for name, c_type in (("b1", "bool"), ("i4", "int32"), ("i8", "int64"), ("f4", "float"), ("f8", "double"))
}

# this type passes an array's memory to ctypes three times as fast as numpy.ndarray.ctypes
_Memory = ctypes.c_char * 0


Arguments = list[tuple[np.dtype[Any], int]]
"""Type and number of axes of each argument."""


def parse(signature: str) -> tuple[str, Arguments]:
    """Parse "i8(i4[:,::1], f8)" to "i8", [(int32, 2), (float64, 0)]."""
    result, _, arguments = signature.rpartition("(")
    return result, [
        (np.dtype(name), dims.count(",") + 1 if dims else 0)
        for name, dims in re.findall(r"(\w\d)(\[[:,1]+\])?", arguments)
    ]


@cache
def _opened() -> ctypes.CDLL | None:
    if os.environ.get("NUMBA_DISABLE_JIT", "0") != "0":
        return None
    try:
        return ctypes.CDLL(str(LIBRARY))
    except OSError:
        return None


def symbol(name: str, signature: str) -> str:
    return f"{name} {signature}"


def _flat(args: tuple[Any, ...], wanted: Arguments) -> list[Any] | None:
    if len(args) != len(wanted):
        return None
    flat: list[Any] = []
    for arg, (dtype, n_dim) in zip(args, wanted, strict=True):
        if n_dim == 0:
            flat.append(arg)
        elif arg.dtype != dtype or arg.ndim != n_dim or not arg.flags.carray:
            return None
        else:
            flat.append(_Memory.from_buffer(arg))
            flat += arg.shape
    return flat


def find(name: str, signatures: list[str]) -> Callable[..., Any] | None:
    """Find a kernel in the library. Returns None if there is no library, or if it lacks the kernel.

    The returned function raises TypeError for arguments that match no signature.
    """
    opened = _opened()
    if opened is None:
        return None
    forms: list[tuple[Callable[..., Any], Arguments]] = []
    for signature in signatures:
        try:
            function = opened[symbol(name, signature)]
        except AttributeError:
            return None
        result, arguments = parse(signature)
        function.restype = None if result == "void" else _C_TYPES[np.dtype(result)]
        c_types: list[Any] = []
        for dtype, n_dim in arguments:
            c_types += [ctypes.c_void_p, *[ctypes.c_int64] * n_dim] if n_dim else [_C_TYPES[dtype]]
        function.argtypes = c_types
        forms.append((function, arguments))

    def call(*args: Any) -> Any:
        for function, wanted in forms:
            if (flat := _flat(args, wanted)) is not None:
                return function(*flat)
        given = ", ".join(f"{arg.dtype}{arg.shape}" if hasattr(arg, "shape") else repr(arg) for arg in args)
        raise TypeError(f"{name} does not take {given}")

    return call
