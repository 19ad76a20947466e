"""A cache for one sequence, and the decode that fills it."""

from __future__ import annotations

import ctypes
import time
from contextlib import nullcontext
from typing import Any

import numpy as np

from kvtool.errors import LibraryError, ModelError, OutOfMemory, PlanError, UsageError
from kvtool.llama.cache.batch import Batch
from kvtool.llama.cache.threads import Threads
from kvtool.llama.libllama.bindings import api
from kvtool.llama.libllama.crash import crash_means, damaged
from kvtool.llama.libllama.devices import has_gpu
from kvtool.llama.libllama.log import because, log_tail, no_memory
from kvtool.llama.loaded.model import Model
from kvtool.system.cpu import default_threads
from kvtool.units import CACHE_TYPES

FLASH = {"auto": -1, "off": 0, "on": 1}
"""llama.cpp's numbers for the values of --flash-attn."""

_DAMAGED = "the model file may be damaged"

_QUANTIZED = {name for name in CACHE_TYPES if name.startswith("q")}


def check_finite(values: np.ndarray | float, cache: Decoder | None = None) -> None:
    """Raise an error if a value is not finite: PlanError if a policy has merged values, else ModelError.

    values: logits, or numbers that are computed from them. cache: None if the cache is not known.
    """
    if not np.isfinite(values).all():
        kind = PlanError if cache and cache.has_merged else ModelError
        raise kind(f"the model's logits are not finite; {cache.suspect if cache else _DAMAGED}")


