"""The tokens that each row holds, oldest first: a copy of the table of rows for callers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtool.engine.rows import Rows


@dataclass(frozen=True, slots=True)
class Cells:
    """Copies of the tables of `Rows`; in each row the oldest token comes first.

    Attributes
    ----------
    layer, head
        i32[row]: the layer of each row, and its KV head within the layer.
    live
        i32[row]: number of tokens that the row holds.
    pos
        i32[row, n_kv]: positions in the stream, ascending; -1 at the end of a row that holds fewer tokens.
    rot
        i32[row, n_kv]: positions that the tokens' keys are rotated to; -1 where `pos` is -1.
    cell
        i32[row, n_kv]: the cell of each token. Use it to index arrays [row, cell], such as the policy's
        state: np.take_along_axis(engine.state[0], cells.cell, axis=1).
    """

    n_past: int
    layer: np.ndarray
    head: np.ndarray
    live: np.ndarray
    pos: np.ndarray
    rot: np.ndarray
    cell: np.ndarray

    @classmethod
    def of(cls, rows: Rows) -> Cells:
        """Copy the table of these rows."""
        live, layer = rows.is_live(), rows.layer
        pos = np.where(live, rows.pos[:, : rows.n_kv], np.iinfo(np.int32).max)
        # the sort need not be stable: tokens of a row have different positions, and the order of empty cells
        # does not matter
        cell = np.argsort(pos, axis=1)
        return cls(
            n_past=rows.n_past,
            layer=layer.copy(),
            head=(np.arange(len(layer)) - np.searchsorted(layer, layer)).astype(np.int32),
            live=rows.live.copy(),
            pos=np.where(live, np.take_along_axis(pos, cell, axis=1), -1),
            rot=np.where(live, np.take_along_axis(rows.rot, cell, axis=1), -1),
            cell=cell.astype(np.int32),
        )

    def held(self) -> np.ndarray:
        """b1[row, n_past]: True if the row holds the token."""
        held = np.zeros((len(self.live), self.n_past), np.bool_)
        row, column = np.nonzero(self.pos >= 0)
        held[row, self.pos[row, column]] = True
        return held

    def share(self) -> np.ndarray:
        """f64[n_past]: for each token, the share of the rows that hold it."""
        share: np.ndarray = np.bincount(self.pos[self.pos >= 0], minlength=self.n_past) / len(self.live)
        return share
