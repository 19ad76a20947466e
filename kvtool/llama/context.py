"""A cache of cells and the decode that fills it, with any llama.cpp and with the patch."""

from __future__ import annotations

import ctypes
import time
from contextlib import nullcontext
from functools import cached_property
from typing import Any

import numpy as np

from kvtool.errors import LibraryError, ModelError, OutOfMemory, UsageError
from kvtool.llama.archive import INDEX_BITS, Archive
from kvtool.llama.crash import crash_means, damaged
from kvtool.llama.devices import default_threads, has_gpu
from kvtool.llama.library import TERM, Edit, EnableParams, Move, Term, api, check, error_text, lib
from kvtool.llama.log import because, log_tail, no_memory
from kvtool.llama.model import Model
from kvtool.llama.threads import Threads
from kvtool.models.header import read as read_header
from kvtool.models.layers import Kind
from kvtool.policy import Merge, Recalls, Request, Signal

CACHE_TYPES = {
    "f32": 0,
    "f16": 1,
    "bf16": 30,
    "q8_0": 8,
    "q5_1": 7,
    "q5_0": 6,
    "q4_1": 3,
    "q4_0": 2,
}
"""ggml's numbers for the types that -ctk and -ctv name."""

FLASH = {"auto": -1, "off": 0, "on": 1}
"""llama.cpp's numbers for what -fa says."""

GROUPS = {"sum": 0, "max": 1, "first": 2}
"""The C API's numbers for `Request.group`."""

_QUANTIZED = {name for name in CACHE_TYPES if name.startswith("q")}


