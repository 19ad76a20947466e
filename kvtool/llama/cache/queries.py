"""The last queries of each layer, and the attention that future queries would give to cells."""

from __future__ import annotations

import numpy as np

from kvtool.llama.cache.decoder import Decoder
from kvtool.llama.libllama.library import check, lib


class Queries:
    """The last n queries of a context. n_head: i32[row], number of query heads in each row's group."""

    def __init__(self, context: Decoder, n: int, n_row: int, n_head: np.ndarray) -> None:
        self._context = context
        self._shape = n_row, int(n_head.max())
        self.n = n

    def future(self, n_last: int, pos: int, n_kv: int) -> tuple[np.ndarray, np.ndarray]:
        """Estimate the attention logits of future queries: the last n_last queries, at later positions.

        Return the mean and the variance of the logits over the queries, each f32[row, head, n_kv] for the
        first n_kv cells. pos: the first of the later positions.
        """
        shape = *self._shape, n_kv
        mean, variance = np.empty(shape, np.float32), np.empty(shape, np.float32)
        where = mean.ctypes.data, variance.ctypes.data
        check(lib.llama_kvtool_read_future(self._context.handle, n_last, pos, *where, *shape))
        return mean, variance

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the queries that `save` returns."""
        n_number: int = lib.llama_kvtool_get_queries(self._context.handle, None, None)
        check(n_number)
        return self.n, n_number

    def save(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the queries f32[n, n_number], oldest first, and positions i32[n].

        `n_number` is the number of elements of one token's queries in all layers. Each query is rotated to
        its position. Entries without a query have position -1.
        """
        out, pos = np.empty(self.shape, np.float32), np.empty(self.n, np.int32)
        check(lib.llama_kvtool_get_queries(self._context.handle, out.ctypes.data, pos.ctypes.data))
        return out, pos

    def fits(self, queries: np.ndarray, pos: np.ndarray) -> bool:
        """True if the arrays have the shapes and dtypes of the arrays that `save` returns."""
        is_shaped = queries.shape == self.shape and pos.shape == (self.n,)
        return is_shaped and queries.dtype == np.float32 and pos.dtype == np.int32

    def restore(self, queries: np.ndarray, pos: np.ndarray) -> None:
        """Continue from arrays that `save` returned."""
        assert self.fits(queries, pos)
        queries, pos = np.ascontiguousarray(queries), np.ascontiguousarray(pos)
        check(lib.llama_kvtool_set_queries(self._context.handle, queries.ctypes.data, pos.ctypes.data))
