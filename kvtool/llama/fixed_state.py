"""What a cache keeps beside its rows: what sliding layers see, and recurrent states."""

from __future__ import annotations

import numpy as np

from kvtool.llama.decoder import Decoder
from kvtool.llama.library import check, lib


class FixedState:
    """What sliding and recurrent layers of a context hold; one without such layers has none of it."""

    def __init__(self, context: Decoder) -> None:
        self._context = context

    @staticmethod
    def of(context: Decoder) -> FixedState | None:
        """That of a context; None where nothing lies beside its rows."""
        return FixedState(context) if lib.llama_kvtool_n_beside(context.handle) else None

    @property
    def shapes(self) -> list[tuple[int]]:
        """The shapes of the two arrays that `save` returns."""
        n: int = lib.llama_kvtool_n_beside(self._context.handle)
        return [(n,), (lib.llama_kvtool_get_beside(self._context.handle, None, None),)]

    def save(self) -> tuple[np.ndarray, np.ndarray]:
        """What they hold: a table i32[n], where it belongs; u1[bytes]."""
        table, data = (np.empty(*own) for own in zip(self.shapes, (np.int32, np.uint8), strict=True))
        check(lib.llama_kvtool_get_beside(self._context.handle, table.ctypes.data, data.ctypes.data))
        return table, data

    def fits(self, table: np.ndarray, data: np.ndarray) -> bool:
        """Whether `save` may have returned these."""
        is_shaped = [table.shape, data.shape] == self.shapes
        return is_shaped and table.dtype == np.int32 and data.dtype == np.uint8

    def restore(self, table: np.ndarray, data: np.ndarray) -> None:
        """Writes what `save` returned."""
        assert self.fits(table, data)
        check(lib.llama_kvtool_set_beside(self._context.handle, table.ctypes.data, data.ctypes.data))
