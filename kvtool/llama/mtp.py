"""A model's layers for multi-token prediction (MTP), which compute draft tokens from its hidden states.

The hidden state of a token is what the last ordinary layer makes of it. The input of an MTP layer is a token
together with the hidden state of the token before; its logits are those of the token after both.
"""

from __future__ import annotations

import ctypes

import numpy as np

from kvtool.llama.bindings import api
from kvtool.llama.decoder import Decoder
from kvtool.llama.library import check, lib


def output_hidden(decoder: Decoder, *, every: bool) -> None:
    """Let later decodes keep the hidden states of all tokens, or only of those with logits."""
    check(lib.llama_kvtool_output_hidden(decoder.handle, every))


def read_hidden(decoder: Decoder, first: int, out: np.ndarray) -> None:
    """Write the hidden states of the last decode's tokens first, first + 1, ... to f32[n, n_hidden]."""
    check(lib.llama_kvtool_get_hidden(decoder.handle, first, len(out), out.ctypes.data))


class MtpContext(Decoder):
    """A cache of the MTP layers, whose positions are independent of the model's own cache.

    Parameters
    ----------
    like
        The model's own cache.
    n_cell, n_batch
        As in `Decoder`.
    n_threads
        CPU threads. Default: as in `Decoder`.

    Attributes
    ----------
    hidden
        Hidden state f32[1, n_hidden] of the last token with logits.
    """

    def __init__(self, like: Decoder, n_cell: int, n_batch: int, n_threads: int | None = None) -> None:
        super().__init__(
            like.model,
            n_cell,
            n_batch,
            n_threads=n_threads,
            kv_offload=like.kv_offload,
            context_type=api.LLAMA_CONTEXT_TYPE_MTP,
        )
        output_hidden(self, every=False)
        self.hidden = np.empty((1, api.llama_model_n_embd_out(self.model._model)), np.float32)

    def read(self, tokens: np.ndarray, hidden: np.ndarray, pos_0: int) -> None:
        """Decode i32[n] tokens without logits. hidden: f32[n, n_hidden] of the tokens before them."""
        hidden = np.ascontiguousarray(hidden, np.float32)
        self._batch.raw.embd = hidden.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        self._decode(tokens, pos_0, 0)

    def step(self, token: int, hidden: np.ndarray, pos: int) -> None:
        """Decode a token, for logits and `hidden`. hidden: f32[1, n_hidden] of the token before it."""
        self._batch.raw.embd = hidden.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        # a step of its own: in some architectures llama.cpp finds the hidden state of a single token only
        self.decode(np.array([token], np.int32), pos, 1)
        read_hidden(self, 0, self.hidden)
