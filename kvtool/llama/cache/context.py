"""A cache that policies edit."""

from __future__ import annotations

import ctypes
from functools import cached_property
from typing import Any

import numpy as np

from kvtool.errors import ModelError, OutOfMemory
from kvtool.llama.cache.archive import Archive, ArchiveSettings
from kvtool.llama.cache.decoder import Decoder
from kvtool.llama.cache.fixed_state import FixedState
from kvtool.llama.cache.queries import Queries
from kvtool.llama.libllama.library import TERM, Edit, EnableParams, api, check, error_text, lib
from kvtool.llama.libllama.log import no_memory
from kvtool.llama.loaded.model import Model
from kvtool.policy import PER_CELL, Merge, RecallSettings, Signal, SignalRequest
from kvtool.units import PLAIN, TYPE_NUMBERS, archive_types

GROUPS = {"sum": 0, "max": 1, "first": 2}
"""Number in the C API for each value of `SignalRequest.group`."""


class Context(Decoder):
    """A cache of the patched llama.cpp, in which each row has its own evictions.

    Sliding layers have no rows: llama.cpp manages their cells. Raises ModelError if the model's layers have
    no rows, and OutOfMemory if there is no memory for the cache or the signals.

    Parameters
    ----------
    n_filled
        Number of cells that steps fill from the archive. These cells follow the live cells. 0: as many as the
        request needs.
    n_draft
        Maximum tokens that `drop` can remove.
    repeats
        True if a step with residents may be repeated. `drop` can then remove all tokens of a step: one token,
        and up to n_draft draft tokens.
    n_defer
        Maximum queries that steps store, so that signals of several steps are computed together. This needs
        flash attention. If 0, each step computes its own signals.
    how
        Other arguments of `Decoder`.

    Attributes
    ----------
    n_dim
        Length of a key; the maximum if layers differ.
    row_layers
        i32[row]: the layer of each row, counted among all layers of the model.
    layer_cells
        i32[layer]: number of cells of each layer that has rows.
    archive
        Evicted tokens that may be recalled; None without recall.
    queries
        The last queries. None unless the request has the signal FUTURE.
    fixed_state
        State of sliding and recurrent layers; None without such layers.
    """

    def __init__(
        self,
        model: Model,
        n_cell: int,
        n_batch: int,
        request: SignalRequest | None = None,
        *,
        ragged: bool = False,
        n_filled: int = 0,
        n_draft: int = 0,
        repeats: bool = False,
        n_defer: int = 0,
        archive: ArchiveSettings | None = None,
        **how: Any,
    ) -> None:
        request, archive = request or SignalRequest(), archive or ArchiveSettings()
        n_earlier = n_draft + repeats
        if n_earlier and model.layers.recurrent_bytes:
            # llama.cpp aborts if it keeps earlier states and a batch has no room for two more tokens
            n_batch = max(n_batch, n_earlier + 2)
        # llama.cpp limits batches to the cache's initial number of cells. Create enough cells for a batch;
        # `resize` below then reduces their number
        n_first = max(n_cell, n_batch) if request.recall else n_cell
        super().__init__(model, n_first, n_batch, ragged=ragged, n_earlier=n_earlier, **how)
        per_cell = [signal for signal in PER_CELL if signal in request.reads]
        self._recent = Signal.RECENT in request.reads
        self._cleared = [signal for signal in per_cell if signal is not Signal.RECENT]
        self._n_query = max(request.n_query, 1)
        # store n_draft more queries, because n_query queries must remain after draft tokens are removed
        self._n_slot = self._n_query + n_draft
        recall, made = request.recall or RecallSettings(n_cell=0, chunk=1), model.layers.has_values
        n_future = request.n_future if Signal.FUTURE in request.reads else 0
        kinds = archive_types(archive.type)
        params = EnableParams(
            signals=sum(per_cell),
            group=GROUPS[request.group],
            n_query=self._n_query,
            n_future=n_future,
            n_draft=n_draft,
            n_defer=n_defer,
            n_recall=n_filled or recall.n_filled(made),
            n_synthetic=recall.n_cell if made else 0,
            n_exact=recall.n_exact,
            n_near=archive.n_near,
            type_k=TYPE_NUMBERS[kinds[0]],
            type_v=TYPE_NUMBERS[kinds[1]],
            plain=archive.type.startswith(PLAIN),
            logn=request.logn,
            ragged=ragged,
        )
        self.n_row: int = lib.llama_kvtool_enable(self._context, ctypes.byref(params))
        if self.n_row < 0:
            why = error_text()
            self.close()
            if no_memory():
                what = f"no memory for a cache of {n_cell} cells and batches of {n_batch} tokens"
                raise OutOfMemory(f"{what}: {why}", on_gpu=model.uses_gpu)
            raise ModelError(f"{model.path.name} cannot be used yet: {why}")
        self.n_dim: int = lib.llama_kvtool_n_dim(self._context)
        self.row_layers = np.empty(self.n_row, np.int32)
        check(lib.llama_kvtool_row_layers(self._context, self.row_layers.ctypes.data, self.n_row))
        # without np.unique, which imports numpy.ma: that takes longer than all of this constructor
        layers = sorted(set(self.row_layers.tolist()))
        self._layer = np.searchsorted(layers, self.row_layers)
        n_layer = len(layers)
        self.fixed_state = FixedState.of(self)
        self.queries = Queries(self, self._n_query, self.n_row, self.n_head) if n_future else None
        self.archive: Archive | None = None
        if request.recall:
            try:
                self.archive = Archive(self, n_layer, archive)
            except BaseException:
                self.close()
                raise
        self.layer_cells = np.full(n_layer, self.n_ctx, np.int32)
        if self.n_ctx > n_cell:
            self.resize(np.full(n_layer, n_cell))

    @property
    def n_cell(self) -> int:
        """Number of cells of the layer with the most cells."""
        return int(self.layer_cells.max())

    @property
    def cache_bytes(self) -> int:
        """Size in bytes of the K and V of all layers (also sliding layers), and of recurrent states."""
        return int(lib.llama_kvtool_cache_bytes(self.handle))

    def signal_bytes(self, n_cell: np.ndarray) -> int:
        """Return the size of signals and stored queries in bytes. n_cell: i32[layer], cells of each layer.

        A signal is an array f32[row, cell]. RECENT has such an array for each of n_query queries. Copies that
        the host makes while it reads from a device are not counted.
        """
        n_signal = len(self._cleared) + self._recent * self._n_query
        n_query = self.queries.shape[1] * self._n_slot if self.queries else 0
        n_deferred = int(lib.llama_kvtool_deferred_bytes(self.handle))
        return 4 * (int(n_cell[self._layer].sum()) * n_signal + n_query) + n_deferred

    @cached_property
    def n_head(self) -> np.ndarray:
        """i32[row]: number of query heads that read each row. Several layers may read the same row."""
        groups = self.model.groups
        n_query = np.zeros(max(layer.number for layer, _ in groups) + 1, np.int32)
        for layer, n in groups:
            n_query[layer.owner] += n
        return n_query[self.row_layers]

    def watch(self, *, on: bool) -> None:
        """Turn the signals of later decodes on or off. They are on at first."""
        check(lib.llama_kvtool_watch(self.handle, on))

    def see(self, n_seen: int) -> None:
        """Set the number of tokens before the first query of the next decode.

        Signals that use 1 / t or log t compute t from this number.
        """
        check(lib.llama_kvtool_seen(self.handle, n_seen))

    def read(self, signal: Signal, n_kv: int) -> np.ndarray:
        """Return the values f32[row, n_kv] of a signal.

        RECENT is computed from the last n_query queries, and other signals from all queries since the last
        edit. IMPORTANT is the age of the newest query that the key was important to: 1 for the last query, 0
        if there is no such query.
        """
        out = np.empty((self.n_row, n_kv), np.float32)
        check(lib.llama_kvtool_read(self.handle, int(signal), out.ctypes.data, self.n_row, n_kv))
        return out

    def history(self, signal: Signal, n_kv: int) -> np.ndarray:
        """Return a signal in the form that `write` restores.

        The form of RECENT is f32[query, row, n_kv], oldest query first. Other signals are f32[row, n_kv].
        """
        if signal != Signal.RECENT:
            return self.read(signal, n_kv)
        out = np.empty(self.history_shape(signal, n_kv), np.float32)
        check(lib.llama_kvtool_read_recent(self.handle, out.ctypes.data, *out.shape))
        return out

    def history_shape(self, signal: Signal, n_kv: int) -> tuple[int, ...]:
        return (*([self._n_query] if signal == Signal.RECENT else []), self.n_row, n_kv)

    def write(self, signal: Signal, values: np.ndarray) -> None:
        """Restore a signal from its `history`."""
        values = np.ascontiguousarray(values, np.float32)
        where = values.ctypes.data
        if signal == Signal.RECENT:
            check(lib.llama_kvtool_write_recent(self.handle, where, *values.shape))
        else:
            check(lib.llama_kvtool_write(self.handle, int(signal), where, *values.shape))

    def clear_signals(self) -> None:
        """Clear all signals except RECENT."""
        nothing = np.zeros((self.n_row, self.n_cell), np.float32)
        for signal in self._cleared:
            self.write(signal, nothing)

    def read_keys(self, first: np.ndarray, delta: np.ndarray) -> np.ndarray:
        """Return the keys of n consecutive cells in each row: f32[row, n, n_dim].

        first: i32[row], index of the first of these cells. delta: i32[row, n], number of positions by which
        each key is rotated. llama.cpp may multiply quantized keys by a Hadamard matrix before it stores them;
        the method undoes this.
        """
        n_row, n = delta.shape
        out = np.empty((n_row, n, self.n_dim), np.float32)
        first, delta = (np.ascontiguousarray(array, np.int32) for array in (first, delta))
        pointers = (array.ctypes.data for array in (first, delta, out))
        check(lib.llama_kvtool_read_keys(self.handle, *pointers, n_row, n, self.n_dim))
        return out

    def read_value_norms(self, n_kv: int) -> np.ndarray:
        """Return f32[row, n_kv]: norm of each cell's value."""
        out = np.empty((self.n_row, n_kv), np.float32)
        check(lib.llama_kvtool_read_value_norms(self.handle, out.ctypes.data, *out.shape))
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
        """Edit the cache: first merge values, then move cells. Afterwards cells 0 .. n_keep - 1 are live.

        All signals are cleared except RECENT. The values of RECENT move along with the cells. If cells are
        hidden, RECENT is also cleared. Raises LibraryError for an invalid index or an invalid pair of moves.
        The cache is then unchanged.

        Parameters
        ----------
        moves
            i32[n, 4]: (row, dst, src, delta). Cell dst gets the content of cell src, and the key is rotated
            by delta positions.
        n_keep
            Number of cells that each row keeps; if rows are ragged, number of cells of the longest row.
        pos_0
            The last live cell gets position pos_0 + n_keep - 1 in llama.cpp's table, and the next token must
            have the position after it. If the newest token gets another position, positions in sliding layers
            change by the same amount. Sliding layers drop tokens whose position becomes negative.
        merge
            New values for kept cells, by the cells' indices before the moves.
        n_keep_row
            Only if rows are ragged: i32[row], the number of cells that each row keeps, at most n_keep.
        n_hidden
            Number of cells at the start of each row that later queries do not see. pos_0 must be at least
            -n_hidden.
        force_graph
            True to edit by a graph even if the cache is in host memory, where it could be edited directly.
        """
        moves = np.ascontiguousarray(moves, np.int32).reshape(-1, 4)
        edit = Edit(n_move=len(moves), n_keep=n_keep, pos_0=pos_0, n_hidden=n_hidden, force_graph=force_graph)
        edit.moves = moves.ctypes.data
        if n_keep_row is not None:
            n_keep_row = np.ascontiguousarray(n_keep_row, np.int32)
            edit.n_keep_row = n_keep_row.ctypes.data
        if merge is not None:
            self.has_merged = True
            terms = np.empty(len(merge.row), TERM)
            for name in TERM.names or ():
                terms[name] = getattr(merge, name)
            edit.terms, edit.n_term = terms.ctypes.data, len(terms)
        check(lib.llama_kvtool_apply(self.handle, ctypes.byref(edit)))
        if self.has_merged and not n_keep:
            # set all values to zero: if a merge has overflowed, infinite values in free cells make logits NaN
            api.llama_memory_clear(self._memory, True)
            self.has_merged = False

    def mark_drafts(self, n: int) -> None:
        """Mark the last n tokens of the next decode as draft tokens.

        In that decode, each token attends exactly to archived tokens that are chosen for this token alone. In
        other decodes, they are chosen for all tokens together.
        """
        check(lib.llama_kvtool_mark_drafts(self.handle, n))

    def drop(self, n: int) -> None:
        """Remove the last n tokens from the cache, and their attention from the signals.

        n is at most n_draft, or n_draft + 1 after a step with residents. With signals or recurrent layers,
        only draft tokens of the last decode can be removed. Tokens before the last edit cannot be removed.
        Raises LibraryError for tokens that cannot be removed.
        """
        check(lib.llama_kvtool_drop(self.handle, n))

    def hide(self, n: int) -> None:
        """Hide the first n cells from later queries, and clear the signals.

        The next token may have any position. Sliding layers drop all tokens.
        """
        check(lib.llama_kvtool_apply(self.handle, ctypes.byref(Edit(n_keep=n, n_hidden=n))))

    def resize(self, n_cell: np.ndarray) -> None:
        """Set the number of cells of each layer. Live cells keep their content. n_cell: i32[layer]."""
        n_cell = np.ascontiguousarray(n_cell, np.int32)
        check(lib.llama_kvtool_resize(self.handle, n_cell.ctypes.data, len(n_cell)))
        self.layer_cells = n_cell

    def cell_bytes(self, layer: int) -> int:
        """Return the size of the K and V of a layer's cell, in bytes."""
        n_bytes: int = lib.llama_kvtool_get_cells(self.handle, layer, None, 1)
        check(n_bytes)
        return n_bytes

    def cells(self, layer: int, n: int) -> np.ndarray:
        """Return the first n cells of a layer as u1[bytes]: all keys, then all values, in stored format."""
        out = np.empty(n * self.cell_bytes(layer), np.uint8)
        check(lib.llama_kvtool_get_cells(self.handle, layer, out.ctypes.data, n))
        return out

    def fits(self, layer: int, n: int, data: np.ndarray) -> bool:
        """True if the data has the dtype and size of n cells of the layer."""
        return data.dtype == np.uint8 and data.nbytes == n * self.cell_bytes(layer)

    def set_cells(self, layer: int, n: int, data: np.ndarray) -> None:
        """Write cells that `cells` returned."""
        assert self.fits(layer, n, data)
        assert data.flags.c_contiguous
        check(lib.llama_kvtool_set_cells(self.handle, layer, data.ctypes.data, n))

    def set_positions(self, rot: np.ndarray) -> None:
        """Set the positions of keys in each row's first n cells. rot: i32[row, n]. Only ALiBi needs this."""
        rot = np.ascontiguousarray(rot, np.int32)
        check(lib.llama_kvtool_set_positions(self.handle, rot.ctypes.data, *rot.shape))
