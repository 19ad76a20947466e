"""A model's layers for multi-token prediction (MTP), which compute draft tokens from hidden states.

The hidden state of a token is the output of the last ordinary layer for this token. An MTP layer reads a
token together with the hidden state of the token before it. Its logits predict the next token.
"""

from __future__ import annotations

import ctypes

import numpy as np

from kvtool.llama.cache.decoder import Decoder
from kvtool.llama.libllama.bindings import api
from kvtool.llama.libllama.library import check, lib


def output_hidden(decoder: Decoder, *, every: bool) -> None:
    """Let later decodes keep hidden states. every: True for all tokens, False for tokens with logits."""
    check(lib.llama_kvtool_output_hidden(decoder.handle, every))


def read_hidden(decoder: Decoder, first: int, out: np.ndarray) -> None:
    """Copy n hidden states of the last decode, starting at its token `first`, to `out` f32[n, n_hidden]."""
    check(lib.llama_kvtool_get_hidden(decoder.handle, first, len(out), out.ctypes.data))


class MtpContext(Decoder):
    """A cache of the MTP layers. Its positions are independent of the positions in the model's own cache.

    like: the model's own cache. hidden: hidden state f32[1, n_hidden] of the last token with logits.
    """

    def __init__(self, like: Decoder, n_cell: int, n_batch: int, n_threads: int | None = None) -> None:
        super().__init__(
            like.model,
            n_cell,
            n_batch,
            n_threads=n_threads,
            context_type=api.LLAMA_CONTEXT_TYPE_MTP,
        )
        output_hidden(self, every=False)
        self.hidden = np.empty((1, api.llama_model_n_embd_out(self.model._model)), np.float32)

    def read(self, tokens: np.ndarray, hidden: np.ndarray, pos_0: int) -> None:
        """Decode i32[n] tokens without logits.

        hidden: f32[n, n_hidden], for each token the hidden state of the token before it.
        """
        hidden = np.ascontiguousarray(hidden, np.float32)
        self._batch.raw.embd = hidden.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        self._decode(tokens, pos_0, 0)

    def step(self, token: int, hidden: np.ndarray, pos: int) -> None:
        """Decode a token, and set the logits and `self.hidden`. hidden: f32[1, n_hidden], as for `read`."""
        self._batch.raw.embd = hidden.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        # decode only this token: some architectures give a hidden state only if a step has a single token
        self.decode(np.array([token], np.int32), pos, 1)
        read_hidden(self, 0, self.hidden)
