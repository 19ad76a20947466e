"""The table of what every row holds: which token lies in which cell, and where its key is rotated to."""

from __future__ import annotations

import numpy as np


class Rows:
    """What the rows of a cache hold, kept on the host.

    The cells 0 .. live[row] - 1 of a row hold tokens, in no order. llama.cpp's own table only says that a
    cell is in use and older than the next token. The arrays are plain ones, for reading; the methods below
    change them.

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
    pos
        i32[row, n_cell]: the position in the stream of each live cell's token. Other cells mean nothing.
    rot
        i32[row, n_cell]: the position that each live cell's key is rotated to, likewise.
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
        """Forgets everything; each row has n_cell empty cells."""
        n_row = len(self.layer)
        self.n_past = self.next_rot = self.n_kv = 0
        self._live = np.zeros(n_row, np.int32)
        self.pos, self.rot = np.zeros((n_row, n_cell), np.int32), np.zeros((n_row, n_cell), np.int32)
        self._write_ahead()

    @property
    def live(self) -> np.ndarray:
        """i32[row]: live cells of each row."""
        # beside a decode even a sum of a few numbers takes 40 us: rows of one length are counted once
        return self._live if self.ragged else np.full(len(self.layer), self.n_kv, np.int32)

    def append(self, n: int) -> None:
        """The next n tokens of the stream, at the end of every row."""
        if self.ragged:
            new = np.arange(n)
            where = self._row, self._live[:, None] + new
            self.pos[where], self.rot[where] = self.n_past + new, self.next_rot + new
            self._live += n
        self.n_kv += n
        self.n_past += n
        self.next_rot += n

    def take_back(self, n: int) -> None:
        """The newest n tokens, which were appended last, never came."""
        if self.ragged:
            self._live -= n
        self.n_kv -= n
        self.n_past -= n
        self.next_rot -= n

    def rotate_from(self, next_rot: int) -> None:
        """The next token's key is rotated to next_rot, and later ones to what follows."""
        self.next_rot = next_rot
        self._write_ahead()

    def put(self, live: np.ndarray, pos: np.ndarray, rot: np.ndarray) -> None:
        """Lets each row hold live i32[row] tokens, with pos and rot i32[row, n_kv] of its first cells.

        n_past, n_kv and next_rot must have been set.
        """
        self._live = live.copy()
        self.pos[:, : self.n_kv], self.rot[:, : self.n_kv] = pos, rot
        self._write_ahead()

    def resize(self, n_cell: int) -> None:
        """Gives each row n_cell cells; the live ones must be among them."""
        shape, n = (len(self.layer), n_cell), self.n_kv
        old = self.pos, self.rot
        self.pos, self.rot = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        for new, source in zip((self.pos, self.rot), old, strict=True):
            new[:, :n] = source[:, :n]
        self._write_ahead()

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
        row, cell, old = moves.T[:3].astype(np.intp)
        # no cell that something comes from is one that something goes to
        self.pos[row, cell] = self.pos[row, old]
        self.rot[row, cell] = self.rot[row, old] + moves[:, 3]
        self._live = n_keep
        self.n_kv = int(n_keep.max())
        self.rotate_from(next_rot)

    def _write_ahead(self) -> None:
        """Writes into the free cells what the next tokens will bring, so that `append` has nothing to write.

        Every row lies elsewhere in memory: for many tokens at once this takes little more than for one.
        Ragged rows do not end in the same cell.
        """
        if not self.ragged:
            new = np.arange(self.pos.shape[1] - self.n_kv, dtype=np.int32)
            self.pos[:, self.n_kv :] = self.n_past + new
            self.rot[:, self.n_kv :] = self.next_rot + new
