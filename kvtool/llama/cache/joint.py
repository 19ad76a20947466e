"""Joint steps: tokens of several contexts are decoded in one batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtool.errors import LibraryError, ModelError, OutOfMemory
from kvtool.llama.cache.batch import Batch
from kvtool.llama.cache.context import Context
from kvtool.llama.libllama.bindings import api
from kvtool.llama.libllama.library import error_text, lib
from kvtool.llama.libllama.log import because, log_tail, no_memory
from kvtool.models.layers import PAD

MAX_CONTEXTS = 256
"""Maximum contexts of a joint step, which is llama.cpp's maximum number of sequences."""


@dataclass(eq=False)
class Part:
    """One context's part of a joint step: the context and the arguments for its `decode`."""

    context: Context
    tokens: np.ndarray
    pos_0: int
    n_output: int


class JointContext:
    """Context that decodes tokens of up to n_most other contexts in one step. It stores no tokens itself.

    like: one of the contexts. All of them have the same model, request and settings. n_most: at most
    `MAX_CONTEXTS`. n_batch: maximum tokens of a step.

    Raises ModelError if the model has recurrent layers or an index, and OutOfMemory or LibraryError if
    llama.cpp cannot make the context.
    """

    def __init__(self, like: Context, n_most: int, n_batch: int) -> None:
        self.model = like.model
        self.n_most, self.n_batch = n_most, n_batch
        params = api.llama_context_default_params()
        params.n_ctx = PAD
        params.swa_full = False
        params.n_batch = params.n_ubatch = params.n_outputs_max = n_batch
        params.n_seq_max = n_most
        # all chats can share one KV buffer in the joint context: tokens never attend to its cells, only to
        # the cells of their chat's context
        params.kv_unified = True
        params.flash_attn_type = 0
        self._n_threads = params.n_threads = params.n_threads_batch = like.n_threads
        log_tail.clear()
        self._context = api.llama_init_from_model(like.model._model, params)
        if not self._context:
            if no_memory():
                raise OutOfMemory(f"no memory to decode for {n_most} chats at once{because()}")
            raise LibraryError(f"llama.cpp cannot decode for {n_most} chats at once{because()}")
        self.model.adapt(self._context)
        if lib.llama_kvtool_enable_joint(self._context, like.handle, n_most) < 0:
            why = error_text()
            self.close()
            raise ModelError(why)
        self._batch = Batch(n_batch)

    def close(self) -> None:
        """Free the context. A second call does nothing."""
        if self._context:
            api.llama_free(self._context)
            self._context = None

    def decode(self, parts: list[Part]) -> None:
        """Decode each part like its context's `decode`. If this raises LibraryError, no part is decoded."""
        batch = self._batch
        batch.clear()
        for i, part in enumerate(parts):
            batch.add(part.tokens, part.pos_0, part.n_output, i)
        members = np.array([part.context.handle for part in parts], np.uintp)
        n_tokens = np.array([len(part.tokens) for part in parts], np.int32)
        n_threads = parts[0].context.n_threads
        if n_threads != self._n_threads:
            api.llama_set_n_threads(self._context, n_threads, n_threads)
            self._n_threads = n_threads
        log_tail.clear()
        where = members.ctypes.data, n_tokens.ctypes.data
        status = lib.llama_kvtool_decode_joint(self._context, batch.raw, *where, len(parts))
        if status != 0:
            why = error_text() if status == -1 else ""
            failure = f"llama.cpp cannot decode for {len(parts)} chats at once (status {status})"
            raise LibraryError(f"{failure}: {why}" if why else f"{failure}{because()}")
        n_output = sum(part.n_output for part in parts)
        pointer = api.llama_get_logits(self._context)
        logits = np.ctypeslib.as_array(pointer, (n_output, self.model.n_vocab))
        at = 0
        for part in parts:
            # copy the logits: the next step overwrites them, even if this context takes no part in that step
            part.context.set_logits(logits[at : at + part.n_output].copy())
            at += part.n_output