class Decoder:
    """A cache with n_cell cells for one sequence.

    Raises UsageError if the model is closed, or if the type of V cannot be used with the model and this
    setting of flash attention. Raises OutOfMemory or LibraryError if llama.cpp cannot make the cache.

    Parameters
    ----------
    n_batch
        Maximum tokens decoded at once; at most n_cell.
    ragged
        True if rows may hold different numbers of cells. Only a `Context` can have such rows.
    n_output
        Maximum tokens of a decode that give logits.
    n_earlier
        Number of earlier states of recurrent layers that llama.cpp keeps. The last n_earlier tokens can then
        be removed.
    type_k, type_v, flash
        See `Settings`.
    n_threads
        CPU threads. Default: `Threads` chooses, at most one per core.
    on_tensor
        llama.cpp's callback for each operation of a decode.
    context_type
        llama.cpp's number of the context's type. Default: a context of the model's ordinary layers.

    Attributes
    ----------
    has_merged
        True if values have been merged since the cache was last cleared. An infinite value in a free cell
        still spoils later logits, because llama.cpp multiplies it by 0.
    """

    def __init__(
        self,
        model: Model,
        n_cell: int,
        n_batch: int,
        *,
        ragged: bool = False,
        n_output: int = 1,
        n_earlier: int = 0,
        type_k: str = "f16",
        type_v: str = "f16",
        flash: str = "auto",
        n_threads: int | None = None,
        on_tensor: Any = None,
        context_type: int = 0,
    ) -> None:
        model._check_open()
        self.model = model
        self.ragged = ragged
        params = api.llama_context_default_params()
        params.ctx_type = context_type
        # n_ctx also limits the cache of sliding layers, which needs room for the window and a step's tokens
        n_swa = model.layers.n_swa
        params.n_ctx = max(n_cell, n_swa and n_swa + n_batch)
        params.swa_full = False
        params.n_batch = params.n_ubatch = n_batch
        params.n_seq_max = 1
        params.n_rs_seq = n_earlier
        params.n_outputs_max = min(n_output, n_batch)
        self._threads = Threads(n_threads or default_threads())
        params.n_threads = params.n_threads_batch = self._threads.n
        params.type_k = CACHE_TYPES[type_k]
        params.type_v = CACHE_TYPES[type_v]
        flash = choose_flash(flash, type_v, model.layers.has_alibi)
        params.flash_attn_type = FLASH[flash]
        if on_tensor is not None:
            # keep the callback alive: llama.cpp holds no reference to it
            self._on_tensor = params.cb_eval = on_tensor
        # Adapt the number of threads only if results do not depend on it. They do with flash attention and a
        # float cache, because each thread then sums one part of the cache
        self._adapts = not (n_threads or has_gpu()) and (flash == "off" or type_v in _QUANTIZED)
        log_tail.clear()
        self._context = None
        with crash_means(damaged(model.path)):
            self._context = api.llama_init_from_model(model._model, params)
        if not self._context:
            if no_memory():
                what = f"no memory for a cache of {n_cell} cells and batches of {n_batch} tokens"
                raise OutOfMemory(f"{what}{because()}", on_gpu=model.uses_gpu)
            raise LibraryError(f"llama.cpp cannot make a cache of {n_cell} cells{because()}")
        model.adapt(self._context)
        self.n_ctx: int = api.llama_n_ctx(self._context)
        self.n_batch: int = api.llama_n_batch(self._context)
        self._batch = Batch(n_batch)
        self._taken: np.ndarray | None = None
        self._n_output = self._next = 0
        self._logits_where = (0, 0)
        self._has_decoded = self.has_merged = False

    @property
    def suspect(self) -> str:
        """Likely cause of logits or attention that are not finite."""
        return "the weights of the policy's merges may be too large" if self.has_merged else _DAMAGED

    @property
    def n_threads(self) -> int:
        """Number of CPU threads of the next decode."""
        return self._threads.n

    def close(self) -> None:
        """Free the cache. A second call does nothing."""
        if self._context:
            api.llama_free(self._context)
            self._context = None

    @property
    def handle(self) -> object:
        """Pointer to llama.cpp's context."""
        self.check_open()
        return self._context

    def check_open(self) -> None:
        """Raise UsageError if the cache or its model is closed: llama.cpp would read freed memory."""
        if not (self._context and self.model.is_open):
            raise UsageError("this engine or its model is closed; make a new one")

    def decode(self, tokens: np.ndarray, pos_0: int, n_output: int) -> None:
        """Decode i32[n] tokens at positions pos_0, pos_0 + 1, ...; the last n_output give logits."""
        # ask for at least one output, because llama.cpp aborts without outputs in one architecture
        self._decode(tokens, pos_0, max(n_output, 1))
        self._taken = None
        self._n_output = n_output
        self._next = n_output - 1

    def _decode(self, tokens: np.ndarray, pos_0: int, n_output: int) -> None:
        """Decode i32[n] tokens. Raises OutOfMemory or LibraryError."""
        self.check_open()
        n = len(tokens)
        self._batch.clear()
        self._batch.add(tokens, pos_0, n_output)
        log_tail.clear()
        n_threads, start = self._threads.n, time.perf_counter()
        # a damaged file may crash the first decode
        with nullcontext() if self._has_decoded else crash_means(damaged(self.model.path)):
            status = api.llama_decode(self._context, self._batch.raw)
        if self._adapts:
            self._threads.record(n, time.perf_counter() - start)
            if self._threads.n != n_threads:
                api.llama_set_n_threads(self._context, self._threads.n, self._threads.n)
        self._has_decoded = True
        if status != 0 and no_memory():
            raise OutOfMemory(f"no memory for a step of {n} tokens{because()}", on_gpu=self.model.uses_gpu)
        if status != 0:
            raise LibraryError(f"llama.cpp cannot decode (status {status}){because()}")

    def wait(self) -> None:
        """Wait until the devices have finished all decodes. On GPUs and workers, `decode` does not wait."""
        self.check_open()
        api.llama_synchronize(self._context)

    def set_logits(self, logits: np.ndarray) -> None:
        """Replace the logits of the last decode by f32[n_output, n_vocab]."""
        self._has_decoded = True
        self._taken = logits
        self._n_output = len(logits)
        self._next = self._n_output - 1

    def logits(self) -> np.ndarray:
        """Return f32[n_output, n_vocab] of the last decode: a view that the next decode overwrites."""
        self.check_open()
        if self._taken is not None:
            return self._taken
        pointer = api.llama_get_logits(self._context)
        where = ctypes.addressof(pointer.contents), self._n_output
        if where != self._logits_where:
            # keep the view, because a new view takes long: NumPy makes a ctypes type for it
            self._logits = np.ctypeslib.as_array(pointer, (self._n_output, self.model.n_vocab))
            self._logits_where = where
        return self._logits

    @property
    def next_logits(self) -> np.ndarray:
        """Logits f32[n_vocab] to sample from: of the last output, unless `sample_from` chose another."""
        logits: np.ndarray = self.logits()[self._next]
        return logits

    @property
    def next_output(self) -> int:
        """Index of `next_logits` among the last decode's outputs, as a negative number: -1 is the last."""
        return self._next - self._n_output

    def sample_from(self, n: int) -> None:
        """Let the next token be sampled from output n of the last decode."""
        self._next = n

    @property
    def has_logits(self) -> bool:
        """True if the last decode left logits to sample from."""
        return self._n_output > 0

    @property
    def has_own_logits(self) -> bool:
        """True if llama.cpp's context has the last decode's logits; False if `set_logits` set them."""
        return self._taken is None

    def forget_logits(self) -> None:
        self._n_output = 0

    def clear(self) -> None:
        """Free all cells."""
        api.llama_memory_seq_rm(self._memory, 0, -1, -1)

    def remove(self, first: int, end: int) -> None:
        """Free the cells at positions first .. end - 1."""
        if not api.llama_memory_seq_rm(self._memory, 0, first, end):
            raise LibraryError(f"llama.cpp cannot remove positions {first} to {end - 1} of its cache")

    def state(self) -> bytes:
        """Return the live cells in llama.cpp's format for a sequence. Raises LibraryError for ragged rows."""
        if self.ragged:
            raise LibraryError("llama.cpp cannot save a cache whose rows hold different numbers of cells")
        n = api.llama_state_seq_get_size(self.handle, 0)
        buffer = (ctypes.c_uint8 * n)()
        return bytes(buffer[: api.llama_state_seq_get_data(self._context, buffer, n, 0)])

    def set_state(self, data: bytes) -> None:
        """Write cells that `state` returned into an empty cache."""
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        if api.llama_state_seq_set_data(self.handle, buffer, len(data), 0) != len(data):
            raise LibraryError(f"llama.cpp cannot take back the cells that it saved{because()}")

    @property
    def _memory(self) -> object:
        self.check_open()
        return api.llama_get_memory(self._context)


def choose_flash(flash: str, type_v: str, has_alibi: bool) -> str:
    """Choose flash attention for a type of V. Raises UsageError if the type of V cannot be used with `flash`.

    has_alibi: True if the model has ALiBi, with a different mask for each head.
    """
    if has_alibi:
        # on most devices, flash attention needs the same mask for all heads
        if type_v in _QUANTIZED and has_gpu():
            raise UsageError(
                f"a {type_v} V cache cannot have a mask for each head on a GPU; choose --cache-type-v f16"
            )
        flash = "off" if flash == "auto" and type_v not in _QUANTIZED else flash
    if flash == "off" and type_v in _QUANTIZED:
        raise UsageError(
            f"a {type_v} V cache needs flash attention: --flash-attn on, or another --cache-type-v"
        )
    if flash == "auto":
        if type_v in _QUANTIZED:
            return "on"
        # on a CPU, llama.cpp is faster without flash attention (and with a transposed V) from 512 cells on,
        # and never much slower
        return "auto" if has_gpu() else "off"
    return flash
