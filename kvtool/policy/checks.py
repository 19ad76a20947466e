"""Checks of parameters, and of arrays before they are passed to a kernel."""

from operator import index
from typing import Any

import numpy as np


def check_kept(budget: int, slack: int, sinks: int = 0, window: int = 0, least: int = 0) -> None:
    """Raise ValueError unless sinks and window fit into the cells that an eviction leaves.

    An eviction leaves budget - slack cells. least: smallest window that works.
    """
    for name, value in (("budget", budget), ("slack", slack), ("sinks", sinks), ("window", window)):
        check_whole(name, value, ValueError)
    if budget < 2:
        raise ValueError(f"a budget of {budget} is too small")
    if not 1 <= slack < budget:
        raise ValueError(f"slack must be in 1..{budget - 1} (below the budget), got {slack}")
    if sinks < 0:
        raise ValueError(f"sinks must not be negative, got {sinks}")
    most = budget - slack - sinks
    if most < least:
        newest = f"{sinks} sinks, a window of {least}" if least else f"{sinks} sinks"
        raise ValueError(f"a budget of {budget} is too small for {newest} and {slack} slack")
    if not least <= window <= most:
        raise ValueError(
            f"window must be in {least}..{most} (the budget of {budget} less "
            f"{slack} slack and {sinks} sinks), got {window}"
        )


def check_numbers(name: str, array: np.ndarray, pos: np.ndarray) -> None:
    """Raise ValueError if the array f32[row, cell] is NaN for a live cell. pos: as in `View`."""
    # a NaN anywhere makes the maximum NaN, and finding the maximum is fast
    if array.size and np.isnan(array.max()) and np.isnan(array[pos >= 0]).any():
        raise ValueError(f"{name} has a value that is not a number")


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError unless the value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_whole(name: str, value: object, error: type[Exception] = TypeError) -> None:
    """Raise the given type of error unless the value is an integer."""
    if type(value) is int:
        return
    try:
        index(value)  # type: ignore[arg-type]
    except TypeError:
        raise error(f"{name} must be a whole number, got {value!r}") from None


def check_cells(name: str, array: object, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raise TypeError or ValueError unless a kernel can use the array.

    The array must have this type and shape, and be C-contiguous and writeable. It may have more columns.
    Kernels do not check their arguments, and with too few columns they would read out of bounds.
    """
    n_row, n_cell = shape
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array, got {type(array).__name__}")
    if array.dtype != dtype:
        raise TypeError(f"{name} must be of type {dtype}, got {array.dtype}; convert it with astype")
    if array.ndim != 2 or array.shape[0] != n_row or array.shape[1] < n_cell:
        raise ValueError(f"{name} must be of shape [{n_row}, {n_cell} or more], got {list(array.shape)}")
    if not array.flags.carray:
        raise ValueError(f"{name} must be C-contiguous and writeable; copy it with np.array")
