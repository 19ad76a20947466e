"""The table of what every row holds: which token lies in which cell, and where its key is rotated to."""

from __future__ import annotations

import numpy as np


class Rows:
    """What the rows of a cache hold, kept on the host.

    The cells 0 .. live[row] - 1 of a row hold tokens, in no order. llama.cpp's own table only says that a
    cell is in use and older than the next token. The arrays are plain ones: read them, and change them
    through `append`, `move`, `resize` and `clear` only.

    Attributes
    ----------
    layer
        i32[row]: the layer of each row. Rows of one layer are neighbours.
    ragged
        Whether rows may hold different numbers of tokens.
    n_past
        Tokens of the stream so far, which is the position of the next one. The engine has no other clock.
    next_rot
        The position that the next token's key is rotated to.
    n_kv
        Live cells of each row; of the longest row if they are ragged.
    live
        i32[row]: live cells of each row.
    pos
        i32[row, n_cell]: the position in the stream of each live cell's token.
    rot
        i32[row, n_cell]: the position that each live cell's key is rotated to.
    """

    live: np.ndarray
    pos: np.ndarray
    rot: np.ndarray

    def __init__(self, layer: np.ndarray, n_cell: int, *, ragged: bool) -> None:
        self.layer = layer
        self.ragged = ragged
        self._first_rows = np.flatnonzero(np.diff(layer, prepend=-1))
        self._row = np.arange(len(layer))[:, None]
        self.clear(n_cell)

    def clear(self, n_cell: int) -> None:
        """Forgets everything; each row has n_cell empty cells."""
        n_row = len(self.layer)
        self.n_past = self.next_rot = self.n_kv = 0
        self.live = np.zeros(n_row, np.int32)
        self.pos, self.rot = np.zeros((n_row, n_cell), np.int32), np.zeros((n_row, n_cell), np.int32)

    def append(self, n: int) -> None:
        """The next n tokens of the stream, at the end of every row."""
        # the usual step is one token for all rows
        new = 0 if n == 1 else np.arange(n, dtype=np.int32)
        if self.ragged:
            where = self._row, self.live[:, None] + np.arange(n)
            self.pos[where], self.rot[where] = self.n_past + new, self.next_rot + new
        else:
            self.pos[:, self.n_kv : self.n_kv + n] = self.n_past + new
            self.rot[:, self.n_kv : self.n_kv + n] = self.next_rot + new
        self.live += n
        self.n_kv += n
        self.n_past += n
        self.next_rot += n

    def put(self, live: np.ndarray, pos: np.ndarray, rot: np.ndarray) -> None:
        """Lets each row hold live i32[row] tokens, with pos and rot i32[row, n_kv] of its first cells."""
        self.live = live.copy()
        self.pos[:, : pos.shape[1]], self.rot[:, : rot.shape[1]] = pos, rot

    def resize(self, n_cell: int) -> None:
        """Gives each row n_cell cells; the live ones must be among them."""
        if n_cell != self.pos.shape[1]:
            self.pos, self.rot = (resized(array, n_cell) for array in (self.pos, self.rot))

    def most_live(self) -> np.ndarray:
        """i32[layer]: the live cells of each layer's longest row."""
        return self.most(self.live)

    def most(self, live: np.ndarray) -> np.ndarray:
        """i32[layer]: of each layer the most of live i32[row]."""
        most: np.ndarray = np.maximum.reduceat(live, self._first_rows)
        return most

    def is_live(self) -> np.ndarray:
        """b1[row, n_kv]: which cells hold a token."""
        return np.arange(self.n_kv) < self.live[:, None]

    def view_pos(self) -> np.ndarray:
        """i32[row, n_kv]: a copy of `pos`, with -1 where no token is."""
        pos = self.pos[:, : self.n_kv].copy()
        if self.ragged:
            pos[~self.is_live()] = -1
        return pos

    def new_rot(self, n: int) -> np.ndarray:
        """i32[row, n]: `rot` of the newest n tokens."""
        return np.take_along_axis(self.rot, (self.live - n)[:, None] + np.arange(n), axis=1)

    def move(self, moves: np.ndarray, n_keep: np.ndarray, next_rot: int) -> None:
        """Does what an edit of the cache did: moves i32[n, 4] of (row, dst, src, delta), n_keep i32[row]."""
        row, cell, old, delta = moves.T
        # no cell that something comes from is one that something goes to
        self.pos[row, cell] = self.pos[row, old]
        self.rot[row, cell] = self.rot[row, old] + delta
        self.live = n_keep
        self.n_kv = int(n_keep.max())
        self.next_rot = next_rot


def resized(array: np.ndarray, n_cell: int) -> np.ndarray:
    """A new array [row, n_cell, ...] with the cells of the old one that fit, and zeros behind them."""
    new = np.zeros((len(array), n_cell, *array.shape[2:]), array.dtype)
    n = min(n_cell, array.shape[1])
    new[:, :n] = array[:, :n]
    return new