class Decoder:
    """One sequence in a cache of n_cell cells, and the decode that fills it: what any llama.cpp has.

    Parameters
    ----------
    n_cell
        Cells of the cache.
    n_batch
        Maximum tokens decoded at once.
    n_output
        Maximum tokens of a decode that give logits.
    type_k, type_v
        Types of keys and values, by their names in `CACHE_TYPES`.
    flash
        Flash attention: "on", "off" or "auto".
    n_threads
        Threads of a CPU; as `Threads` chooses, one per core at most, if not given.
    ragged
        Whether rows may hold different numbers of cells, which only a `Context` can do.
    on_tensor
        llama.cpp's callback for each operation of a decode, as `observe` has it.

    Raises
    ------
    UsageError
        For cache types that cannot go together.
    OutOfMemory, LibraryError
        If llama.cpp makes no such cache.
    """

    def __init__(
        self,
        model: Model,
        n_cell: int,
        n_batch: int,
        *,
        ragged: bool = False,
        n_output: int = 1,
        type_k: str = "f16",
        type_v: str = "f16",
        flash: str = "auto",
        n_threads: int | None = None,
        on_tensor: Any = None,
    ) -> None:
        self.model = model
        self.n_batch = n_batch
        self.ragged = ragged
        params = api.llama_context_default_params()
        # the sliding layers' cache is never longer than this, and must hold what they see and a step
        params.n_ctx = max(n_cell, self.model.n_swa and self.model.n_swa + n_batch)
        params.swa_full = False
        params.n_batch = params.n_ubatch = n_batch
        params.n_seq_max = 1
        params.n_outputs_max = min(n_output, n_batch)
        self._threads = Threads(n_threads or default_threads())
        params.n_threads = params.n_threads_batch = self._threads.n
        params.type_k = CACHE_TYPES[type_k]
        params.type_v = CACHE_TYPES[type_v]
        flash = choose_flash(flash, type_v, ragged or model.layers.has_alibi)
        params.flash_attn_type = FLASH[flash]
        if on_tensor is not None:
            # llama.cpp keeps no reference
            self._on_tensor = params.cb_eval = on_tensor
        # flash attention adds up a float cache in parts, one a thread: their number must not change
        self._adapts = not (n_threads or has_gpu()) and (flash == "off" or type_v in _QUANTIZED)
        log_tail.clear()
        self._batch: Any = None
        self._context = None
        with crash_means(damaged(model.path)):
            self._context = api.llama_init_from_model(model._model, params)
        if not self._context:
            if no_memory():
                raise OutOfMemory(f"no memory for a cache of {n_cell} cells{because()}")
            raise LibraryError(f"llama.cpp cannot make a cache of {n_cell} cells{because()}")
        self.n_ctx: int = api.llama_n_ctx(self._context)
        self._batch = batch = api.llama_batch_init(n_batch, 0, 1)
        as_array = np.ctypeslib.as_array
        self._tokens, self._pos, self._wants = (
            as_array(field, (n_batch,)) for field in (batch.token, batch.pos, batch.logits)
        )
        as_array(batch.n_seq_id, (n_batch,))[:] = 1
        self._order = np.arange(n_batch, dtype=np.int32)
        for i in range(n_batch):
            batch.seq_id[i][0] = 0
        self._n_output = 0
        self._logits_where = (0, 0)
        self._has_decoded = False

    def close(self) -> None:
        """Frees the cache. A second call does nothing."""
        if self._context:
            api.llama_free(self._context)
            self._context = None
            if self._batch:
                api.llama_batch_free(self._batch)
                self._batch = None

    @property
    def handle(self) -> object:
        """llama.cpp's own context."""
        self._check_open()
        return self._context

    def _check_open(self) -> None:
        """Raises UsageError if the cache or its model has been closed: llama.cpp would read freed memory."""
        if not (self._context and self.model.is_open):
            raise UsageError("this engine or its model is closed; make a new one")

    def decode(self, tokens: np.ndarray, pos_0: int, n_output: int) -> None:
        """Decodes i32[n] tokens at positions pos_0, pos_0 + 1, ...; the last n_output give logits."""
        self._check_open()
        n = len(tokens)
        self._batch.n_tokens = n
        self._tokens[:n] = tokens
        self._pos[:n] = self._order[:n] + pos_0
        # one at least: llama.cpp aborts without in one architecture, and it takes no time that counts
        first = n - max(n_output, 1)
        self._wants[:first] = False
        self._wants[first:n] = True
        log_tail.clear()
        n_threads, start = self._threads.n, time.perf_counter()
        # a damaged file shows in the first decode
        with nullcontext() if self._has_decoded else crash_means(damaged(self.model.path)):
            status = api.llama_decode(self._context, self._batch)
        if self._adapts:
            self._threads.took(n, time.perf_counter() - start)
            if self._threads.n != n_threads:
                api.llama_set_n_threads(self._context, self._threads.n, self._threads.n)
        self._has_decoded = True
        if status != 0:
            raise LibraryError(f"llama.cpp cannot decode (status {status}){because()}")
        self._n_output = n_output

    def logits(self) -> np.ndarray:
        """f32[n_output, n_vocab] of the last decode: a view that the next decode overwrites."""
        self._check_open()
        pointer = api.llama_get_logits(self._context)
        where = ctypes.addressof(pointer.contents), self._n_output
        if where != self._logits_where:
            # NumPy makes a new ctypes type for each view, which takes longer than all else here
            self._logits = np.ctypeslib.as_array(pointer, (self._n_output, self.model.n_vocab))
            self._logits_where = where
        return self._logits

    @property
    def has_logits(self) -> bool:
        """Whether the last decode left logits to sample from."""
        return self._n_output > 0

    def remove(self, first: int, end: int) -> None:
        """Frees the cells at positions first .. end - 1."""
        if not api.llama_memory_seq_rm(self._memory, 0, first, end):
            raise LibraryError(f"llama.cpp cannot remove positions {first} to {end - 1} of its cache")

    def shift(self, first: int, end: int, delta: int) -> None:
        """Moves positions first .. end - 1 by delta; their keys are rotated before the next decode."""
        api.llama_memory_seq_add(self._memory, 0, first, end, delta)

    def state(self) -> bytes:
        """The live cells as llama.cpp saves a sequence. Raises LibraryError for ragged rows."""
        if self.ragged:
            raise LibraryError("llama.cpp cannot save a cache whose rows hold different numbers of cells")
        n = api.llama_state_seq_get_size(self._context, 0)
        buffer = (ctypes.c_uint8 * n)()
        return bytes(buffer[: api.llama_state_seq_get_data(self._context, buffer, n, 0)])

    def set_state(self, data: bytes) -> None:
        """Writes what `state` returned into an empty cache."""
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        if api.llama_state_seq_set_data(self._context, buffer, len(data), 0) != len(data):
            raise LibraryError(f"llama.cpp cannot take back the cells that it saved{because()}")

    @property
    def _memory(self) -> object:
        self._check_open()
        return api.llama_get_memory(self._context)


