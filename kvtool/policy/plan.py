"""What a policy answers: which cells stay, and which values merge."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Merge:
    """New values for kept cells: V[row, dst] is the sum of weight * V[row, src] over the terms of (row, dst).

    The terms of one (row, dst) are neighbours. All sources are read before any value is written. Keys do not
    change. Cells are numbered as in the view.

    Attributes
    ----------
    row, dst, src
        i32[n]: the row of each term, the cell that takes the value, the cell that gives it.
    weight
        f32[n]: the factor of each term.
    """

    row: np.ndarray
    dst: np.ndarray
    src: np.ndarray
    weight: np.ndarray


@dataclass(frozen=True, slots=True)
class Plan:
    """What a policy answers.

    Attributes
    ----------
    keep
        b1[row, n_kv]: True for the cells that stay, the same number in every row unless the policy is ragged.
    merge
        New values for kept cells; None: all values stay as they are.
    """

    keep: np.ndarray
    merge: Merge | None = None


def true_cells(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row and cell of each True of b1[row, cell], row by row: np.nonzero in a fifth of its time."""
    row, cell = np.divmod(np.flatnonzero(mask), mask.shape[1])
    return row, cell
