"""The host's side of the cells: what they hold, and which goes where after an eviction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtool.kernels.kernel import kernel


@dataclass(frozen=True, slots=True)
class Cells:
    """What each row holds of the stream, in arrays of their own; in each row the oldest token comes first.

    n_past: tokens of the stream so far. layer, head i32[row]: the layer and the KV head in it of each row.
    live i32[row]: how many tokens the row holds. pos i32[row, n_kv]: their positions in the stream, rising,
    and -1 behind them in a row that holds fewer than others. rot i32[row, n_kv]: the positions that their
    keys are rotated to, likewise. cell i32[row, n_kv]: where they lie, for what else is known of a cell:
    np.take_along_axis(engine.state[0], cells.cell, axis=1).
    """

    n_past: int
    layer: np.ndarray
    head: np.ndarray
    live: np.ndarray
    pos: np.ndarray
    rot: np.ndarray
    cell: np.ndarray

    def held(self) -> np.ndarray:
        """b1[row, n_past]: whether the row holds the token."""
        held = np.zeros((len(self.live), self.n_past), np.bool_)
        row, column = np.nonzero(self.pos >= 0)
        held[row, self.pos[row, column]] = True
        return held

    def share(self) -> np.ndarray:
        """f64[n_past]: the share of the rows that hold each token."""
        share: np.ndarray = np.bincount(self.pos[self.pos >= 0], minlength=self.n_past) / len(self.live)
        return share


def append(next_pos: int, next_rot: int, n: int, pos: np.ndarray, rot: np.ndarray, live: np.ndarray) -> None:
    """n new tokens at the end of every row: pos and rot i32[row, n_cell] from next_pos and next_rot on.

    live i32[row], how many cells of each row live, grows by n.
    """
    new = np.arange(n)
    if (live == live[0]).all():
        # a slice is written several times as fast
        where: Any = slice(None), slice(live[0], live[0] + n)
    else:
        where = np.arange(len(live))[:, None], live[:, None] + new
    pos[where] = next_pos + new
    rot[where] = next_rot + new
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
