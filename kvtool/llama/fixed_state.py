"""State of sliding and recurrent layers, which have no rows."""

from __future__ import annotations

import numpy as np

from kvtool.llama.decoder import Decoder
from kvtool.llama.library import check, lib


class FixedState:
    """State of a context's sliding and recurrent layers, to save and restore."""

    def __init__(self, context: Decoder) -> None:
        self._context = context

    @staticmethod
    def of(context: Decoder) -> FixedState | None:
        """Return the fixed state of a context; None if it has no sliding or recurrent layers."""
        return FixedState(context) if lib.llama_kvtool_n_fixed_state(context.handle) else None

    @property
    def shapes(self) -> list[tuple[int]]:
        """Shapes of the two arrays that `save` returns."""
        n: int = lib.llama_kvtool_n_fixed_state(self._context.handle)
        return [(n,), (lib.llama_kvtool_get_fixed_state(self._context.handle, None, None),)]

    def save(self) -> tuple[np.ndarray, np.ndarray]:
        """Return a table i32[n] of the positions that the data belongs to, and the data u1[bytes]."""
        table_shape, data_shape = self.shapes
        table, data = np.empty(table_shape, np.int32), np.empty(data_shape, np.uint8)
        check(lib.llama_kvtool_get_fixed_state(self._context.handle, table.ctypes.data, data.ctypes.data))
        return table, data

    def fits(self, table: np.ndarray, data: np.ndarray) -> bool:
        """True if `save` can return arrays of these shapes."""
        is_shaped = [table.shape, data.shape] == self.shapes
        return is_shaped and table.dtype == np.int32 and data.dtype == np.uint8

    def restore(self, table: np.ndarray, data: np.ndarray) -> None:
        """Write arrays that `save` returned."""
        assert self.fits(table, data)
        check(lib.llama_kvtool_set_fixed_state(self._context.handle, table.ctypes.data, data.ctypes.data))
