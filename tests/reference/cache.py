"""A cache in NumPy: shuffled cells, made-up attention full of ties, and what an engine does with a plan."""

import numpy as np


class Cache:
    """pos i32[row, n_cell] and a policy's state; the first n_kv cells live.

    rows: for each row the records that a twin reads, oldest first. n_value: how many values attention takes.
    """

    def __init__(self, n_layer, n_head_kv, n_cell, state, seed, n_value=4):
        self.layer = np.repeat(np.arange(n_layer, dtype=np.int32), n_head_kv)
        n_row = len(self.layer)
        self.pos = np.zeros((n_row, n_cell), np.int32)
        self.state = state
        self.rows = [[] for _ in range(n_row)]
        self.n_kv = self.next = 0
        self.attn = self.last = None
        self.rng = np.random.default_rng(seed)
        self.n_value = n_value

    def grow(self, n_token):
        """Appends tokens, then deals the cells and the step's attention anew."""
        end = self.n_kv + n_token
        self.pos[:, self.n_kv : end] = np.arange(self.next, self.next + n_token)
        for number, row in enumerate(self.rows):
            row += [
                {"pos": self.next + i, "mass": 0.0, "last": 0.0, "old": False, "row": number}
                for i in range(n_token)
            ]
        self.n_kv, self.next = end, self.next + n_token
        self.shuffle()
        self.attn, self.last = self._attention(), self._attention()
        for row, pos, attn, last in zip(self.rows, self.pos, self.attn, self.last, strict=True):
            cell_of = {pos[cell]: cell for cell in range(end)}
            for token in row:
                token["mass"] += float(attn[cell_of[token["pos"]]])
                token["last"] = float(last[cell_of[token["pos"]]])

    def shuffle(self):
        """Deals every row's cells anew, the signals with them."""
        order = self.rng.random((len(self.rows), self.n_kv)).argsort(axis=1)
        for array in (self.pos, *self.state):
            array[:, : self.n_kv] = np.take_along_axis(array, order, axis=1)
        if self.attn is not None and self.attn.shape == order.shape:
            self.attn = np.take_along_axis(self.attn, order, axis=1)
            self.last = np.take_along_axis(self.last, order, axis=1)

    def live(self):
        """pos i32[row, n_kv], C-contiguous."""
        return self.pos[:, : self.n_kv].copy()

    def apply(self, keep):
        """Fills the holes among the first cells with kept cells of the tail, and zeroes the rest."""
        n_keep = int(keep[0].sum())
        for row, kept in enumerate(keep):
            holes = np.flatnonzero(~kept[:n_keep])
            tail = n_keep + np.flatnonzero(kept[n_keep:])
            stays = set(self.pos[row, : self.n_kv][kept].tolist())
            self.rows[row] = [token for token in self.rows[row] if token["pos"] in stays]
            for array in (self.pos, *self.state):
                array[row, holes] = array[row, tail]
                array[row, n_keep:] = 0
        self.n_kv = n_keep

    def _attention(self):
        # eighths and the like: sums of them are exact, whatever their order
        values = self.rng.integers(0, self.n_value, (len(self.rows), self.n_kv))
        return (values / 2 ** (self.n_value - 1).bit_length()).astype(np.float32)
