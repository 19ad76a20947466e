"""Results of a policy."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Merge:
    """New values of kept cells: V[row, dst] becomes the sum of weight * V[row, src] over all its terms.

    Terms with the same (row, dst) are adjacent. All sources are read before any value is written. Keys do not
    change. Indices of cells are the same as in the view. Include dst itself as a source if its value should
    stay.

    Attributes
    ----------
    row, dst, src
        i32[n]: row, destination cell and source cell of each term.
    weight
        f32[n]: factor of each term.
    """

    row: np.ndarray
    dst: np.ndarray
    src: np.ndarray
    weight: np.ndarray


@dataclass(frozen=True, slots=True)
class Plan:
    """The cells to keep, and the values to merge.

    Attributes
    ----------
    keep
        b1[row, n_kv]: True for the cells to keep. Unless the policy is ragged, every row keeps the same
        number.
    merge
        None if no value changes.
    """

    keep: np.ndarray
    merge: Merge | None = None


def true_cells(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the same as np.nonzero(mask), for mask b1[row, cell], five times as fast."""
    row, cell = np.divmod(np.flatnonzero(mask), mask.shape[1])
    return row, cell
