"""State of sliding and recurrent layers, which have no rows."""

from __future__ import annotations

import numpy as np

from kvtool.llama.cache.decoder import Decoder
from kvtool.llama.libllama.library import check, lib
from kvtool.models.layers import Kind


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

    @property
    def n_bytes(self) -> int:
        """Size of both arrays in bytes."""
        (n_table,), (n_data,) = self.shapes
        return n_table * np.int32().nbytes + n_data

    def copy(self) -> np.ndarray:
        """Return u1[n_bytes]: the arrays of `save`, one after the other."""
        whole = np.empty(self.n_bytes, np.uint8)
        table, data = self.arrays_in(whole)
        check(lib.llama_kvtool_get_fixed_state(self._context.handle, table.ctypes.data, data.ctypes.data))
        return whole

    def arrays_in(self, whole: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the two arrays of `save` as views of u1[n_bytes]."""
        n_table = self.shapes[0][0] * np.int32().nbytes
        return whole[:n_table].view(np.int32), whole[n_table:]

    def save(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the table i32[n] and the data u1[bytes] of `llama_kvtool_get_fixed_state`."""
        return self.arrays_in(self.copy())

    def fits(self, table: np.ndarray, data: np.ndarray) -> bool:
        """True if `save` can return arrays of these shapes."""
        is_shaped = [table.shape, data.shape] == self.shapes
        return is_shaped and table.dtype == np.int32 and data.dtype == np.uint8

    def can_cut(self, table: np.ndarray, pos: int) -> bool:
        """True if the state can be cut to the tokens before position `pos`.

        Sliding layers must still hold all tokens in the window of the token at `pos`. They hold only the
        current window and some earlier tokens, so this is True only for the newest positions. It is False
        with recurrent layers, which keep only their newest state.
        """
        layers = self._context.model.layers
        if layers.of(Kind.RECURRENT):
            return False
        first = max(pos - layers.n_swa + 1, 0)
        cells = table[1:]
        return int(((cells >= first) & (cells < pos)).sum()) == pos - first

    def restore(self, table: np.ndarray, data: np.ndarray, *, pos: int | None = None) -> None:
        """Write arrays that `save` returned.

        pos: if given, cut the state to the tokens before this position. `can_cut` must be True for it.
        """
        assert self.fits(table, data)
        if pos is not None:
            # the next token gets the cell of the first token that is cut off: older tokens keep their cells
            first, cells = np.flatnonzero(table[1:] == pos)[:1], table[1:]
            table = np.concatenate([first, np.where(cells < pos, cells, -1)], dtype=np.int32)
        check(lib.llama_kvtool_set_fixed_state(self._context.handle, table.ctypes.data, data.ctypes.data))
