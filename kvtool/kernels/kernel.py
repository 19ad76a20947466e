"""The numba decorator."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Generic, ParamSpec, TypeVar

from kvtool.kernels import ahead

P = ParamSpec("P")

R = TypeVar("R")


class Kernel(Generic[P, R]):
    """A function: from the library of kernels, or compiled by numba when it is first called."""

    def __init__(self, function: Callable[P, R], signatures: list[str], any_order: bool) -> None:
        self.name = f"{function.__module__}.{function.__qualname__}"
        self.signatures = signatures
        self._function = function
        self._any_order = any_order
        self._called: Callable[P, R] | None = None
        self._compiled: Callable[P, R] | None = None

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._called is None:
            self._called = ahead.find(self.name, self.signatures) or self.compile()
        return self._called(*args, **kwargs)

    def compile(self) -> Callable[P, R]:
        """What numba makes of it, from the disk cache when it is there."""
        if self._compiled is None:
            # of a kernel that it calls numba knows what only once it is compiled
            names = self._function.__globals__
            for name in self._function.__code__.co_names:
                if isinstance(called := names.get(name), Kernel):
                    names[name] = called.compile()
            self._compiled = _numba().njit(
                self.signatures,
                cache=True,
                nogil=True,
                error_model="numpy",
                fastmath={"reassoc"} if self._any_order else False,
            )(self._function)
        return self._compiled


def _numba() -> ModuleType:
    folder = str(ahead.LIBRARY.parent)
    os.environ["NUMBA_CACHE_DIR"] = folder
    import numba

    # where numba was imported before, and by its dictionary because numba makes its settings at run time
    vars(numba.config)["CACHE_DIR"] = folder
    return numba


def kernel(
    signature: str | list[str], *, any_order: bool = False
) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """To be compiled for one signature, or for each of a list.

    "i4[:,::1]" is a C-contiguous matrix of int32. Outputs come last; nothing is checked inside. any_order:
    sums of floats may be taken in any order; for whole numbers, whose sums are the same in each.
    """
    signatures = [signature] if isinstance(signature, str) else signature
    return lambda function: Kernel(function, signatures, any_order)


def of_module(module: ModuleType) -> Iterator[Kernel[..., object]]:
    """The kernels that a module defines or uses."""
    return (value for value in vars(module).values() if isinstance(value, Kernel))
