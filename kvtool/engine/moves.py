"""Moves of cells: which cells fill the holes of evicted cells, and how far their keys are rotated."""

from __future__ import annotations

import numpy as np

from kvtool.engine.rows import Rows
from kvtool.kernels.kernel import kernel

_LAST = np.iinfo(np.int32).max
"""Position that sorts empty cells after all tokens."""


def deltas(rows: Rows, source: np.ndarray, n_keep: np.ndarray, next_rot: int) -> np.ndarray:
    """Return by how many positions each kept key must be rotated to close all gaps: i32[row, most].

    source: i32[row, most], the result of `fill_holes`. n_keep: i32[row], number of cells that each row keeps;
    `most` is the maximum. next_rot: `Rows.next_rot` after the rotation.
    """
    pos = np.take_along_axis(rows.pos, source, axis=1)
    dead = np.arange(source.shape[1]) >= n_keep[:, None] if rows.ragged else None
    if dead is not None:
        pos[dead] = _LAST
    # rank of each cell by position: 0 for the oldest token
    rank = np.empty_like(pos)
    np.put_along_axis(rank, np.argsort(pos, axis=1), np.arange(pos.shape[1], dtype=np.int32)[None], axis=1)
    delta: np.ndarray = next_rot - n_keep[:, None] + rank - np.take_along_axis(rows.rot, source, axis=1)
    if dead is not None:
        delta[dead] = 0
    return delta


def moves_of(source: np.ndarray, delta: np.ndarray | None) -> np.ndarray:
    """Return i32[n, 4]: the moves (row, dst, src, delta) of all cells whose content or key changes.

    source: i32[row, most], the result of `fill_holes`. delta: i32[row, most], the result of `deltas`; None if
    no key is rotated.
    """
    most = source.shape[1]
    moved = source != np.arange(most, dtype=np.int32)
    if delta is not None:
        moved |= delta != 0
    where = np.flatnonzero(moved)
    moves = np.zeros((len(where), 4), np.int32)
    moves[:, 0], moves[:, 1] = np.divmod(where, most)
    moves[:, 2] = source.ravel()[where]
    if delta is not None:
        moves[:, 3] = delta.ravel()[where]
    return moves


@kernel("void(b1[:,::1], i4[::1], i4[:,::1])")
def fill_holes(keep, n_keep, source):
    """Choose the cell whose content moves to each hole.

    In each row, a hole is an evicted cell among the first n_keep cells. The tail is the cells from n_keep on.
    The first hole gets the first kept cell of the tail, the second hole the second, and so on.

    keep b1[row, n], n_keep i32[row] -> source i32[row, most]: for each hole, the index of the cell whose
    content moves there. All other cells have their own index. `most` is the maximum of n_keep.
    """
    n_row, most = source.shape
    for row in range(n_row):
        tail = n_keep[row]
        for cell in range(most):
            if cell >= n_keep[row] or keep[row, cell]:
                source[row, cell] = cell
                continue
            while not keep[row, tail]:
                tail += 1
            source[row, cell] = tail
            tail += 1
