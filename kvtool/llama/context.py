"""A cache that evicts each row on its own, with the patch."""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import Any

import numpy as np

from kvtool.errors import ModelError
from kvtool.llama.archive import Archive
from kvtool.llama.decoder import Decoder
from kvtool.llama.fixed_state import FixedState
from kvtool.llama.library import TERM, Edit, EnableParams, check, error_text, lib
from kvtool.llama.model import Model
from kvtool.llama.queries import Queries
from kvtool.policy import PER_CELL, Merge, Recalls, Signal, SignalRequest
from kvtool.units import CACHE_TYPES

GROUPS = {"sum": 0, "max": 1, "first": 2}
"""The C API's numbers for `SignalRequest.group`."""


class Context(Decoder):
    """A cache each of whose rows is evicted on its own, from the patched library.

    Sliding layers, if the model has some, have no rows: llama.cpp keeps what they see beside the cells.

    Parameters
    ----------
    request
        What a policy needs of the attention.
    ragged
        Whether rows may hold different numbers of cells.
    archive_type
        Number format of the archive, if the request recalls from one.
    n_filled
        Cells behind the live ones that steps fill from the archive, if not as few as the request says.
    n_draft
        Maximum tokens that `drop` can remove.
    n_near
        Archived tokens that are farther than this are chosen, and attended to, as if they were so far.
    n_archive, archive_bytes
        The most archived tokens, or the most bytes that they take; a quarter of the free memory, or half of
        the disk's free space, without either.
    archive_file
        Where to make the file that the archive lies in; it lies in host memory if not given.
    how
        As in `Decoder`.

    Attributes
    ----------
    n_row
        Rows that are evicted on their own.
    n_dim
        The length of a key; the longest if layers differ.
    row_layers
        i32[row]: the layer of each row, counted among all layers of the model.
    layer_cells
        i32[layer]: the cells of each layer that has rows.
    archive
        What has left the cache and may be recalled; None without recall.
    queries
        The last queries; None unless the request looks ahead.
    beside
        What sliding and recurrent layers hold; None without such layers.

    Raises
    ------
    ModelError
        For a model whose layers have no rows.
    """

    def __init__(
        self,
        model: Model,
        n_cell: int,
        n_batch: int,
        request: SignalRequest | None = None,
        *,
        ragged: bool = False,
        archive_type: str = "f16",
        n_filled: int = 0,
        n_draft: int = 0,
        n_near: int = 0,
        n_archive: int | None = None,
        archive_bytes: int | None = None,
        archive_file: str | None = None,
        **how: Any,
    ) -> None:
        request = request or SignalRequest()
        # llama.cpp takes no batch longer than the cells that there are at first
        n_first = max(n_cell, n_batch) if request.recall else n_cell
        super().__init__(model, n_first, n_batch, ragged=ragged, **how)
        per_cell = [signal for signal in PER_CELL if signal in request.signals]
        self._recent = Signal.RECENT in request.signals
        self._cleared = [signal for signal in per_cell if signal is not Signal.RECENT]
        self._n_query = max(request.n_query, 1)
        # queries that are taken back may not have taken the place of older ones
        self._n_slot = self._n_query + n_draft
        recall, made = request.recall or Recalls(n_cell=0, chunk=1), model.layers.has_values
        n_future = request.n_future if Signal.FUTURE in request.signals else 0
        params = EnableParams(
            signals=sum(per_cell),
            group=GROUPS[request.group],
            n_query=self._n_query,
            n_future=n_future,
            n_ahead=n_draft,
            n_recall=n_filled or recall.n_filled(made),
            n_made=recall.n_cell if made else 0,
            n_exact=recall.n_exact,
            n_near=n_near,
            type_k=CACHE_TYPES[archive_type],
            type_v=CACHE_TYPES[archive_type],
            log_n=request.log_n,
            ragged=ragged,
        )
        self.n_row: int = lib.llama_kvtool_enable(self._context, ctypes.byref(params))
        if self.n_row < 0:
            why = error_text()
            self.close()
            raise ModelError(f"{model.path.name} cannot be used yet: {why}")
        self.n_dim: int = lib.llama_kvtool_n_dim(self._context)
        self.row_layers = np.empty(self.n_row, np.int32)
        check(lib.llama_kvtool_row_layers(self._context, self.row_layers.ctypes.data, self.n_row))
        layers, self._layer = np.unique(self.row_layers, return_inverse=True)
        n_layer = len(layers)
        self.fixed_state = FixedState.of(self)
        self.queries = Queries(self, self._n_query, self.n_row, self.n_head) if n_future else None
        self.archive: Archive | None = None
        if request.recall:
            try:
                self.archive = Archive(self, n_layer, n_archive, archive_bytes, archive_file)
            except BaseException:
                self.close()
                raise
        self.layer_cells = np.full(n_layer, self.n_ctx, np.int32)
        if self.n_ctx > n_cell:
            self.resize(np.full(n_layer, n_cell))

    @property
    def n_cell(self) -> int:
        """Cells of the longest layer."""
        return int(self.layer_cells.max())

    @property
    def cache_bytes(self) -> int:
        """Bytes of the K and V tensors, those of sliding layers included."""
        return int(lib.llama_kvtool_cache_bytes(self._context))

    def signal_bytes(self, n_cell: np.ndarray) -> int:
        """Bytes beside a cache whose layers have i32[layer] cells: a signal's f32[row, cell], and queries.

        RECENT has as much of each query. Of each there is one copy: what the host holds while it reads them
        from a device is not counted.
        """
        n_signal = len(self._cleared) + self._recent * self._n_slot
        n_query = self.queries.shape[1] * self._n_slot if self.queries else 0
        return 4 * (int(n_cell[self._layer].sum()) * n_signal + n_query)

    @cached_property
    def n_head(self) -> np.ndarray:
        """i32[row]: the query heads, of all layers that read its cells, that share each row's KV head."""
        groups = self.model.groups
        n_query = np.zeros(max(layer.number for layer, _ in groups) + 1, np.int32)
        for layer, n in groups:
            n_query[layer.owner] += n
        return n_query[self.row_layers]

    def watch(self, *, on: bool) -> None:
        """Whether later decodes compute the signals, as they do at first."""
        check(lib.llama_kvtool_watch(self._context, on))

    def see(self, n_seen: int) -> None:
        """The first query of the next decode has seen n_seen tokens before: what 1 / t and log t count."""
        check(lib.llama_kvtool_seen(self._context, n_seen))

    def read(self, signal: Signal, n_kv: int) -> np.ndarray:
        """f32[row, n_kv]: one signal of the queries since the last edit; RECENT of its last queries.

        IMPORTANT is how many queries ago a key was last important: 1 is the last query; 0: to none.
        """
        out = np.empty((self.n_row, n_kv), np.float32)
        check(lib.llama_kvtool_read(self._context, int(signal), out.ctypes.data, self.n_row, n_kv))
        return out

    def history(self, signal: Signal, n_kv: int) -> np.ndarray:
        """What `write` continues a signal from: `read`, or for RECENT f32[query, row, n_kv], oldest first."""
        if signal != Signal.RECENT:
            return self.read(signal, n_kv)
        out = np.empty(self.history_shape(signal, n_kv), np.float32)
        check(lib.llama_kvtool_read_recent(self._context, out.ctypes.data, *out.shape))
        return out

    def history_shape(self, signal: Signal, n_kv: int) -> tuple[int, ...]:
        """The shape of what `history` returns."""
        return (*([self._n_query] if signal == Signal.RECENT else []), self.n_row, n_kv)

    def write(self, signal: Signal, values: np.ndarray) -> None:
        """Continues a signal from its `history`."""
        values = np.ascontiguousarray(values, np.float32)
        where = values.ctypes.data
        if signal == Signal.RECENT:
            check(lib.llama_kvtool_write_recent(self._context, where, *values.shape))
        else:
            check(lib.llama_kvtool_write(self._context, int(signal), where, *values.shape))

    def clear_signals(self) -> None:
        """Clears all signals but RECENT."""
        nothing = np.zeros((self.n_row, self.n_cell), np.float32)
        for signal in self._cleared:
            self.write(signal, nothing)

    def read_keys(self, first: np.ndarray, delta: np.ndarray) -> np.ndarray:
        """f32[row, n, n_dim]: the keys of cells first i32[row] .. of each row, rotated by delta i32[row, n].

        A quantized K is stored under one orthogonal map of llama.cpp's; its keys come under that map.
        """
        n_row, n = delta.shape
        out = np.empty((n_row, n, self.n_dim), np.float32)
        first, delta = (np.ascontiguousarray(array, np.int32) for array in (first, delta))
        pointers = (array.ctypes.data for array in (first, delta, out))
        check(lib.llama_kvtool_read_keys(self._context, *pointers, n_row, n, self.n_dim))
        return out

    def read_value_norms(self, n_kv: int) -> np.ndarray:
        """f32[row, n_kv]: the length of each cell's value."""
        out = np.empty((self.n_row, n_kv), np.float32)
        check(lib.llama_kvtool_read_lengths(self._context, out.ctypes.data, *out.shape))
        return out

    def apply(
        self,
        moves: np.ndarray,
        n_keep: int,
        pos_0: int,
        merge: Merge | None = None,
        *,
        n_keep_row: np.ndarray | None = None,
        n_hidden: int = 0,
        force_graph: bool = False,
    ) -> None:
        """Edits the cache and clears the signals: merges first, then moves; cells 0 .. n_keep - 1 stay live.

        Parameters
        ----------
        moves
            i32[n, 4]: (row, dst, src, delta). Cell dst takes what cell src holds, its key rotated by delta.
        n_keep, pos_0
            The last live cell counts as position pos_0 + n_keep - 1, the others come before it, and the next
            token must come at pos_0 + n_keep. Where that is another position than it was, sliding layers
            move along; what would come before position 0 they lose.
        merge
            New values for cells that stay.
        n_keep_row
            i32[row]: n_keep of each row, at most n_keep, if rows are ragged.
        n_hidden
            First cells that later queries do not see; pos_0 may then be as much below 0.
        force_graph
            Never take the short cut through host memory.

        Raises
        ------
        LibraryError
            For an index or a pair of moves that cannot be. The cache is then unchanged.
        """
        self._check_open()
        moves = np.ascontiguousarray(moves, np.int32).reshape(-1, 4)
        edit = Edit(n_move=len(moves), n_keep=n_keep, pos_0=pos_0, n_hidden=n_hidden, force_graph=force_graph)
        edit.moves = moves.ctypes.data
        if n_keep_row is not None:
            n_keep_row = np.ascontiguousarray(n_keep_row, np.int32)
            edit.n_keep_row = n_keep_row.ctypes.data
        if merge is not None:
            terms = np.empty(len(merge.row), TERM)
            for name in TERM.names or ():
                terms[name] = getattr(merge, name)
            edit.terms, edit.n_term = terms.ctypes.data, len(terms)
        check(lib.llama_kvtool_apply(self._context, ctypes.byref(edit)))

    def mark_drafts(self, n: int) -> None:
        """Mark the last n tokens of the next decode as draft tokens, which choose clusters alone."""
        check(lib.llama_kvtool_guess(self._context, n))

    def drop(self, n: int) -> None:
        """Remove the last n tokens, and their attention from the signals.

        Raises LibraryError for more than n_draft tokens, for tokens before the last edit, for recurrent
        layers, and, with signals, for other tokens than draft tokens of the last decode.
        """
        check(lib.llama_kvtool_take_back(self._context, n))

    def hide(self, n: int) -> None:
        """Keeps the first n cells out of sight of later queries, and clears the signals.

        The next token may have any position. Sliding layers forget everything.
        """
        check(lib.llama_kvtool_apply(self._context, ctypes.byref(Edit(n_keep=n, n_hidden=n))))

    def resize(self, n_cell: np.ndarray) -> None:
        """Gives each layer i32[layer] that many cells. The live ones keep what they hold."""
        n_cell = np.ascontiguousarray(n_cell, np.int32)
        check(lib.llama_kvtool_resize(self._context, n_cell.ctypes.data, len(n_cell)))
        self.layer_cells = n_cell

    def cell_bytes(self, layer: int) -> int:
        """Bytes of K and V that one cell takes in a layer."""
        n_bytes: int = lib.llama_kvtool_get_cells(self._context, layer, None, 1)
        check(n_bytes)
        return n_bytes

    def cells(self, layer: int, n: int) -> np.ndarray:
        """u1[bytes]: the first n cells of a layer as they are stored, keys and then values, cell by cell."""
        out = np.empty(n * self.cell_bytes(layer), np.uint8)
        check(lib.llama_kvtool_get_cells(self._context, layer, out.ctypes.data, n))
        return out

    def fits(self, layer: int, n: int, data: np.ndarray) -> bool:
        """Whether `cells` may have returned this for n cells of the layer."""
        return data.dtype == np.uint8 and data.nbytes == n * self.cell_bytes(layer)

    def set_cells(self, layer: int, n: int, data: np.ndarray) -> None:
        """Writes what `cells` returned."""
        assert self.fits(layer, n, data)
        assert data.flags.c_contiguous
        check(lib.llama_kvtool_set_cells(self._context, layer, data.ctypes.data, n))

    def set_places(self, rot: np.ndarray) -> None:
        """Says where the keys i32[row, n] of each row's first cells stand: with ALiBi they do not."""
        rot = np.ascontiguousarray(rot, np.int32)
        check(lib.llama_kvtool_set_places(self._context, rot.ctypes.data, *rot.shape))
