"""Which cell goes where after an eviction: the host's side of an edit."""

from __future__ import annotations

import numpy as np

from kvtool.kernels import kernel


def append(next_pos: int, next_rot: int, n: int, pos: np.ndarray, rot: np.ndarray, live: np.ndarray) -> None:
    """n new tokens at the end of every row: pos and rot i32[row, n_cell] from next_pos and next_rot on.

    live i32[row], how many cells of each row live, grows by n.
    """
    new = np.arange(n)
    row, cell = np.arange(len(live))[:, None], live[:, None] + new
    pos[row, cell] = next_pos + new
    rot[row, cell] = next_rot + new
    live += n


@kernel("void(b1[:,::1], i4[::1], i4[:,::1])")
def fill_holes(keep: np.ndarray, n_keep: np.ndarray, source: np.ndarray) -> None:
    """The cell that each of a row's first n_keep cells takes its content from: as few moves as evictions.

    keep b1[row, n], n_keep i32[row] of them true in each row -> source i32[row, most]: a kept cell below
    n_keep stays; the hole of an evicted one takes a kept cell from the tail, both from the left. Cells of a
    row from its n_keep on have themselves.
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


@kernel("void(i4[:,::1], i4[:,::1])")
def rank_by_pos(pos: np.ndarray, rank: np.ndarray) -> None:
    """How many tokens of its row are older than each cell's: pos i32[row, n] -> rank i32[row, n]."""
    n_row, n = pos.shape
    for row in range(n_row):
        order = np.argsort(pos[row], kind="mergesort")
        for i in range(n):
            rank[row, order[i]] = i
