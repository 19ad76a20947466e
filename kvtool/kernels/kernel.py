"""Decorator for kernels: functions over arrays that numba compiles."""

import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Generic, ParamSpec, TypeVar

from kvtool.kernels import load
from kvtool.system.files import can_write

P = ParamSpec("P")

R = TypeVar("R")


class Kernel(Generic[P, R]):
    """Compiled function. The first call gets it from the shared library, or else lets numba compile it."""

    def __init__(self, function: Callable[P, R], signatures: list[str], any_order: bool) -> None:
        self.name = f"{function.__module__}.{function.__qualname__}"
        self.signatures = signatures
        self._function = function
        self._any_order = any_order
        self._called: Callable[P, R] | None = None
        self._compiled: Callable[P, R] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        called = self._called
        return (self.prepare() if called is None else called)(*args, **kwargs)

    def prepare(self) -> Callable[P, R]:
        """Load or compile the function now instead of at its first call, and return it."""
        if self._called is None:
            self._called = load.find(self.name, self.signatures)
        if self._called is None:
            try:
                self._called = self.compile()
            except OSError:
                # the disk has no room for the compiled function
                self._called = self.compile(stores=False)
        return self._called

    def compile(self, *, stores: bool = True) -> Callable[P, R]:
        """Compile the function with numba, or load it from numba's disk cache. Raises OSError.

        stores: False to leave the disk cache alone. It is also left alone if kvtool's cache folder cannot be
        written.
        """
        if self._compiled is None:
            # the kernels that this function calls must be compiled before numba compiles it
            names = self._function.__globals__
            for name in self._function.__code__.co_names:
                if isinstance(called := names.get(name), Kernel):
                    names[name] = called.compile(stores=stores)
            self._compiled = _numba().njit(
                self.signatures,
                # if the folder cannot be written, numba would write next to the sources, or fail
                cache=stores and can_write(load.LIBRARY.parent),
                nogil=True,
                error_model="numpy",
                fastmath={"reassoc"} if self._any_order else False,
            )(self._function)
        return self._compiled


def _numba() -> ModuleType:
    folder = str(load.LIBRARY.parent)
    os.environ["NUMBA_CACHE_DIR"] = folder
    import numba

    # numba reads the environment only when it is imported. It may have been imported before, so also set the
    # folder here. Use `vars`, because mypy does not know CACHE_DIR
    vars(numba.config)["CACHE_DIR"] = folder
    return numba


def kernel(
    signature: str | list[str], *, any_order: bool = False
) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Make a function a kernel with one or several signatures.

    Output arrays come last. The caller checks arguments; a kernel does not.

    signature: in numba's notation. "i4[:,::1]" is a C-contiguous matrix of int32. any_order: True if sums of
    floats may be reordered. Use it only for whole numbers: their sums are exact in any order.
    """
    signatures = [signature] if isinstance(signature, str) else signature
    return lambda function: Kernel(function, signatures, any_order)


def of_module(module: ModuleType) -> Iterator[Kernel[..., object]]:
    """List the kernels that a module defines or uses."""
    return (value for value in vars(module).values() if isinstance(value, Kernel))
