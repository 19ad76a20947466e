"""Checks of parameters, and of scores before they are passed to a kernel."""

from operator import index

import numpy as np


def check_kept(budget: int, slack: int, sinks: int = 0, window: int = 0, min_window: int = 0) -> None:
    """Raise ValueError unless sinks and window fit into the cells that an eviction leaves.

    An eviction leaves budget - slack cells. min_window: smallest window that works.
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
    if most < min_window:
        newest = f"{sinks} sinks, a window of {min_window}" if min_window else f"{sinks} sinks"
        raise ValueError(f"a budget of {budget} is too small for {newest} and {slack} slack")
    if not min_window <= window <= most:
        raise ValueError(
            f"window must be in {min_window}..{most} (the budget of {budget} less "
            f"{slack} slack and {sinks} sinks), got {window}"
        )


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


def checked_score(score: object, pos: np.ndarray) -> np.ndarray:
    """Return the score f32[row, n_kv or more], C-contiguous and writeable, as kernels need it.

    Raises TypeError or ValueError for another type or shape, and if a live cell is NaN. Kernels do not check
    their arguments, and with too few columns they would read out of bounds. pos: as in `View`.
    """
    n_row, n_kv = pos.shape
    if not isinstance(score, np.ndarray):
        raise TypeError(f"the score must be a NumPy array, got {type(score).__name__}")
    if score.dtype != np.float32:
        raise TypeError(f"the score must be of type float32, got {score.dtype}; convert it with astype")
    if score.ndim != 2 or score.shape[0] != n_row or score.shape[1] < n_kv:
        raise ValueError(f"the score must be of shape [{n_row}, {n_kv} or more], got {list(score.shape)}")
    live = score[:, :n_kv]
    # a NaN anywhere makes the maximum NaN, and finding the maximum is fast
    if live.size and np.isnan(live.max()) and len(nan := np.argwhere(np.isnan(live) & (pos >= 0))):
        raise ValueError("the score of row {}, cell {}, is not a number (NaN)".format(*nan[0]))
    return score if score.flags.carray else np.array(score, order="C")
