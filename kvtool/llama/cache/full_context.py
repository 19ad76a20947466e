"""A cache that is never edited, for architectures that run only with the policy `full`."""

from __future__ import annotations

from typing import Any, NoReturn, TypeAlias

import numpy as np

from kvtool.llama.cache.context import Context
from kvtool.llama.cache.decoder import Decoder
from kvtool.llama.loaded.model import Model

_TABLE_BYTES = 8
"""Bytes of a cell in the table before the saved cells. The table is not read: old sessions have one."""


class FullContext(Decoder):
    """A cache of one row, which keeps all tokens until it is cleared. llama.cpp manages its cells."""

    n_row = 1
    # length of a key: 0, because no policy that reads keys runs with this cache
    n_dim = 0
    archive = queries = fixed_state = None

    def __init__(self, model: Model, n_cell: int, n_batch: int, **how: Any) -> None:
        super().__init__(model, n_cell, n_batch, **how)
        self._cell_bytes = model.layers.cell_bytes(how.get("type_k", "f16"), how.get("type_v", "f16"))
        self.cache_bytes = self.n_ctx * self._cell_bytes
        self.row_layers = np.zeros(1, np.int32)
        self.n_head = np.full(1, sum(model.info.n_head), np.int32)
        self.layer_cells = np.array([n_cell], np.int32)
        self.n_cell = n_cell

    def apply(self, moves: np.ndarray, n_keep: int, *more: object, **how: object) -> None:
        """Remove all tokens if n_keep is 0. Otherwise do nothing: all tokens stay where they are."""
        assert not len(moves)
        if not n_keep:
            self.clear()

    def signal_bytes(self, _n_cell: np.ndarray) -> int:
        """Return 0: there are no signals."""
        return 0

    def clear_signals(self) -> None:
        """Do nothing: there are no signals."""

    def set_positions(self, rot: np.ndarray) -> None:
        """Do nothing: a token has one position in all rows."""

    def cell_bytes(self, layer: int) -> int:
        """Return the size of a cell's K and V in all layers, in bytes."""
        return self._cell_bytes

    def cells(self, layer: int, n: int) -> np.ndarray:
        """Return u1[bytes]: a table of n cells, and the cells in llama.cpp's format."""
        return np.frombuffer(bytes(_TABLE_BYTES * n) + self.state(), np.uint8)

    def fits(self, layer: int, n: int, data: np.ndarray) -> bool:
        """True if the data is long enough for n cells. llama.cpp checks the rest in `set_state`."""
        return data.dtype == np.uint8 and data.nbytes > _TABLE_BYTES * n

    def set_cells(self, layer: int, n: int, data: np.ndarray) -> None:
        """Fill an empty cache with the data that `cells` returned."""
        self.set_state(data[_TABLE_BYTES * n :].tobytes())

    def _never(self, *args: object, **kwargs: object) -> NoReturn:
        """Stand for methods that the engine calls only for policies and settings that it refuses here."""
        raise AssertionError("this cache is never edited, and has no signals")

    see = read = history = history_shape = write = read_keys = read_value_norms = _never
    hide = resize = mark_drafts = drop = _never


AnyContext: TypeAlias = Context | FullContext
"""Context of an engine."""
