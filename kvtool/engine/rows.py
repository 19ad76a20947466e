"""Table of the rows: the token in each cell, and the position that its key is rotated to."""

from __future__ import annotations

import numpy as np


class Rows:
    """Tokens in the rows of a cache, in a table on the host.

    The cells 0 .. live[row] - 1 of a row hold tokens, in any order. llama.cpp's own table does not record
    which token a cell holds. Callers may read the arrays, but must change them through the methods.

    Attributes
    ----------
    layer
        i32[row]: the layer of each row. Rows of one layer are neighbours.
    ragged
        True if rows may hold different numbers of tokens.
    n_past
        Number of tokens of the stream so far, and position of the next token. All times in the engine are
        values of `n_past`.
    next_rot
        Position that the next token's key is rotated to.
    n_kv
        Number of live cells of a row; if rows are ragged, of the longest row.
    pos, rot
        i32[row, n_cell]: the position in the stream of each live cell's token, and the position that the
        cell's key is rotated to. The values of other cells have no meaning.
    """

    pos: np.ndarray
    rot: np.ndarray

    def __init__(self, layer: np.ndarray, n_cell: int, *, ragged: bool) -> None:
        self.layer = layer
        self.ragged = ragged
        self._first_rows = np.flatnonzero(np.diff(layer, prepend=-1))
        self._row = np.arange(len(layer))[:, None]
        self.clear(n_cell)

    def clear(self, n_cell: int) -> None:
        """Empty all rows, and resize each to n_cell cells."""
        n_row = len(self.layer)
        self.n_past = self.next_rot = self.n_kv = 0
        self._live = np.zeros(n_row, np.int32)
        self.pos, self.rot = np.zeros((n_row, n_cell), np.int32), np.zeros((n_row, n_cell), np.int32)
        self._write_ahead()

    @property
    def live(self) -> np.ndarray:
        """i32[row]: number of live cells of each row."""
        # Rows that are not ragged all have n_kv live cells. For them `append` does not update `_live`, which
        # would take 40 us right after a decode
        return self._live if self.ragged else np.full(len(self.layer), self.n_kv, np.int32)

    def append(self, n: int) -> None:
        """Append the next n tokens of the stream to every row."""
        if self.ragged:
            new = np.arange(n)
            where = self._row, self._live[:, None] + new
            self.pos[where], self.rot[where] = self.n_past + new, self.next_rot + new
            self._live += n
        self.n_kv += n
        self.n_past += n
        self.next_rot += n

    def drop(self, n: int) -> None:
        """Undo `append`: remove the newest n tokens."""
        if self.ragged:
            self._live -= n
        self.n_kv -= n
        self.n_past -= n
        self.next_rot -= n

    def rotate_from(self, next_rot: int) -> None:
        """Set the positions that the keys of the next tokens are rotated to: next_rot, next_rot + 1, ..."""
        self.next_rot = next_rot
        self._write_ahead()

    def put(self, live: np.ndarray, pos: np.ndarray, rot: np.ndarray) -> None:
        """Set the number of live cells, and the positions and rotations of the first n_kv cells.

        Set `n_past`, `n_kv` and `next_rot` first. live: i32[row]. pos, rot: i32[row, n_kv].
        """
        self._live = live.copy()
        self.pos[:, : self.n_kv], self.rot[:, : self.n_kv] = pos, rot
        self._write_ahead()

    def resize(self, n_cell: int) -> None:
        """Resize each row to n_cell cells, which must be at least n_kv."""
        shape, n = (len(self.layer), n_cell), self.n_kv
        old = self.pos, self.rot
        self.pos, self.rot = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for new, source in zip((self.pos, self.rot), old, strict=True):
            new[:, :n] = source[:, :n]
        self._write_ahead()

    def most_live(self) -> np.ndarray:
        """Return i32[layer]: number of live cells of each layer's longest row."""
        return self.most(self.live)

    def most(self, live: np.ndarray) -> np.ndarray:
        """Compute the maximum over the rows of each layer: live i32[row] -> i32[layer]."""
        most: np.ndarray = np.maximum.reduceat(live, self._first_rows)
        return most

    def is_live(self) -> np.ndarray:
        """Return b1[row, n_kv]: True for cells that hold a token."""
        return np.arange(self.n_kv) < self.live[:, None]

    def view_pos(self) -> np.ndarray:
        """Return i32[row, n_kv]: a copy of `pos`, with -1 in empty cells."""
        pos = self.pos[:, : self.n_kv].copy()
        if self.ragged:
            pos[~self.is_live()] = -1
        return pos

    def new_rot(self, n: int) -> np.ndarray:
        """Return i32[row, n]: `rot` of the newest n tokens."""
        return np.take_along_axis(self.rot, (self.live - n)[:, None] + np.arange(n), axis=1)

    def move(self, moves: np.ndarray, n_keep: np.ndarray, next_rot: int) -> None:
        """Update the table after an edit of the cache.

        moves: i32[n, 4], from `moves_of`. n_keep: i32[row], number of cells that each row keeps.
        """
        row, cell, old = moves.T[:3].astype(np.intp)
        # the order of the moves does not matter: no move's source is another move's destination
        self.pos[row, cell] = self.pos[row, old]
        self.rot[row, cell] = self.rot[row, old] + moves[:, 3]
        self._live = n_keep
        self.n_kv = int(n_keep.max())
        self.rotate_from(next_rot)

    def _write_ahead(self) -> None:
        """Write the positions of the next tokens into all free cells, so that `append` need not write them.

        The rows are far apart in memory, so writing many positions to a row takes hardly more time than
        writing one. Free cells of ragged rows begin at different indices, so `append` writes their positions.
        """
        if not self.ragged:
            new = np.arange(self.pos.shape[1] - self.n_kv, dtype=np.int32)
            self.pos[:, self.n_kv :] = self.n_past + new
            self.rot[:, self.n_kv :] = self.next_rot + new