class Context(Decoder):
    """A `Cache` each of whose rows is evicted on its own, from the patched library.

    Sliding layers, if the model has some, have no rows: llama.cpp keeps what they see beside the cells.

    Parameters
    ----------
    request
        What a policy needs of the attention.
    ragged
        Whether rows may hold different numbers of cells.
    archive_type
        Number format of the archive, if the request recalls from one.
    n_near
        Archived tokens that are farther than this are chosen, and attended to, as if they were so far.
    n_archive, archive_bytes
        The most archived tokens, or the most bytes that they take; half of the free memory, or of the disk's
        free space, without either.
    archive_file
        Where to make the file that the archive lies in; it lies in host memory if not given.
    how
        As in `Decoder`.

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
        request: Request | None = None,
        *,
        ragged: bool = False,
        archive_type: str = "f16",
        n_near: int = 0,
        n_archive: int | None = None,
        archive_bytes: int | None = None,
        archive_file: str | None = None,
        **how: Any,
    ) -> None:
        super().__init__(model, n_cell, n_batch, ragged=ragged, **how)
        ask = request or Request()
        # keys are no signal of the graph's: they are read from the cache
        signals = int(ask.signals & ~Signal.KEYS)
        self._n_query = max(ask.n_query, 1)
        type_archive = CACHE_TYPES[archive_type]
        recall = ask.recall or Recalls(n_cell=0, chunk=1, index="keys")
        n_bit = INDEX_BITS[recall.index]
        archive = recall.n_cell, n_near, n_bit, type_archive, type_archive
        wanted = EnableParams(signals, GROUPS[ask.group], self._n_query, *archive, ask.log_n, ragged)
        self.n_row: int = lib.llama_kvtool_enable(self._context, ctypes.byref(wanted))
        if self.n_row < 0:
            why = error_text()
            self.close()
            raise ModelError(f"{model.path.name} cannot be used yet: {why}")
        self.n_dim: int = lib.llama_kvtool_n_dim(self._context)
        self.row_layers = np.empty(self.n_row, np.int32)
        check(lib.llama_kvtool_row_layers(self._context, self.row_layers.ctypes.data, self.n_row))
        n_layer = int(np.count_nonzero(np.diff(self.row_layers))) + 1
        self.archive: Archive | None = None
        if ask.recall:
            try:
                self.archive = Archive(self, n_layer, n_archive, archive_bytes, archive_file)
            except BaseException:
                self.close()
                raise
        self.layer_cells = np.full(n_layer, self.n_ctx, np.int32)
        if model.n_swa and model.n_swa + n_batch > n_cell:
            self.resize(np.full(n_layer, n_cell))

    @property
    def n_cell(self) -> int:
        """Cells of the longest layer."""
        return int(self.layer_cells.max())

    @property
    def cache_bytes(self) -> int:
        """Bytes of the K and V tensors, those of sliding layers included."""
        return int(lib.llama_kvtool_cache_bytes(self._context))

    @cached_property
    def n_head(self) -> np.ndarray:
        """i32[row]: the query heads, of all layers that read its cells, that share each row's KV head."""
        # the number of heads is in the file's header
        n_head = read_header(self.model.path).n_head
        n_query = np.zeros(len(n_head), np.int32)
        for layer in self.model.layers.of(Kind.ROWS):
            n_query[layer.owner] += n_head[layer.number] // layer.n_head_kv
        return n_query[self.row_layers]

    def see(self, n_seen: int) -> None:
        """The first query of the next decode has seen n_seen tokens before."""
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

    def read_keys(self, first: np.ndarray, delta: np.ndarray) -> np.ndarray:
        """f32[row, n, n_dim]: keys of cells first i32[row] .. of each row, rotated by delta i32[row, n]."""
        n_row, n = delta.shape
        out = np.empty((n_row, n, self.n_dim), np.float32)
        first, delta = (np.ascontiguousarray(array, np.int32) for array in (first, delta))
        pointers = (array.ctypes.data for array in (first, delta, out))
        check(lib.llama_kvtool_read_keys(self._context, *pointers, n_row, n, self.n_dim))
        return out

    def apply(
        self,
        moves: np.ndarray,
        n_keep: int,
        pos_0: int,
        merge: Merge | None = None,
        *,
        n_keep_row: np.ndarray | None = None,
        force_graph: bool = False,
    ) -> None:
        """Edits the cache and clears the signals, as `Cache.apply` says.

        force_graph: never take the short cut through host memory.
        """
        self._check_open()
        moves = np.ascontiguousarray(moves, np.int32).reshape(-1, 4)
        edit = Edit(
            moves=moves.ctypes.data_as(ctypes.POINTER(Move)),
            n_move=len(moves),
            n_keep=n_keep,
            pos_0=pos_0,
            force_graph=force_graph,
        )
        if n_keep_row is not None:
            n_keep_row = np.ascontiguousarray(n_keep_row, np.int32)
            edit.n_keep_row = n_keep_row.ctypes.data
        terms = np.empty(0, TERM)
        if merge is not None:
            terms = np.empty(len(merge.row), TERM)
            for name in TERM.names or ():
                terms[name] = getattr(merge, name)
            edit.terms = terms.ctypes.data_as(ctypes.POINTER(Term))
            edit.n_term = len(terms)
        check(lib.llama_kvtool_apply(self._context, ctypes.byref(edit)))

    def hide(self, n: int) -> None:
        """Keeps the first n cells out of sight of later queries, and clears the signals."""
        edit = Edit(n_keep=n, n_hidden=n)
        check(lib.llama_kvtool_apply(self._context, ctypes.byref(edit)))

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

    @property
    def n_beside(self) -> int:
        """Entries of the table that `beside` returns; 0 for a model that keeps nothing beside its rows."""
        return int(lib.llama_kvtool_n_beside(self._context))

    def beside(self) -> tuple[np.ndarray, np.ndarray]:
        """What sliding and recurrent layers hold: a table i32[n_beside], where it belongs; u1[bytes]."""
        table, data = (np.empty(*own) for own in zip(self.beside_shapes, (np.int32, np.uint8), strict=True))
        check(lib.llama_kvtool_get_beside(self._context, table.ctypes.data, data.ctypes.data))
        return table, data

    def set_beside(self, table: np.ndarray, data: np.ndarray) -> None:
        """Writes what `beside` returned."""
        assert [table.shape, data.shape] == self.beside_shapes
        check(lib.llama_kvtool_set_beside(self._context, table.ctypes.data, data.ctypes.data))

    @property
    def beside_shapes(self) -> list[tuple[int]]:
        """The shapes of the two arrays that `beside` returns."""
        return [(self.n_beside,), (lib.llama_kvtool_get_beside(self._context, None, None),)]


def choose_flash(flash: str, type_v: str, own_masks: bool) -> str:
    """What -fa "auto" means for this type of V. Raises UsageError if the two cannot go together.

    own_masks: each head has a mask of its own, as with ragged rows and with ALiBi.
    """
    if own_masks:
        # flash attention takes no mask of each head's own on most devices
        if type_v in _QUANTIZED and has_gpu():
            raise UsageError(
                f"a {type_v} V cache does not go with masks of its heads on a GPU; choose -ctv f16"
            )
        flash = "off" if flash == "auto" and type_v not in _QUANTIZED else flash
    if flash == "off" and type_v in _QUANTIZED:
        raise UsageError(f"a {type_v} V cache needs flash attention: -fa on, or another -ctv")
    if flash == "auto":
        if type_v in _QUANTIZED:
            return "on"
        # on a CPU a transposed V without flash attention is faster from 512 cells on, and never much slower
        return "auto" if has_gpu() else "off"
    return flash
